"""The documents' converters of generators: commands of `mm-convert`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from mindspeed_mm.checkpoint.common.config import ConvertGeneratorConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.run import Converted
from mindspeed_mm.checkpoint.original.adapter_files import Adapter, convert_adapter, tensors_of_checkpoint
from mindspeed_mm.checkpoint.original.converting import GeneratorTarget, convert_generator
from mindspeed_mm.checkpoint.original.diffusers_model import told_version
from mindspeed_mm.checkpoint.original.families import GENERATORS
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.layerzero import open_trained
from mindspeed_mm.checkpoint.original.lora import LoraScaling
from mindspeed_mm.checkpoint.original.reading import GeneratorWeights, open_generator
from mindspeed_mm.checkpoint.original.stepvideo_release import convert_release
from mindspeed_mm.checkpoint.original.text_encoder import convert_text_encoder
from mindspeed_mm.core.errors import UsageError

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
        self._version = version

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
        tensors = tensors_of_checkpoint(cfg.source_path) if self._holds_one_rank(cfg.source_path) else None
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
        opened = partial(open_trained, iteration=iteration, prefix=prefix, average=ema_model)
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
        super().__init__("t2v" if version in ("t2v", "t2v-lora") else "i2v" if version else None)

    def source_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Rename the authors' own weights, or with `--version i2v-lora` their LoRA, to MindSpeed-MM's names."""
        if self._takes_adapters:
            return self._convert_adapter(cfg, Naming.MM)
        return super().source_to_mm(cfg)

    def t2v_text_encoder(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Take the language model out of a LLaVA folder: HunyuanVideo's text encoder, in half precision."""
        return convert_text_encoder(cfg.source_path, cfg.target_path, stream=sys.stderr)
