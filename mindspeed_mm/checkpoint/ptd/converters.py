"""The converters of models that MindSpeed-MM trains over Megatron: one command for each family."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from mindspeed_mm.checkpoint.common.config import ConvertHFConfig, ConvertMMConfig, HfConfig, ParallelConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.run import Converted, Verify, Writing
from mindspeed_mm.checkpoint.dcp_folder.reading import step_in
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.megatron.families import (
    DEEPSEEK_VL,
    GLM_4V,
    INTERNVL,
    LANGUAGE_MODEL,
    QWEN2_5_OMNI,
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_VL,
)
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily
from mindspeed_mm.checkpoint.ptd.config import (
    ConvertLoraHFConfig,
    ConvertLoraMMConfig,
    ConvertReleasedConfig,
    ConvertRewardMMConfig,
    ResplitConfig,
    RewardModelConfig,
)
from mindspeed_mm.checkpoint.ptd.conversions import (
    adapters_to_hf,
    adapters_to_megatron,
    divide_anew,
    hf_to_megatron,
    megatron_to_hf,
)
from mindspeed_mm.checkpoint.ptd.division import check_facts
from mindspeed_mm.checkpoint.ptd.trained import divide_trained
from mindspeed_mm.checkpoint.ptd.videoalign import ReleasedFiles, is_reward_model, released_to_hf
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.core.errors import CheckpointError, UsageError
from mindspeed_mm.core.suggest import where_else
from mindspeed_mm.core.terminal import say


class _Megatron(Converter):
    family: ClassVar[MegatronFamily]

    def hf_to_mm(self, cfg: ConvertMMConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Divide a Hugging Face folder among the ranks of a Megatron-style checkpoint.

        Args:
            cfg: The folders and the division.
            overwrite: Replace what an earlier conversion wrote to mm_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
        """
        return self._divided(cfg, Writing(overwrite, verify, self.examine))

    def mm_to_hf(self, cfg: ConvertHFConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Join a Megatron-style checkpoint to a Hugging Face folder; a run, whose checkpoints hold whole tensors, too.

        Args:
            cfg: The folders and the division.
            overwrite: Replace what an earlier conversion wrote to save_hf_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
        """
        if _other_text_model(cfg) is not None:
            raise UsageError(
                "the whole model is written, and the language model with it",
                key="cfg.common_model_config.llm_hf_dir",
                way_out="Leave it out.",
            )
        if cfg.save_vit_only:
            raise UsageError("a Hugging Face folder of a vision tower alone is not written", key="cfg.save_vit_only")
        if _holds_whole_tensors(cfg.mm_dir):
            return self._of_whole_tensors(cfg, overwrite, verify)
        return megatron_to_hf(
            self.family,
            cfg.mm_dir,
            cfg.hf_config.hf_dir,
            cfg.save_hf_dir,
            cfg.parallel_config,
            facts=cfg.common_model_config,
            writing=Writing(overwrite, verify, self.examine),
        )

    def _of_whole_tensors(self, cfg: ConvertHFConfig, overwrite: bool, verify: Verify) -> Converted:
        config = model_config(cfg.hf_config.hf_dir)
        check_facts(cfg.common_model_config, self.family.model(config), config, cfg.hf_config.hf_dir)
        _note_no_effect(cfg.parallel_config, "parallel_config", cfg.mm_dir)
        distributed = GenericDCPConverter()
        distributed.examine = self.examine
        return distributed.dcp_to_hf(
            cfg.mm_dir, cfg.save_hf_dir, cfg.hf_config.hf_dir, overwrite=overwrite, verify=verify
        )

    def resplit(self, cfg: ResplitConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Divide a Megatron-style checkpoint anew, or a run, whose checkpoints hold whole tensors.

        Args:
            cfg: The checkpoint, the folder to write and both divisions.
            overwrite: Replace what an earlier conversion wrote to target_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
        """
        writing = Writing(overwrite, verify, self.examine)
        hf_dir: Path | None = None
        if cfg.hf_config:
            hf_dir = cfg.hf_config.hf_dir
        if _holds_whole_tensors(cfg.source_dir):
            _note_no_effect(cfg.source_parallel_config, "source_parallel_config", cfg.source_dir)
            wanted = cfg.target_parallel_config
            return divide_trained(self.family, cfg.source_dir, cfg.target_dir, hf_dir, wanted, writing=writing)
        return divide_anew(
            self.family,
            cfg.source_dir,
            cfg.target_dir,
            hf_dir,
            cfg.source_parallel_config,
            cfg.target_parallel_config,
            writing=writing,
        )

    def _divided(self, cfg: ConvertMMConfig, writing: Writing, *, u_shape: bool = False) -> Converted:
        return hf_to_megatron(
            self.family,
            cfg.hf_config.hf_dir,
            cfg.mm_dir,
            cfg.parallel_config,
            facts=cfg.common_model_config,
            vision_only=cfg.save_vit_only,
            text_dir=None if cfg.save_vit_only else _other_text_model(cfg),
            u_shape=u_shape,
            writing=writing,
        )


def _holds_whole_tensors(folder: Path) -> bool:
    """Whether a folder is a run or holds a distributed checkpoint, and is not divided among ranks."""
    return not is_megatron_folder(folder) and step_in(folder) is not None


def _note_no_effect(said: ParallelConfig | None, key: str, folder: Path) -> None:
    if said is not None:
        say(f"note: cfg.{key} has no effect: {folder} holds whole tensors", err=True)


class _WithAdapters(_Megatron):
    """Models that may be canonical, whose adapters can be exchanged with PEFT then."""

    def lora_hf_to_mm(self, cfg: ConvertLoraMMConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Divide adapters of PEFT among the ranks of a canonical model.

        Args:
            cfg: The folders and the division.
            overwrite: Replace what an earlier conversion wrote to mm_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
        """
        return adapters_to_megatron(
            self.family,
            cfg.hf_config.hf_dir,
            cfg.mm_dir,
            cfg.parallel_config,
            naming=cfg.common_model_config,
            writing=Writing(overwrite, verify, self.examine),
        )

    def lora_mm_to_hf(self, cfg: ConvertLoraHFConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Join the adapters of a canonical model to what PEFT reads.

        Args:
            cfg: The folders and the division.
            overwrite: Replace what an earlier conversion wrote to save_hf_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
        """
        return adapters_to_hf(
            self.family,
            cfg.mm_dir,
            cfg.save_hf_dir,
            cfg.parallel_config,
            naming=cfg.common_model_config,
            writing=Writing(overwrite, verify, self.examine),
        )


def _other_text_model(cfg: ConvertMMConfig) -> Path | None:
    told = {cfg.common_model_config.llm_hf_dir}
    if cfg.llm_hf_config:
        told.add(cfg.llm_hf_config.hf_dir)
    told.discard(None)
    if len(told) > 1:
        raise UsageError(
            "names another folder than cfg.common_model_config.llm_hf_dir",
            key="cfg.llm_hf_config.hf_dir",
            way_out="Leave one of them out.",
        )
    return next(iter(told), None)


class Qwen2VLConverter(_WithAdapters):
    """Qwen2-VL: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = QWEN2_VL


class VideoAlignConverter(_Megatron):
    """VideoAlign's reward model: released files or Hugging Face folder ↔ Megatron-style checkpoint."""

    family = QWEN2_VL

    def released_to_hf(self, cfg: ConvertReleasedConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Write the released files, or Qwen2-VL to train from, as a Hugging Face folder; adapters are added.

        Args:
            cfg: The folders.
            overwrite: Replace what an earlier conversion wrote to save_hf_dir.
            verify: Read everything back and compare.
        """
        if cfg.common_model_config.llm_hf_dir is not None:
            way_out = "Leave it out: the language model is that of cfg.hf_config.hf_dir."
            raise UsageError("is not read here", key="cfg.common_model_config.llm_hf_dir", way_out=way_out)
        return released_to_hf(
            _released(cfg.hf_config.hf_dir, cfg.pt_path, cfg.common_model_config),
            cfg.save_hf_dir,
            Writing(overwrite, verify),
        )

    def hf_to_mm(  # type: ignore[override]
        self, cfg: ConvertRewardMMConfig, overwrite: bool = False, verify: Verify = True
    ) -> Converted:
        """Divide a folder of the reward model, or Qwen2-VL to train one from, or the released files among ranks.

        Args:
            cfg: The folders and the division.
            overwrite: Replace what an earlier conversion wrote to mm_dir.
            verify: Read everything back and compare.
        """
        if cfg.save_lora_only:
            way_out = "Leave it out: adapters are added to the weights."
            raise UsageError("adapters alone are not written", key="cfg.save_lora_only", way_out=way_out)
        facts, home = cfg.common_model_config, cfg.hf_config.hf_dir
        cfg.mm_dir.parent.mkdir(parents=True, exist_ok=True)
        # On the target's disk: the whole model is written once before it is divided.
        with tempfile.TemporaryDirectory(dir=cfg.mm_dir.parent) as place:
            if cfg.pt_path is not None or facts.resize_vocab_size is not None or not is_reward_model(home):
                files = _released(home, cfg.pt_path, facts)
                home = Path(place) / "whole"
                released_to_hf(files, home, Writing(verify=verify))
            whole = cfg.model_copy(update={"hf_config": HfConfig(hf_dir=home)})
            return self._divided(whole, Writing(overwrite, verify))


def _released(hf_dir: Path, pt_path: Path | None, facts: RewardModelConfig) -> ReleasedFiles:
    if pt_path is not None and not pt_path.exists():
        raise CheckpointError("does not exist", where=str(pt_path), key="--cfg.pt_path", way_out=where_else(pt_path))
    return ReleasedFiles(hf_dir, pt_path, facts.model_prefix, facts.resize_vocab_size)


class Qwen2_5_VLConverter(_WithAdapters):
    """Qwen2.5-VL: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = QWEN2_5_VL

    def hf_to_mm_ldt(self, cfg: ConvertMMConfig, overwrite: bool = False, verify: Verify = True) -> Converted:
        """Divide a Hugging Face folder in the shape of a U: embedding, final norm and head stand on the first stage, in
        its first and its last virtual chunk, for training over a long distance.

        Args:
            cfg: The folders and the division.
            overwrite: Replace what an earlier conversion wrote to mm_dir.
            verify: Read everything back and compare, also the logits; full: of models of any size.
        """
        return self._divided(cfg, Writing(overwrite, verify, self.examine), u_shape=True)


class Qwen2_5_OmniConverter(_Megatron):
    """Qwen2.5-Omni's thinker: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = QWEN2_5_OMNI


class Qwen3VLMegatronConverter(_Megatron):
    """Qwen3-VL, dense and with experts: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = QWEN3_VL


class InternVLConverter(_Megatron):
    """InternVL 2.5 and 3, original and -HF: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = INTERNVL


class GlmConverter(_Megatron):
    """GLM-4.1V: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = GLM_4V


class DeepSeekVLConverter(_Megatron):
    """DeepSeek-VL2 and the first DeepSeek-VL: Hugging Face folder ↔ Megatron-style checkpoint."""

    family = DEEPSEEK_VL


class LanguageModelConverter(_Megatron):
    """A language model alone (Llama, Qwen, Mixtral, GLM, DeepSeek): Hugging Face folder ↔ Megatron-style checkpoint."""

    family = LANGUAGE_MODEL
