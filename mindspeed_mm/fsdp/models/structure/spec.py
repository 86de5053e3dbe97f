"""What the engine must know of a model and reads off the live one: its blocks, ties, towers and output head."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from mindspeed_mm.core.patterns import holding_others, resolve_patterns
from mindspeed_mm.fsdp.models.behaviour import multi_token
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import own_names, whole_of
from mindspeed_mm.fsdp.models.structure.towers import Tower, find_media_without_towers, find_towers
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, embedding_of, head_of, module_names, name_of, tie_groups

__all__ = ["ModelSpec", "Tower", "find_blocks", "resolve_spec"]


@dataclass(frozen=True)
class ModelSpec:
    """What the engine knows of a model: modules to shard, ties, towers, head and blocks."""

    shard_modules: list[str]
    """Names of modules to wrap one by one: blocks in execution order, a tower after its blocks."""
    tie_groups: list[list[str]]
    """Names of modules that share a parameter."""
    towers: list[Tower] = field(default_factory=list)
    """One entry a modality that a batch may lack."""
    media_without_towers: list[str] = field(default_factory=list)
    """Batch keys of media that all ranks must have together, or none."""
    head: str = ""
    """The module that turns hidden states into logits; empty when there is none."""
    blocks: list[str] = field(default_factory=list)
    """The repeated blocks among `shard_modules`, which recompute works on too."""


def resolve_spec(model: nn.Module) -> ModelSpec:
    """Read the specification off a model that is built but not sharded.

    Embedding and head are wrapped on their own, or as one tied group, so that the root does not hold both for the
    length of a step.
    """
    blocks, groups, towers = find_blocks(model), tie_groups(model), find_towers(model)
    embedding, head = name_of(model, embedding_of(model)), name_of(model, head_of(model))
    shard_modules = _with_towers(blocks, towers)
    if multi_token.heads_of(model) is not None:
        shard_modules.append(multi_token.NAME)
    wrapped = {"", *blocks}.union(*groups)
    shard_modules += [name for name in (embedding, head) if name not in wrapped]
    return ModelSpec(
        shard_modules=shard_modules,
        tie_groups=groups,
        towers=towers,
        media_without_towers=find_media_without_towers(model),
        head=head,
        blocks=blocks,
    )


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks, in execution order; also of a model that is sharded already.

    A generator's adapter states them; otherwise they are the instances of the classes that `_no_split_modules` names.
    Some classes name whole towers beside the blocks inside them: a module that holds blocks is not one itself.
    """
    adapter = facts_of(model).adapter
    found: list[str] = []
    if adapter is not None:
        names = module_names(whole_of(model))
        for pattern in adapter.blocks:  # one by one: the order of the patterns is that of execution
            found += resolve_patterns([pattern], names, key="blocks")
        return own_names(model, found)
    classes = set(attribute_at(model, "_no_split_modules", ()))
    for name, module in model.named_modules():
        # Sharding puts a class of its own in front: the blocks' class is among the bases then.
        own_classes = {cls.__name__ for cls in type(module).__mro__}
        if classes & own_classes and next(module.parameters(), None) is not None:
            found.append(name)
    holders = holding_others(found, found)
    return [name for name in found if name not in holders]


def _with_towers(blocks: list[str], towers: list[Tower]) -> list[str]:
    """Children before parents: whoever wraps in this order finds a tower's own remaining parameters."""
    modules = list(blocks)
    for name in dict.fromkeys(tower.module for tower in towers):
        inner = [position for position, block in enumerate(modules) if block.startswith(f"{name}.")]
        modules.insert(max(inner, default=-1) + 1, name)
    return modules
