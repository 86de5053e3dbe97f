"""A second reading of launches: what a configuration must have, worked out of the words that a shell hands over and of
the launch's JSON files by a table of its own. It imports nothing of the package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

_NUMBERS: dict[str, tuple[str, float | None]] = {
    "lr": ("training.lr", None),
    "min-lr": ("training.lr_min", 0.0),
    "lr-warmup-init": ("training.lr_start", 0.0),
    "weight-decay": ("training.weight_decay", 0.01),
    "adam-beta1": ("training.adam_beta1", 0.9),
    "adam-beta2": ("training.adam_beta2", 0.999),
    "adam-eps": ("training.adam_eps", 1e-8),
    "clip-grad": ("training.clip_grad", 1.0),
    "train-iters": ("training.train_iters", None),
    "micro-batch-size": ("training.micro_batch_size", None),
    "seed": ("training.seed", 1234),
    "log-interval": ("training.log_interval", 100),
    "save-interval": ("training.save_interval", 0),
    "initial-loss-scale": ("training.initial_loss_scale", None),
    "manual-gc-interval": ("training.manual_gc_interval", None),
    "moe-aux-loss-coeff": ("features.loss_cfg.router_aux_loss_coef", None),
    "tensor-model-parallel-size": ("parallel.tensor_parallel_size", 1),
    "expert-model-parallel-size": ("parallel.expert_parallel_size", 1),
    "dpo-label-smoothing": ("posttrain.dpo.label_smoothing", None),
    "pref-ftx": ("posttrain.dpo.pref_ftx", None),
}
"""Flag → key, and the value that Megatron has where the flag is absent; None: nothing is asked then."""
_SWITCHES = {
    "no-load-optim": "training.no_load_optim",
    "no-load-rng": "training.no_load_rng",
    "no-save-optim": "training.no_save_optim",
    "no-save-rng": "training.no_save_rng",
    "async-save": "training.save_async",
    "use-deter-comp": "training.use_deter_comp",
    "init-model-with-meta-device": "training.init_model_with_meta_device",
    "swap-attention": "features.enable_activation_offload",
    "moe-grouped-gemm": "model.use_grouped_expert_matmul",
    "encoder-dp-balance": "parallel.encoder_plan.balance",
    "profile": "tools.profile.enable",
}
_BASIC = "data.dataset_param.basic_parameters"
_PREPROCESS = "data.dataset_param.preprocess_parameters"
_TRAINS = ("pretrain_", "posttrain_", "finetune_")
_MEDIA = {"data_path": "dataset", "data_folder": "dataset_dir"}
_OFF = ("use_pmcc_data", "pretrain")
"""Switches of rows that no launch sets."""
_ABSENT = object()


class Flags:
    """The words of an entry, by the names of flags, with `-` between words."""

    def __init__(self, words: list[str]) -> None:
        self._values: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                name, sign, value = word[2:].replace("_", "-").partition("=")
                if sign:
                    value = word.partition("=")[2]
                self._values[name] = [value] if sign else []
            elif name:
                self._values[name].append(word)

    def has(self, name: str) -> bool:
        """Whether it is given."""
        return name in self._values

    def all(self, name: str) -> list[str]:
        """Every value behind it."""
        return self._values.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        """Its value."""
        return self.all(name)[0] if self.all(name) else default

    def number(self, name: str, default: float = 0) -> float:
        """Its value as a number."""
        return float(self.text(name, str(default)))


def second_reading(entry: str, words: list[str], root: Path) -> dict[str, Any]:
    """Key of the configuration → the value that it must have.

    Args:
        entry: Path of the Python script that the launch starts.
        words: The launcher's and the entry's, as a shell hands them over.
        root: The working directory, from which JSON files are read.
    """
    own = words[words.index(entry) + 1 :]
    sections: dict[str, Any] = {}
    if own and own[0].endswith((".yaml", ".yml")):  # flags, data and model in one file
        sections = YAML(typ="safe").load(root / own[0])
        for name in ("gpt_args", "lora_args"):
            words = [*_as_words(sections.get(name) or {}), *words]
    launch = _Launch(Path(entry).name, Flags(words), root, sections)
    wanted: dict[str, Any] = {}
    if launch.entry == "posttrain_flux_dancegrpo.py":  # with a schedule and rows of its own
        return dict(_switches(launch)) | {"training.lr": launch.flags.number("lr"), "posttrain.method": "grpo"}
    if launch.entry == "finetune_t2i.py":  # with flags of its own
        return dict(_ming_t2i(launch))
    parts: list[Callable[[_Launch], Iterator[tuple[str, Any]]]] = [_numbers, _switches, _files]
    if launch.trains:
        parts += [_schedule, _batch, _ranks, _precision, _checkpoints, _adapters, _loss, _waiting]
    for part in parts:
        wanted |= dict(part(launch))
    return wanted


def _ming_t2i(launch: _Launch) -> Iterator[tuple[str, Any]]:
    flags = launch.flags
    for name, key in (("learning-rate", "lr"), ("max-train-steps", "train_iters"), ("clip-grad", "clip_grad"),
                      ("weight-decay", "weight_decay"), ("micro-batch-size", "micro_batch_size"), ("seed", "seed"),
                      ("checkpointing-steps", "save_interval"),
                      ("gradient-accumulation-steps", "gradient_accumulation_steps")):  # fmt: skip
        yield f"training.{key}", flags.number(name)
    yield "training.lr_warmup_ratio", flags.number("lr-warmup-steps") / flags.number("max-train-steps")
    yield "training.diffusion.timestep_density", flags.text("weighting-scheme")
    yield f"{_BASIC}.dataset", flags.text("json-path")
    yield f"{_BASIC}.dataset_dir", flags.text("image-folder")
    yield f"{_PREPROCESS}.height", 512
    yield "model.task", "t2i"


def _as_words(section: Mapping[str, Any]) -> Iterator[str]:
    """The flags of a section, as a command line has them."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _as_words(value)
        elif value is not None and value is not False:
            yield f"--{name}"
            if value is not True:
                yield from map(str, value if isinstance(value, list) else [value])


