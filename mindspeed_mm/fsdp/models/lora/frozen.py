"""Adapters that lie frozen under the one that is trained: y = W·x + Σ scale_i · B_i·A_i·x + scale · B·A·x.

Each keeps its own rank, alpha and kind, as PEFT wrote them. They are in no checkpoint: a run that goes on reads them
from their folders again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces
from mindspeed_mm.fsdp.models.lora.files import AdapterFile, StoredAdapter
from mindspeed_mm.fsdp.models.lora.injection import expression_of, inject_adapter
from mindspeed_mm.fsdp.models.lora.names import MAGNITUDE, adapter_weight
from mindspeed_mm.fsdp.models.lora.targets import is_linear

KEY = "training.lora.frozen_adapters"


def inject_frozen(model: nn.Module, folders: Sequence[str]) -> tuple[str, ...]:
    """Put the frozen adapters into a model without weights; returns their folders.

    Raises:
        ModelFolderError: There are no adapters, or of a kind that can only be merged.
        ConfigError: They are of layers that the model does not have.
    """
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    for index, folder in enumerate(folders):
        adapter = AdapterFile.find(Path(folder), KEY).adapter()
        _check(adapter, layers, folder)
        inject_adapter(
            model,
            f"frozen_{index}",
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.use_rslora,
            use_dora=any(key.endswith(f"lora_{MAGNITUDE}") for key in adapter.keys),
            rank_pattern=dict(adapter.rank_pattern),
            alpha_pattern=dict(adapter.alpha_pattern),
            target_modules=expression_of(list(adapter.layers)),
        )
    return tuple(folders)


@torch.no_grad()
def load_frozen(model: nn.Module) -> None:
    """Fill the frozen adapters from their folders. Each rank reads its part.

    Raises:
        ModelFolderError: A file is of another shape than its settings say.
    """
    lora = facts_of(model).lora
    own: dict[str, Any] = dict(model.named_parameters())
    for index, folder in enumerate(lora.frozen if lora is not None else ()):
        adapter = AdapterFile.find(Path(folder), KEY).adapter()
        with safe_open(adapter.weights, framework="pt") as reader:
            for layer, sides in adapter.layers.items():
                for side, key in sides.items():
                    target = own.get(adapter_weight(layer, side, f"frozen_{index}"))
                    if target is not None:  # of a pipeline, another rank may have the layer
                        _fill(target, adapter.stored(key, reader), folder, key)


def _fill(target: torch.Tensor, stored: Any, folder: str, key: str) -> None:
    if stored.shape != tuple(target.shape):
        raise ModelFolderError(
            f"{list(stored.shape)} in the file, {list(target.shape)} by its settings", where=folder, key=key
        )
    for piece, region in local_pieces(target):
        stored.copy_to(piece, region)


def _check(adapter: StoredAdapter, layers: dict[str, nn.Module], folder: str) -> None:
    if adapter.fused or adapter.whole:
        what = "adapters on fused experts" if adapter.fused else f"'{adapter.whole[0]}', which was trained whole"
        raise ModelFolderError(
            f"holds {what}, which cannot lie under other adapters",
            where=folder,
            key=KEY,
            way_out="Merge it into the base first: mm merge BASE ADAPTER --out FOLDER.",
        )
    if foreign := [name for name in adapter.layers if name not in layers]:
        raise ConfigError(
            f"'{folder}' is of other layers than this model has ({foreign[0]} …)",
            key=KEY,
            way_out="Name adapters that were trained on this model.",
        )
