"""Streams a folder's tensors straight into the shards that this rank holds, and accounts for every key."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.keymap import RuleMatch, check_used_once
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.stored_weights import open_stored
from mindspeed_mm.checkpoint.transformers_map import loading_steps
from mindspeed_mm.core.errors import ModelFolderError, Problem
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import QuantizedLayout, packings_of
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.initialization import initialize
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces
from mindspeed_mm.fsdp.models.loading.source import Fetch, open_source
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight, naming_of
from mindspeed_mm.fsdp.models.structure.share import first_names, whole_of
from mindspeed_mm.fsdp.models.structure.ties import shared_parameters

_COMPARED_BYTES = 64 * 2**20
"""Of tied weights that are compared, read at a time."""
_MOST = 5
"""How many keys of each kind a message lists."""


@dataclass(frozen=True)
class LoadReport:
    """What loading did, for the log and the run record."""

    folder: str = ""
    """Where the weights came from; empty when they were initialised from scratch."""
    tensors: int = 0
    """Stored tensors read."""
    size_bytes: int = 0
    """Size of the tensors as stored, for the whole model."""
    seconds: float = 0.0
    initialized: tuple[str, ...] = ()
    """Parameters that were initialised instead."""
    ignored: tuple[str, ...] = ()
    """Stored keys that the model has no place for, and that were allowed."""
    nonfinite: tuple[str, ...] = ()
    """Parameters with NaN or infinity in this rank's shards."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user."""


@dataclass
class _Diff:
    """What does not fit between a folder and a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Problem] = field(default_factory=list)

    def check(self, folder: Path) -> None:
        if not (self.missing or self.unexpected or self.mismatched):
            return
        problems = [
            *_listed([Problem("missing in the folder", key=key) for key in self.missing]),
            *_listed([Problem("stored, but the model has no place for it", key=key) for key in self.unexpected]),
            *_listed(self.mismatched),
        ]
        counts = (
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected, {len(self.mismatched)} of another form"
        )
        raise ModelFolderError(
            f"{folder}: the weights do not fit the model: {counts}. What is meant to differ is listed in "
            "training.allow_missing and training.allow_unexpected.",
            problems=problems,
        )


def stream_weights(
    model: nn.Module,
    folder: Path,
    *,
    seed: int,
    units: Sequence[str],
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    from_first_rank: bool = False,
) -> LoadReport:
    """Fill parameters and persistent buffers, which have memory already. Each rank reads its part, without
    communication, or rank 0 reads for all.

    Args:
        model: Built by `ModelHub.build`, sharded or not.
        folder: With safetensors, or in Megatron's style.
        seed: For parameters that the folder is allowed to lack.
        units: As in `initialize`.
        allow_missing: Patterns of the model's names that the folder may lack.
        allow_unexpected: Patterns of stored names that the model may lack.
        from_first_rank: See `open_source`.

    Raises:
        ModelFolderError: Damaged files; keys missing, left over or of another shape; quantised weights; tied weights
            that differ in the folder.
    """
    started = time.perf_counter()
    whole, stored_name = whole_of(model), naming_of(model)  # a pipeline's rank reads its part, and compares everything
    targets = _targets(whole)
    aliases = _aliases(whole)
    with open_source(folder, _config_of(model), from_first_rank=from_first_rank) as (stored, fetch):
        steps = _steps(whole, stored, {*targets, *aliases})
        shapes, packings = _shapes(whole, targets), packings_of(model)
        diff, initialized, ignored = _compare(whole, shapes, aliases, steps, allow_missing, allow_unexpected)
        diff.check(folder)
        _check_ledger(steps, stored, {*targets, *aliases}, initialized, ignored)
        made = {key: tensor for step in steps for key, tensor in step.targets.items()}
        wanted = {key: tensor for key, tensor in made.items() if aliases.get(key, key) in targets}
        nonfinite = _copy(_own_targets(model), aliases, wanted, folder, packings, fetch)
        size_bytes = sum(tensor.size_bytes for tensor in stored.values())
    # Names are the folder's up to here; what is initialised goes by the names of the model with its adapters.
    unfilled = set(initialized)
    fresh = {name for name, _ in model.named_parameters() if stored_name(name) in unfilled}
    if fresh:
        initialize(model, seed=seed, units=units, names=fresh)
    return LoadReport(
        folder=str(folder),
        tensors=len(stored),
        size_bytes=size_bytes,
        seconds=time.perf_counter() - started,
        initialized=tuple(initialized),
        ignored=tuple(ignored),
        nonfinite=tuple(nonfinite),
        warnings=tuple(_warnings(folder, initialized, ignored, nonfinite)),
    )


def check_weights(
    model: nn.Module, folder: Path, *, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
) -> None:
    """Raise `ModelFolderError` where `stream_weights` would for a folder's keys and shapes. No value is read but of
    weights that are tied in the model and stored twice, and the model needs no memory."""
    targets = _targets(model)
    aliases = _aliases(model)
    with open_stored(folder, _config_of(model)) as stored:
        steps = _steps(model, stored, {*targets, *aliases})
        diff, initialized, ignored = _compare(
            model, _shapes(model, targets), aliases, steps, allow_missing, allow_unexpected
        )
        diff.check(folder)
        _check_ledger(steps, stored, {*targets, *aliases}, initialized, ignored)
        made = {key: tensor for step in steps for key, tensor in step.targets.items()}
        for alias, first in aliases.items():
            if alias in made and first in made and not _are_equal(made[alias], made[first]):
                raise _differing_ties(alias, first, folder)


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """What its config.json says; None for a class that is not of transformers."""
    to_dict = getattr(getattr(whole_of(model), "config", None), "to_dict", None)
    return to_dict() if to_dict is not None else None


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several → the first, as a folder has them."""
    stored_name = naming_of(model)
    return {stored_name(alias): stored_name(first) for first, *others in shared_parameters(model) for alias in others}


