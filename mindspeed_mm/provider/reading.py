"""What the rules of flags read from and write to: a configuration in the making, in which each value has the flag or
the line of the file that gave it, so that two of them that disagree are named together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.tree import (
    MappingEntry,
    Node,
    SourcePosition,
    as_node,
    find,
    merge,
    nest,
    plain,
    value_at_key,
)
from mindspeed_mm.provider.module_names import ModuleNames
from mindspeed_mm.provider.parse import GivenFlags, given_of

# --- a configuration in the making ------------------------------------------------------------------------------------

FROM_FLAGS = "flags"
"""The source of a configuration that no single file gives."""


def derived(words: str) -> SourcePosition:
    """The place of a value that was worked out from others."""
    return SourcePosition(f"derived: {words}")


class Draft:
    """The tree of a configuration, and what was noticed while it was made."""

    def __init__(self) -> None:
        self.root = Node({}, SourcePosition(FROM_FLAGS))
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        """What a person should know, each once."""

    def put(self, key: str, value: object, place: SourcePosition) -> None:
        """Set a key. Where it has another value already, both are named as a contradiction."""
        held = find(self.root, key)
        if held is None or held.node.value is None:
            self.replace(key, value, place)
        elif plain(held.node) != _as_plain(value):
            self.problem(
                f"{show(_as_plain(value))}, but {held.node.place} says {show(plain(held.node))} ({key})",
                place,
                "Keep one of them.",
            )

    def put_node(self, key: str, node: Node) -> None:
        """Set a key to what a file says, whose values know their places."""
        self.replace(key, node, node.place)

    def replace(self, key: str, value: object, place: SourcePosition) -> None:
        """Set a key, whatever it had."""
        node = value if isinstance(value, Node) else as_node(_as_plain(value), place)
        parents = key.split(".")[:-1]
        for depth in range(1, len(parents) + 1):  # a section that a file leaves empty takes keys
            parent = find(self.root, ".".join(parents[:depth]))
            if parent is not None and parent.node.value is None:
                parent.node.value = {}
        merge(self.root, nest(key, MappingEntry(place, node)))

    def fill(self, key: str, value: object, words: str) -> None:
        """Set a key that nobody has given."""
        if self.value(key) is None:
            self.replace(key, value, derived(words))

    def value(self, key: str, default: object = None) -> Any:
        """What a key has so far."""
        value = value_at_key(self.root, key)
        if value is None:
            return default
        return value

    def has(self, key: str) -> bool:
        """Whether a key is set, be it to null."""
        return find(self.root, key) is not None

    def place(self, key: str) -> SourcePosition:
        """Where a key got its value."""
        entry = find(self.root, key)
        if entry is not None:
            return entry.node.place
        return SourcePosition(key)

    def note(self, words: str) -> None:
        """Tell a person something, once."""
        if words not in self.notes:
            self.notes.append(words)

    def problem(self, what: str, place: SourcePosition | str = "", way_out: str = "") -> None:
        """Something that nobody but the user can put right."""
        self.problems.append(Problem(what, str(place), way_out=way_out))


def _as_plain(value: object) -> object:
    """A value as files hold it: lists, not tuples."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value


# --- reading ----------------------------------------------------------------------------------------------------------


LENGTH_OF_RUN = "training.train_iters"


@dataclass
class Reading:
    """One command line on its way to a configuration."""

    namespace: Namespace
    draft: Draft = field(default_factory=Draft)
    names: ModuleNames | None = None
    """What the model's modules are called; None where the model is not known."""
    decoder_layers: int | None = None
    """Number of layers of the language model, or of a generator's transformer."""
    stage_layers: list[int] = field(default_factory=list)
    """Number of layers on each stage, where model.json says it."""
    is_generator: bool = False
    """Whether the model draws pictures or clips."""
    folder_of_weights: str = ""
    """The folder of a generator's weights inside the model's folder."""
    sharing_stages: int = 1
    """Number of pipeline stages whose ranks share each sequence, where a model's pairs are not cut into stages."""
    settled: set[str] = field(default_factory=set)
    """Flags whose place model.json has taken."""

    @property
    def given(self) -> GivenFlags:
        """Which flags were given, and where."""
        return given_of(self.namespace)

    def has(self, dest: str) -> bool:
        """Whether a flag was given."""
        return dest in self.given.places

    def value(self, dest: str, default: object = None) -> Any:
        """A flag's value: what was given, or else Megatron's default."""
        value = getattr(self.namespace, dest, None)
        if value is None:
            return default
        return value

    def place(self, dest: str) -> SourcePosition:
        """Where a flag was given."""
        return self.given.places.get(dest, SourcePosition(f"--{dest.replace('_', '-')}"))

    def set_ones(self, *names: str) -> list[str]:
        """Those of some flags that have a value other than false, nothing or 0."""
        return [name for name in names if self.value(name)]

    def size(self, name: str) -> int:
        """A key of `parallel` as it stands, 1 where it is not given or is no number."""
        value = self.draft.value(f"parallel.{name}", 1)
        if isinstance(value, int) and value > 0:
            return value
        return 1

    @property
    def context(self) -> int:
        """Number of ranks that share a sequence."""
        return max(1, int(self.value("context_parallel_size", 1))) * self.sharing_stages

    @property
    def model_ranks(self) -> int:
        """Number of ranks that work on the same rows."""
        return self.size("tensor_parallel_size") * self.size("pipeline_parallel_size") * self.context

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different rows, 1 where nobody says how many ranks there are."""
        return max(1, (self.given.world_size or self.model_ranks) // self.model_ranks)
