"""DanceGRPO by MindSpeed-MM's flags: the YAML that they make, and the run."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from mindspeed_mm.core.artifacts import atomic_write_text, read_jsonl
from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.core.file_writing import check_output_file
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.terminal import say
from mindspeed_mm.provider.entry_flags import entry_flags

CONFIGURATION = "dancegrpo.yaml"


def run(words: Sequence[str]) -> Path:
    """Train as the flags say; `dancegrpo.yaml` beside the run's folder trains the same by `mm train`.

    Args:
        words: The command line's.

    Returns:
        The run's folder.

    Raises:
        MMError: Anything that a person can act on.
    """
    flags = read_flags(words)
    options = flags.options
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        for note in (*flags.notes, *notes_on_data(options.mm_data)):
            say(f"note: {note}", err=True)
    if options.hps_reward_save is not None:
        check_output_file(options.hps_reward_save, _is_rewards, "--hps_reward_save")
    text = io.StringIO()
    YAML().dump(configuration(options), text)
    options.save.absolute().parent.mkdir(parents=True, exist_ok=True)
    path = options.save.with_name(f"{options.save.name}.{CONFIGURATION}")
    atomic_write_text(path, text.getvalue())  # every rank the same
    from mindspeed_mm.tasks import train  # torch: not for --help

    train.run(path, flags.overrides)
    if options.hps_reward_save is not None and is_first:
        write_rewards(options.save, options.hps_reward_save)
    return Path(options.save)


def _is_rewards(head: bytes) -> bool:
    """Whether a file begins with a number on a line, as `write_rewards` writes them."""
    try:
        float(head.split(b"\n", 1)[0])
    except ValueError:
        return False
    return True


def write_rewards(run_folder: Path, path: Path) -> None:
    """The mean reward of each step that the log has, a line each, as the script writes it."""
    rewards = [line["reward"] for line in read_jsonl(run_folder / "metrics.jsonl") if "reward" in line]
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, "".join(f"{reward}\n" for reward in rewards))


# --- flags ------------------------------------------------------------------------------------------------------------
# The flags and files of MindSpeed-MM's `posttrain_flux_dancegrpo.py`, and what they mean here.

_DTYPES = {"bf16": "bf16", "no": "fp32"}
"""`--mixed_precision` → `param_dtype`."""
_GUIDANCE = 3.5
"""What the script tells FLUX.1 dev."""


@dataclass(frozen=True)
class DanceFlags:
    """What a command line asks for."""

    options: argparse.Namespace
    overrides: tuple[str, ...]
    """`section.key=value`, for the YAML."""
    notes: tuple[str, ...]
    """What differs from the script, and which flags do nothing."""


def read_flags(words: Sequence[str]) -> DanceFlags:
    """The flags of a command line.

    Raises:
        UsageError: One is unknown, missing, or of a value that cannot be.
    """
    known = entry_flags("posttrain_flux_dancegrpo", mixed_precision=_DTYPES)
    options, others = known.parser.parse_known_args(list(words))
    overrides, notes = known.rest(others)
    if options.save is known.parser.get_default("save"):
        notes.append(f"--save is not given: the run goes to {options.save}")
    if not options.use_group:
        raise UsageError(
            "is missing: samples are compared with others of their prompt", key="--use_group", way_out="Give it."
        )
    if not options.use_hpsv2 and not any(word.startswith("posttrain.rewards") for word in overrides):
        raise UsageError(
            "is missing, and so is any other reward",
            key="--use_hpsv2",
            way_out="Give it, with reward in the file of --mm-model; or add 'posttrain.rewards=[{name: jpeg_size}]'.",
        )
    if options.selective_checkpointing != 1 and options.gradient_checkpointing:
        raise UsageError(
            f"{options.selective_checkpointing:g}: blocks are recomputed all or as patterns say",
            key="--selective_checkpointing",
            way_out="Leave it out and add features.recompute_plan.apply_modules=[PATTERN].",
        )
    samples = options.train_batch_size * options.num_generations
    if options.sample_batch_size is None:
        options.sample_batch_size = options.num_generations
    if options.sample_batch_size < 1 or samples % options.sample_batch_size:
        raise UsageError(
            f"{options.sample_batch_size} does not divide the {samples} samples of a rank and step "
            "(--train_batch_size × --num_generations)",
            key="--sample_batch_size",
            way_out="Choose one that does.",
        )
    if options.gradient_accumulation_steps not in (1, samples):
        notes.append(
            f"--gradient_accumulation_steps {options.gradient_accumulation_steps}: the {samples} samples of a rollout "
            "make one step here, in which they count alike; the script makes several steps of them"
        )
    return DanceFlags(options, tuple(overrides), tuple(notes))


def configuration(options: argparse.Namespace) -> JsonObject:
    """The YAML's content.

    Raises:
        ConfigError: A JSON file is broken, or lacks what is needed.
    """
    sizes = {"height": options.h, "width": options.w}
    samples = options.train_batch_size * options.num_generations
    warmup = options.lr_warmup_steps if options.lr_scheduler == "constant_with_warmup" else 0
    plan = {"param_dtype": _DTYPES[options.mixed_precision], "cpu_offload": options.use_cpu_offload}
    return {
        "model": {"model_name_or_path": str(options.load), "model_id": "flux"},
        "data": {
            "dataset_param": {
                "dataset_type": "generation_prompts",
                "basic_parameters": {"dataset": _prompts(options.mm_data)},
                "preprocess_parameters": sizes,
            }
        },
        "parallel": {"fsdp_plan": plan, "ulysses_parallel_size": options.sp_size, **_sharding(options)},
        "features": {"recompute": options.gradient_checkpointing},
        "training": {
            "lr": options.lr,
            "lr_decay_style": "constant",
            "lr_warmup_ratio": min(1.0, warmup / options.train_iters),
            "weight_decay": options.weight_decay,
            "clip_grad": options.max_grad_norm,
            "train_iters": options.train_iters,
            "micro_batch_size": options.sample_batch_size,
            "gradient_accumulation_steps": samples // options.sample_batch_size,
            "seed": options.seed,
            "log_interval": options.log_interval,
            "save": str(options.save),
            "save_interval": options.save_interval,
            "diffusion": {"shift": options.shift, "guidance": _GUIDANCE},
        },
        "posttrain": {
            "method": "grpo",
            "grpo": {
                "num_generations": options.num_generations,
                "clip_range": options.clip_range,
                "adv_clip_max": options.adv_clip_max,
            },
            "flow": {
                "sde": "dance",
                "noise_level": options.eta,
                "num_inference_steps": options.sampling_steps,
                "timestep_fraction": options.timestep_fraction,
                "same_noise": options.init_same_noise,
            },
            "rewards": [_hps(options)] if options.use_hpsv2 else [],
        },
    }


def _prompts(path: Path) -> str:
    found = _inside(path, "dataset_param", "basic_parameters", "data_path")
    return str(found)


def notes_on_data(path: Path) -> list[str]:
    """What data.json holds beside the place of the prompts, which is all that is read. Raises as `configuration`."""
    _prompts(path)
    content = read_json_object(path, ConfigError)
    dataset = content["dataset_param"]
    left_out = [f"basic_parameters.{name}" for name in dataset["basic_parameters"] if name != "data_path"]
    left_out += [name for name in dataset if name not in ("basic_parameters", "dataset_type")]
    left_out += [name for name in content if name != "dataset_param"]
    if not left_out:
        return []
    have = "has" if len(left_out) == 1 else "have"
    return [f"{path}: {', '.join(left_out)} {have} no effect: sizes are --h and --w, and all else is of the flags"]


def _hps(options: argparse.Namespace) -> JsonObject:
    folder = Path(_inside(options.mm_model, "reward", "ckpt_dir"))
    weights = folder / _inside(options.mm_model, "reward", "load_pt")
    # The script has CLIP's words from a package of its own; FLUX.1 comes with the same.
    return {"name": "hps_v2", "settings": {"path": str(weights), "tokenizer": str(options.load / "tokenizer")}}


def _inside(path: Path, *keys: str) -> str:
    value: Any = read_json_object(path, ConfigError)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str) or not value:
        raise ConfigError("is missing, or is no text", where=str(path), key=".".join(keys), way_out="Give it.")
    return value


def _sharding(options: argparse.Namespace) -> JsonObject:
    if options.fsdp_sharding_strategy == "none":
        return {"fully_shard_parallel_size": 1}
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    is_hybrid = options.fsdp_sharding_strategy == "hybrid_full" and ranks > here
    if is_hybrid:
        return {"fully_shard_parallel_size": here}
    return {}