def _own_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank reads; a copy of a weight that another stage has too is read under that one's name."""
    stored_name, targets = naming_of(model), _targets(model)
    for copy, first in first_names(model).items():
        tensor = targets.pop(stored_name(copy))
        targets.setdefault(stored_name(first), tensor)
    return targets


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once, and the buffers that a checkpoint holds, but for adapters: no folder has them."""
    stored_name = naming_of(model)
    targets: dict[str, torch.Tensor] = {
        stored_name(name): parameter for name, parameter in model.named_parameters() if not is_adapter_weight(name)
    }
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full_name = f"{module_name}.{name}" if module_name else name
            is_kept = name not in module._non_persistent_buffers_set and not is_adapter_weight(full_name)
            if buffer is not None and is_kept:
                targets[stored_name(full_name)] = buffer
    return targets


def _shapes(model: nn.Module, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The targets as a folder has them: what is kept in bytes as the weight that it stands for, without memory."""
    shapes = dict(targets)
    for name, packing in packings_of(model).items():
        shapes[name] = torch.empty(targets[name].shape[0], packing.inputs, device="meta")
    return shapes


@contextmanager
def stored_weights(model: nn.Module, folder: Path) -> Iterator[dict[str, LazyTensor]]:
    """Inside, a folder's tensors can be read under the names of the model without adapters."""
    with open_stored(folder, _config_of(model)) as stored:
        wanted = set(_targets(whole_of(model)))
        yield {name: tensor for step in _steps(model, stored, wanted) for name, tensor in step.targets.items()}


def _steps(model: nn.Module, stored: Mapping[str, LazyTensor], wanted: Collection[str]) -> list[RuleMatch]:
    rules = facts_of(model).conversion_rules
    if rules is not None:
        return loading_steps(model, stored, wanted, rules)  # type: ignore[arg-type]
    key_map = getattr(model, "key_map", None)
    if key_map is not None:
        steps = key_map.steps(stored)
        used = {key for step in steps for key in step.sources}
        return steps + [RuleMatch((key,), {key: tensor}) for key, tensor in stored.items() if key not in used]
    return [RuleMatch((key,), {key: tensor}) for key, tensor in stored.items()]


def _compare(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    steps: Sequence[RuleMatch],
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
) -> tuple[_Diff, list[str], list[str]]:
    """The differences, the allowed ones apart: (what is wrong, names to initialise, names to ignore)."""
    made = {key: tensor for step in steps for key, tensor in step.targets.items()}
    reached = {aliases.get(key, key) for key in made}
    missing = [name for name in targets if name not in reached]
    unexpected = [key for key in made if aliases.get(key, key) not in targets]
    may_lack = _matcher(allow_missing, "training.allow_missing", getattr(model, "_keys_to_ignore_on_load_missing", ()))
    may_hold = _matcher(
        allow_unexpected, "training.allow_unexpected", getattr(model, "_keys_to_ignore_on_load_unexpected", ())
    )
    diff = _Diff(
        missing=[name for name in missing if not may_lack(name)],
        unexpected=[key for key in unexpected if not may_hold(key)],
    )
    for key, tensor in made.items():
        target = targets.get(aliases.get(key, key))
        problem = _mismatch(key, tensor, target) if target is not None else None
        if problem is not None:
            diff.mismatched.append(problem)
    return diff, [name for name in missing if may_lack(name)], [key for key in unexpected if may_hold(key)]


def _matcher(patterns: Sequence[str], key: str, regexes: Collection[str] | None) -> Any:
    """Whether a name matches one of our patterns, or one of the regular expressions that a transformers class lists."""
    own = [compile_pattern(pattern, key=key) for pattern in patterns]
    theirs = [re.compile(regex) for regex in regexes or ()]
    return lambda name: any(p.fullmatch(name) for p in own) or any(p.search(name) for p in theirs)


