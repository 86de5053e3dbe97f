"""What a run with LayerZeRO trained: a run of this suite, which saves distributed checkpoints, or MindSpeed's files.

Facts: MindSpeed's `core/distributed/layerzero/state/`. Each rank writes `iter_…/model_<rank>.pt`. In it `model` holds
the rank's flat piece of every sharded parameter, and the others whole; `shard_state_dict` says the whole shapes, and
the pieces follow one another by rank. Tensor and pipeline parallelism do not go with it for generators.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_mm.checkpoint.dcp_folder.reading import find_step
from mindspeed_mm.checkpoint.layout import checkpoint_folder, list_iterations
from mindspeed_mm.checkpoint.lazy_tensor import Agreeing, Concatenated, LazyTensor, Reshaped
from mindspeed_mm.checkpoint.megatron.pt_reading import PtContent, read_pt_files
from mindspeed_mm.checkpoint.original.families import generator_of
from mindspeed_mm.checkpoint.original.reading import GeneratorWeights, weights_of_run
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.core.errors import CheckpointError

_FILE = re.compile(r"model_(\d+)\.pt")
_MODEL, _AVERAGE = "model", "ema_model"
_WRAPPERS = ("_zero3_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class FlatPieces:
    """What the files of all ranks hold."""

    contents: tuple[PtContent, ...]
    """By rank."""
    section: str
    prefix: str
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, LazyTensor]:
        """Every piece by its file and its name: `model_1.pt/blocks.0.ffn.0.weight`."""
        found: dict[str, LazyTensor] = {}
        for content in self.contents:
            for key, tensor in content.tensors[self.section].items():
                found[f"{content.path.name}/{key}"] = tensor
        return found

    def whole(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The whole tensors under the names of the model.

        Args:
            stored: Stand for its own, as a ledger counts them.

        Raises:
            CheckpointError: Pieces are missing, or do not fill the shape; or copies differ.
        """
        first = self.contents[0]
        made: dict[str, LazyTensor] = {}
        for key in first.tensors[self.section]:
            name = key
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            places = [f"{content.path.name}/{key}" for content in self.contents]
            if missing := [place for place in places if place not in stored]:
                raise CheckpointError("is missing", where=str(first.path.parent), key=missing[0])
            pieces = [stored[place] for place in places]
            shape = first.shapes.get(name)
            name = name.removeprefix(f"{self.prefix}.") if self.prefix else name
            made[name] = Agreeing(pieces, places) if shape is None else self._joined(key, pieces, shape)
        return made

    def _joined(self, key: str, pieces: list[LazyTensor], shape: list[int]) -> LazyTensor:
        held = sum(math.prod(piece.shape) for piece in pieces)
        if held != math.prod(shape) or any(len(piece.shape) != 1 for piece in pieces):
            what = f"has {held:,} elements on all ranks, and its shape is {shape}"
            where = str(self.contents[0].path.parent)
            raise CheckpointError(what, where=where, key=key, way_out="Copy the files of all ranks.")
        return Reshaped(Concatenated(pieces, 0), shape)


@contextmanager
def open_trained(
    path: Path, *, iteration: int | None = None, prefix: str = "predictor", average: bool = False
) -> Iterator[GeneratorWeights]:
    """Open what a run trained, for the length of the `with` block.

    Args:
        path: The run's folder, or a step of it.
        iteration: The step; None: the newest, or the one named by `path`.
        prefix: What the names in MindSpeed's files begin with.
        average: The moving average of the weights.

    Raises:
        CheckpointError: There is no such step, or it is damaged.
        ModelFolderError: The weights are of no family here.
    """
    check_folder_exists(path)
    step = path if iteration is None else checkpoint_folder(path, iteration)
    files = _files_of(step)
    if not files and iteration is None and (steps := list_iterations(path)):
        step = checkpoint_folder(path, steps[-1])
        files = _files_of(step)
    if not files:
        yield weights_of_run(find_step(path if iteration is None else step), average=average)
        return
    section = _AVERAGE if average else _MODEL
    contents = tuple(read_pt_files(files))
    for content in contents:
        if section not in content.tensors:
            raise CheckpointError(f"holds no section '{section}'", where=str(content.path))
    pieces = FlatPieces(contents, section, prefix)
    family, naming = generator_of(pieces.whole(pieces.stored), str(step))
    yield GeneratorWeights(step, family, naming, pieces.stored, {}, pieces, is_of_run=True)


def _files_of(step: Path) -> list[Path]:
    """The files of LayerZeRO in a step, by rank."""
    found = {int(match[1]): file for file in step.glob("model_*.pt") if (match := _FILE.fullmatch(file.name))}
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        where = str(step / f"model_{missing[0]}.pt")
        raise CheckpointError("does not exist", where=where, way_out="Copy the files of all ranks.")
    return [found[rank] for rank in sorted(found)]
