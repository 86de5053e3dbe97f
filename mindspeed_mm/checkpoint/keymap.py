"""Declarative key maps: how the tensors of one layout become those of another.

A rule names source and target patterns and the operations between them (`key_ops.py`). Applying a map reads nothing:
it gives steps, each of which says which stored keys it uses up and which target tensors they make, and the ledger
proves that every key is used exactly once. A map without reordering can be turned round.

    KeyRule("blocks.{n}.attn.{part}.weight", "layers.{n}.self_attention.{part}.weight")  # rename
    KeyRule(("{at}.q.weight", "{at}.k.weight", "{at}.v.weight"), "{at}.qkv.weight", (Concat(0),))  # merge
    KeyRule(("{at}.experts.{e}.gate", "{at}.experts.{e}.up"), "{at}.experts.gate_up", (Stack(0), Concat(1)))

`{name}` stands for one part of a key between dots, `{name*}` for any number of them. A placeholder that only the
sources have is collected, in numerical order, and one that only the targets have is dealt out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mindspeed_mm.checkpoint.key_ops import Column, Drop, Op
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import ModelFolderError, Problem

_MOST_DIGITS = 18


@dataclass(frozen=True)
class RuleMatch:
    """One application of a rule: these stored keys, all of each, make these tensors."""

    sources: tuple[str, ...]
    targets: Mapping[str, LazyTensor]
    dropped: tuple[LazyTensor, ...] = ()
    """What of the sources is in no target, by rule (`Drop`)."""


class KeyRule:
    """One line of a key map. Patterns may be given as one string or several."""

    def __init__(self, sources: str | Sequence[str], targets: str | Sequence[str], ops: Sequence[Op] = ()) -> None:
        self.sources = (sources,) if isinstance(sources, str) else tuple(sources)
        self.targets = (targets,) if isinstance(targets, str) else tuple(targets)
        self.ops = tuple(ops)

    @property
    def inverse(self) -> KeyRule:
        """The rule that leads back."""
        return KeyRule(self.targets, self.sources, [op.inverse for op in reversed(self.ops)])

    @cached_property
    def regexes(self) -> list[re.Pattern[str]]:
        """One for each source pattern."""
        return [_compile(pattern) for pattern in self.sources]

    @cached_property
    def shared(self) -> list[str]:
        """Placeholders that sources and targets have in common: one application for each of their values."""
        return [name for name in _names(self.sources) if name in _names(self.targets)]

    def build(self, columns: list[list[tuple[str, dict[str, str]]]], tensors: Mapping[str, LazyTensor]) -> RuleMatch:
        """One application.

        Args:
            columns: For each source pattern its matches, a key with its placeholders' values.
            tensors: The tensors by key.

        Raises:
            ModelFolderError: A source is absent, or shapes do not fit the operations.
        """
        _check_complete(self, columns)
        work: list[Column] = [[tensors[key] for key, _ in column] for column in columns]
        values = {name: columns[0][0][1][name] for name in self.shared}
        keys = tuple(key for column in columns for key, _ in column)
        dropped: list[LazyTensor] = []
        try:
            for op in self.ops:
                dropped += work[op.position] if isinstance(op, Drop) else ()
                work = op.apply(work)
            made = [self._named(pattern, column, values) for pattern, column in zip(self.targets, work, strict=True)]
        except (ValueError, IndexError) as error:
            way_out = getattr(error, "way_out", "")
            raise ModelFolderError(f"{error} (rule {self})", key=keys[0], way_out=way_out) from error
        return RuleMatch(keys, {key: tensor for column in made for key, tensor in column}, tuple(dropped))

    def _named(self, pattern: str, column: Column, values: dict[str, str]) -> list[tuple[str, LazyTensor]]:
        dealt = [name for name in _names([pattern]) if name not in values]
        if not dealt and len(column) == 1:
            return [(_fill(pattern, values), column[0])]
        if len(dealt) != 1:
            raise ValueError(f"{len(column)} tensors for the one target {pattern}")
        return [(_fill(pattern, values | {dealt[0]: str(i)}), tensor) for i, tensor in enumerate(column)]

    def __repr__(self) -> str:
        return f"{' + '.join(self.sources)} -> {' + '.join(self.targets)}"


class KeyMap:
    """Rules in order; a key goes to the first that takes it.

    Args:
        rules: The rules.
        keep_others: Pass a key that no rule takes on under its own name, instead of leaving it over.
    """

    def __init__(self, rules: Iterable[KeyRule], *, keep_others: bool = False) -> None:
        self.rules, self.keep_others = list(rules), keep_others

    @property
    def inverse(self) -> KeyMap:
        """The map that leads back."""
        return KeyMap([rule.inverse for rule in self.rules], keep_others=self.keep_others)

    def steps(self, tensors: Mapping[str, LazyTensor]) -> list[RuleMatch]:
        """What becomes of these tensors. Keys that no rule takes are in no step."""
        groups: dict[tuple[int, tuple[str, ...]], list[list[tuple[str, dict[str, str]]]]] = {}
        others: list[str] = []
        for key in sorted(tensors, key=natural_order):
            found = self._match(key)
            if found is None:
                others.append(key)
                continue
            position, column, values = found
            rule = self.rules[position]
            group = (position, tuple(values.get(name, "") for name in rule.shared))
            groups.setdefault(group, [[] for _ in rule.sources])[column].append((key, values))
        steps = [self.rules[position].build(columns, tensors) for (position, _), columns in groups.items()]
        return steps + [RuleMatch((key,), {key: tensors[key]}) for key in others if self.keep_others]

    def _match(self, key: str) -> tuple[int, int, dict[str, str]] | None:
        for position, rule in enumerate(self.rules):
            for column, regex in enumerate(rule.regexes):
                if match := regex.fullmatch(key):
                    return position, column, match.groupdict()
        return None


def check_used_once(steps: Iterable[RuleMatch], sources: Iterable[str], targets: Iterable[str]) -> None:
    """The ledger: every source key used exactly once, every target key made exactly once.

    Raises:
        ModelFolderError: Naming the keys (the first five of each kind, and how many there are).
    """
    steps = list(steps)
    used = Counter(key for step in steps for key in step.sources)
    made = Counter(key for step in steps for key in step.targets)
    problems = [
        *_listed("is not used", [key for key in sources if used[key] == 0]),
        *_listed("is used more than once", [key for key, times in used.items() if times > 1]),
        *_listed("is not made", [key for key in targets if made[key] == 0]),
        *_listed("is made more than once", [key for key, times in made.items() if times > 1]),
        *_listed("is made but not wanted", [key for key in made if key not in set(targets)]),
    ]
    if problems:
        raise ModelFolderError("the key map does not fit", problems=problems)


def natural_order(key: str) -> list[tuple[int, str]]:
    """Sort key that puts `layers.2` before `layers.10`."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in key.split(".")]


