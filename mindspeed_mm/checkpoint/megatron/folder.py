"""A folder of Megatron's: which of its steps is meant, how it is divided, its tensors under the hub's names, and what
the files of one that is written hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.keymap import check_used_once, is_number, natural_order
from mindspeed_mm.checkpoint.lazy_tensor import Agreeing, LazyTensor, Sliced
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily, MegatronModel
from mindspeed_mm.checkpoint.megatron.layout import (
    LAYOUT_FILE,
    WEIGHTS_FILE,
    MegatronLayout,
    MegatronRank,
    Stages,
    parse_folder_name,
)
from mindspeed_mm.checkpoint.megatron.pt_reading import PtContent, read_pt_files
from mindspeed_mm.checkpoint.megatron.sharding import Shards, divide, join
from mindspeed_mm.checkpoint.megatron.spelling import OF_KERNELS, usual_names
from mindspeed_mm.checkpoint.megatron.torch_dist import WholeWeights, read_whole
from mindspeed_mm.checkpoint.recognise import is_megatron_step, is_torch_dist
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.json_file import read_json_object

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CHECKPOINT_VERSION = 3.0
_SHOWN = 100
_CHUNK = re.compile(r"model\d*")
_POWERS = tuple(2**n for n in range(13))


@dataclass(frozen=True)
class DividedWeights:
    """What the files of a step hold."""

    step: Path
    shards: Shards
    model: MegatronModel
    layout: MegatronLayout
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What else the files hold → why it is no part of the model."""

    @property
    def canonical(self) -> bool:
        """Whether projections are stored apart."""
        return self.layout.canonical

    @property
    def stored(self) -> dict[str, LazyTensor]:
        """Every piece by its file's folder, its chunk and its name: `mp_rank_00_001/model.…`."""
        return {self._key(rank, chunk, name): tensor for rank, chunk, name, tensor in self._pieces()}

    def whole(self, stored: Mapping[str, LazyTensor] | None = None) -> dict[str, LazyTensor]:
        """The whole tensors, under Megatron's names.

        Args:
            stored: Stand for `self.stored`, as a ledger counts them.

        Raises:
            CheckpointError: As `join`.
        """
        shards = self.shards
        if stored is not None:
            shards = {rank: {chunk: {} for chunk in chunks} for rank, chunks in self.shards.items()}
            for rank, chunk, name, _ in self._pieces():
                shards[rank][chunk][name] = stored[self._key(rank, chunk, name)]
        return join(shards, self.model, self.layout)

    def padding(self, stored: Mapping[str, LazyTensor]) -> list[LazyTensor]:
        """The rows that fill the vocabulary up, and are no part of the model. `stored` as of `whole`."""
        found: list[LazyTensor] = []
        for rank, chunk, name, tensor in self._pieces():
            cut = self.model.cut_of(name)
            if cut is None or not cut.padded or self.model.vocabulary is None:
                continue
            rows, ranks = tensor.shape[cut.dim], self.layout.tp_size(self.model.tower_of(name).name)
            surplus = min(rows, (rank.tp % ranks + 1) * rows - self.model.vocabulary)
            if surplus > 0:
                found.append(Sliced(stored[self._key(rank, chunk, name)], cut.dim, rows - surplus, surplus))
        return found

    def _pieces(self) -> Iterator[tuple[MegatronRank, str, str, LazyTensor]]:
        for rank, chunks in self.shards.items():
            for chunk, tensors in chunks.items():
                for name, tensor in tensors.items():
                    yield rank, chunk, name, tensor

    def _key(self, rank: MegatronRank, chunk: str, name: str) -> str:
        return f"{self.layout.folder_name(rank)}/{chunk}.{name}"


def step_files(folder: Path) -> list[Path]:
    """The files with the weights of the step that `find_step` finds, by name."""
    step = find_step(folder)
    return sorted(step.glob("*.distcp") if is_torch_dist(step) else step.glob(f"mp_rank_*/{WEIGHTS_FILE}"))


