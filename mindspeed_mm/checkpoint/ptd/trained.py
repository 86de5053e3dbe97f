"""A run, or another distributed checkpoint, divided among the ranks of a Megatron-style checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from mindspeed_mm.checkpoint.common.config import ParallelConfig
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, find_step, model_noted_in
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import hub_folder
from mindspeed_mm.checkpoint.hf_folder import DtypeRule, asset_files, model_config
from mindspeed_mm.checkpoint.megatron.expected import check_whole, expected_shapes
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily
from mindspeed_mm.checkpoint.megatron.folder import divided_files, megatron_tensors
from mindspeed_mm.checkpoint.megatron.sharding import times_written
from mindspeed_mm.checkpoint.ptd.conversions import megatron_output
from mindspeed_mm.checkpoint.ptd.division import layout_of
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import CheckpointError, UsageError


def divide_trained(
    family: MegatronFamily,
    source_dir: Path,
    target_dir: Path,
    hf_dir: Path | None,
    target: ParallelConfig,
    *,
    writing: Writing,
) -> Converted:
    """Divide the whole tensors of a distributed checkpoint among ranks, in the dtypes of the model's folder.

    Args:
        family: Of the model.
        source_dir: A run, whose newest step is taken; a step; or the folder of a conversion.
        target_dir: The folder to write.
        hf_dir: The model's folder; None: the one that the run started from.
        target: The division.
        writing: How the output is written.

    Raises:
        UsageError: Nothing says which folder the model is of, or transformers has no class for it.
        CheckpointError: The checkpoint holds adapters, or is damaged.
        MMError: As `convert`; or the division does not fit the model.
    """
    step = find_step(source_dir)
    home = hf_dir or model_noted_in(step)
    if home is None:
        raise UsageError(
            "does not say which model it holds",
            where=str(step),
            way_out="Name the model's folder: --cfg.hf_config.hf_dir, or --model of mm convert.",
        )
    config = model_config(home)
    outline = TransformersOutline.of(home)
    if outline is None:
        raise UsageError(
            "names no class of transformers, by which a distributed checkpoint is read",
            where=str(home / "config.json"),
            key="architectures",
            way_out="Write the checkpoint as a Hugging Face folder (dcp_to_hf), and divide that (hf_to_mm).",
        )
    ledger = SourceLedger(DcpReader(step).model_tensors(), step)
    adapters = [name for name in ledger.tensors if ".lora_" in name]
    if adapters:
        raise CheckpointError(
            f"holds adapters ({len(adapters)} tensors, as {adapters[0]}) without the model under them",
            where=str(step),
            way_out="Merge them first (mm merge RUN --out FOLDER), and divide that folder (hf_to_mm).",
        )
    model = family.model(config)
    layout = layout_of(target, model.depths, canonical=False)
    layout.check(model.depths, model.experts)
    on_hub = hub_folder(outline, ledger.tensors, None, step, allow_unused=writing.allow_unused)
    rule, left_out, tensors = DtypeRule.of_source(home), dict(on_hub.left_out), {}
    for key, tensor in on_hub.tensors.items():
        if key.startswith(model.not_carried):
            left_out[key] = "is not part of this layout"
        else:
            tensors[key] = rule.cast(key, tensor)
    whole = megatron_tensors(tensors, model)
    check_whole(whole, expected_shapes(home, family, config, canonical=False), model, step, home)
    conversion = Conversion(
        sources=[step, home],
        ledgers=[ledger],
        **megatron_output(divided_files(whole, model, layout), layout),
        times=times_written(whole, model, layout),
        left_out=left_out,
        copies=asset_files(home),
    )
    return convert(conversion, target_dir, writing, stream=sys.stderr)
