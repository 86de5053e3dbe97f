"""The documents' converters of generators, commands of `mm-convert`; what LayerZeRO saved and the text encoder of a
LLaVA folder are read here too.

Facts about LayerZeRO: MindSpeed's `core/distributed/layerzero/state/`. Each rank writes `iter_…/model_<rank>.pt`. In it
`model` holds the rank's flat piece of every sharded parameter, and the others whole; `shard_state_dict` says the whole
shapes, and the pieces follow one another by rank. Tensor and pipeline parallelism do not go with it for generators.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TextIO

import torch

from mindspeed_mm.checkpoint.common.config import ConvertGeneratorConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import find_step
from mindspeed_mm.checkpoint.hf_folder import DtypeRule, asset_files, model_config, safetensors_files
from mindspeed_mm.checkpoint.layout import checkpoint_folder, list_iterations
from mindspeed_mm.checkpoint.lazy_tensor import Agreeing, Concatenated, LazyTensor, Reshaped
from mindspeed_mm.checkpoint.megatron.pt_reading import PtContent, read_pt_files
from mindspeed_mm.checkpoint.original.adapter_files import Adapter, convert_adapter, tensors_of_checkpoint
from mindspeed_mm.checkpoint.original.converting import GeneratorTarget, convert_generator
from mindspeed_mm.checkpoint.original.diffusers_model import told_version
from mindspeed_mm.checkpoint.original.families import GENERATORS, generator_of
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.lora import LoraScaling
from mindspeed_mm.checkpoint.original.opensoraplan import convert_wf_vae
from mindspeed_mm.checkpoint.original.reading import GeneratorWeights, open_generator, weights_of_run
from mindspeed_mm.checkpoint.original.stepvideo_release import convert_release
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, open_weights
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError

_COMMANDS_FOR = {
    Naming.DIFFUSERS: "hf_to_mm or hf_to_source",
    Naming.ORIGINAL: "source_to_mm or source_to_hf",
    Naming.MM: "mm_to_hf or resplit",
}


class OriginalCommands:
    """The subcommands between diffusers' folders and the authors' files."""

    families: ClassVar[tuple[str, ...]]
    """Names of the families that a converter takes."""

    def __init__(self, version: Literal["t2v", "i2v"] | None = None) -> None:
        self._version: str | None = version

    def source_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write the authors' own weights as a diffusers folder."""
        return self._convert(cfg, Naming.ORIGINAL, Naming.DIFFUSERS)

    def hf_to_source(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write a diffusers folder under the authors' own names."""
        return self._convert(cfg, Naming.DIFFUSERS, Naming.ORIGINAL)

    def _convert(
        self,
        cfg: ConvertGeneratorConfig,
        source: Naming,
        target: Naming,
        adapter: Adapter | None = None,
        *,
        is_distributed: bool = False,
        open_source: Callable[[Path], AbstractContextManager[GeneratorWeights]] = open_generator,
    ) -> Converted:
        parallel = cfg.target_parallel_config
        if parallel.ep_size != 1:
            raise UsageError("this model has no experts", key="cfg.target_parallel_config.ep_size", way_out="Set 1.")
        if adapter is None and cfg.lora_path is not None:
            raise UsageError("is not used here", key="cfg.lora_path", way_out="Use merge_lora_to_base.")
        return convert_generator(
            cfg.source_path,
            cfg.target_path,
            GeneratorTarget(
                target,
                parallel.tp_size,
                parallel.pp_layers,
                cfg.hf_dir,
                task=self._version,
                is_distributed=is_distributed,
            ),
            adapter=adapter,
            keep_backup=cfg.keep_backup,
            check=lambda weights: self._check(weights, source),
            open_source=open_source,
            stream=sys.stderr,
        )

    def _convert_adapter(self, cfg: ConvertGeneratorConfig, target: Naming) -> Converted:
        parallel = cfg.target_parallel_config
        if parallel.tp_size * parallel.ep_size * sum(map(len, parallel.pp_layers or [[1]])) > 1:
            raise UsageError("adapters are written for one rank", key="cfg.target_parallel_config", way_out="Leave it.")
        (family,) = (family for family in GENERATORS if family.name == self.families[0])
        return convert_adapter(
            cfg.source_path,
            cfg.target_path,
            family,
            target,
            in_place=cfg.source_path.resolve() == cfg.target_path.resolve(),
            keep_backup=cfg.keep_backup,
            stream=sys.stderr,
        )

    def _check(self, weights: GeneratorWeights, expected: Naming) -> None:
        name, where = weights.family.name, str(weights.path)
        if name not in self.families:
            raise UsageError(
                f"holds {name}, and {type(self).__name__} takes {' and '.join(self.families)}", where=where
            )
        if weights.naming is not expected and not (weights.is_of_run and expected is Naming.MM):
            raise UsageError(
                f"holds {name} under {weights.naming} names, and {expected} names are expected here",
                where=where,
                way_out=f"Use {_COMMANDS_FOR[weights.naming]}.",
            )
        if self._version is None:
            return
        found = told_version(weights.under_diffusers_names(), weights.family)
        if self._version.upper() not in found.upper():
            raise UsageError(f"is {self._version}, and the weights are {found}", where=where, key="version")


class MMCommands(OriginalCommands):
    """And those of MindSpeed-MM's own names."""

    def hf_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Rename a diffusers folder to MindSpeed-MM's names and divide it among ranks."""
        return self._convert(cfg, Naming.DIFFUSERS, Naming.MM)

    def source_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Rename the authors' own weights to MindSpeed-MM's names and divide them among ranks."""
        return self._convert(cfg, Naming.ORIGINAL, Naming.MM)

    def mm_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write what was trained as a diffusers folder: MindSpeed-MM's weights, or a run."""
        return self._convert(cfg, Naming.MM, Naming.DIFFUSERS)

    def mm_to_dcp(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write MindSpeed-MM's weights or adapters as a distributed checkpoint that trains."""
        tensors = None
        if self._holds_one_rank(cfg.source_path):
            tensors = tensors_of_checkpoint(cfg.source_path)
        if tensors and all(".lora_" in name for name in tensors):
            return self._convert_adapter(cfg, Naming.DIFFUSERS)
        return self._convert(cfg, Naming.MM, Naming.DIFFUSERS, is_distributed=True)

    @staticmethod
    def _holds_one_rank(path: Path) -> bool:
        return len([*path.glob("mp_rank_*/"), *path.glob("*/mp_rank_*/")]) == 1

    def layerzero_to_mm(
        self,
        cfg: ConvertGeneratorConfig,
        iteration: int | None = None,
        prefix: str = "predictor",
        ema_model: bool = False,
    ) -> Converted:
        """Write what a run with LayerZeRO trained in MindSpeed-MM's layout: a run of this suite, or MindSpeed's files.

        Args:
            cfg: `source_path` is the run's folder.
            iteration: The step; without it the newest.
            prefix: What the names in MindSpeed's files begin with.
            ema_model: Take the moving average of the weights.
        """
        opened = partial(_open_trained, iteration=iteration, prefix=prefix, average=ema_model)
        return self._convert(cfg, Naming.MM, Naming.MM, open_source=opened)

    def resplit(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Divide MindSpeed-MM's weights anew, as target_parallel_config says."""
        return self._convert(cfg, Naming.MM, Naming.MM)

    def merge_lora_to_base(
        self, cfg: ConvertGeneratorConfig, lora_alpha: float | None = None, lora_rank: int | None = None
    ) -> Converted:
        """Merge a LoRA into MindSpeed-MM's weights, and divide the result.

        Args:
            cfg: `source_path` is the base, `lora_path` the adapter.
            lora_alpha: Where the adapter does not say it itself.
            lora_rank: Compared with the adapter's.
        """
        if cfg.lora_path is None:
            raise UsageError("is not given", key="cfg.lora_path", way_out="Name the adapter's file or folder.")
        return self._convert(cfg, Naming.MM, Naming.MM, Adapter(cfg.lora_path, LoraScaling(lora_alpha, lora_rank)))


class WanConverter(MMCommands, Converter):
    """Wan 2.1 and 2.2: diffusers, the authors' names, MindSpeed-MM's names."""

    families = ("Wan",)

    def __init__(self) -> None:
        super().__init__()

    def lora_hf_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write a LoRA of DiffSynth, diffusers or kohya's scripts under MindSpeed-MM's names."""
        return self._convert_adapter(cfg, Naming.MM)


class VACEConverter(MMCommands, Converter):
    """VACE, Wan's control variant: diffusers, the authors' names, MindSpeed-MM's names."""

    families = ("VACE",)

    def __init__(self) -> None:
        super().__init__()


class GeneratorConverter(OriginalCommands, Converter):
    """Any generator here, FLUX and LTX too: diffusers' folder, the authors' names."""

    families = tuple(family.name for family in GENERATORS)

    def __init__(self) -> None:
        super().__init__()


class CogVideoConverter(MMCommands, Converter):
    """CogVideoX 1.0 and 1.5: diffusers, the authors' names, MindSpeed-MM's names."""

    families = ("CogVideoX",)


class OpenSoraPlanConverter(MMCommands, Converter):
    """Open-Sora Plan 1.3 and 1.5: their authors' names, which are those of diffusers' layout, MindSpeed-MM's names, and
    WF-VAE."""

    families = ("Open-Sora Plan 1.3", "Open-Sora Plan 1.5")

    def __init__(self, version: Literal["v1.2", "v1.3", "v1.5"] = "v1.5") -> None:
        super().__init__()
        if version == "v1.2":
            raise UsageError("Open-Sora Plan v1.2 is not built", key="version", way_out="v1.3 and v1.5 are.")
        self._version = version

    def source_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Rename the authors' own weights to MindSpeed-MM's names and divide them among ranks."""
        return self._convert(cfg, Naming.DIFFUSERS, Naming.MM)

    def source_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write the authors' own weights as the folder `transformer` of a model."""
        return self._convert(cfg, Naming.DIFFUSERS, Naming.DIFFUSERS)

    def vae_convert(self, cfg: ConvertGeneratorConfig, use_ema_model: bool = True) -> Converted:
        """Write WF-VAE as the folder `vae` of a model.

        Args:
            cfg: `source_path` is the authors' .ckpt file.
            use_ema_model: Take the moving average of the weights where there is one.
        """
        return convert_wf_vae(cfg.source_path, cfg.target_path, averaged=use_ema_model, stream=sys.stderr)


class StepVideoConverter(MMCommands, Converter):
    """Step-Video: its transformer under MindSpeed-MM's names and back; its released folder in diffusers' layout."""

    families = ("Step-Video",)

    def __init__(self) -> None:
        super().__init__()

    def source_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write the released folder, all of it, in the layout that trains."""
        return convert_release(cfg.source_path, cfg.target_path, stream=sys.stderr)


class HunyuanVideoConverter(MMCommands, Converter):
    """HunyuanVideo and HunyuanVideo 1.5: diffusers, the authors' names, MindSpeed-MM's names."""

    families = ("HunyuanVideo", "HunyuanVideo 1.5")

    def __init__(self, version: Literal["t2v", "i2v", "t2v-lora", "i2v-lora"] | None = None) -> None:
        self._takes_adapters = version is not None and version.endswith("-lora")
        task: Literal["t2v", "i2v"] | None = None
        if version in ("t2v", "t2v-lora"):
            task = "t2v"
        elif version is not None:
            task = "i2v"
        super().__init__(task)

    def source_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Rename the authors' own weights, or with `--version i2v-lora` their LoRA, to MindSpeed-MM's names."""
        if self._takes_adapters:
            return self._convert_adapter(cfg, Naming.MM)
        return super().source_to_mm(cfg)

    def t2v_text_encoder(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Take the language model out of a LLaVA folder: HunyuanVideo's text encoder, in half precision."""
        return _convert_text_encoder(cfg.source_path, cfg.target_path, stream=sys.stderr)


# --- LayerZeRO --------------------------------------------------------------------------------------------------------

_FILE = re.compile(r"model_(\d+)\.pt")
_MODEL, _AVERAGE = "model", "ema_model"
_WRAPPERS = ("_zero3_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class FlatPieces:
    """What the files of all ranks hold."""

    contents: tuple[PtContent, ...]
    """By rank."""
    section: str
    prefix: str
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, LazyTensor]:
        """Every piece by its file and its name: `model_1.pt/blocks.0.ffn.0.weight`."""
        found: dict[str, LazyTensor] = {}
        for content in self.contents:
            for key, tensor in content.tensors[self.section].items():
                found[f"{content.path.name}/{key}"] = tensor
        return found

    def whole(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The whole tensors under the names of the model.

        Args:
            stored: Stand for its own, as a ledger counts them.

        Raises:
            CheckpointError: Pieces are missing, or do not fill the shape; or copies differ.
        """
        first = self.contents[0]
        made: dict[str, LazyTensor] = {}
        for key in first.tensors[self.section]:
            name = key
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            places = [f"{content.path.name}/{key}" for content in self.contents]
            if missing := [place for place in places if place not in stored]:
                raise CheckpointError("is missing", where=str(first.path.parent), key=missing[0])
            pieces = [stored[place] for place in places]
            # By the name without wrappers, but with the prefix, as the files list them.
            shape = first.shapes.get(name)
            if self.prefix:
                name = name.removeprefix(f"{self.prefix}.")
            if shape is None:  # not sharded: every rank holds the whole
                made[name] = Agreeing(pieces, places)
            else:
                made[name] = self._joined(key, pieces, shape)
        return made

    def _joined(self, key: str, pieces: list[LazyTensor], shape: list[int]) -> LazyTensor:
        held = sum(math.prod(piece.shape) for piece in pieces)
        if held != math.prod(shape) or any(len(piece.shape) != 1 for piece in pieces):
            what = f"has {held:,} elements on all ranks, and its shape is {shape}"
            where = str(self.contents[0].path.parent)
            raise CheckpointError(what, where=where, key=key, way_out="Copy the files of all ranks.")
        return Reshaped(Concatenated(pieces, 0), shape)


@contextmanager
def _open_trained(
    path: Path, *, iteration: int | None = None, prefix: str = "predictor", average: bool = False
) -> Iterator[GeneratorWeights]:
    """Open what a run trained, for the length of the `with` block.

    Args:
        path: The run's folder, or a step of it.
        iteration: The step; None: the newest, or the one named by `path`.
        prefix: What the names in MindSpeed's files begin with.
        average: The moving average of the weights.

    Raises:
        CheckpointError: There is no such step, or it is damaged.
        ModelFolderError: The weights are of no family here.
    """
    check_folder_exists(path)
    step = path if iteration is None else checkpoint_folder(path, iteration)
    files = _rank_files(step)
    if not files and iteration is None and (steps := list_iterations(path)):
        step = checkpoint_folder(path, steps[-1])
        files = _rank_files(step)
    if not files:
        yield weights_of_run(find_step(path if iteration is None else step), average=average)
        return
    section = _AVERAGE if average else _MODEL
    contents = tuple(read_pt_files(files))
    for content in contents:
        if section not in content.tensors:
            raise CheckpointError(f"holds no section '{section}'", where=str(content.path))
    pieces = FlatPieces(contents, section, prefix)
    family, naming = generator_of(pieces.whole(pieces.stored), str(step))
    yield GeneratorWeights(step, family, naming, pieces.stored, {}, pieces, is_of_run=True)


def _rank_files(step: Path) -> list[Path]:
    """The files of LayerZeRO in a step, by rank."""
    found = {int(match[1]): file for file in step.glob("model_*.pt") if (match := _FILE.fullmatch(file.name))}
    # Holes below the highest rank: how many ranks there were, nothing says.
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        where = str(step / f"model_{missing[0]}.pt")
        raise CheckpointError("does not exist", where=where, way_out="Copy the files of all ranks.")
    return [found[rank] for rank in sorted(found)]


# --- the text encoder of a LLaVA folder -------------------------------------------------------------------------------

_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
"""What the language model's keys begin with, of older and newer transformers → what stands there in a model alone."""
_TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges")


def _convert_text_encoder(source: Path, target: Path, *, stream: TextIO | None = None) -> Converted:
    """Write the language model in half precision, with its tokenizer; the rest of the folder is left out.

    Args:
        source: A LLaVA folder of transformers.
        target: The folder to write.
        stream: Where progress is shown.

    Raises:
        ModelFolderError: It is the folder of another model, or has no weights.
        UsageError: The target may not be written.
        CheckpointError: What was written does not read back.
    """
    config = model_config(source)
    text = config.get("text_config")
    if config.get("model_type") != "llava" or not isinstance(text, dict):
        raise ModelFolderError(
            f"has the model type {config.get('model_type')!r}, and a LLaVA model with a text_config is expected",
            where=str(source / "config.json"),
            way_out="Name the folder of llava-llama-3-8b in transformers' layout.",
        )
    with open_weights(source, MAPPED_BYTES) as stored:
        ledger = SourceLedger(stored, source)
        tensors: dict[str, LazyTensor] = {}
        left_out: dict[str, str] = {}
        rule = DtypeRule({}, torch.float16)
        for key, tensor in ledger.tensors.items():
            start = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
            if start is None:
                left_out[key] = "is no part of the language model"
                continue
            tensors[_PREFIXES[start] + key.removeprefix(start)] = rule.cast(key, tensor)
        if not tensors:
            raise ModelFolderError("holds no language model", where=str(source))
        files, texts = safetensors_files(tensors)
        # `text_config` names neither class nor type for a model that stands alone.
        written = {"model_type": "llama", **text, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
        texts["config.json"] = json.dumps(written, indent=2) + "\n"
        copies = {name: path for name, path in asset_files(source).items() if name.startswith(_TOKENIZER)}
        conversion = Conversion(
            [source], [ledger], files, {"kind": "hf"}, left_out=left_out, copies=copies, texts=texts
        )
        return convert(conversion, target, Writing(), stream=stream)