class _Launch:
    """One launch, with its files."""

    def __init__(self, entry: str, flags: Flags, root: Path, sections: Mapping[str, Any]) -> None:
        self.entry, self.flags, self.root = entry, flags, root
        self.model, self.data = (self._file(name, sections) for name in ("model", "data"))

    def _file(self, name: str, sections: Mapping[str, Any]) -> dict[str, Any]:
        path = self.flags.text(f"mm-{name}")
        return json.loads((self.root / path).read_text()) if path else dict(sections.get(name) or {})

    @property
    def trains(self) -> bool:
        return self.entry.startswith(_TRAINS)

    @property
    def draws(self) -> bool:
        return any(name in self.model for name in ("predictor", "diffusion", "ae"))

    @property
    def kind(self) -> str:
        return str(self.data.get("dataset_param", {}).get("dataset_type", "huggingface" if self.data else ""))

    @property
    def world(self) -> int:
        return int(self.flags.number("nproc-per-node", 1) * self.flags.number("nnodes", 1))

    @property
    def steps(self) -> float:
        return self.flags.number("train-iters", 1)

    def ranks(self, name: str) -> int:
        size = {"tensor": "tensor-model-parallel-size", "stages": "pipeline-model-parallel-size"}
        return int(self.flags.number(size.get(name, "context-parallel-size"), 1))

    @property
    def together(self) -> int:
        """Ranks that work on the same rows."""
        return math.prod(self.ranks(name) for name in ("tensor", "stages", "context"))

    @property
    def of_pairs(self) -> bool:
        """Whether a generator is trained on pairs: its ranks of stages share each sequence."""
        return self.draws and self.entry.startswith("posttrain_")


def _numbers(launch: _Launch) -> Iterator[tuple[str, Any]]:
    idle = {"min-lr"} if _style(launch.flags) == "constant" else set()  # nothing falls to it
    for name, (key, absent) in _NUMBERS.items():
        if launch.flags.has(name) and name not in idle:
            yield key, launch.flags.number(name)
        elif name == "log-interval" and launch.flags.has("warmup-ratio"):
            yield key, 1
        elif absent is not None and launch.trains:
            yield key, absent


