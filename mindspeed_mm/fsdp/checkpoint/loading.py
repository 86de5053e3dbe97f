"""Reads a checkpoint into a live, sharded model and its optimizer, under any world size and plan; and its tensors
whole, one at a time, in one process without a model or a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, wrapper_prefix
from mindspeed_mm.checkpoint.dcp_folder.storage import Tree, read_tree
from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.tree import (
    BESIDE,
    BESIDE_OPTIMIZER,
    EMA,
    MODEL,
    OPTIMIZER,
    TrainedBeside,
    average_tensors,
    check_same_shapes,
    model_tensors,
    named_copies,
    plain_name,
    tensors_to_fill,
    tied_names,
    trained_parameters,
)
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.structure.stages import first_names, whole_of
from mindspeed_mm.fsdp.optimizer.build import kind_of, state_room
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.utils.ranks import Ranks

RESTORE = "Restore the checkpoint from a copy, or name an older one in training.load."
WEIGHTS_ONLY = "Say --weights-only to take the weights and start with a fresh optimizer."

OptimizerState = dict[str, dict[str, torch.Tensor]]
"""Parameter → key → tensor."""


def load_tensors(
    checkpoint: CommittedCheckpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
    ema: Ema | None = None,
) -> bool:
    """Fill parameters, buffers and, when they are given, the optimizer's state and the average. Called by all ranks.

    Returns:
        Whether the average was filled; a checkpoint may hold none.

    Raises:
        CheckpointError: The checkpoint was saved from another model or by another optimizer; nothing was changed.
    """
    reader = ranks.together("reading the index", lambda: DcpReader(checkpoint.path))
    return _fill(TensorIndex(reader, checkpoint), reader, model, optimizer, ranks, ema)


def load_beside(checkpoint: CommittedCheckpoint, beside: TrainedBeside, ranks: Ranks, *, with_optimizer: bool) -> bool:
    """Fill what is trained beside the model, and its optimizer. Called by all ranks.

    Returns:
        Whether the checkpoint holds it.

    Raises:
        CheckpointError: It was saved of another model or by another optimizer; nothing was changed.
    """
    reader = ranks.together("reading the index", lambda: DcpReader(checkpoint.path))
    held = TensorIndex(reader, checkpoint, BESIDE, BESIDE_OPTIMIZER)
    if not held.model_entries():
        return False
    _fill(held, reader, beside.model, beside.optimizer if with_optimizer else None, ranks, None)
    return True


def _fill(
    held: TensorIndex,
    reader: DcpReader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
    ema: Ema | None,
) -> bool:
    """Read what an index holds of a model; whether that includes the average."""
    weights, whole = tensors_to_fill(model), whole_of(model)
    names = ranks.together("comparing with the model", lambda: held.match(model_tensors(whole), tied_names(whole)))
    state: OptimizerState = {}
    if optimizer is not None:
        state = ranks.together("comparing with the optimizer", lambda: held.optimizer_room(model, optimizer))
    if ema is not None and not held.average_entries(ema.key):
        ema = None  # none was kept
    tree: Tree = {MODEL: {names[name]: tensor for name, tensor in weights.items()}}
    if state:
        tree[OPTIMIZER] = _flat(state)
    if ema is not None:
        key = ema.key
        ranks.together("comparing with the average", lambda: held.check_average(trainable_parameters(whole), key))
        tree[key] = averages_to_fill(ema)
    with torch.no_grad():
        read_tree(held.as_stored(tree), reader.storage, ranks)
    if optimizer is not None:
        _give_state(model, optimizer, state)
    if first_names(model):
        _fill_copies(model, optimizer, ema)
    return ema is not None


def _flat(state: OptimizerState) -> dict[str, torch.Tensor]:
    """The optimizer's state under the keys of a checkpoint."""
    flat = {}
    for name, keys in state.items():
        for key, tensor in keys.items():
            flat[f"state.{name}.{key}"] = tensor
    return flat


