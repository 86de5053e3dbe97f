"""What the engine must know of a model and reads off the live one: its blocks, ties, towers and output head."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.models.behaviour import multi_token
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.ties import tie_groups
from mindspeed_mm.fsdp.models.structure.towers import Tower, find_towers

__all__ = ["ModelSpec", "Tower", "find_blocks", "resolve_spec"]


@dataclass(frozen=True)
class ModelSpec:
    """A model's own plan."""

    shard_modules: list[str]
    """Names of modules to wrap one by one: blocks in execution order, a tower after its blocks."""
    tie_groups: list[list[str]]
    """Names of modules that share a parameter."""
    towers: list[Tower] = field(default_factory=list)
    """One entry a modality that a batch may lack."""
    head: str = ""
    """The module that turns hidden states into logits; empty when there is none."""
    blocks: list[str] = field(default_factory=list)
    """The repeated blocks among `shard_modules`, which recompute works on too."""


def resolve_spec(model: nn.Module) -> ModelSpec:
    """Read the specification off a model that is built but not sharded.

    Embedding and head are wrapped on their own,
    or as one tied group, so that the root does not hold both for the length of a step.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    embedding, head = (_name_of(model, getter, names) for getter in ("get_input_embeddings", "get_output_embeddings"))
    groups = tie_groups(model)
    tied = {name for group in groups for name in group}
    towers = find_towers(model)
    ends = [name for name in (embedding, head) if name and name not in tied and name not in blocks]
    further = [multi_token.NAME] if hasattr(model, multi_token.NAME) else []
    return ModelSpec(
        shard_modules=_with_towers(blocks, towers) + further + ends,
        tie_groups=groups,
        towers=towers,
        head=head,
        blocks=blocks,
    )


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks, in execution order; also of a model that is sharded already.

    A generator's adapter states them; otherwise they are the instances of the classes that `_no_split_modules` names.
    Some classes name whole towers beside the blocks inside them: what holds blocks is none.
    """
    adapter = facts_of(model).adapter
    if adapter is not None:
        names = [name for name, _ in model.named_modules()]
        return [name for pattern in adapter.blocks for name in resolve_patterns([pattern], names, key="blocks")]
    classes = set(getattr(model, "_no_split_modules", None) or ())
    names = [
        name
        for name, module in model.named_modules()
        # Sharding puts a class of its own in front: the blocks' class is among the bases then.
        if classes & {cls.__name__ for cls in type(module).__mro__} and next(module.parameters(), None) is not None
    ]
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


def _with_towers(blocks: list[str], towers: list[Tower]) -> list[str]:
    """Children before parents: whoever wraps in this order finds a tower's own remaining parameters."""
    modules = list(blocks)
    for name in dict.fromkeys(tower.module for tower in towers):
        inner = [position for position, block in enumerate(modules) if block.startswith(f"{name}.")]
        modules.insert(max(inner, default=-1) + 1, name)
    return modules


def _name_of(model: nn.Module, getter: str, names: dict[int, str]) -> str:
    get = getattr(model, getter, None)
    try:
        module = get() if get is not None else None
    except (AttributeError, NotImplementedError):  # transformers' way to say that there is none
        return ""
    return names.get(id(module), "") if isinstance(module, nn.Module) else ""
