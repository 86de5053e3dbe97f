"""Adapters of a generator as ComfyUI and kohya's scripts name them: after the layers of the authors' own files.

    diffusers   transformer.blocks.0.attn1.to_q.lora_A.weight
    ComfyUI     diffusion_model.blocks.0.self_attn.q.lora_down.weight     and .alpha
    kohya       lora_unet_blocks_0_self_attn_q.lora_down.weight           and .alpha

Where the authors have one layer for several of diffusers, several adapters become one: their A's stand below one
another, their B's on the diagonal of a matrix of zeros. A layer of these without an adapter has one of zeros, so that
all parts have the same rank: by that, readers take the parts out again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mindspeed_mm.checkpoint.keymap import KeyMap, RuleMatch, made_by
from mindspeed_mm.checkpoint.lazy_tensor import Computed, LazyTensor
from mindspeed_mm.checkpoint.original.flux import FLUX
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.wan import VACE, WAN
from mindspeed_mm.core.errors import UsageError

LoraFormat = Literal["diffusers", "comfyui", "kohya"]
NAMES: dict[str, KeyMap] = {
    **{family.class_name: family.rules(Naming.ORIGINAL).inverse for family in (FLUX, WAN, VACE)},
    "QwenImageTransformer2DModel": KeyMap([], keep_others=True),  # the authors' names are diffusers'
}
"""Class of the transformer → diffusers' names to the authors'."""
UNREAD_BY_DIFFUSERS = frozenset({VACE.class_name})
"""Of these, the classes whose names by ComfyUI and kohya diffusers does not translate back."""
ALPHA_BESIDE_LAYERS = frozenset({FLUX.class_name})
"""Classes whose adapters by diffusers' own names hold each layer's alpha, in place of settings in the header:
diffusers' loader reads either and rejects a file that has both (`loaders/peft.py` at 0.42), ComfyUI reads alphas alone
(`comfy/lora.py`). diffusers' loaders of the other classes here reject such keys."""


_FILE_KEY = re.compile(
    r"(?P<layer>.+?)\.(?P<side>lora_down\.weight|lora_up\.weight|lora_A\.weight|lora_B\.weight|alpha)"
)
_SIDE_NAMES = {
    "lora_down.weight": "A", "lora_A.weight": "A", "lora_up.weight": "B", "lora_B.weight": "B", "alpha": "alpha",
}  # fmt: skip


@dataclass(frozen=True)
class LayerAdapter:
    """What is added to the weight of one linear layer: scale · B·A."""

    a: LazyTensor
    """(rank, inputs)."""
    b: LazyTensor
    """(outputs, rank)."""
    scale: float


def renamed_adapters(
    adapters: Mapping[str, LayerAdapter],
    weights: Mapping[str, tuple[int, ...]],
    class_name: str,
    lora_format: LoraFormat,
) -> dict[str, LazyTensor]:
    """A file's tensors.

    Args:
        adapters: By the names of layers in diffusers.
        weights: Shapes of the transformer's weights, by diffusers' keys.
        class_name: Of the transformer in diffusers.
        lora_format: `comfyui` or `kohya`.

    Raises:
        UsageError: The names of this model's layers, or of one of them, are not known there.
    """
    if class_name not in NAMES:
        raise UsageError(
            f"the names of {class_name} are not known to {lora_format}; they are for {', '.join(NAMES)}",
            key="--lora-format",
            way_out="Export with --lora-format diffusers.",
        )
    names, made = NAMES[class_name], dict[str, LazyTensor]()
    # Stand-ins of the weights' shapes: the map shows which layers become one.
    shapes = {key: _zero_factor(shape) for key, shape in weights.items()}
    left = set(adapters)
    for step in names.steps(shapes):
        parts = [source.removesuffix(".weight") for source in step.sources]
        if left.isdisjoint(parts) or not all(source.endswith(".weight") for source in step.sources):
            continue
        left.difference_update(parts)
        made |= _of_one_layer(names, step, [weights[source] for source in step.sources], adapters, lora_format)
    if left:
        raise UsageError(
            f"{lora_format} has no name for it", key=min(left), way_out="Export with --lora-format diffusers."
        )
    return made


