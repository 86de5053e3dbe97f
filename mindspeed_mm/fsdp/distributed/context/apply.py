"""Context parallelism: one sequence is spread over the ranks of ring × ulysses.

Every rank of a context group reads the same batch. The model gets it whole, so that media are placed and positions are
counted as ever; a hook in front of the decoder (or of a generator's blocks) takes this rank's tokens, and attention
alone communicates. Gradients of parameters are parts, which FSDP's sum over the same ranks makes whole.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.fsdp.distributed.context.generators import apply_to_generator
from mindspeed_mm.fsdp.distributed.context.plan import KEYS, ContextPlan, find_decoder, takes_share
from mindspeed_mm.fsdp.distributed.context.towers import apply_to_tower
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.models.structure.stages import own_names
from mindspeed_mm.fsdp.ops.attention import is_right_padded
from mindspeed_mm.fsdp.ops.context_attention.language import register_context_attention
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.layout import SequenceLayout, build_layout
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that mark the documents of a packed row. The layout knows them; a tower that received them would cut its
own tokens by them."""
_BY_PLACE = {
    "_rows": ("_targets", "_weights", "_segment", "_sampled"),
    "latent_places": ("latent_tokens", "latent_times", "latent_positions"),
    "drawn_places": ("_velocities",),
}
"""Places in the flattened rows, and what an objective prepares for each of them."""
_WHOLE = (
    "_labelled_samples",
    "_weight_sum",
    "_micro_batches",
    "_advantages",
    "_tokens",
    "_fresh",
    "_counts",
    "_reference",
)
"""What it prepares of the whole batch."""
_FILLS = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED_LABEL,
    "shift_labels": IGNORED_LABEL,
    "position_ids": 0,
    "mm_token_type_ids": 0,
    "token_type_ids": 0,
    "part_ids": 0,
    "token_kinds": 0,
}
"""Batch keys along the sequence, with what padding is there."""
_DECODER_TOKENS = {
    **dict.fromkeys(("input_ids", "inputs_embeds", "visual_pos_masks", "mm_token_type_ids"), 1),
    "position_ids": -1,
}
"""Inputs of a decoder along the sequence, with its dimension."""


class ContextParallel:
    """What the training step must know of a spread sequence.

    Denominators are counted on the whole batch, before `split`, and summed over the data ranks alone: all ranks of a
    context group count the same.

    Args:
        groups: Who shares a sequence.
        replicates_loss: Every rank of a context group computes the loss of the whole sequence (generators), not of its
            own tokens.
    """

    def __init__(self, groups: ContextGroups, *, replicates_loss: bool) -> None:
        self.groups = groups
        self.replicates_loss = replicates_loss

    def split(self, batch: Batch) -> Batch:
        """A prepared micro-batch, still on the host, with what this rank needs to work on its share: `mm_context`, to
        be passed to the model, and labels of its own tokens.

        Raises:
            DataError: Rows are padded on another side than the right.
        """
        if self.replicates_loss:
            return batch | {CONTEXT_KEY: self.groups}
        return split_rows(batch, self.groups)

    def sum_losses(self, losses: Tensor) -> Tensor:
        """Losses of this rank's share, in place, as those of the whole sequence."""
        if not self.replicates_loss:
            dist.all_reduce(losses, group=self.groups.everyone)
        return losses


def apply_context_parallel(model: nn.Module, plan: ContextPlan, state: ParallelState) -> ContextParallel:
    """Prepare a model for spread sequences, in place; call it before sharding.

    Args:
        model: Built, not sharded; parameters on meta or real. Of a pipeline, this rank's part.
        plan: From `resolve_context_plan`.
        state: Its ring and ulysses axes.
    """
    groups = groups_of(state)
    if plan.spreads_samples:
        apply_to_generator(model, groups)
    elif not takes_share(model):
        apply_to_decoder(model)
        for name in own_names(model, plan.towers):
            apply_to_tower(model.get_submodule(name))
    return ContextParallel(groups, replicates_loss=plan.spreads_samples)


def groups_of(state: ParallelState) -> ContextGroups:
    """The context groups of this rank."""
    groups = ContextGroups(everyone=state.axis_group("cp"))
    if state.axis_size("ring") > 1:
        groups = replace(groups, ring=state.axis_group("ring"))
    if state.axis_size("ulysses") > 1:
        groups = replace(groups, ulysses=state.axis_group("ulysses"))
    return groups


def apply_to_decoder(model: nn.Module) -> None:
    """Let the decoder of a language model work on a share when the call brings one."""
    decoder = find_decoder(model)
    name = register_context_attention()
    decoder.set_attn_implementation(name)  # type: ignore[operator]
    decoder.register_forward_pre_hook(take_share, with_kwargs=True)