def _mismatch(key: str, tensor: LazyTensor, target: torch.Tensor) -> Problem | None:
    if tensor.shape != tuple(target.shape):
        return Problem(f"stored with shape {tensor.shape}, the model has {tuple(target.shape)}", key=key)
    if target.is_floating_point() and (not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2):
        return Problem(
            f"stored as {str(tensor.dtype).removeprefix('torch.')}: quantised weights cannot be trained", key=key
        )
    return None


def _check_ledger(
    steps: Sequence[RuleMatch],
    stored: Mapping[str, LazyTensor],
    wanted: set[str],
    initialized: Sequence[str],
    ignored: Sequence[str],
) -> None:
    made = {key for step in steps for key in step.targets}
    check_used_once(steps, stored, (wanted & made) | set(ignored))


def _copy(
    targets: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
    folder: Path,
    packings: Mapping[str, QuantizedLayout],
    fetch: Fetch,
) -> list[str]:
    """Read every target's local part. Returns the names with NaN or infinity in it."""
    nonfinite: list[str] = []
    filled: dict[str, str] = {}
    for key, described in tensors.items():
        name, tensor = aliases.get(key, key), fetch(described)
        if name not in targets:
            continue
        if name in filled:
            _check_equal(key, tensor, filled[name], targets[name], folder)
            continue
        filled[name] = key
        packing = packings.get(name)
        is_finite = _pack_local(tensor, targets[name], packing) if packing else _copy_local(tensor, targets[name])
        if not is_finite:
            nonfinite.append(name)
    return nonfinite


@torch.no_grad()
def _copy_local(tensor: LazyTensor, target: torch.Tensor) -> bool:
    """Whether all that was read is finite."""
    finite = True
    for piece, region in local_pieces(target):
        if piece.numel():
            tensor.copy_to(piece, region)
            finite = finite and _is_finite(piece)
    return finite


@torch.no_grad()
def _pack_local(tensor: LazyTensor, target: torch.Tensor, packing: QuantizedLayout) -> bool:
    """As `_copy_local`, for a weight that is kept in bytes: one layer's rows are in memory as numbers at a time."""
    finite = True
    for piece, (rows, _) in local_pieces(target):
        numbers = torch.empty(rows[1], packing.inputs, device=piece.device)
        tensor.copy_to(numbers, (rows, (0, packing.inputs)))
        if numbers.numel():
            finite = finite and _is_finite(numbers)
            piece.copy_(packing.pack(numbers))
    return finite


def _is_finite(piece: torch.Tensor) -> bool:
    if not piece.is_floating_point():
        return True
    low, high = piece.aminmax()  # one pass without a copy; NaN goes through
    return bool(low.isfinite() & high.isfinite())


@torch.no_grad()
def _check_equal(key: str, tensor: LazyTensor, first_key: str, target: torch.Tensor, folder: Path) -> None:
    """A weight that is tied in the model and stored twice must be the same both times."""
    for piece, region in local_pieces(target):
        other = torch.empty_like(piece)
        tensor.copy_to(other, region)
        if not torch.equal(other, piece):
            raise _differing_ties(key, first_key, folder)


def _are_equal(left: LazyTensor, right: LazyTensor) -> bool:
    """Whether two stored tensors of one shape hold the same, read some rows at a time."""
    rows = max(1, _COMPARED_BYTES // max(1, left.size_bytes // max(1, left.shape[0])))
    for start in range(0, left.shape[0], rows):
        length = min(rows, left.shape[0] - start)
        region = ((start, length), *((0, size) for size in left.shape[1:]))
        pieces = [torch.empty(length, *left.shape[1:], dtype=left.dtype) for _ in range(2)]
        for tensor, piece in zip((left, right), pieces, strict=True):
            tensor.copy_to(piece, region)
        if not torch.equal(*pieces):
            return False
    return True


def _differing_ties(key: str, first_key: str, folder: Path) -> ModelFolderError:
    return ModelFolderError(
        f"is stored with other values than '{first_key}', but the model ties the two",
        where=str(folder),
        key=key,
        way_out="Set tie_word_embeddings in config.json as the weights were trained.",
    )


def _warnings(folder: Path, initialized: Sequence[str], ignored: Sequence[str], nonfinite: Sequence[str]) -> list[str]:
    found = []
    if initialized:
        found.append(f"{folder}: {_some(initialized)} not stored; initialised")
    if ignored:
        found.append(f"{folder}: {_some(ignored)} stored but not used")
    if nonfinite:
        found.append(f"{folder}: NaN or infinity in {_some(nonfinite)}")
    return found


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MOST])
    return listed if len(names) <= _MOST else f"{listed} and {len(names) - _MOST} more"


def _listed(problems: Sequence[Problem]) -> list[Problem]:
    more = [Problem(f"and {len(problems) - _MOST} more")] if len(problems) > _MOST else []
    return [*problems[:_MOST], *more]
