"""A folder of Megatron's: which of its steps is meant, how it is divided, its tensors under the hub's names, and what
the files of one that is written hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from mindspeed_mm.checkpoint.dcp_folder.reading import step_in
from mindspeed_mm.checkpoint.keymap import check_used_once, in_natural_order, is_number, made_by, names_behind
from mindspeed_mm.checkpoint.layout import RELEASE, TRACKER, tracker_text
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Sliced
from mindspeed_mm.checkpoint.megatron.family import Config, MegatronFamily, MegatronModel
from mindspeed_mm.checkpoint.megatron.layout import (
    LAYOUT_FILE,
    WEIGHTS_FILE,
    MegatronLayout,
    MegatronRank,
    Stages,
    parse_folder_name,
)
from mindspeed_mm.checkpoint.megatron.pt_reading import PtContent, read_pt_files
from mindspeed_mm.checkpoint.megatron.sharding import Shards, divide, join, with_one_head
from mindspeed_mm.checkpoint.megatron.spelling import OF_KERNELS, usual_names
from mindspeed_mm.checkpoint.megatron.torch_dist import WholeWeights, read_whole
from mindspeed_mm.checkpoint.recognise import check_folder_exists, is_megatron_step, is_torch_dist
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.json_file import read_json_object

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
    beside: Mapping[str, str] = field(default_factory=dict)
    """What else the files hold → why it is not part of the model."""

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
        if stored is None:
            return join(self.shards, self.model, self.layout)
        counted: Shards = {}
        for rank, chunks in self.shards.items():
            counted[rank] = {chunk: {} for chunk in chunks}
        for rank, chunk, name, _ in self._pieces():
            counted[rank][chunk][name] = stored[self._key(rank, chunk, name)]
        return join(counted, self.model, self.layout)

    def padding(self, stored: Mapping[str, LazyTensor]) -> list[LazyTensor]:
        """The rows that fill the vocabulary up, and are no part of the model. `stored` as of `whole`."""
        found: list[LazyTensor] = []
        for rank, chunk, name, tensor in self._pieces():
            cut = self.model.cut_of(name)
            if cut is None or not cut.padded or self.model.vocabulary is None:
                continue
            rows = tensor.shape[cut.dim]
            # Ranks beyond those that divide the tower hold its pieces again, from the first on.
            part = rank.tp % self.layout.tp_size(self.model.tower_of(name).name)
            surplus = min(rows, (part + 1) * rows - self.model.vocabulary)
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
    pattern = "*.distcp" if is_torch_dist(step) else f"mp_rank_*/{WEIGHTS_FILE}"
    return sorted(step.glob(pattern))


def find_step(folder: Path) -> Path:
    """The folder that holds `mp_rank_*` or `metadata.json`: the one given, or the step in it that the tracker names,
    which may be a conversion's folder with a step of its own.

    Raises:
        CheckpointError: There is none.
    """
    check_folder_exists(folder)
    if is_megatron_step(folder):
        return folder
    named = tracker_text(folder)
    if is_number(named):
        # The tracker says 100, the folder is iter_0000100.
        named = f"iter_{int(named):07d}"
    steps = [path.name for path in sorted(folder.glob("*/")) if _holds_step(path)]
    if named in steps:
        return find_step(folder / named)
    if named:
        way_out = "Copy the whole folder again."
        if steps:
            way_out = f"Name a step itself: {', '.join(steps)}."
        elif step_in(folder) is not None:
            raise CheckpointError(
                "holds a distributed checkpoint, which is not divided among ranks",
                where=str(folder),
                way_out="Write it as a Hugging Face folder (mm_to_hf), and divide that (hf_to_mm).",
            )
        raise CheckpointError(
            f"names '{named[:_SHOWN]}', and there is no such step here", where=str(folder / TRACKER), way_out=way_out
        )
    if len(steps) == 1:
        return find_step(folder / steps[0])
    if not steps:
        what, way_out = "holds no mp_rank_* folder and no metadata.json", "Name the folder that holds them."
    else:
        what, way_out = f"has {len(steps)} steps and no {TRACKER}", f"Name one of them: {', '.join(steps)}."
    raise CheckpointError(what, where=str(folder), way_out=way_out)


def _holds_step(folder: Path) -> bool:
    return is_megatron_step(folder) or is_megatron_step(folder / RELEASE)


def hub_tensors(folder: Path, family: MegatronFamily, config: Config) -> dict[str, LazyTensor]:
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
    made = made_by(steps)
    check_used_once(steps, whole, made)
    return in_natural_order(made)


def without_a_name(whole: Mapping[str, LazyTensor], model: MegatronModel) -> list[LazyTensor]:
    """What `renamed_to_hub` drops, since the hub has no tensor for it: a bias that changes nothing, say."""
    dropped: list[LazyTensor] = []
    for step in model.key_map.inverse.steps(whole):
        dropped += step.dropped
    return dropped


def read_weights(
    folder: Path,
    family: MegatronFamily,
    config: Config,
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
            "a division was given, and the checkpoint holds whole tensors",
            where=str(step),
            key="parallel_config",
            way_out="Leave it out.",
        )
    return read_whole(step, family.model(config, canonical=canonical), canonical=canonical)


def read_divided(
    folder: Path,
    family: MegatronFamily,
    config: Config,
    wanted: MegatronLayout | None = None,
    *,
    canonical: bool = False,
) -> DividedWeights:
    """What a folder with `mp_rank_*` holds. Arguments and errors as of `read_weights`."""
    step = find_step(folder)
    kept = read_layout(step)
    told = kept or wanted
    expert_ranks = 1
    if told is not None:
        # Needed before files are read: the names of their folders do not show what a second number is.
        canonical, expert_ranks = told.canonical, told.ep
    model = family.model(config, canonical=canonical)
    contents = _read_files(step, expert_ranks)
    layout = kept or replace(_layout_of(contents, model, wanted), canonical=canonical)
    if wanted is not None:
        refuse_contradiction(wanted, layout, step)
    layout.check(model.depths, model.experts, where=str(step))
    shards = _shards(step, contents, layout)
    return DividedWeights(step, shards, model, layout, _beside(contents, shards, layout))


def _beside(contents: Mapping[MegatronRank, PtContent], shards: Shards, layout: MegatronLayout) -> dict[str, str]:
    found = {}
    for rank, content in contents.items():
        # `optimizer` and the like, beside `model` or `model0` …
        for section, stored in content.tensors.items():
            at = f"{layout.folder_name(rank)}/{section}"
            if section not in shards[rank]:
                found[at] = "is not part of the model"
                continue
            for name in stored:
                if name.endswith("._extra_state"):
                    found[f"{at}.{name}"] = OF_KERNELS
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


def megatron_tensors(hub: Mapping[str, LazyTensor], model: MegatronModel) -> dict[str, LazyTensor]:
    """The hub's tensors as whole Megatron tensors, without those that the layout has no place for.

    Raises:
        ModelFolderError: A tensor has no place, or is missing.
    """
    carried = {key: tensor for key, tensor in hub.items() if not key.startswith(model.not_carried)}
    steps = model.key_map.steps(carried)
    whole = made_by(steps)
    check_used_once(steps, carried, whole)
    return with_one_head(whole, model, names=("the embedding", "the head tied to it"))


def divided_files(
    whole: Mapping[str, LazyTensor], model: MegatronModel, layout: MegatronLayout
) -> dict[str, dict[str, dict[str, LazyTensor]]]:
    """What a folder in this division holds.

    Args:
        whole: The model's tensors under Megatron's own names.
        model: Of the tensors.
        layout: The division.

    Returns:
        File, relative to the step's folder → `model` (or `model0` …) → name → tensor.

    Raises:
        UsageError: The division does not fit the model.
        ModelFolderError: A layer is missing.
    """
    layout.check(model.depths, model.experts)
    _check_layers(whole, model)
    return rank_files(divide(whole, model, layout), layout)


def rank_files(shards: Shards, layout: MegatronLayout) -> dict[str, dict[str, dict[str, LazyTensor]]]:
    """What each rank holds, by its file's name in a step."""
    return {f"{layout.folder_name(rank)}/{WEIGHTS_FILE}": content for rank, content in shards.items()}