def split_rows(batch: Batch, groups: ContextGroups) -> Batch:
    """A batch of text with its share: labels of own tokens, borders in the layout instead of beside it.

    Raises:
        DataError: Rows are padded on the left.
    """
    labels = batch["shift_labels"]
    mask = batch.get("attention_mask")
    if mask is not None and not is_right_padded(mask):
        raise DataError(
            "rows are not padded on the right, and a spread sequence has no mask",
            where=", ".join(map(str, batch.get("sample_ids", ()))),
            key="attention_mask",
            way_out="Pad on the right, or pack.",
        )
    share = ContextShare(groups, _layout_of(batch, groups))
    length = labels.shape[1]
    if share.layout.leaves_ranks_empty:
        # A balanced layout gives each rank two pieces of a document.
        batch = lengthened(batch, 2 * groups.ring_size * groups.ulysses_size)
        share = ContextShare(groups, _layout_of(batch, groups))
    kept = {key: value for key, value in batch.items() if key not in _BORDERS}
    own = {"shift_labels": share.take(batch["shift_labels"], 1), CONTEXT_KEY: share}
    return kept | own | own_places(batch, share, length)


def _layout_of(batch: Batch, groups: ContextGroups) -> SequenceLayout:
    length = batch["shift_labels"].shape[1]
    borders = None
    if "cu_seq_lens_q" in batch:
        borders = batch["cu_seq_lens_q"].tolist()
    return build_layout(length, groups.ring_size, groups.ulysses_size, borders=borders, balanced=True)


def lengthened(batch: Batch, by: int) -> Batch:
    """Rows with so many tokens of padding behind them, in a packed row as one more document: models of transformers
    fail on a rank without tokens. What is computed for them is not read."""
    longer = dict(batch)
    for key, fill in _FILLS.items():
        if key in batch:
            longer[key] = F.pad(batch[key], (0, by), value=fill)
    if "cu_seq_lens_q" in batch:
        borders = batch["cu_seq_lens_q"]
        longer["cu_seq_lens_q"] = torch.cat([borders, borders[-1:] + by])
        longer["pad_tokens"] = batch.get("pad_tokens", 0) + by
    return longer


def own_places(batch: Batch, share: ContextShare, length: int) -> Batch:
    """What an objective prepared for labelled tokens and for latents, of the own ones, numbered among the own tokens.

    Args:
        batch: Prepared.
        share: Of this rank.
        length: Tokens of a row when it was prepared.

    Raises:
        MMError: The objective has prepared something that cannot be split.
    """
    known = {*_BY_PLACE, *chain.from_iterable(_BY_PLACE.values()), *_WHOLE}
    unknown = [key for key in batch if key.startswith("_") and key not in known]
    if unknown:
        names, keys = ", ".join(f"'{key}'" for key in unknown), "key" if len(unknown) == 1 else "keys"
        raise MMError(f"the objective's {keys} {names} cannot be split along the sequence", key=KEYS)
    own = len(share.positions)
    # Of each token of a row, its place among the own ones; -1: another rank's.
    place = torch.full((share.layout.length,), -1).index_copy(0, share.positions, torch.arange(own))
    found: Batch = {}
    for key, with_it in _BY_PLACE.items():
        if key not in batch:
            continue
        row, token = batch[key] // length, place[batch[key] % length]
        is_own = token >= 0
        found[key] = (row * own + token)[is_own]
        found |= {name: batch[name][is_own] for name in with_it if name in batch}
    return found


def take_share(decoder: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments | None:
    """Hook in front of a decoder: its inputs along the sequence become those of own tokens.

    Raises:
        ConfigError: The model made a mask of its own, or passes inputs by position.
    """
    share = kwargs.get(CONTEXT_KEY)
    if share is None:
        return None
    mask = kwargs.get("attention_mask")
    if args or isinstance(mask, dict) or (mask is not None and mask.dim() != 2):
        what = "passes inputs by position" if args else "makes attention masks of its own"
        raise ConfigError(
            f"the model in front of {type(decoder).__name__} {what}", key=KEYS, way_out="Set both sizes to 1."
        )
    tokens = kwargs.get("inputs_embeds")
    if tokens is None:
        tokens = kwargs["input_ids"]
    # A mask in its last form, and empty: transformers makes none, nor looks for documents in positions, which would
    # wait for the device and fails where a rank has no token.
    own = {**kwargs, "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=tokens.device)}
    if own.get("position_ids") is None:
        own["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
    for key, dim in _DECODER_TOKENS.items():
        if own.get(key) is not None:
            own[key] = share.take(own[key], dim)
    if own.get("deepstack_visual_embeds") is not None:
        rows = own_media_rows(kwargs["visual_pos_masks"], share)
        own["deepstack_visual_embeds"] = [level.index_select(0, rows) for level in own["deepstack_visual_embeds"]]
    return args, own


def own_media_rows(visual_BL: Tensor, share: ContextShare) -> Tensor:
    """Numbers, among all media tokens of a batch, of those that this rank holds. With none, no row is taken, but the
    features stay in the graph: a rank that left them out would leave others waiting in the backward pass."""
    numbers = visual_BL.flatten().cumsum(0).view_as(visual_BL) - 1
    return share.take(numbers, 1)[share.take(visual_BL, 1)]
