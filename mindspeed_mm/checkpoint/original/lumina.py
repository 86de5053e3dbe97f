"""Lumina-mGPT: MindSpeed-MM's folder of one rank holds the Hugging Face folder's names as they are."""

from __future__ import annotations

import sys

from mindspeed_mm.checkpoint.common.config import ConvertGeneratorConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.files import PtFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, convert
from mindspeed_mm.checkpoint.hf_folder import asset_files, safetensors_files
from mindspeed_mm.checkpoint.layout import RELEASE, TRACKER
from mindspeed_mm.checkpoint.megatron.folder import CHECKPOINT_VERSION, find_step
from mindspeed_mm.checkpoint.megatron.layout import WEIGHTS_FILE
from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.checkpoint.safetensors_folder import check_same_tensors, open_weights
from mindspeed_mm.core.errors import CheckpointError, UsageError

_RANK = "mp_rank_00"


class LuminaConverter(Converter):
    """Lumina-mGPT (Chameleon in transformers): Hugging Face folder ↔ MindSpeed-MM's folder."""

    family = "Lumina-mGPT"

    def theirs(self, name: str) -> str:
        """What MindSpeed-MM calls a tensor of the Hugging Face folder: the same."""
        return name

    def ours(self, name: str) -> str:
        """What the Hugging Face folder calls a tensor of MindSpeed-MM's: the same."""
        return name

    def hf_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write a Hugging Face folder as MindSpeed-MM's folder of one rank."""
        _refuse_division(cfg, self.family)
        _refuse_unused(cfg, "lora_path", "hf_dir")
        with open_weights(cfg.source_path) as stored:
            ledger = SourceLedger(stored, cfg.source_path)
            files = {f"{RELEASE}/{_RANK}/{WEIGHTS_FILE}": self._pt_file(ledger)}
            conversion = Conversion([cfg.source_path], [ledger], files, {"kind": "mm"}, texts={TRACKER: RELEASE})
            return _run(conversion, cfg)

    def mm_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write MindSpeed-MM's folder as a Hugging Face folder; `hf_dir` gives configuration and tokenizer."""
        if cfg.hf_dir is None:
            raise UsageError("is needed", key="--cfg.hf_dir", way_out="Name the folder of the original model.")
        _refuse_unused(cfg, "lora_path")
        step = find_step(cfg.source_path)
        ranks = sorted(path.name for path in step.glob("mp_rank_*/"))
        if ranks != [_RANK]:
            raise CheckpointError(f"holds {', '.join(ranks)}, and {_RANK} alone is expected", where=str(step))
        (content,) = read_pt_files([step / _RANK / WEIGHTS_FILE])
        stored = {self.ours(name): tensor for name, tensor in content.tensors.get("model", {}).items()}
        ledger = SourceLedger(stored, step)
        # A folder of configuration and tokenizer will do; what weights it has are compared.
        if any(cfg.hf_dir.glob("*.safetensors")):
            check_same_tensors(ledger.tensors, step, cfg.hf_dir)
        files, texts = safetensors_files(ledger.tensors)
        copies = asset_files(cfg.hf_dir)
        return _run(Conversion([step, cfg.hf_dir], [ledger], files, {"kind": "hf"}, copies=copies, texts=texts), cfg)

    def _pt_file(self, ledger: SourceLedger) -> PtFile:
        tensors = {self.theirs(name): tensor for name, tensor in ledger.tensors.items()}
        return PtFile({"model": tensors}, {"checkpoint_version": CHECKPOINT_VERSION})


def _refuse_division(cfg: ConvertGeneratorConfig, family: str) -> None:
    parallel = cfg.target_parallel_config
    if parallel.tp_size > 1 or parallel.ep_size > 1 or sum(len(chunk) for chunk in parallel.pp_layers or []) > 1:
        raise UsageError(f"MindSpeed-MM does not divide {family}", key="--cfg.target_parallel_config")


def _refuse_unused(cfg: ConvertGeneratorConfig, *keys: str) -> None:
    for key in keys:
        if getattr(cfg, key) is not None:
            raise UsageError("is not used here", key=f"--cfg.{key}", way_out="Leave it out.")


def _run(conversion: Conversion, cfg: ConvertGeneratorConfig) -> Converted:
    in_place = cfg.target_path.resolve() == cfg.source_path.resolve()
    return convert(conversion, cfg.target_path, in_place=in_place, keep_backup=cfg.keep_backup, stream=sys.stderr)