def is_number(part: str) -> bool:
    """Whether a part of a key is a number as programs write it: ASCII digits, and not thousands of them."""
    return part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS


def _listed(what: str, keys: Sequence[str], most: int = 5) -> list[Problem]:
    more = [Problem(f"and {len(keys) - most} more")] if len(keys) > most else []
    return [Problem(what, key=key) for key in keys[:most]] + more


_PLACEHOLDER = re.compile(r"\{(\w+)(\*?)\}")


def _compile(pattern: str) -> re.Pattern[str]:
    text, position, seen = "", 0, set()
    for match in _PLACEHOLDER.finditer(pattern):
        name = match[1]
        value = f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if match[2] else '[^.]+'})"
        text += re.escape(pattern[position : match.start()]) + value
        position = match.end()
        seen.add(name)
    return re.compile(text + re.escape(pattern[position:]))


def _names(patterns: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(match[1] for pattern in patterns for match in _PLACEHOLDER.finditer(pattern)))


def _fill(pattern: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], pattern)


def _check_complete(rule: KeyRule, columns: list[list[tuple[str, dict[str, str]]]]) -> None:
    present = [key for column in columns for key, _ in column]
    for pattern, column in zip(rule.sources, columns, strict=True):
        if not column:
            raise ModelFolderError(f"there is nothing for '{pattern}' beside it (rule {rule})", key=present[0])
        collected = [name for name in _names([pattern]) if name not in rule.shared]
        indices = [values[name] for _, values in column for name in collected]
        if collected and indices != [str(i) for i in range(len(column))]:
            raise ModelFolderError(f"'{pattern}' is not numbered from 0 without holes: {indices}", key=present[0])