def _give_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Let the optimizer have the state that was read, and no other."""
    parameters = trained_parameters(model, optimizer)
    own = dict(parameters)
    for copy, first in first_names(model).items():
        own.setdefault(first, parameters.get(copy, nn.Parameter()))
    optimizer.state.clear()
    for name, keys in state.items():
        optimizer.state[own[name]] = keys


def averages_to_fill(ema: Ema) -> dict[str, torch.Tensor]:
    """`average_tensors` for reading, as `tensors_to_fill`."""
    tensors = average_tensors(ema)
    own = {plain_name(name): tensor for name, tensor in ema.tensors().items()}
    for copy, first in first_names(ema.model).items():
        if copy in own:
            tensors.setdefault(first, own[copy])
    return tensors


def trainable_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """What an average is kept of, by name."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _fill_copies(model: nn.Module, optimizer: torch.optim.Optimizer | None, ema: Ema | None) -> None:
    """Where one rank has a shared weight and its copy, the weight was read: give the copy the same."""
    own = dict(model.named_parameters())
    averages = ema.tensors() if ema is not None else {}
    for copy, first in first_names(model).items():
        if first not in own:
            continue
        if copy in named_copies(model):
            own[copy].copy_(own[first])
        if copy in averages:
            averages[copy].copy_(averages[first])
        if optimizer is not None and own[first] in optimizer.state:
            state = optimizer.state[own[first]]
            optimizer.state[own[copy]] = {key: value.clone() for key, value in state.items()}


def load_state(checkpoint: CommittedCheckpoint) -> dict[str, Any]:
    """What the trainer had handed over as JSON; empty for a checkpoint from elsewhere."""
    path = checkpoint.path / layout.TRAINER_STATE
    if checkpoint.manifest is None and not path.exists():
        return {}
    return read_json_object(path, CheckpointError, way_out=RESTORE)


def load_rng(checkpoint: CommittedCheckpoint, ranks: Ranks) -> dict[str, torch.Tensor] | None:
    """This rank's random-number state; None when it was not kept, or was kept by another number of ranks.

    Raises:
        CheckpointError: Its file is damaged.
    """
    if checkpoint.manifest is None or checkpoint.manifest.world_size != ranks.world_size:
        return None
    path = checkpoint.path / layout.rng_file(ranks.rank)
    try:
        if path.exists():
            return load_file(path)
        return None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), way_out=RESTORE) from error


def check_holds_adapters(checkpoint: CommittedCheckpoint, wanted: bool) -> None:
    """Raise `CheckpointError` when it holds whole weights and the run trains adapters, or the other way round: known
    from the index, before a model is built."""
    TensorIndex(DcpReader(checkpoint.path), checkpoint).check_adapters(wanted)


def check_holds_optimizer(checkpoint: CommittedCheckpoint) -> None:
    """Raise `CheckpointError` when a checkpoint of ours was saved without the state of its optimizer."""
    if checkpoint.manifest is not None and checkpoint.manifest.optimizer is None:
        raise CheckpointError("holds no optimizer state", where=str(checkpoint.path), way_out=WEIGHTS_ONLY)


def check_tensors(checkpoint: CommittedCheckpoint, model: nn.Module, *, with_optimizer: bool) -> None:
    """Raise `CheckpointError` when the checkpoint is of another model: known from its index.

    Args:
        checkpoint: What is to be loaded.
        model: Whole; parameters may be on meta.
        with_optimizer: The state of its optimizer is loaded, too.
    """
    held = TensorIndex(DcpReader(checkpoint.path), checkpoint)
    held.match(model_tensors(model), tied_names(model))
    if with_optimizer:
        held.check_trained(trainable_parameters(model))


