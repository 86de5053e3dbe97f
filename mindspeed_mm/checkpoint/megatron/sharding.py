"""Divides whole Megatron tensors among ranks, stages and chunks, and joins them again. Nothing is read: both directions
are expressions over the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from mindspeed_mm.checkpoint.keymap import in_natural_order, is_number
from mindspeed_mm.checkpoint.lazy_tensor import Agreeing, LazyTensor, stored_keys
from mindspeed_mm.checkpoint.megatron.family import EXPERT, MegatronModel, PipelineTower, TensorCut
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout, MegatronRank, Place
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, Problem

_SHOWN = 20
Tensors = Mapping[str, LazyTensor]
Shards = dict[MegatronRank, dict[str, dict[str, LazyTensor]]]
"""Rank → `model`, or `model0`, `model1` … → name as that rank has it → tensor."""


def divide(whole: Tensors, model: MegatronModel, layout: MegatronLayout) -> Shards:
    """What every file of a checkpoint holds.

    Args:
        whole: Whole tensors by name.
        model: Names, cuts and stages.
        layout: Checked against the model.

    Raises:
        ModelFolderError: A tensor belongs to no tower, or the ranks do not divide it.
    """
    shards: Shards = {}
    for rank in layout.ranks:
        shards[rank] = {chunk: {} for chunk in layout.chunk_keys}
    tensors = dict(whole)
    if model.tied_head and layout.stages > 1 and model.embedding in tensors:
        # The last stage has no embedding to share: it holds a copy as its head.
        tensors[model.head] = tensors[model.embedding]
    for name, tensor in in_natural_order(tensors).items():
        for rank, chunk, local, piece in _pieces(name, tensor, model, layout):
            shards[rank][chunk][local] = piece
    return shards


def _pieces(
    name: str, tensor: LazyTensor, model: MegatronModel, layout: MegatronLayout
) -> Iterator[tuple[MegatronRank, str, str, LazyTensor]]:
    """Who holds which piece of a tensor, and as what."""
    tower = model.tower_of(name)
    size, cut = layout.tp_size(tower.name), model.cut_of(name)
    pieces = [tensor]
    try:
        if cut is not None:
            pieces = [cut.piece(tensor, rank, size, layout.vocabulary_multiple) for rank in range(size)]
    except (ValueError, IndexError) as error:
        raise ModelFolderError(
            f"cannot be divided by tensor parallelism of {size}: {error}", key=name, way_out="Choose another tp_size."
        ) from error
    expert_ranks, local_expert = _expert_ranks(name, model, layout)
    # A tower may be divided among fewer tensor ranks than the text: those beyond hold its pieces again.
    for place, local in _stage_places(local_expert, tower, layout):
        for tp in range(layout.tp):
            for ep in expert_ranks:
                yield MegatronRank(tp, place.stage, ep), layout.model_key(place.chunk), local, pieces[tp % len(pieces)]


def times_written(whole: Tensors, model: MegatronModel, layout: MegatronLayout) -> dict[str, int | None]:
    """How often `divide` writes each stored tensor, those that it writes once left out.

    Args:
        whole: Whole tensors by name, of which none is made of parts of a stored one that are held differently.
        model: Names, cuts and stages.
        layout: Checked against the model.
    """
    # With several stages the last one has a copy of the embedding as its head.
    tied = model.tied_head and layout.stages > 1
    found: dict[str, int | None] = {}
    for name, tensor in whole.items():
        times = _holders(name, model, layout)
        if tied and name == model.embedding:
            times += _holders(model.head, model, layout)
        found |= dict.fromkeys(stored_keys(tensor), times)
    return {key: times for key, times in found.items() if times != 1}


def _holders(name: str, model: MegatronModel, layout: MegatronLayout) -> int:
    """Ranks that hold the same piece of a tensor."""
    tower = model.tower_of(name)
    # Uncut, it is one piece that every tensor rank holds.
    pieces = layout.tp_size(tower.name) if model.cut_of(name) else 1
    expert_ranks, _ = _expert_ranks(name, model, layout)
    return layout.tp // pieces * len(expert_ranks) * len(_stage_places(name, tower, layout))


def _stage_places(name: str, tower: PipelineTower, layout: MegatronLayout) -> list[tuple[Place, str]]:
    """Where a tensor stands, and its name there: layers are numbered from 0 at every place."""
    if tower.name in layout.everywhere:
        return [(Place(0, stage), name) for stage in range(layout.stages)]
    if name.startswith(tower.layers):
        number, _, rest = name.removeprefix(tower.layers).partition(".")
        if not is_number(number):
            raise ModelFolderError(f"its layer, '{number[:_SHOWN]}', is not a number", key=name[: 5 * _SHOWN])
        try:
            place, local = layout.place_of_layer(tower.name, int(number))
        except IndexError as error:
            raise ModelFolderError(f"the {tower.name} tower has no layer {number}", key=name) from error
        return [(place, f"{tower.layers}{local}.{rest}")]
    if name.startswith(tower.first):
        return [(layout.first_place(tower.name), name)]
    if name.startswith(tower.last):
        return [(layout.last_place(tower.name), name)]
    places = product(range(layout.chunks), range(layout.stages))
    return [(Place(chunk, stage), name) for chunk, stage in places]


def _expert_ranks(name: str, model: MegatronModel, layout: MegatronLayout) -> tuple[list[int], str]:
    """The expert ranks that hold a tensor, and its name there."""
    found = EXPERT.fullmatch(name)
    if found is None or layout.ep == 1:
        return list(range(layout.ep)), name
    if not is_number(found["number"]) or int(found["number"]) >= model.experts:
        raise ModelFolderError(f"config.json has {model.experts} experts, counted from 0", key=name)
    # Runs of experts, rank after rank; each rank counts its own from 0.
    rank, local = divmod(int(found["number"]), model.experts // layout.ep)
    return [rank], f"{found['before']}{local}{found['after']}"


class _Piece(NamedTuple):
    rank: MegatronRank
    where: str
    tensor: LazyTensor


def join(shards: Shards, model: MegatronModel, layout: MegatronLayout) -> dict[str, LazyTensor]:
    """The whole tensors. Where several ranks hold the same, reading compares their copies.

    Args:
        shards: What every file holds.
        model: Names, cuts and stages.
        layout: How it was divided; checked against the model.

    Raises:
        CheckpointError: A file lacks what its siblings hold, or holds what belongs nowhere.
    """
    pieces: dict[str, list[_Piece]] = {}
    for rank, chunks in shards.items():
        for chunk in range(layout.chunks):
            key = layout.model_key(chunk)
            for local, tensor in chunks[key].items():
                name = _whole_name(local, Place(chunk, rank.pp), rank, model, layout)
                where = f"{layout.folder_name(rank)}  {key}.{local}"
                pieces.setdefault(name, []).append(_Piece(rank, where, tensor))
    whole = {name: _joined(name, found, model, layout) for name, found in in_natural_order(pieces).items()}
    return with_one_head(whole, model)


def with_one_head(
    whole: dict[str, LazyTensor], model: MegatronModel, names: tuple[str, str] | None = None
) -> dict[str, LazyTensor]:
    """Whole tensors, without a head that is a copy of the embedding: reading compares the two.

    Args:
        whole: By name.
        model: Says whether the head is a copy.
        names: What errors call embedding and head; None: as the model does.
    """
    embedding, head = model.embedding, model.head
    if model.tied_head and {head, embedding} <= whole.keys():
        whole[embedding] = Agreeing([whole[embedding], whole.pop(head)], names or (embedding, head))
    return whole


def _whole_name(local: str, place: Place, rank: MegatronRank, model: MegatronModel, layout: MegatronLayout) -> str:
    try:
        tower = model.tower_of(local)
    except ModelFolderError as error:
        raise CheckpointError(
            f"{local} belongs to no tower of this model",
            where=layout.folder_name(rank),
            way_out="Is it another model's?",
        ) from error
    name = local
    if local.startswith(tower.layers):
        number, _, rest = local.removeprefix(tower.layers).partition(".")
        # Position in the place → number in the whole model.
        held = layout.layers_at(tower.name, place)
        layer = _number_below(number, len(held), f"{local}: it is layer", "layers", layout.folder_name(rank))
        name = f"{tower.layers}{held[layer]}.{rest}"
    if (found := EXPERT.fullmatch(name)) and model.experts:
        experts = model.experts // layout.ep
        local_expert = _number_below(
            found["number"], experts, f"{local}: it is expert", "experts", layout.folder_name(rank)
        )
        name = f"{found['before']}{local_expert + rank.ep * experts}{found['after']}"
    return name


def _number_below(text: str, most: int, what: str, of_what: str, where: str) -> int:
    """A number in a name, as it is written: `01` would be a second name of 1."""
    if not is_number(text) or str(int(text)) != text:
        raise CheckpointError(f"{what} '{text[:_SHOWN]}', which is not a number", where=where)
    if int(text) >= most:
        raise CheckpointError(f"{what} {text}, counted from 0, and there are {most} {of_what} here", where=where)
    return int(text)


def _joined(name: str, pieces: list[_Piece], model: MegatronModel, layout: MegatronLayout) -> LazyTensor:
    _check_present(name, pieces, layout)
    _check_dtypes(name, pieces)
    cut = model.cut_of(name)
    if cut is None:
        return _agreed(pieces)
    size = layout.tp_size(model.tower_of(name).name)
    # Ranks beyond those that divide the tower hold its pieces again, from the first on.
    copies_of_part: list[list[_Piece]] = [[] for _ in range(size)]
    for piece in pieces:
        copies_of_part[piece.rank.tp % size].append(piece)
    agreed = list(map(_agreed, copies_of_part))
    try:
        for part in agreed:
            if len(part.shape) <= cut.dim:
                raise ValueError(f"a piece of shape {list(part.shape)} has no dim {cut.dim} that is cut")
        whole = cut.whole(agreed, model.vocabulary)
        _check_lengths(agreed, whole, cut, layout.vocabulary_multiple)
    except ValueError as error:
        raise CheckpointError("cannot be joined", problems=[Problem(str(error), pieces[0].where)]) from error
    return whole


def _check_present(name: str, pieces: list[_Piece], layout: MegatronLayout) -> None:
    """Every tensor rank holds a piece, or the whole; so does every expert rank, except of an expert."""
    present = {(piece.rank.tp, piece.rank.ep) for piece in pieces}
    expert_ranks: Iterable[int] = range(layout.ep)
    if EXPERT.fullmatch(name):
        # Those that hold this expert: one of them.
        expert_ranks = sorted({ep for _, ep in present})
    for tp, ep in product(range(layout.tp), expert_ranks):
        if (tp, ep) in present:
            continue
        there = pieces[0]
        if tp != there.rank.tp:
            found = f"tensor rank {tp}, and there on rank {there.rank.tp}"
        else:
            found = f"expert rank {ep}, and there on rank {there.rank.ep}"
        raise CheckpointError(
            f"{name} is missing on {found}",
            where=there.where.partition(" ")[0],
            way_out="Copy the whole folder again.",
        )


def _check_dtypes(name: str, pieces: list[_Piece]) -> None:
    first = pieces[0]
    for piece in pieces:
        if piece.tensor.dtype != first.tensor.dtype:
            raise CheckpointError(
                f"is {piece.tensor.dtype}, and {first.tensor.dtype} at {first.where}; they are pieces of one tensor",
                where=piece.where,
                way_out="Save the checkpoint again with one type for all ranks.",
            )


def _check_lengths(pieces: list[LazyTensor], whole: LazyTensor, cut: TensorCut, multiple: int) -> None:
    """Each piece is as long as dividing the whole makes it: others would sum up too."""
    for rank, piece in enumerate(pieces):
        expected = cut.piece(whole, rank, len(pieces), multiple).shape
        if piece.shape != expected:
            raise ValueError(
                f"rank {rank} of {len(pieces)} holds a piece of shape {list(piece.shape)}, "
                f"and of {list(whole.shape)} it should hold {list(expected)}"
            )


def _agreed(copies: list[_Piece]) -> LazyTensor:
    if len(copies) == 1:
        return copies[0].tensor
    return Agreeing([copy.tensor for copy in copies], [copy.where for copy in copies])
