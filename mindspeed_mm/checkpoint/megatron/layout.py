"""How a Megatron-style checkpoint is divided: sizes of its parallel groups, layers of each stage, names of files.

The division is kept beside the weights as `layout.json`, so that nobody has to repeat it. A folder without one (written
by another program) shows it by its files: their names have the ranks, their tensors the layers of each stage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mindspeed_mm.core.errors import CheckpointError, Problem, UsageError

LAYOUT_FILE = "layout.json"
WEIGHTS_FILE = "model_optim_rng.pt"
TOWERS = ("text", "vision", "audio")
FLAG_OF_TOWER = {"text": "llm_pp_layers", "vision": "vit_pp_layers", "audio": "audio_pp_layers"}
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")

Stages = tuple[tuple[int, ...], ...]
"""Layers of a tower: for each virtual chunk, those on each stage. `((10, 10, 10, 2),)` is a pipeline of four stages."""


class MegatronRank(NamedTuple):
    """The ranks that one file is for."""

    tp: int
    pp: int
    ep: int


class Place(NamedTuple):
    """Where on the pipeline a tensor stands."""

    chunk: int
    stage: int


@dataclass(frozen=True)
class MegatronLayout:
    """One way to divide a model."""

    layers: Mapping[str, Stages]
    """Of each tower that the model has. All have the same numbers of chunks and stages."""
    tp: int = 1
    ep: int = 1
    tp_of_tower: Mapping[str, int] = field(default_factory=dict)
    """Where a tower's size differs from `tp` (`vit_tp_size`, `audio_tp_size`): its pieces repeat over the ranks."""
    vocabulary_multiple: int = 1
    """The vocabulary is filled up to a multiple of this times the tensor ranks."""
    canonical: bool = False
    """Queries, keys and values, and gates and ups, are stored apart."""
    everywhere: frozenset[str] = frozenset()
    """Towers that every stage holds whole, in its first chunk, as heterogeneous parallelism trains them."""
    u_shape: bool = False
    """The ends of the language model both stand on the first stage, in its first and in its last chunk, wherever the
    layers are."""

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(next(iter(self.layers.values()))[0])

    @property
    def chunks(self) -> int:
        """Of every stage: more than one where the pipeline is interleaved."""
        return len(next(iter(self.layers.values())))

    @property
    def ranks(self) -> list[MegatronRank]:
        """The ranks of all files, in the order of their names."""
        return list(self.iterate_ranks())

    def iterate_ranks(self) -> Iterator[MegatronRank]:
        """As `ranks`, one by one: a damaged file may name millions."""
        for tp in range(self.tp):
            for pp in range(self.stages):
                for ep in range(self.ep):
                    yield MegatronRank(tp, pp, ep)

    def tp_size(self, tower: str) -> int:
        """Tensor ranks that divide a tower."""
        return self.tp_of_tower.get(tower, self.tp)

    def first_place(self, tower: str) -> Place:
        """Where what comes before the tower's layers stands: beside the first of them."""
        if self._has_u_shape(tower):
            return Place(0, 0)
        return self._filled(tower)[0]

    def last_place(self, tower: str) -> Place:
        """Where what comes behind the tower's layers stands: beside the last of them."""
        if self._has_u_shape(tower):
            return Place(self.chunks - 1, 0)
        return self._filled(tower)[-1]

    def place_of_layer(self, tower: str, layer: int) -> tuple[Place, int]:
        """Where a layer is, and its number there.

        Raises:
            IndexError: The division has fewer layers.
        """
        for place, start, end in self._runs(tower):
            if start <= layer < end:
                return place, layer - start
        raise IndexError(layer)

    def layers_at(self, tower: str, place: Place) -> range:
        """The layers of a tower at a place, by their numbers in the whole model."""
        if tower in self.everywhere:
            if place.chunk > 0:
                return range(0)
            return range(sum(map(sum, self.layers[tower])))
        return next(range(start, end) for found, start, end in self._runs(tower) if found == place)

    def model_key(self, chunk: int) -> str:
        """What a chunk's tensors stand under in a file."""
        if self.chunks == 1:
            return "model"
        return f"model{chunk}"

    @property
    def chunk_keys(self) -> list[str]:
        """Keys under which a file holds the tensors of its chunks: `model_key` of every chunk."""
        return list(map(self.model_key, range(self.chunks)))

    def folder_name(self, rank: MegatronRank) -> str:
        """`mp_rank_TT`, with `_PPP` when there are several stages and `_EEE` when there are several expert ranks."""
        name = f"mp_rank_{rank.tp:02d}"
        if self.stages > 1:
            name += f"_{rank.pp:03d}"
        if self.ep > 1:
            name += f"_{rank.ep:03d}"
        return name

    def check(self, depths: Mapping[str, int], experts: int, *, where: str = "") -> None:
        """Compare with a model.

        Args:
            depths: Layers of each of its towers.
            experts: Routed experts in a layer.
            where: Whose division this is, for errors.

        Raises:
            UsageError: Towers, layers or experts do not fit.
        """
        problems = []
        for tower in self.layers:
            if tower not in depths:
                problems.append(Problem(f"the model has no {tower} tower", where, FLAG_OF_TOWER[tower]))
        problems += self._wrong_depths(depths, where)
        problems += self._unequal_shapes(where)
        if self.ep > 1 and (not experts or experts % self.ep):
            what = f"{self.ep} ranks do not divide {experts} experts" if experts else "the model has no experts"
            problems.append(Problem(what, where, "ep_size"))
        for tower, size in self.tp_of_tower.items():
            if self.tp % size:
                problems.append(Problem(f"{size} does not divide tp_size {self.tp}", where, _TP_FLAG.get(tower, tower)))
        if problems:
            raise UsageError("the division does not fit the model", problems=problems)

    def to_json(self) -> dict[str, object]:
        """Return the division as a JSON object for `layout.json`, which `from_json` reads."""
        content: dict[str, object] = {"tp_size": self.tp, "ep_size": self.ep}
        for tower, stages in self.layers.items():
            content[FLAG_OF_TOWER[tower]] = list(map(list, stages))
        for tower, size in self.tp_of_tower.items():
            content[_TP_FLAG[tower]] = size
        content |= {"vocabulary_multiple": self.vocabulary_multiple, "canonical": self.canonical}
        if self.everywhere:
            content[_EVERYWHERE] = sorted(self.everywhere)
        if self.u_shape:
            content["u_shape"] = True
        return content

    @classmethod
    def from_json(cls, values: Mapping[str, object], where: str) -> MegatronLayout:
        """From `layout.json`.

        Raises:
            CheckpointError: Something is missing or of another type.
        """
        try:
            layers = {}
            for tower, flag in FLAG_OF_TOWER.items():
                if values.get(flag):
                    layers[tower] = parse_stages(values[flag], flag)
            if "text" not in layers and "vision" not in layers:
                raise UsageError("is missing", key="llm_pp_layers")
            return cls(
                layers=layers,
                tp=_size_of(values, "tp_size"),
                ep=_size_of(values, "ep_size"),
                tp_of_tower={tower: _size_of(values, flag) for tower, flag in _TP_FLAG.items() if flag in values},
                vocabulary_multiple=_size_of(values, "vocabulary_multiple"),
                canonical=_switch_of(values, "canonical"),
                everywhere=_towers(values, layers),
                u_shape="u_shape" in values and _switch_of(values, "u_shape"),
            )
        except UsageError as error:
            raise CheckpointError(
                f"is not the division of a checkpoint: {error}",
                where=where,
                way_out="Copy the file again, or delete it: the folder's files show the division too.",
            ) from error

    def _wrong_depths(self, depths: Mapping[str, int], where: str) -> list[Problem]:
        problems = []
        for tower, depth in depths.items():
            stages = self.layers.get(tower, ())
            given = sum(map(sum, stages))
            if given != depth:
                what = f"{json.dumps(stages)} are {given} layers, the model's {tower} tower has {depth}"
                problems.append(Problem(what, where, FLAG_OF_TOWER[tower]))
        return problems

    def _unequal_shapes(self, where: str) -> list[Problem]:
        problems = []
        for tower, chunks in self.layers.items():
            shape = list(map(len, chunks))
            if shape != [self.stages] * self.chunks:
                what = f"has {shape} stages in its chunks, the first tower has {[self.stages] * self.chunks}"
                problems.append(Problem(what, where, FLAG_OF_TOWER[tower]))
        return problems

    def _runs(self, tower: str) -> list[tuple[Place, int, int]]:
        """Each place with its first layer and the one behind its last; places in the order that data passes them."""
        runs = []
        start = 0
        for chunk, counts in enumerate(self.layers[tower]):
            for stage, count in enumerate(counts):
                runs.append((Place(chunk, stage), start, start + count))
                start += count
        return runs

    def _has_u_shape(self, tower: str) -> bool:
        return self.u_shape and tower == "text"

    def _filled(self, tower: str) -> list[Place]:
        places = []
        for place, start, end in self._runs(tower):
            if end > start:
                places.append(place)
        return places