class TensorIndex:
    """The tensors that a checkpoint holds, compared with what is wanted of it.

    Args:
        reader: Its reader.
        checkpoint: Where it lies and what its manifest says.
        model: Section of the model's tensors.
        optimizer: Section of its optimizer's state.
    """

    def __init__(
        self, reader: DcpReader, checkpoint: CommittedCheckpoint, model: str = MODEL, optimizer: str = OPTIMIZER
    ) -> None:
        self.path: Path = checkpoint.path
        self.manifest = checkpoint.manifest
        self.tensors = reader.entries
        self.prefix = reader.prefix if model == MODEL else f"{model}."
        self._model, self._optimizer = model, optimizer

    def model_entries(self) -> dict[str, TensorStorageMetadata]:
        """The model's tensors by name."""
        entries = self._entries_under(self.prefix)
        if not self.prefix:  # a checkpoint from elsewhere, in which the model's have no prefix
            for key in self._entries_under(f"{OPTIMIZER}."):
                del entries[f"{OPTIMIZER}.{key}"]
        return entries

    def average_entries(self, key: str = EMA) -> dict[str, TensorStorageMetadata]:
        """The average of the trained parameters by name; empty when none was kept under this key."""
        if self.prefix:
            return self._entries_under(f"{key}.")
        return {}

    def _entries_under(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Name without the prefix → entry, of the tensors whose name begins with it."""
        entries = {}
        for name, entry in self.tensors.items():
            if name.startswith(prefix):
                entries[name.removeprefix(prefix)] = entry
        return entries

    def check_average(self, tensors: Mapping[str, torch.Tensor], key: str = EMA) -> None:
        """Raise `CheckpointError`, with a diff, when the checkpoint's average is of other parameters than `tensors`."""
        held = {name: entry.size for name, entry in self.average_entries(key).items()}
        wanted = {name: tensor.shape for name, tensor in tensors.items()}
        check_same_shapes(wanted, held, f"{self.path}, the average of the weights,")

    def match(self, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> dict[str, str]:
        """Name of each of a model's tensors → the name that the checkpoint has for it.

        Args:
            tensors: `tree.model_tensors` of the model.
            aliases: `tree.tied_names` of the model: a checkpoint from elsewhere may hold a shared parameter under
                another of its names, or under all.

        Raises:
            CheckpointError: With a diff, when they are not the same tensors.
        """
        held = {name: entry.size for name, entry in self.model_entries().items()}
        self.check_adapters(any(map(is_adapter_weight, tensors)))
        wrapper = wrapper_prefix(held, tensors)
        names = {name: f"{wrapper}{name}" for name in tensors}
        for alias, name in aliases.items():
            stored = f"{wrapper}{alias}"
            if stored in held and names[name] not in held:
                names[name] = stored
            elif stored in held:
                del held[stored]
        check_same_shapes({names[name]: tensor.shape for name, tensor in tensors.items()}, held, str(self.path))
        return names

    def check_adapters(self, wanted: bool) -> None:
        """Raise `CheckpointError` when the checkpoint holds adapters and none are wanted, or the other way round."""
        held = any(map(is_adapter_weight, self.model_entries()))
        if wanted and not held:
            raise CheckpointError(
                "holds whole weights as a distributed checkpoint, and under adapters (training.lora.enable) they are "
                "read from model folders alone",
                where=str(self.path),
                key="training.load",
                way_out=f"Write it as one, mm export {quoted(self.path)} OUT --model MODEL, and name that in "
                "training.load. mm-convert hf_to_dcp --is_lora_base true writes a distributed checkpoint that adapters "
                "stand on.",
            )
        if held and not wanted:
            raise CheckpointError(
                "holds adapters only, and this run trains whole weights",
                where=str(self.path),
                key="training.lora.enable",
                way_out="Write the merged model with mm export --merge, and name it in model.model_name_or_path.",
            )

    def optimizer_room(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Room for the optimizer state that the checkpoint holds.

        Raises:
            CheckpointError: It is of another optimizer, or of a parameter that is not trained here.
        """
        self._check_optimizer(optimizer)
        parameters = trained_parameters(model, optimizer)
        for copy, first in first_names(model).items():
            if copy in parameters:
                parameters.setdefault(first, parameters[copy])
        self.check_trained({**trainable_parameters(whole_of(model)), **parameters})
        state: OptimizerState = {}
        for name, key, entry in self.state_entries():
            if name in parameters:  # others are trained on other stages
                room = state_room(optimizer, parameters[name], key, entry.size, entry.properties.dtype)
                state.setdefault(name, {})[key] = room
        return state

    def state_entries(self) -> Iterator[tuple[str, str, TensorStorageMetadata]]:
        """Parameter, key and tensor of the optimizer's state."""
        start = f"{self._optimizer}.state."
        for full_name, entry in self.tensors.items():
            if full_name.startswith(start):
                name, _, key = full_name.removeprefix(start).rpartition(".")
                yield name, key, entry

    def check_trained(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Raise `CheckpointError` for the state of a parameter that is not among those that are trained."""
        for name, _, _ in self.state_entries():
            if name not in trained:
                raise CheckpointError(
                    "has optimizer state for a parameter that is not trained here",
                    where=str(self.path),
                    key=name,
                    way_out=WEIGHTS_ONLY,
                )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        kept = self.manifest.optimizer if self.manifest else None
        has_state = any(key.startswith(f"{self._optimizer}.state.") for key in self.tensors)
        if kept is None and not (self.manifest is None and has_state):
            raise CheckpointError("holds no optimizer state", where=str(self.path), way_out=WEIGHTS_ONLY)
        if kept not in {None, kind_of(optimizer)}:
            raise CheckpointError(
                f"holds the state of {kept}, this run has {kind_of(optimizer)}",
                where=str(self.path),
                key="training.optimizer",
                way_out=WEIGHTS_ONLY,
            )

    def as_stored(self, tree: Tree) -> JsonObject:
        """The tree under the checkpoint's own keys."""
        if not self.prefix:
            return dict(tree[MODEL])
        sections = {MODEL: self._model, OPTIMIZER: self._optimizer}
        return {sections.get(section, section): tensors for section, tensors in tree.items()}


# --- whole tensors, without a model -----------------------------------------------------------------------------------


Weights = Literal["ema", "model"]
"""The average of the weights where one was kept of them, or all as they were trained."""


class DcpTensors:
    """Reads a checkpoint's model by name: its weights as they were trained, or the average where there is one.

    Args:
        checkpoint: From `committed.open_checkpoint`.
        weights: None takes the average when there is one.

    Raises:
        CheckpointError: The average is asked for and the checkpoint has none.
    """

    def __init__(self, checkpoint: CommittedCheckpoint, weights: Weights | None = None) -> None:
        self._reader = DcpReader(checkpoint.path)
        self._index = TensorIndex(self._reader, checkpoint)
        average = self._index.average_entries()
        if weights == "ema" and not average:
            raise CheckpointError(
                "holds no average of the weights",
                where=str(checkpoint.path),
                key="training.ema.enable",
                way_out="Take the weights as they were trained: --weights model.",
            )
        self.weights: Weights = weights or ("ema" if average else "model")
        """Which were taken."""
        self._averaged = average.keys() if self.weights == "ema" else set()

    def lazy(self) -> dict[str, Stored]:
        """Every tensor of the model by name, not read yet."""
        trained = self._reader.model_tensors()
        return trained | {name: self._reader.lazy(f"{EMA}.{name}") for name in self._averaged}

    def matched_to(self, model: nn.Module) -> dict[str, Stored]:
        """The model's tensors by its own names, not read yet.

        Raises:
            CheckpointError: The checkpoint was saved from another model.
        """
        lazy = self.lazy()
        names = self._index.match(model_tensors(model), tied_names(model))
        return {name: lazy[held] for name, held in names.items()}
