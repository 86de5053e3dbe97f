"""A step that Megatron-Core wrote as `torch_dist`: whole tensors in torch's own format of distributed checkpoints,
however many ranks wrote them. The layers of a tower are stacked in one tensor, or stand there each with its number.

Format: Megatron-Core 0.16.1, `dist_checkpointing/core.py` (metadata.json) and `strategies/{common,torch}.py`. Names:
`sharded_state_dict` of `transformer/transformer_block.py`, `transformer/mlp.py` and `transformer/moe/experts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader
from mindspeed_mm.checkpoint.keymap import is_number
from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, LazyTensor, Selected, Sliced
from mindspeed_mm.checkpoint.megatron.family import MegatronModel
from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.checkpoint.megatron.sharding import with_one_head
from mindspeed_mm.checkpoint.megatron.spelling import OF_KERNELS, usual_name
from mindspeed_mm.checkpoint.recognise import DIST_COMMON, DIST_SETTINGS
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError
from mindspeed_mm.core.json_file import read_json_object

_BACKEND = "torch_dist"
_NO_PART = "is not part of the model"
_OPTIMIZERS = re.compile(r"(optimizer|chained_\d+)\..*")
_CHUNK = re.compile(r"model\d*")
_STACKED_EXPERTS = re.compile(r"(?P<before>.*\.mlp\.experts\.)experts\.(?P<after>linear_fc.*)")
_ONE_EXPERT = re.compile(r"(?P<before>.*\.mlp\.experts\.)experts\.(?P<number>\d+)\.(?P<after>.*)")
_HALVES = ("_w", "_v")
"""What ends the names of a gate and its up where they are stored apart."""
_MOST_PADDING = 2**20


@dataclass(frozen=True)
class WholeWeights:
    """What a step holds of a model, no matter how many ranks wrote it."""

    step: Path
    stored: Mapping[str, LazyTensor]
    """By the step's own keys."""
    model: MegatronModel
    canonical: bool
    """Projections are stored apart."""
    beside: Mapping[str, str]
    """What else is there → why it is not part of the model."""

    def whole(self, stored: Mapping[str, LazyTensor] | None = None) -> dict[str, LazyTensor]:
        """The whole tensors, under the names that they have where each layer is stored by itself.

        Args:
            stored: Stand for `self.stored`, as a ledger counts them.

        Raises:
            CheckpointError: A tensor has no place in the model, or not all of its layers.
        """
        made: dict[str, LazyTensor] = {}
        for key, tensor in (stored or self.stored).items():
            for name, part in self._parts(key, tensor):
                if name in made:
                    raise CheckpointError(f"{name} is stored twice", where=str(self.step), key=key)
                made[name] = part
        return with_one_head(
            {name: self._without_padding(name, t) for name, t in _joined_halves(made).items()}, self.model
        )

    def padding(self, stored: Mapping[str, LazyTensor]) -> list[LazyTensor]:
        """The rows that fill the vocabulary up, and are no part of the model. `stored` as of `whole`."""
        found: list[LazyTensor] = []
        for key, tensor in stored.items():
            surplus = self._surplus_rows(key, tensor)
            if surplus:
                found.append(Sliced(tensor, 0, tensor.shape[0] - surplus, surplus))
        return found

    def _parts(self, key: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
        """Layer by layer, and in a layer expert by expert."""
        for name, layer in self._layers(key, tensor):
            if found := _ONE_EXPERT.fullmatch(name):
                yield usual_name(f"{found['before']}local_experts.{found['number']}.{found['after']}"), layer
            # (experts, …) of one layer
            elif found := _STACKED_EXPERTS.fullmatch(name):
                self._check_stacked(key, layer, self.model.experts, "experts")
                for expert in range(self.model.experts):
                    yield f"{found['before']}local_experts.{expert}.{found['after']}", Selected(layer, 0, expert)
            else:
                yield usual_name(name), layer

    def _layers(self, key: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
        try:
            tower = self.model.tower_of(key)
        except ModelFolderError as error:
            raise CheckpointError(
                "belongs to no tower of this model", where=str(self.step), key=key, way_out="Is it another model's?"
            ) from error
        if not key.startswith(tower.layers):
            yield key, tensor
            return
        rest = key.removeprefix(tower.layers)
        number, depth = rest.partition(".")[0], self.model.depths[tower.name]
        if is_number(number):
            if int(number) >= depth:
                what = f"is of layer {number}, counted from 0, and the {tower.name} tower has {depth}"
                raise CheckpointError(what, where=str(self.step), key=key)
            yield key, tensor
            return
        self._check_stacked(key, tensor, depth, f"layers of the {tower.name} tower")
        for layer in range(depth):
            # (layers, …): the key has no number, the name behind it is that of each layer.
            yield f"{tower.layers}{layer}.{rest}", Selected(tensor, 0, layer)

    def _check_stacked(self, key: str, tensor: LazyTensor, wanted: int, of_what: str) -> None:
        if not tensor.shape or tensor.shape[0] != wanted:
            what = f"has shape {list(tensor.shape)}, and should begin with the model's {wanted} {of_what}"
            raise CheckpointError(what, where=str(self.step), key=key)

    def _without_padding(self, name: str, tensor: LazyTensor) -> LazyTensor:
        surplus = self._surplus_rows(name, tensor)
        if surplus:
            return Sliced(tensor, 0, 0, tensor.shape[0] - surplus)
        return tensor

    def _surplus_rows(self, name: str, tensor: LazyTensor) -> int:
        """Rows beyond the vocabulary. Megatron fills it up to a multiple of a power of two times the tensor ranks; any
        other length is another model's, and told by its shape."""
        cut = self.model.cut_of(name)
        if self.model.vocabulary is None or cut is None or not cut.padded or not tensor.shape:
            return 0
        rows = tensor.shape[0]
        surplus = rows - self.model.vocabulary
        multiple = rows & -rows  # the largest power of two that divides it
        if 0 < surplus < min(multiple, _MOST_PADDING):
            return surplus
        return 0


def read_whole(step: Path, model: MegatronModel, *, canonical: bool) -> WholeWeights:
    """What a step holds.

    Args:
        step: With metadata.json.
        model: That was saved.
        canonical: Projections are stored apart; the step does not say it.

    Raises:
        CheckpointError: It was written in another format, or a file is missing, broken, or asks for something that
            weights do not need.
    """
    backend = read_json_object(step / DIST_SETTINGS, CheckpointError).get("sharded_backend")
    if backend != _BACKEND:
        raise CheckpointError(
            f"is {backend!r}, and {_BACKEND} alone is read",
            where=str(step / DIST_SETTINGS),
            key="sharded_backend",
            way_out=f"Save it again from Megatron with --ckpt-format {_BACKEND}.",
        )
    reader = DcpReader(step)
    beside = _common(step / DIST_COMMON)
    stored: dict[str, LazyTensor] = {}
    for key in reader.entries:
        if found := _OPTIMIZERS.fullmatch(key):
            beside[found[1]] = _NO_PART
        elif key.endswith("._extra_state"):
            beside[key] = OF_KERNELS
        else:
            stored[key] = reader.lazy(key)
    for key, entry in reader.storage.metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            name = key.partition("/")[0]  # behind it stands of which layer or rank
            beside[name] = OF_KERNELS if name.endswith("._extra_state") else _NO_PART
    return WholeWeights(step, stored, model, canonical, beside)


def _common(path: Path) -> dict[str, str]:
    """What stands beside the tensors: arguments, schedules, and nothing of the model."""
    (content,) = read_pt_files([path])
    if of_model := next((key for key in content.tensors if _CHUNK.fullmatch(key)), None):
        name = next(iter(content.tensors[of_model]))
        raise CheckpointError(
            "lies beside the index, where none of the model's tensors should be",
            where=str(path),
            key=f"{of_model}.{name}",
        )
    return {f"{path.name}/{key}": _NO_PART for key in content.tensors}


def _joined_halves(made: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Gate and up, which newer Megatron may store apart, in one tensor."""
    found = {}
    for name, tensor in made.items():
        stem, end = name[:-2], name[-2:]
        if end not in _HALVES or ".linear_fc1." not in stem:
            found[name] = tensor
        # The gate brings its up along; the up by itself is passed over.
        elif end == _HALVES[0]:
            other = made.get(stem + _HALVES[1])
            if other is None:
                raise CheckpointError("has no other half", key=name, way_out="Copy the whole folder again.")
            found[stem] = Concatenated([tensor, other], 0)
    return found