def layers_of(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, tuple[int, ...]], class_name: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]] | None:
    """The way back: adapters by the names of layers in diffusers, each as A, B and what B·A is multiplied by.

    Args:
        tensors: Of a file by ComfyUI's or kohya's names.
        weights: Shapes of the transformer's weights, by diffusers' keys.
        class_name: Of the transformer in diffusers.

    Returns:
        None where one of the names is not that of a layer of this model.
    """
    if class_name not in NAMES:
        return None
    names, own = NAMES[class_name], dict[str, str]()
    for step in names.steps({key: _zero_factor(shape) for key, shape in weights.items()}):
        for key in made_by([step]):
            layer = key.removesuffix(".weight")
            # All names are made from the model's layers: kohya's underscores cannot be turned back.
            own |= {f"diffusion_model.{layer}": key, f"lora_unet_{layer.replace('.', '_')}": key}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _FILE_KEY.fullmatch(name)
        if match is None or match["layer"] not in own:
            return None
        found.setdefault(own[match["layer"]], {})[_SIDE_NAMES[match["side"]]] = tensor
    layers = {}
    for key, parts in found.items():
        if not {"A", "B"} <= parts.keys():
            return None
        a, b = parts["A"], parts["B"]
        scale = float(parts["alpha"]) / len(a) if "alpha" in parts else 1.0
        # The rule that takes the authors' weight apart takes B apart: its rows are the outputs.
        of_parts = made_by(names.inverse.steps({key: _known(b)}))
        for source, rows in of_parts.items():
            layers[source.removesuffix(".weight")] = (a, rows.read(), scale)
    return layers


def _of_one_layer(
    names: KeyMap,
    step: RuleMatch,
    shapes: list[tuple[int, ...]],
    adapters: Mapping[str, LayerAdapter],
    lora_format: LoraFormat,
) -> dict[str, LazyTensor]:
    """The adapter of one of the authors' layers, made of those of its parts.

    Args:
        names: From diffusers to the authors.
        step: What makes the layer's weight.
        shapes: Of the weights of its parts.
        adapters: Of any parts, by their names in diffusers.
        lora_format: As above.
    """
    parts = [adapters.get(source.removesuffix(".weight")) for source in step.sources]
    there = list(filter(None, parts))
    first = there[0]
    # One rank, scale and dtype for the joined layer: smaller ranks are filled up, other scales go into B.
    rank, scale, dtype = max(part.a.shape[0] for part in there), first.scale, first.a.dtype
    whole_rank, inputs = rank * len(parts), first.a.shape[1]
    downs: list[LazyTensor] = []
    diagonal: dict[str, LazyTensor] = {}
    for number, (source, part, shape) in enumerate(zip(step.sources, parts, shapes, strict=True)):
        downs.append(_down(part, (rank, inputs), dtype))
        # Part `number` of A's rows meets these columns of B alone.
        columns = slice(number * rank, (number + 1) * rank)
        diagonal[source] = _up(part, columns, (shape[0], whole_rank), scale, dtype)
    down = downs[0] if len(downs) == 1 else Computed(downs, torch.cat, (whole_rank, inputs), dtype)
    # The rule that joins the weights of the parts joins their B's: rows below one another.
    ((key, up),) = made_by(names.steps(diagonal)).items()
    layer = key.removesuffix(".weight")
    if lora_format == "comfyui":
        layer = f"diffusion_model.{layer}"
    else:
        layer = f"lora_unet_{layer.replace('.', '_')}"
    # Readers divide alpha by the rank that they see, which is that of the joined layer.
    alpha = Computed([], lambda _: torch.tensor(scale * whole_rank), (), torch.float32)
    return {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up, f"{layer}.alpha": alpha}


def _down(part: LayerAdapter | None, shape: tuple[int, int], dtype: torch.dtype) -> LazyTensor:
    """A, with rows of zeros below it where others have a larger rank."""

    def padded(read: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.zeros(shape, dtype=dtype)
        for a in read:
            rows[: len(a)] = a
        return rows

    return Computed([part.a] if part else [], padded, shape, dtype)


def _up(
    part: LayerAdapter | None, columns: slice, shape: tuple[int, int], scale: float, dtype: torch.dtype
) -> LazyTensor:
    """B in its columns of a matrix of zeros, made to fit the common scale."""

    def padded(read: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.zeros(shape, dtype=dtype)
        for b in read:
            assert part is not None
            if part.scale != scale:
                b = b * (part.scale / scale)
            rows[:, columns.start : columns.start + b.shape[1]] = b
        return rows

    return Computed([part.b] if part else [], padded, shape, dtype)


def _known(tensor: torch.Tensor) -> LazyTensor:
    return Computed([], lambda _: tensor, tuple(tensor.shape), tensor.dtype)


def _zero_factor(shape: tuple[int, ...]) -> LazyTensor:
    return Computed([], lambda _: torch.zeros(shape), shape, torch.float32)