_TP_FLAG = {"vision": "vit_tp_size", "audio": "audio_tp_size"}
_EVERYWHERE = "towers_on_every_stage"


def _towers(values: Mapping[str, object], layers: Mapping[str, Stages]) -> frozenset[str]:
    names = values.get(_EVERYWHERE, [])
    known = [tower for tower in layers if tower != "text"]
    if not isinstance(names, list) or not all(name in known for name in names):
        raise UsageError(f"{names!r} are not towers of {known}", key=_EVERYWHERE)
    return frozenset(names)


def _size_of(values: Mapping[str, object], key: str) -> int:
    value = _given(values, key)
    if type(value) is not int or value < 1:
        raise UsageError(f"{value!r} is not a whole number above 0", key=key)
    return value


def _switch_of(values: Mapping[str, object], key: str) -> bool:
    value = _given(values, key)
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither true nor false", key=key)
    return value


def _given(values: Mapping[str, object], key: str) -> object:
    if key not in values:
        raise UsageError("is missing", key=key)
    return values[key]


def parse_stages(value: object, flag: str) -> Stages:
    """Layers of a tower as people write them: `[14, 14]`, or one list for each virtual chunk.

    Raises:
        UsageError: It is neither.
    """
    chunks = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(map(_are_counts, chunks)):
        raise UsageError(
            f"{value!r} are not the layers of stages",
            key=flag,
            way_out="Write [14,14], or one list for each virtual chunk: [[7,7],[7,7]].",
        )
    return tuple(map(tuple, chunks))


