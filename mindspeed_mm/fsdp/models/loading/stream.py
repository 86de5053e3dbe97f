"""Streams a folder's tensors straight into the shards that this rank holds, and accounts for every key."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from mindspeed_mm.checkpoint.keymap import KeyMap, RuleMatch, check_used_once, made_by
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.safetensors_folder import find_entries, holds_safetensors
from mindspeed_mm.checkpoint.stored_weights import open_stored
from mindspeed_mm.checkpoint.transformers_map import loading_steps
from mindspeed_mm.core.errors import ModelFolderError, Problem, first_problems
from mindspeed_mm.core.errors import first_names as listed
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.models.added_tokens import with_new_rows
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import QuantizedLayout, packings_of
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.initialization import initialize, persistent_buffers
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces
from mindspeed_mm.fsdp.models.loading.source import Fetch, open_source
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight, naming_of
from mindspeed_mm.fsdp.models.structure.stages import first_names, whole_of
from mindspeed_mm.fsdp.utils.finite import is_finite
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, shared_parameters

_COMPARED_BYTES = 64 * 2**20
"""Of tied weights that are compared, read at a time."""
_TIE = (
    "config.json ties the head to the input embeddings, and the model does not: its class needs "
    "_tied_weights_keys = {{'{head}': '{first}'}}, and config.json tie_word_embeddings: true outside text_config, too. "
    "In training.allow_missing the head would start with random values."
)
"""Way out where a tied head is looked for in the folder."""


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
class _Comparison:
    """How a folder and a model differ."""

    missing: list[Problem] = field(default_factory=list)
    """Of names of the model that the folder must have and lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Keys of the folder that the model must have and lacks."""
    mismatched: list[Problem] = field(default_factory=list)
    initialized: list[str] = field(default_factory=list)
    """Names of the model that the folder may lack, and does."""
    ignored: list[str] = field(default_factory=list)
    """Keys of the folder that the model may lack, and does."""

    def check(self, folder: Path) -> None:
        if not (self.missing or self.unexpected or self.mismatched):
            return
        unexpected = [Problem("stored, but the model has no place for it", key=key) for key in self.unexpected]
        problems = [*first_problems(self.missing), *first_problems(unexpected), *first_problems(self.mismatched)]
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
        steps = _stored_steps(whole, stored, {*targets, *aliases})
        made = with_new_rows(whole, made_by(steps), folder, aliases)
        found = _compare_names(whole, _shapes(whole, targets), aliases, made, allow_missing, allow_unexpected)
        found.check(folder)
        _check_ledger(steps, stored, {*targets, *aliases}, found)
        wanted = {key: tensor for key, tensor in made.items() if aliases.get(key, key) in targets}
        nonfinite = _copy(_own_targets(model), aliases, wanted, folder, packings_of(model), fetch)
        size_bytes = sum(tensor.size_bytes for tensor in stored.values())
    # Names are the folder's up to here; what is initialised goes by the names of the model with its adapters.
    unfilled = set(found.initialized)
    named = chain(model.named_parameters(), persistent_buffers(model))
    fresh = {name for name, _ in named if stored_name(name) in unfilled}
    if fresh:
        initialize(model, seed=seed, units=units, names=fresh)
    return LoadReport(
        folder=str(folder),
        tensors=len(stored),
        size_bytes=size_bytes,
        seconds=time.perf_counter() - started,
        initialized=tuple(found.initialized),
        ignored=tuple(found.ignored),
        nonfinite=tuple(nonfinite),
        warnings=tuple(_warnings(folder, found, nonfinite)),
    )


def check_weights(
    model: nn.Module, folder: Path, *, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
) -> None:
    """Raise `ModelFolderError` where `stream_weights` would for a folder's keys and shapes. No value is read but of
    weights that are tied in the model and stored twice, and the model needs no memory."""
    targets = _targets(model)
    aliases = _aliases(model)
    with open_stored(folder, _config_of(model)) as stored:
        steps = _stored_steps(model, stored, {*targets, *aliases})
        made = with_new_rows(model, made_by(steps), folder, aliases)
        found = _compare_names(model, _shapes(model, targets), aliases, made, allow_missing, allow_unexpected)
        found.check(folder)
        _check_ledger(steps, stored, {*targets, *aliases}, found)
        for alias, first in aliases.items():
            if alias in made and first in made and not _are_equal(made[alias], made[first]):
                raise _differing_ties(alias, first, folder)


def _config_of(model: nn.Module) -> dict[str, object] | None:
    """What its config.json says; None for a class that is not of transformers."""
    to_dict = attribute_at(whole_of(model), "config.to_dict")
    if to_dict is not None:
        return to_dict()
    return None


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several → the first, as a folder has them."""
    stored_name = naming_of(model)
    aliases = {}
    for first, *others in shared_parameters(model):
        for alias in others:
            aliases[stored_name(alias)] = stored_name(first)
    return aliases


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
    targets: dict[str, torch.Tensor] = {}
    for name, tensor in chain(model.named_parameters(), persistent_buffers(model)):
        if not is_adapter_weight(name):
            targets[stored_name(name)] = tensor
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
        made = made_by(_stored_steps(model, stored, set(_targets(whole_of(model)))))
        yield with_new_rows(whole_of(model), made, folder)


def _stored_steps(model: nn.Module, stored: Mapping[str, LazyTensor], wanted: Collection[str]) -> list[RuleMatch]:
    rules = facts_of(model).conversion_rules
    if rules is not None:
        return loading_steps(model, stored, wanted, rules)  # type: ignore[arg-type]
    key_map: KeyMap | None = attribute_at(model, "key_map")
    steps = [] if key_map is None else list(key_map.steps(stored))
    used = set(chain.from_iterable(step.sources for step in steps))
    for key, tensor in stored.items():
        if key not in used:  # goes by the same name in the model
            steps.append(RuleMatch((key,), {key: tensor}))
    return steps


