"""Adapters out of a distributed checkpoint, added to a model's weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, find_step
from mindspeed_mm.checkpoint.layout import MANIFEST
from mindspeed_mm.checkpoint.safetensors_file import write_safetensors
from mindspeed_mm.checkpoint.stored_weights import UNDER_ADAPTERS
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.models.lora.files import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS
from mindspeed_mm.fsdp.models.lora.names import ADAPTER
from mindspeed_mm.tasks.export import export, merge
from mindspeed_mm.tasks.requests.export import ExportRequest, MergeRequest

_DOWN = ".lora_A.weight"
_LENGTH = ".lora_magnitude_vector"


def merge_checkpoint(
    base: Path, source: Path, target: Path, modules: Sequence[str], scaling: float | None, *, overwrite: bool = False
) -> merge.Merged | export.Exported:
    """Write a model with the adapters of a checkpoint added.

    Args:
        base: The model that they were trained on.
        source: A run, whose newest step is taken; a step; or the folder of a conversion.
        target: The folder to write.
        modules: Parts of names: only layers that have one of them get their adapters. Empty: all.
        scaling: What B·A is multiplied by; None: as the run says it, or the adapter_config.json beside it, else 1.
        overwrite: Replace what an earlier merge wrote there.

    Raises:
        ModelFolderError: It holds no adapters of these layers, or more than adapters; or they are of another model.
        MMError: As `mm merge`.
    """
    step = find_step(source)
    tensors, left, others = _adapters_in(step, modules)
    if not tensors:
        what = "holds no adapters" + (" of these layers" if left else "")
        raise ModelFolderError(what, where=str(step), key="lora_target_modules" if left else "lora_dcp_dir")
    if left:
        say(f"note: adapters of {len(left)} layers are not added, as {left[0]}: see --lora_target_modules", err=True)
    elif scaling is None and (step / MANIFEST).is_file():  # the run knows all about them
        return export.run(ExportRequest(step, target, model_folder=base, merge=True, overwrite=overwrite))
    if others:
        raise ModelFolderError(
            f"holds {len(others)} tensors that are no adapters and would be lost",
            where=str(step),
            key=others[0],
            way_out="Write the whole model of a run with mm export --merge.",
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_safetensors(tensors, folder / PEFT_WEIGHTS, {"format": "pt"})
        ranks = {key.removesuffix(_DOWN): len(tensor) for key, tensor in tensors.items() if key.endswith(_DOWN)}
        settings: dict[str, object] = {"peft_type": "LORA", "use_dora": any(key.endswith(_LENGTH) for key in tensors)}
        # B·A as it is: the scale of the merge is the whole factor.
        settings["r"] = settings["lora_alpha"] = next(iter(ranks.values()), 1)
        if len(set(ranks.values())) > 1:
            own = {layer.removeprefix(PEFT_PREFIX): rank for layer, rank in ranks.items()}
            settings |= {"rank_pattern": own, "alpha_pattern": own}
        (folder / PEFT_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
        factor = _factor(step, scaling)
        return merge.run(MergeRequest(base, (folder,), out=target, scales=(factor,), overwrite=overwrite))


def _adapters_in(step: Path, modules: Sequence[str]) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """A checkpoint's adapters under PEFT's keys, the layers that are left out, and names of what else was trained."""
    tensors: dict[str, torch.Tensor] = {}
    left: dict[str, None] = {}
    others: list[str] = []
    for name, stored in DcpReader(step).model_tensors().items():
        if ".lora_" not in name:
            if not name.startswith(PEFT_PREFIX):  # else the base that they stand on
                others.append(name)
            continue
        plain = name.removeprefix(UNDER_ADAPTERS).removeprefix(PEFT_PREFIX)
        layer, _, side = plain.partition(".lora_")
        if modules and not any(word in layer for word in modules):
            left[layer] = None
            continue
        side = side.replace(f".{ADAPTER}", "")
        if side == "magnitude_vector.weight":
            side = "magnitude_vector"
        tensors[f"{PEFT_PREFIX}{layer}.lora_{side}"] = stored.read().contiguous()
    return tensors, list(left), others


def _factor(step: Path, said: float | None) -> float:
    """What B·A is multiplied by."""
    trained = _trained_factor(step)
    if said is None:
        return 1.0 if trained is None else trained
    if trained is not None and trained != said:
        say(f"note: --scaling is {said:g}, and the adapters were trained with {trained:g}", err=True)
    return said


def _trained_factor(step: Path) -> float | None:
    """Alpha / rank, by the configuration of the run or by PEFT's settings beside the checkpoint."""
    found: object = None
    for file, keys in ((step / MANIFEST, ("context", "config", "training", "lora")), (step.parent / PEFT_CONFIG, ())):
        if found is None and file.is_file():
            found = read_json_object(file, ModelFolderError)
            for key in keys:
                found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    rank, alpha = found.get("rank", found.get("r")), found.get("alpha", found.get("lora_alpha"))
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        return None
    return alpha / (rank**0.5 if found.get("use_rslora") else rank)
