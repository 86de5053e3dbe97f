"""Context parallelism of vision towers: patches are spread in front of the blocks, and features put together behind the
mergers, so that the model scatters them into its text as ever.

For towers of flat patches of many images: `blocks`, which take document borders (`cu_seqlens`) and rotations, and
mergers that make one feature of each square of patches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from mindspeed_mm.fsdp.ops.context_attention.language import register_context_attention
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.layout import build_layout, scale_layout
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def apply_to_tower(tower: nn.Module) -> bool:
    """Let a tower work on a share of the patches when the call brings `mm_context`, the share of a text or the ranks
    themselves; call it before sharding.

    Returns:
        False: the tower is of another shape and was left as it is, to be computed whole on every rank.
    """
    if not can_be_spread(tower):
        return False
    side: int = attribute_at(tower, "config.spatial_merge_size")
    tower.set_attn_implementation(register_context_attention())  # type: ignore[operator]
    patches = SpreadPatches(side * side)
    for number, block in enumerate(tower.blocks):  # type: ignore[arg-type]
        before = partial(patches.before_block, number == 0)
        block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)  # others work on own patches
    for merger in (tower.merger, *attribute_at(tower, "deepstack_merger_list", ())):
        merger.register_forward_hook(patches.after_merger)
    return True


def can_be_spread(tower: nn.Module) -> bool:
    """Whether a tower has blocks, a merger of squares of patches, and attention behind transformers' interface."""
    has_blocks = isinstance(attribute_at(tower, "blocks"), nn.ModuleList)
    has_merger = isinstance(attribute_at(tower, "merger"), nn.Module)
    merges_squares = bool(attribute_at(tower, "config.spatial_merge_size"))
    is_exchangeable = bool(attribute_at(tower, "_supports_attention_backend", False))
    return has_blocks and has_merger and merges_squares and is_exchangeable


class SpreadPatches:
    """Hooks of one tower. What they keep is of the call that goes through the tower now; blocks that are computed again
    have theirs in their arguments.

    Args:
        unit: Patches that a merger makes one feature of: they stay together.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._features: ContextShare | None = None
        self._shares: list[tuple[Tensor, ContextShare, Tensor]] = []
        """By document borders of the patches: the share, and borders of the own patches as one document."""
        self._rotations: tuple[Any, Any] = (None, None)

    def before_block(self, is_first: bool, _: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments:
        """Own patches, rotations and borders instead of all."""
        if is_first:
            groups = kwargs.get(CONTEXT_KEY)
            if isinstance(groups, ContextShare):
                groups = groups.groups
            self._begin(groups, len(args[0]))
        if self._features is None:
            # The text's share means nothing here.
            return args, {key: value for key, value in kwargs.items() if key != CONTEXT_KEY}
        share, own_borders = self._share_for(self._features.groups, kwargs["cu_seqlens"])
        if self._rotations[0] is not kwargs["position_embeddings"]:
            own = tuple(share.take(each, 0) for each in kwargs["position_embeddings"])
            self._rotations = (kwargs["position_embeddings"], own)
        hidden, *others = args
        if is_first:
            hidden = share.take(hidden, 0)
        inputs = {"cu_seqlens": own_borders, "position_embeddings": self._rotations[1], CONTEXT_KEY: share}
        return (hidden, *others), kwargs | inputs

    def after_merger(self, _: nn.Module, __: object, own: Tensor) -> Tensor:
        """Features of all patches. Each rank reads those among its own text, so gradients are summed."""
        if self._features is None:
            return own
        return self._features.gather(own, 0, sum_gradients=True)

    def _begin(self, groups: ContextGroups | None, patches: int) -> None:
        self._shares, self._rotations, self._features = [], (None, None), None
        if groups is not None:
            layout = build_layout(patches // self._unit, groups.ring_size, groups.ulysses_size)
            # A tower fails on no patches at all: images too small to give every rank some are computed whole on each.
            if not layout.leaves_ranks_empty:
                self._features = ContextShare(groups, layout)

    def _share_for(self, groups: ContextGroups, borders: Tensor) -> tuple[ContextShare, Tensor]:
        for known, share, own_borders in self._shares:
            if known is borders:
                return share, own_borders
        assert self._features is not None
        share = ContextShare(groups, scale_layout(self._features.layout, self._unit, borders.tolist()))
        own_borders = borders.new_tensor([0, len(share.positions)])
        self._shares.append((borders, share, own_borders))
        return share, own_borders