def _compare_names(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    made: Mapping[str, LazyTensor],
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
) -> _Comparison:
    may_lack = _matcher(model, allow_missing, "missing")
    may_hold = _matcher(model, allow_unexpected, "unexpected")
    found = _Comparison()
    reached = set()
    for key, tensor in made.items():
        name = aliases.get(key, key)
        reached.add(name)
        if name in targets:
            found.mismatched += _mismatch(key, tensor, targets[name])
        elif may_hold(key):
            found.ignored.append(key)
        else:
            found.unexpected.append(key)
    missing = []
    for name in targets:
        if name in reached:
            continue
        if may_lack(name):
            found.initialized.append(name)
        else:
            missing.append(name)
    way_out_of = _untied_head(model) if missing else {}
    found.missing = [Problem("missing in the folder", key=name, way_out=way_out_of.get(name, "")) for name in missing]
    return found


def _untied_head(model: nn.Module) -> dict[str, str]:
    """Name of the head → way out, where the configuration ties it to the input embeddings and the class does not."""
    ties = [attribute_at(model, f"config.{part}tie_word_embeddings", False) for part in ("", "text_config.")]
    get_head, get_first = attribute_at(model, "get_output_embeddings"), attribute_at(model, "get_input_embeddings")
    head = attribute_at(get_head(), "weight") if any(ties) and get_head is not None else None
    if head is None or get_first is None:
        return {}
    first = attribute_at(get_first(), "weight")
    names = {id(weight): name for name, weight in model.named_parameters()}
    if head is first or not {id(head), id(first)} <= names.keys():
        return {}
    return {names[id(head)]: _TIE.format(head=names[id(head)], first=names[id(first)])}


def _matcher(
    model: nn.Module, patterns: Sequence[str], kind: Literal["missing", "unexpected"]
) -> Callable[[str], bool]:
    """Whether a name matches one of our patterns, or one of the regular expressions that a transformers class lists."""
    expressions = [compile_pattern(pattern, key=f"training.allow_{kind}") for pattern in patterns]
    regexes = [re.compile(regex) for regex in attribute_at(model, f"_keys_to_ignore_on_load_{kind}", ())]

    def matches(name: str) -> bool:
        return any(each.fullmatch(name) for each in expressions) or any(each.search(name) for each in regexes)

    return matches


def _mismatch(key: str, tensor: LazyTensor, target: torch.Tensor) -> Iterator[Problem]:
    is_quantised = not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2
    if tensor.shape != tuple(target.shape):
        yield Problem(f"stored with shape {tensor.shape}, the model has {tuple(target.shape)}", key=key)
    elif target.is_floating_point() and is_quantised:
        stored = str(tensor.dtype).removeprefix("torch.")
        yield Problem(f"stored as {stored}: quantised weights cannot be trained", key=key)


def _check_ledger(
    steps: Sequence[RuleMatch],
    stored: Mapping[str, LazyTensor],
    wanted: set[str],
    found: _Comparison,
) -> None:
    made = made_by(steps).keys()
    check_used_once(steps, stored, (wanted & made) | set(found.ignored))


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
        if packing is None:
            finite = _copy_local(tensor, targets[name])
        else:
            finite = _pack_local(tensor, targets[name], packing)
        if not finite:
            nonfinite.append(name)
    return nonfinite


@torch.no_grad()
def _copy_local(tensor: LazyTensor, target: torch.Tensor) -> bool:
    """Whether all that was read is finite."""
    finite = True
    for piece, region in local_pieces(target):
        if piece.numel():
            tensor.copy_to(piece, region)
            finite = finite and is_finite(piece)
    return finite


@torch.no_grad()
def _pack_local(tensor: LazyTensor, target: torch.Tensor, packing: QuantizedLayout) -> bool:
    """As `_copy_local`, for a weight that is kept in bytes: one layer's rows are in memory as numbers at a time."""
    finite = True
    for piece, (rows, _) in local_pieces(target):
        numbers = torch.empty(rows[1], packing.inputs, device=piece.device)
        tensor.copy_to(numbers, (rows, (0, packing.inputs)))
        if numbers.numel():
            finite = finite and is_finite(numbers)
            piece.copy_(packing.pack(numbers))
    return finite


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
        left_piece = torch.empty(length, *left.shape[1:], dtype=left.dtype)
        right_piece = torch.empty_like(left_piece)
        left.copy_to(left_piece, region)
        right.copy_to(right_piece, region)
        if not torch.equal(left_piece, right_piece):
            return False
    return True


def _differing_ties(key: str, first_key: str, folder: Path) -> ModelFolderError:
    return ModelFolderError(
        f"is stored with other values than '{first_key}', but the model ties the two",
        where=str(folder),
        key=key,
        way_out="Set tie_word_embeddings in config.json as the weights were trained.",
    )


def _warnings(folder: Path, found: _Comparison, nonfinite: Sequence[str]) -> list[str]:
    sentences = []
    if found.initialized:
        sentences.append(f"{folder}: {listed(found.initialized)} not stored; initialised")
    if found.ignored:
        sentences.append(f"{folder}: {listed(found.ignored)} stored but not used")
    if nonfinite:
        sentences.append(f"{folder}: NaN or infinity in {listed(nonfinite)}{_files_of(folder, nonfinite)}")
    return sentences


def _files_of(folder: Path, names: Sequence[str]) -> str:
    """Where weights are stored under the names that the model has for them: the files."""
    entries = find_entries(folder) if holds_safetensors(folder) else {}
    files = sorted({entries[name].file.name for name in names if name in entries})
    if files:
        return f", stored in {listed(files)}"
    return ""
