"""Numbers of small tensors on a device that the host has to know: document borders, grids of patches, rows of experts,
and what attention masks hide.

Reading them there makes the host wait until the device has done all that it was given. What the host knew before a
batch went over travels with the moved tensors; everything else is read once a tensor, however many layers ask. While a
model's call runs, whoever makes masks can ask for the facts of its mask.

No compiler may look into functions that read sizes from the device, or talk to other ranks: torch.compile would cut its
graph at the reading, and compile again for every number read. Functions marked by `outside_graphs` run as they are,
between two graphs; while nothing is compiled, the mark costs one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs
from mindspeed_mm.fsdp.utils.device import copied_to

_VALUES = "_mm_host_values"
_KEYS = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "image_grid_thw", "video_grid_thw"),
    *("speaker_frames", "state_lengths", "picture_sizes", "picture_is_drawn"),
    *("images_spatial_crop", "num_local_patches", "patches_grid"),
)


def host_values(tensor: torch.Tensor) -> list[Any]:
    """As `tensor.tolist()`, without a wait where the values are known. Not for tensors that are written to later."""
    known: list[Any] | None = getattr(tensor, _VALUES, None)
    if known is None:
        known = tensor.tolist()
        setattr(tensor, _VALUES, known)
    return known


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the host knows a tensor's values: it came from there, or was read before."""
    return hasattr(tensor, _VALUES)


def sent_with_values(values: Sequence[object], like: torch.Tensor) -> torch.Tensor:
    """A tensor of values that the host has, of the type of another and beside it."""
    return moved_with_values(torch.tensor(values, dtype=like.dtype), like.device)


def moved_with_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on its way to a device, which brings along what it holds."""
    moved = copied_to(tensor, device)
    setattr(moved, _VALUES, tensor.tolist())
    return moved


def carry_host_values(host: Batch, moved: Batch) -> None:
    """Let a moved batch's tensors bring along what they hold."""
    for key in _KEYS:
        if isinstance(host.get(key), torch.Tensor):
            setattr(moved[key], _VALUES, host[key].tolist())


F = TypeVar("F", bound=Callable[..., Any])

_MARKED: list[Any] = []


def outside_graphs(function: F) -> F:
    """Mark a function or method; `draw_graph_borders` makes the marks count."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        return call.runs(*args, **kwargs)  # type: ignore[attr-defined]

    call.runs = function  # type: ignore[attr-defined]
    _MARKED.append(call)
    return call  # type: ignore[return-value]


def draw_graph_borders() -> None:
    """Keep the compiler out of all marked functions. May be called again."""
    for call in _MARKED:
        call.runs = torch.compiler.disable(call.__wrapped__)  # it imports the compiler: not before one is asked for


_KEY = "attention_mask"
_FACTS = "_mm_facts"


class MaskFacts(NamedTuple):
    """Of a (B, T) mask."""

    shape: torch.Size
    is_right_padded: bool
    """Every row is ones, then zeros."""
    ones: int


_OF_THIS_CALL: ContextVar[MaskFacts | None] = ContextVar("mask_facts", default=None)


def read_facts(mask: torch.Tensor) -> MaskFacts:
    """Those of a mask; the host waits for one that lies on a device."""
    seen = mask.bool()
    padded = seen[:, :1].all() & (seen[:, 1:] <= seen[:, :-1]).all()
    return MaskFacts(mask.shape, bool(padded.item()), int(seen.sum()))


def carry_facts(host: Batch, moved: Batch) -> None:
    """Let a moved batch's mask bring along what the host's says."""
    mask = host.get(_KEY)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        setattr(moved[_KEY], _FACTS, read_facts(mask))


def mask_facts_of(mask: torch.Tensor) -> MaskFacts | None:
    """What a moved mask brought along."""
    return getattr(mask, _FACTS, None)


def facts_of_this_call(mask: torch.Tensor) -> MaskFacts | None:
    """Facts of the mask that the model was called with, for one that the library made of it."""
    facts = _OF_THIS_CALL.get()
    if facts is not None and facts.shape == mask.shape:
        return facts
    return None


def tell_facts(model: nn.Module) -> None:
    """Let the facts that came with a mask be found while the model runs on it."""
    model.register_forward_pre_hook(_note_mask, with_kwargs=True)
    model.register_forward_hook(_forget_mask, always_call=True)


def _note_mask(_model: nn.Module, _args: Args, kwargs: Kwargs) -> None:
    mask = kwargs.get(_KEY)
    _OF_THIS_CALL.set(mask_facts_of(mask) if isinstance(mask, torch.Tensor) else None)


def _forget_mask(_model: nn.Module, _args: object, _output: object) -> None:
    _OF_THIS_CALL.set(None)