def _switches(launch: _Launch) -> Iterator[tuple[str, Any]]:
    for name, key in _SWITCHES.items():
        if launch.flags.has(name):
            yield key, True
    if launch.flags.has("save"):
        yield "training.save", launch.flags.text("save")


def _style(flags: Flags) -> str:
    return flags.text("lr-decay-style", "cosine" if flags.has("warmup-ratio") else "linear")


def _schedule(launch: _Launch) -> Iterator[tuple[str, Any]]:
    flags, style = launch.flags, _style(launch.flags)
    yield "training.lr_decay_style", {"WSD": "wsd"}.get(style, style)
    warm = 0.0
    if flags.number("lr-warmup-fraction"):
        warm = flags.number("lr-warmup-fraction") * flags.number("lr-decay-iters", launch.steps) / launch.steps
    elif flags.number("lr-warmup-iters"):
        warm = flags.number("lr-warmup-iters") / launch.steps
    yield "training.lr_warmup_ratio", warm or flags.number("warmup-ratio")
    if flags.has("lr-decay-iters") and style != "WSD":
        yield "training.lr_decay_ratio", flags.number("lr-decay-iters") / launch.steps


def _batch(launch: _Launch) -> Iterator[tuple[str, Any]]:
    flags = launch.flags
    if flags.has("global-batch-size"):
        at_once = flags.number("micro-batch-size") * launch.world / launch.together
        yield "training.gradient_accumulation_steps", flags.number("global-batch-size") / at_once
    if flags.has("seq-length") and not launch.draws and launch.kind != "rewardvideo":  # no question is cut
        yield f"{_BASIC}.cutoff_len", flags.number("seq-length")
    if flags.has("num-workers"):
        yield "data.dataloader_param.num_workers", flags.number("num-workers")


def _ranks(launch: _Launch) -> Iterator[tuple[str, Any]]:
    flags, context = launch.flags, launch.ranks("context")
    ulysses, ring = 1, context
    match flags.text("context-parallel-algo", "megatron_cp_algo"):
        case "ulysses_cp_algo":
            ulysses, ring = context, 1
        case "hybrid_cp_algo":
            ulysses = int(flags.number("ulysses-degree-in-cp", 1))
            ring = context // ulysses
    stages = launch.ranks("stages")
    if launch.of_pairs:
        ulysses, stages = ulysses * stages, 1
    yield "parallel.ulysses_parallel_size", ulysses
    yield "parallel.ring_attention_size", ring
    yield "parallel.pipeline_parallel_size", stages
    chunks = flags.number("virtual-pipeline-model-parallel-size", 1)
    if chunks > 1:
        yield "parallel.pp_plan.virtual_stages", chunks
    if flags.has("use-distributed-optimizer") and not (flags.has("use-torch-fsdp2") or flags.has("layerzero")):
        yield "parallel.fsdp_plan.reshard_after_forward", False


def _precision(launch: _Launch) -> Iterator[tuple[str, Any]]:
    flags = launch.flags
    given = next((name for name in ("bf16", "fp16") if flags.has(name)), None)
    if given and not flags.has("fsdp2-config-path") and not flags.has("layerzero"):
        yield "parallel.fsdp_plan.param_dtype", given
        yield "parallel.fsdp_plan.reduce_dtype", "bf16" if flags.has("grad-reduce-in-bf16") else "fp32"
    if flags.has("warmup-ratio"):  # loops of their own, which compute in bf16
        yield "parallel.fsdp_plan.param_dtype", "bf16"
        yield "parallel.fsdp_plan.reduce_dtype", "fp32"
    if launch.entry == "finetune_vl.py":
        yield "model.freeze", ["vision", "audio", "linear_proj", "linear_proj_audio"]
        yield f"{_BASIC}.train_on_prompt", True
    if flags.text("recompute-granularity") == "full" and not flags.has("use-torch-fsdp2"):
        off = flags.text("recompute-method") == "block" and flags.number("recompute-num-layers", 1) == 0
        yield "features.recompute", not off
    if flags.text("optimizer-selection") == "fused_ema_adamw":
        yield "training.ema.enable", True