def _check_layers(whole: Mapping[str, LazyTensor], model: MegatronModel) -> None:
    for tower in model.towers:
        found = names_behind(whole, tower.layers)
        for layer in range(model.depths[tower.name]):
            if str(layer) not in found:
                what = f"nothing is stored of layer {layer} of the {tower.name} tower"
                raise ModelFolderError(what, key=f"{tower.layers}{layer}")


def _read_files(step: Path, expert_ranks: int) -> dict[MegatronRank, PtContent]:
    folders: dict[MegatronRank, Path] = {}
    for path in sorted(step.glob("mp_rank_*")):
        rank = parse_folder_name(path.name, expert_ranks=expert_ranks > 1)
        if rank is None:
            raise CheckpointError("is not the name of a rank's folder", where=str(path), way_out="Take it away.")
        folders[rank] = path / WEIGHTS_FILE
    return dict(zip(folders, read_pt_files(list(folders.values())), strict=True))


def _layout_of(
    contents: Mapping[MegatronRank, PtContent], model: MegatronModel, wanted: MegatronLayout | None
) -> MegatronLayout:
    """The division that files show: their names have the ranks, their tensors the layers."""
    stages = 1 + max(rank.pp for rank in contents)
    first_file = next(iter(contents.values()))
    # model0, model1 …: one for each chunk; a pipeline without chunks has `model` alone.
    numbered = [key for key in first_file.tensors if key.removeprefix("model").isdecimal()]
    chunks = max(1, len(numbered))
    empty = MegatronLayout({"text": ((0,) * stages,) * chunks})
    layers: dict[str, Stages] = {}
    everywhere = set()
    for tower in model.towers:
        found = []
        for chunk in range(chunks):
            key = empty.model_key(chunk)
            found.append(tuple(_count_layers(contents, stage, key, tower.layers) for stage in range(stages)))
        depth = model.depths[tower.name]
        if stages > 1 and tower.name != "text" and found[0] == (depth,) * stages:
            # Every stage holds the whole tower: its layers are counted on the first alone.
            everywhere.add(tower.name)
            found[0] = (depth, *[0] * (stages - 1))
        layers[tower.name] = tuple(found)
    tp = 1 + max(rank.tp for rank in contents)
    return MegatronLayout(
        layers,
        tp=tp,
        ep=1 + max(rank.ep for rank in contents),
        tp_of_tower=wanted.tp_of_tower if wanted is not None else {},
        vocabulary_multiple=_vocabulary_multiple(contents, model, tp),
        everywhere=frozenset(everywhere),
    )


