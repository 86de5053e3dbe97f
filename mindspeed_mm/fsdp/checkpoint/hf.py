"""Saves a live model as a Hugging Face folder, under the keys and in the layout that transformers writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mindspeed_mm.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    DtypeRule,
    copy_assets,
    drafted_folder,
    write_weights,
)
from mindspeed_mm.checkpoint.keymap import (
    KeyMap,
    RuleMatch,
    check_used_once,
    in_natural_order,
    made_by,
    natural_order,
)
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored, Zeros
from mindspeed_mm.checkpoint.transformers_map import conversion_rules, go_back_as, loading_steps, saving_steps
from mindspeed_mm.core.errors import ModelFolderError, Problem, first_problems
from mindspeed_mm.fsdp.checkpoint.base_weights import has_weights, open_base
from mindspeed_mm.fsdp.checkpoint.tree import model_tensors, tied_names
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import write_own_settings
from mindspeed_mm.fsdp.models.loading.folder import kept_beside
from mindspeed_mm.fsdp.models.loading.local_shard import whole_tensor
from mindspeed_mm.fsdp.models.structure.stages import Share, whole_of
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_hf(
    model: nn.Module,
    folder: Path,
    assets_from: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    ranks: Ranks | None = None,
    write_view: Callable[[Path], None] | None = None,
) -> None:
    """Write a live model, sharded or not. Called by all ranks; each tensor is gathered by itself, rank 0 writes.

    Args:
        model: The model.
        folder: Appears when complete.
        assets_from: Folder whose configuration, tokenizer and processor are copied.
        dtype: None writes each tensor in the dtype that `assets_from` has for it.
        max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        overwrite: Replace an existing folder.
        ranks: All of them; made here when not given, which is itself a collective.
        write_view: Adds to the folder how training looked at its rows.
    """
    ranks = ranks or Ranks()
    made = hub_tensors(model, live_tensors(model))
    rule = ranks.first("reading the source", lambda: DtypeRule.of_source(assets_from, dtype))
    with (
        _kept_by_first_rank(model, assets_from, ranks) as beside,
        drafted_folder(folder, ranks, overwrite=overwrite) as draft,
    ):
        made = with_beside(made, beside)
        ranks.first("copying", lambda: copy_assets(assets_from, draft, dtype))
        ranks.first("writing settings", lambda: write_own_settings(whole_of(model), draft))
        ranks.first("writing the processor's settings", lambda: write_view(draft) if write_view else None)
        write_weights(made, draft, rule, max_shard_bytes, ranks)


@contextmanager
def _kept_by_first_rank(model: nn.Module, source: Path, ranks: Ranks) -> Iterator[dict[str, LazyTensor]]:
    """What `source` holds beside the model, open for the length of the `with` block. Only rank 0 reads it; it stands in
    the plan of all of them."""
    found: dict[str, LazyTensor] = {}
    with ExitStack() as opened:

        def find() -> list[tuple[str, tuple[int, ...], torch.dtype]]:
            if has_weights(source):
                whole = whole_of(model)
                found.update(kept_beside(whole, opened.enter_context(open_base(whole, source))))
            return [(key, tensor.shape, tensor.dtype) for key, tensor in found.items()]

        told = ranks.first("reading the source", find)
        # The other ranks need key, shape and type alone: rank 0 writes.
        yield {key: found.get(key) or Zeros(shape, dtype) for key, shape, dtype in told}


def with_beside(made: Mapping[str, LazyTensor], beside: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """A model's tensors with what `kept_beside` found, in the order of their keys. What was trained replaces what was
    there."""
    return {key: made.get(key) or beside[key] for key in sorted({*made, *beside}, key=natural_order)}


def live_tensors(model: nn.Module) -> dict[str, LazyTensor]:
    """The tensors that a checkpoint of a live model holds, by name, each gathered when it is read: all ranks read the
    same ones in the same order."""
    own, everything = model_tensors(model), model_tensors(whole_of(model))
    reader = _GatheredTensors(own, everything, facts_of(model).share)
    return {name: Stored(name, tensor.shape, tensor.dtype, lambda: reader) for name, tensor in everything.items()}


class _GatheredTensors:
    """Gives whole tensors of a sharded model: each read is a collective, so all ranks read in the same order."""

    def __init__(
        self, own: Mapping[str, torch.Tensor], everything: Mapping[str, torch.Tensor], share: Share | None
    ) -> None:
        self._own, self._everything, self._share = own, everything, share

    def get_tensor(self, key: str) -> torch.Tensor:
        tensor = self._own.get(key)
        if tensor is None:  # another stage has it
            tensor = torch.empty_like(self._everything[key], device=current_device())
        whole = whole_tensor(tensor)
        if self._share is not None:
            # A broadcast takes a tensor on the device, in one piece.
            whole = whole.to(current_device()).contiguous()
            dist.broadcast(whole, group=self._share.group, group_src=self._share.owners[key])
        return whole.cpu()


def hub_tensors(model: nn.Module, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """A model's tensors under the keys, and in the layout, of the folder that it came from.

    Raises:
        ModelFolderError: A tensor would be lost or written twice.
    """
    steps = _saving_steps(whole_of(model), tensors)
    made = made_by(steps)
    check_used_once(steps, tensors, made)
    return in_natural_order(made)


def remember_layout(model: nn.Module, source: Path) -> set[str]:
    """Note on a model built without weights how the source's weights would become its own, so that `hub_tensors` leads
    back to exactly that layout (older names, fused or split tensors).

    Args:
        model: From `ModelHub.build`.
        source: The folder that the run started from.

    Returns:
        The source's keys that a complete export has. Empty when the source holds no weights.
    """
    if not has_weights(source):
        return set()
    own = set(model.state_dict(keep_vars=True)) - set(tied_names(model))
    wanted: set[str] = set()
    with open_base(model, source) as stored:
        for step in _loading_steps(model, stored):
            if own.intersection(step.targets):
                wanted.update(step.sources)
    return wanted


def check_leads_back(model: nn.Module, source: Path) -> None:
    """Raise what an export would where the names of a model's weights do not lead back to those of the folder that it
    is read from. Nothing is read but the headers of files.

    Args:
        model: From `ModelHub.build`, without adapters.
        source: Has weights.

    Raises:
        ModelFolderError: A weight of the folder would be missing from the export, or written twice.
    """
    expected = remember_layout(model, source)
    own = {name: Zeros(tuple(each.shape), each.dtype) for name, each in model_tensors(model).items()}
    check_complete(expected, hub_tensors(model, own), source)


_OTHER_NAMES = (
    "If a plugin's rules of stored names make it: turned round, a rule takes every parameter that its second pattern, "
    "a regular expression, is found in. Write more of the name there and `\\.` for a dot, and export again."
)


def check_complete(expected: Collection[str], made: Collection[str], source: Path) -> None:
    """Raise `ModelFolderError` when an export lacks names of the folder that it came from.

    Args:
        expected: From `remember_layout`.
        made: Names of the export.
        source: The folder.
    """
    lacking = sorted(set(expected) - set(made), key=natural_order)
    if not lacking:
        return
    instead = sorted(set(made) - set(expected), key=natural_order)
    raise ModelFolderError(
        f"{len(lacking)} of the weights in {source} would be missing from the export. Among them:",
        problems=[
            *first_problems(Problem("is not made", key=key) for key in lacking),
            *first_problems((Problem("is made instead", key=key, way_out=_OTHER_NAMES) for key in instead), most=1),
        ],
    )


def folder_tensors(
    model: nn.Module, stored: Mapping[str, LazyTensor], trained: Collection[str] = ()
) -> dict[str, LazyTensor]:
    """A folder's tensors under a model's own names, each once.

    Args:
        model: From `ModelHub.build`. As with `remember_layout`, the way back is noted on it.
        stored: From `open_base`.
        trained: What was trained whole beside adapters and takes its place in the model: it need not be stored, as the
            new head of a model that started from another one's folder is not.

    Raises:
        ModelFolderError: Weights of the model are not stored.
    """
    own, aliases = set(model.state_dict(keep_vars=True)), tied_names(model)
    made = made_by(_loading_steps(model, stored))
    # A shared weight may be stored under several of its names: the one that is no alias counts.
    held = {aliases[name]: tensor for name, tensor in made.items() if name in aliases}
    held |= {name: tensor for name, tensor in made.items() if name in own and name not in aliases}
    missing = sorted(own - held.keys() - aliases.keys() - set(trained), key=natural_order)
    if missing:
        raise ModelFolderError(
            f"{len(missing)} weights of the model are not stored. Among them:",
            problems=[Problem("missing in the folder", key=name) for name in missing[:5]],
        )
    return held


def _loading_steps(model: nn.Module, stored: Mapping[str, LazyTensor]) -> list[RuleMatch]:
    rules = facts_of(model).conversion_rules
    if rules is not None:
        return loading_steps(model, stored, set(model.state_dict()), rules)  # type: ignore[arg-type]
    key_map = setting_of(model, KeyMap, "key_map")
    if key_map is not None:
        return key_map.steps(stored)
    return [RuleMatch((key,), {key: tensor}) for key, tensor in stored.items()]


def _saving_steps(model: nn.Module, tensors: Mapping[str, LazyTensor]) -> list[RuleMatch]:
    from transformers import PreTrainedModel  # heavy

    if isinstance(model, PreTrainedModel):
        outline = _unsharded_outline(model)
        return saving_steps(outline, tensors, conversion_rules(outline, legacy=False))
    key_map = setting_of(model, KeyMap, "key_map")
    if key_map is not None:
        return key_map.inverse.steps(tensors)
    return [RuleMatch((name,), {name: tensor}) for name, tensor in tensors.items()]


def _unsharded_outline(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or when it is sharded, one without storage and of its first class: sharding gives modules new
    classes, and transformers finds its rules by class name."""
    if not isinstance(model, FSDPModule):
        return model
    first_class = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    with torch.device("meta"):
        outline = first_class(model.config)
    go_back_as(outline, model)
    return outline