def _checkpoints(launch: _Launch) -> Iterator[tuple[str, Any]]:
    """`--load` is what the run starts from, unless it is the folder of the model, or of a generator's transformer."""
    flags = launch.flags
    load = flags.text("load")
    if flags.has("ckpt-step"):
        load = f"{load}/iter_{int(flags.number('ckpt-step')):07d}"
    if load and load != flags.text("save"):
        yield "training.load or model.model_name_or_path", load
    if flags.has("finetune"):
        yield "training.no_load_optim", True


def _adapters(launch: _Launch) -> Iterator[tuple[str, Any]]:
    flags = launch.flags
    targets = flags.all("lora-target-modules")
    yield "training.lora.enable", bool(targets)
    if targets:
        yield "training.lora.rank", flags.number("lora-r", 8)
        yield "training.lora.alpha", flags.number("lora-alpha", 16)


def _loss(launch: _Launch) -> Iterator[tuple[str, Any]]:
    if launch.draws:
        return
    if launch.entry.startswith("posttrain_"):
        yield "posttrain.method", "dpo"
        yield "posttrain.dpo.beta", launch.flags.number("dpo-beta", 0.1)
        return
    kind = launch.model.get("loss_cfg", {}).get("loss_type", "default")
    for name in ("per-token", "per-sample"):
        if launch.flags.has(f"calculate-{name}-loss"):
            kind = f"{name.replace('-', '_')}_loss"
    yield "features.loss_cfg.loss_type", "per_micro_batch_loss" if kind == "default" else kind


def _waiting(launch: _Launch) -> Iterator[tuple[str, Any]]:
    if launch.flags.has("distributed-timeout-minutes"):
        yield "training.step_timeout_s", 60 * launch.flags.number("distributed-timeout-minutes")


def _files(launch: _Launch) -> Iterator[tuple[str, Any]]:
    """The model's folder, and the rows."""
    if launch.model.get("init_from_hf_path"):
        yield "model.model_name_or_path", launch.model["init_from_hf_path"]
    if isinstance(launch.model.get("freeze"), list):
        yield "model.freeze", launch.model["freeze"]
    basic = launch.data.get("dataset_param", {}).get("basic_parameters", {})
    if launch.kind == "huggingface":
        given = launch.data["dataset_param"]
        for section in ("basic_parameters", "preprocess_parameters", "attr"):
            for name, value in (given.get(section) or {}).items():
                if name == "packing":
                    yield f"{_BASIC}.packing", value
                elif value is not None and name not in _OFF:
                    yield f"data.dataset_param.{section}.{name}", value
    elif launch.kind == "multimodal" and isinstance(basic, dict):
        yield f"{_BASIC}.dataset", basic["data_path"]
        yield f"{_BASIC}.dataset_dir", basic["data_folder"]
        yield f"{_PREPROCESS}.model_name_or_path", launch.data["dataset_param"]["tokenizer_config"]["from_pretrained"]
        yield f"{_PREPROCESS}.image_max_tiles", launch.data["dataset_param"]["max_dynamic_patch"]
    elif launch.kind == "feature":
        yield f"{_BASIC}.features_dir", basic["data_folder"]
    elif launch.kind in ("t2v", "i2v", "t2i"):
        for theirs, ours in _MEDIA.items():
            if basic.get(theirs):
                yield f"{_BASIC}.{ours}", basic[theirs]


def differences(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Every key whose value is another than the second reading has, in words."""
    found = []
    for keys, value in wanted.items():
        held = [_value(config, key) for key in keys.split(" or ")]
        if not any(_are_same(each, value) for each in held):
            found.append(f"{keys}: {held[0]!r}, and the second reading has {value!r}")
    return found


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12)
    if isinstance(one, str) and isinstance(other, str):  # paths with and without `./` and a slash at the end
        return one.removeprefix("./").rstrip("/") in (other.removeprefix("./").rstrip("/"), _around(other))
    return one == other


def _around(path: str) -> str:
    """The folder around a generator's transformer, which is the model's."""
    return path.removeprefix("./").rstrip("/").removesuffix("/transformer")