def find_step(folder: Path) -> Path:
    """The folder that holds `mp_rank_*` or `metadata.json`: the one given, or the step in it that the tracker names,
    which may be a conversion's folder with a step of its own.

    Raises:
        CheckpointError: There is none.
    """
    if is_megatron_step(folder):
        return folder
    tracker = folder / TRACKER
    named = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if is_number(named):
        named = f"iter_{int(named):07d}"
    steps = [path.name for path in sorted(folder.glob("*/")) if _holds_step(path)]
    if named in steps:
        return find_step(folder / named)
    if named:
        raise CheckpointError(
            f"names '{named[:_SHOWN]}', and there is no such step here",
            where=str(tracker),
            way_out=f"Name a step itself: {', '.join(steps)}." if steps else "Copy the whole folder again.",
        )
    if len(steps) == 1:
        return find_step(folder / steps[0])
    raise CheckpointError(
        f"has {len(steps)} steps and no {TRACKER}" if steps else "holds no mp_rank_* folder and no metadata.json",
        where=str(folder),
        way_out=f"Name one of them: {', '.join(steps)}." if steps else "Name the folder that holds them.",
    )


def _holds_step(folder: Path) -> bool:
    return is_megatron_step(folder) or is_megatron_step(folder / RELEASE)


def hub_tensors(folder: Path, family: MegatronFamily, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """The tensors of a folder under the hub's names, read when they are needed. Arguments and errors as of
    `read_weights`."""
    found = read_weights(folder, family, config)
    return renamed_to_hub(found.whole(), found.model)


def renamed_to_hub(whole: Mapping[str, LazyTensor], model: MegatronModel) -> dict[str, LazyTensor]:
    """Whole Megatron tensors under the hub's names.

    Raises:
        ModelFolderError: One has no name there, or a part of one is missing.
    """
    steps = model.key_map.inverse.steps(whole)
    made = {key: tensor for step in steps for key, tensor in step.targets.items()}
    check_used_once(steps, whole, made)
    return {key: made[key] for key in sorted(made, key=natural_order)}


def without_a_name(whole: Mapping[str, LazyTensor], model: MegatronModel) -> list[LazyTensor]:
    """What `renamed_to_hub` drops, since the hub has no tensor for it: a bias that changes nothing, say."""
    return [tensor for step in model.key_map.inverse.steps(whole) for tensor in step.dropped]


def read_weights(
    folder: Path,
    family: MegatronFamily,
    config: Mapping[str, Any],
    wanted: MegatronLayout | None = None,
    *,
    canonical: bool = False,
) -> DividedWeights | WholeWeights:
    """What a folder holds.

    Args:
        folder: As `find_step` takes it.
        family: Of the model.
        config: Its config.json.
        wanted: How a person said that the folder is divided; None: not at all.
        canonical: Whether projections are stored apart, where neither the folder nor `wanted` says it.

    Raises:
        CheckpointError: A file is missing or broken, or files do not fit together.
        UsageError: `wanted` is another division than the folder's, or the folder is not divided.
    """
    step = find_step(folder)
    if not is_torch_dist(step):
        return read_divided(step, family, config, wanted, canonical=canonical)
    if wanted is not None:
        raise UsageError(
            "a division was said, and the checkpoint holds whole tensors",
            where=str(step),
            key="parallel_config",
            way_out="Leave it out.",
        )
    return read_whole(step, family.model(config, canonical=canonical), canonical=canonical)


def read_divided(
    folder: Path,
    family: MegatronFamily,
    config: Mapping[str, Any],
    wanted: MegatronLayout | None = None,
    *,
    canonical: bool = False,
) -> DividedWeights:
    """What a folder with `mp_rank_*` holds. Arguments and errors as of `read_weights`."""
    step = find_step(folder)
    kept = read_layout(step)
    told = kept or wanted
    canonical = told.canonical if told else canonical
    model = family.model(config, canonical=canonical)
    contents = _read_files(step, told.ep if told else 1)
    layout = kept or replace(_layout_of(contents, model, wanted), canonical=canonical)
    if wanted is not None:
        refuse_contradiction(wanted, layout, step)
    layout.check(model.depths, model.experts, where=str(step))
    shards = _shards(step, contents, layout)
    return DividedWeights(step, shards, model, layout, _left_out(contents, shards, layout))


def _left_out(contents: Mapping[MegatronRank, PtContent], shards: Shards, layout: MegatronLayout) -> dict[str, str]:
    found = {}
    for rank, content in contents.items():
        at = layout.folder_name(rank)
        for section, stored in content.tensors.items():
            if section not in shards[rank]:
                found[f"{at}/{section}"] = "is no part of the model"
            else:
                found |= {f"{at}/{section}.{name}": OF_KERNELS for name in stored if name.endswith("._extra_state")}
    return found


def read_layout(step: Path) -> MegatronLayout | None:
    """How a step says that it is divided; None: it does not say.

    Raises:
        CheckpointError: `layout.json` is damaged.
    """
    file = step / LAYOUT_FILE
    if not file.is_file():
        return None
    return MegatronLayout.from_json(read_json_object(file, CheckpointError), str(file))


def read_shards(step: Path, layout: MegatronLayout) -> Shards:
    """What the files of a step hold, by rank and chunk.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    return _shards(step, _read_files(step, layout.ep), layout)


def files_of(
    hub: Mapping[str, LazyTensor], family: MegatronFamily, config: Mapping[str, Any], layout: MegatronLayout
) -> dict[str, dict[str, dict[str, LazyTensor]]]:
    """What a folder in this division holds.

    Args:
        hub: The model's tensors under the hub's names.
        family: Of the model.
        config: Its config.json.
        layout: The division.

    Returns:
        File, relative to the step's folder → `model` (or `model0` …) → name → tensor.

    Raises:
        UsageError: The division does not fit the model.
        ModelFolderError: A tensor has no place, or is missing.
    """
    model = family.model(config, canonical=layout.canonical)
    layout.check(model.depths, model.experts)
    return divided_files(megatron_tensors(hub, model), model, layout)


def megatron_tensors(hub: Mapping[str, LazyTensor], model: MegatronModel) -> dict[str, LazyTensor]:
    """The hub's tensors as whole Megatron tensors, without those that the layout has no place for.

    Raises:
        ModelFolderError: A tensor has no place, or is missing.
    """
    carried = {key: tensor for key, tensor in hub.items() if not key.startswith(model.not_carried)}
    steps = model.key_map.steps(carried)
    whole = {key: tensor for step in steps for key, tensor in step.targets.items()}
    check_used_once(steps, carried, whole)
    embedding, head = model.embedding, model.head
    if model.tied_head and {head, embedding} <= whole.keys():
        whole[embedding] = Agreeing([whole[embedding], whole.pop(head)], ["the embedding", "the head tied to it"])
    return whole


def divided_files(
    whole: Mapping[str, LazyTensor], model: MegatronModel, layout: MegatronLayout
) -> dict[str, dict[str, dict[str, LazyTensor]]]:
    """As `files_of`, of tensors under Megatron's own names."""
    layout.check(model.depths, model.experts)
    _check_layers(whole, model)
    shards = divide(whole, model, layout)
    return {f"{layout.folder_name(rank)}/{WEIGHTS_FILE}": content for rank, content in shards.items()}


def _check_layers(whole: Mapping[str, LazyTensor], model: MegatronModel) -> None:
    for tower in model.towers:
        found = {name.removeprefix(tower.layers).partition(".")[0] for name in whole if name.startswith(tower.layers)}
        if missing := sorted(set(map(str, range(model.depths[tower.name]))) - found, key=int):
            raise ModelFolderError(
                f"nothing is stored of layer {missing[0]} of the {tower.name} tower", key=f"{tower.layers}{missing[0]}"
            )


def _read_files(step: Path, expert_ranks: int) -> dict[MegatronRank, PtContent]:
    folders: dict[MegatronRank, Path] = {}
    for path in sorted(step.glob("mp_rank_*")):
        rank = parse_folder_name(path.name, expert_ranks=expert_ranks > 1)
        if rank is None:
            raise CheckpointError("is no name of a rank's folder", where=str(path), way_out="Take it away.")
        folders[rank] = path / WEIGHTS_FILE
    return dict(zip(folders, read_pt_files(list(folders.values())), strict=True))


def _layout_of(
    contents: Mapping[MegatronRank, PtContent], model: MegatronModel, wanted: MegatronLayout | None
) -> MegatronLayout:
    """The division that files show: their names have the ranks, their tensors the layers."""
    stages = 1 + max(rank.pp for rank in contents)
    chunks = max(1, sum(key.removeprefix("model").isdecimal() for key in next(iter(contents.values())).tensors))
    layers: dict[str, Stages] = {}
    outline = MegatronLayout({"text": ((0,) * stages,) * chunks})
    for tower in model.towers:
        layers[tower.name] = tuple(
            tuple(_count_layers(contents, stage, outline.model_key(chunk), tower.layers) for stage in range(stages))
            for chunk in range(chunks)
        )
    everywhere = {
        name: depth
        for name, depth in model.depths.items()
        if stages > 1 and name != "text" and layers[name][0] == (depth,) * stages
    }
    for name, depth in everywhere.items():
        layers[name] = ((depth, *[0] * (stages - 1)), *layers[name][1:])
    ep = 1 + max(rank.ep for rank in contents)
    tp = 1 + max(rank.tp for rank in contents)
    layout = MegatronLayout(
        layers,
        tp=tp,
        ep=ep,
        vocabulary_multiple=_vocabulary_multiple(contents, model, tp),
        everywhere=frozenset(everywhere),
    )
    if wanted is None:
        return layout
    return replace(layout, tp_of_tower=wanted.tp_of_tower)


def _vocabulary_multiple(contents: Mapping[MegatronRank, PtContent], model: MegatronModel, tp: int) -> int:
    """The smallest power of two that explains how far the vocabulary was filled up; 1 where none does."""
    name = model.embedding
    found = (stored[name] for content in contents.values() for stored in content.tensors.values() if name in stored)
    embedding = next(found, None)
    if embedding is None or not embedding.shape or model.vocabulary is None:
        return 1
    rows = embedding.shape[0] * tp
    explained = (power for power in _POWERS if -(-model.vocabulary // (power * tp)) * power * tp == rows)
    return next(explained, 1)


def _count_layers(contents: Mapping[MegatronRank, PtContent], stage: int, chunk: str, layers: str) -> int:
    content = next((found for rank, found in contents.items() if rank.pp == stage), None)
    names = content.tensors.get(chunk, {}) if content else {}
    return len({name.removeprefix(layers).partition(".")[0] for name in names if name.startswith(layers)})


def refuse_contradiction(wanted: MegatronLayout, found: MegatronLayout, step: Path) -> None:
    """Raise `UsageError` where a person said another division than the checkpoint has."""
    said, held = wanted.to_json(), found.to_json()
    different = [key for key in said if key != "vocabulary_multiple" and said[key] != held.get(key, said[key])]
    if different:
        key = different[0]
        raise UsageError(
            f"{said[key]} was said, and the checkpoint has {held[key]}",
            where=str(step),
            key=key,
            way_out="Leave it out: the checkpoint knows how it is divided.",
        )


def _shards(step: Path, contents: Mapping[MegatronRank, PtContent], layout: MegatronLayout) -> Shards:
    """By rank and chunk, without what Megatron's kernels keep for themselves."""
    # No more than one can be missing before it is seen: a damaged layout.json may name millions of ranks.
    wanted = set(islice(layout.iterate_ranks(), len(contents) + 1))
    if missing := sorted(wanted - contents.keys()):
        raise CheckpointError(
            f"{layout.folder_name(missing[0])} is missing", where=str(step), way_out="Copy the whole folder again."
        )
    if surplus := sorted(contents.keys() - wanted):
        raise CheckpointError(
            f"is of none of the {len(wanted)} ranks that the checkpoint is divided among",
            where=str(contents[surplus[0]].path.parent),
            way_out="Take it away, or copy the whole folder again.",
        )
    shards: Shards = {}
    for rank, content in contents.items():
        shards[rank] = {}
        keys = [layout.model_key(chunk) for chunk in range(layout.chunks)]
        if other := next((key for key in content.tensors if _CHUNK.fullmatch(key) and key not in keys), None):
            raise CheckpointError(
                f"is no chunk of this division, which has {', '.join(keys)}", where=str(content.path), key=other
            )
        for key in keys:
            shards[rank][key] = usual_names(content.tensors.get(key, {}), str(content.path))
    return shards