def _are_counts(value: object) -> bool:
    """Whether it is a list of whole numbers, each 0 or more; true and false are none."""
    return isinstance(value, list) and bool(value) and all(type(count) is int and count >= 0 for count in value)


def even_layers(depths: Mapping[str, int], stages: int, chunks: int = 1) -> dict[str, Stages]:
    """Layers where none were named: text as evenly as the places allow, the last places the shorter ones; towers before
    it on the first place, as the second front door has them.

    Args:
        depths: Layers of each tower.
        stages: Of the pipeline.
        chunks: Of every stage.
    """
    places = stages * chunks
    each, rest = divmod(depths["text"], places)
    text = [each + 1] * rest + [each] * (places - rest)
    layers = {"text": _in_chunks(text, stages)}
    for tower in TOWERS[1:]:
        if tower in depths:
            layers[tower] = _in_chunks([depths[tower]] + [0] * (places - 1), stages)
    return layers


def even_stages(depth: int, stages: int, chunks: int) -> Stages:
    """As `even_layers` divides the language model, where no place may be empty.

    Raises:
        UsageError: There are more places than layers.
    """
    if stages * chunks > depth:
        raise UsageError(
            f"{stages} stages × {chunks} chunks are more than the model's {depth} layers",
            key="pp_layers",
            way_out="Take fewer; mm-convert takes the layers of each place, and some may have none.",
        )
    return even_layers({"text": depth}, stages, chunks)["text"]


def _in_chunks(counts: list[int], stages: int) -> Stages:
    starts = range(0, len(counts), stages)
    return tuple(tuple(counts[start : start + stages]) for start in starts)


def parse_folder_name(name: str, *, expert_ranks: bool) -> MegatronRank | None:
    """Whose folder it is; None for another name.

    Args:
        name: `mp_rank_01_002`, for example.
        expert_ranks: A single further number is the expert rank, not the stage: nothing in the name tells.
    """
    found = _FOLDER.fullmatch(name)
    if found is None:
        return None
    tp, second, third = map(int, found.groups(default="0"))
    if expert_ranks and found[3] is None:
        return MegatronRank(tp, 0, second)
    return MegatronRank(tp, second, third)
