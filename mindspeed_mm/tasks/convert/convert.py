"""`mm convert`: from a folder that is recognised to a layout that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mindspeed_mm.checkpoint.conversion.run import Converted
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.tasks.export.source import noted_model

Layout = Literal["hf", "dcp", "megatron", "diffusers", "original"]
_PLANNED = ("megatron", "diffusers", "original")


def run(
    source: Path,
    target: Path,
    to: Layout | None = None,
    *,
    model_folder: Path | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> tuple[str, Converted]:
    """Convert a folder.

    Args:
        source: A Hugging Face folder, a distributed checkpoint, or a run.
        target: The folder to write.
        to: Its layout; None: `dcp` of a Hugging Face folder, `hf` of anything else.
        model_folder: Configuration and tokenizer for a checkpoint that does not say what it was trained from.
        overwrite: Replace what an earlier conversion wrote there.
        verify: Read everything back and compare.

    Returns:
        What the source was recognised as, and what was written.

    Raises:
        UsageError: There is no way from that source to that layout.
    """
    kind = recognise(source)
    wanted = to or ("dcp" if kind == "hf" else "hf")
    converter = GenericDCPConverter()
    if (kind, wanted) == ("hf", "dcp"):
        return kind, converter.hf_to_dcp(source, target, overwrite=overwrite, verify=verify)
    if kind in ("dcp", "run") and wanted == "hf":
        assets = model_folder or noted_model(source) or noted_model(source.parent)
        if assets is None:
            raise UsageError(
                "does not say which model it was trained from",
                where=str(source),
                way_out="Name the folder with its config.json and tokenizer: --model FOLDER.",
            )
        return kind, converter.dcp_to_hf(source, target, assets, overwrite=overwrite, verify=verify)
    if wanted in _PLANNED or kind == "megatron":
        raise UsageError(f"from a folder of kind '{kind}' to '{wanted}' is planned", where=str(source), key="--to")
    raise UsageError(
        f"there is nothing to convert from a folder of kind '{kind}' to '{wanted}'", where=str(source), key="--to"
    )