def _vocabulary_multiple(contents: Mapping[MegatronRank, PtContent], model: MegatronModel, tp: int) -> int:
    """The smallest power of two that explains how far the vocabulary was filled up; 1 where none does."""
    embedding = _find_tensor(contents, model.embedding)
    if embedding is None or not embedding.shape or model.vocabulary is None:
        return 1
    # The first rank's piece: all are of one length, since the whole was filled up for that.
    rows = embedding.shape[0] * tp
    for power in _POWERS:
        multiple = power * tp
        filled_up = -(-model.vocabulary // multiple) * multiple
        if filled_up == rows:
            return power
    return 1


def _find_tensor(contents: Mapping[MegatronRank, PtContent], name: str) -> LazyTensor | None:
    """The first piece of a tensor; None where no rank has one."""
    for content in contents.values():
        for stored in content.tensors.values():
            if name in stored:
                return stored[name]
    return None


def _count_layers(contents: Mapping[MegatronRank, PtContent], stage: int, chunk: str, layers: str) -> int:
    """Layers in a chunk of a stage, by its first file: the others hold pieces of the same layers."""
    for rank, content in contents.items():
        if rank.pp == stage:
            return len(names_behind(content.tensors.get(chunk, ()), layers))
    return 0


def refuse_contradiction(wanted: MegatronLayout, found: MegatronLayout, step: Path) -> None:
    """Raise `UsageError` where a person said another division than the checkpoint has."""
    said, held = wanted.to_json(), found.to_json()
    for key, value in said.items():
        # Nobody says that one: it has a default, and the files show it.
        if key == "vocabulary_multiple" or value == held.get(key, value):
            continue
        raise UsageError(
            f"{said[key]} was given, and the checkpoint has {held[key]}",
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
    keys = layout.chunk_keys
    shards: Shards = {}
    for rank, content in contents.items():
        path = str(content.path)
        for key in content.tensors:
            if _CHUNK.fullmatch(key) and key not in keys:
                what = f"is not a chunk of this division, which has {', '.join(keys)}"
                raise CheckpointError(what, where=path, key=key)
        shards[rank] = {key: usual_names(content.tensors.get(key, {}), path) for key in keys}
    return shards
