"""Declarative key maps: how the tensors of one layout become those of another.

A rule names source and target patterns and the operations between them (`key_ops.py`). Applying a map reads nothing:
it gives steps, each of which says which stored keys it uses up and which target tensors they make, and the ledger
proves that every key is used exactly once. A map without reordering can be turned round.

    KeyRule("blocks.{n}.attn.{part}.weight", "layers.{n}.self_attention.{part}.weight")  # rename
    KeyRule(("{at}.q.weight", "{at}.k.weight", "{at}.v.weight"), "{at}.qkv.weight", (Concat(0),))  # merge
    KeyRule(("{at}.experts.{e}.gate", "{at}.experts.{e}.up"), "{at}.experts.gate_up", (Stack(0), Concat(1)))

`{name}` stands for one part of a key between dots, `{name*}` for any number of them. A placeholder that only the
sources have is collected, in numerical order, and one that only the targets have is dealt out.

A key that several rules take goes to the narrowest: `layers.norm` before `layers.{n}`, whichever stands first. Of rules
of which none is narrower than the other, the first has it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple, TypeVar

from mindspeed_mm.checkpoint.key_ops import Column, Drop, Op, UnknownOrder
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import ModelFolderError, Problem, first_problems

_MOST_DIGITS = 18
_Value = TypeVar("_Value")


class KeyMatch(NamedTuple):
    """A stored key that fits a source pattern."""

    key: str
    values: Mapping[str, str]
    """What stands for each placeholder."""


@dataclass(frozen=True)
class RuleMatch:
    """One application of a rule: these stored keys, all of each, make these tensors."""

    sources: tuple[str, ...]
    targets: Mapping[str, LazyTensor]
    dropped: tuple[LazyTensor, ...] = ()
    """What of the sources is in no target, by rule (`Drop`)."""

    def with_targets(self, rename: Callable[[str], str]) -> RuleMatch:
        """The same tensors under other names."""
        return replace(self, targets={rename(key): tensor for key, tensor in self.targets.items()})


class KeyRule:
    """One line of a key map. Patterns may be given as one string or several."""

    def __init__(self, sources: str | Sequence[str], targets: str | Sequence[str], ops: Sequence[Op] = ()) -> None:
        self.sources = _as_tuple(sources)
        self.targets = _as_tuple(targets)
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
        of_targets = _names(self.targets)
        return [name for name in _names(self.sources) if name in of_targets]

    def build(self, columns: list[list[KeyMatch]], tensors: Mapping[str, LazyTensor]) -> RuleMatch:
        """One application.

        Args:
            columns: For each source pattern its matches.
            tensors: The tensors by key.

        Raises:
            ModelFolderError: A source is absent, or shapes do not fit the operations.
        """
        _check_sources(self, columns)
        keys: list[str] = []
        work: list[Column] = []
        for matches in columns:
            keys_of_column = [match.key for match in matches]
            keys += keys_of_column
            work.append([tensors[key] for key in keys_of_column])
        # Every match of an application has the same values of the shared placeholders.
        values = {name: columns[0][0].values[name] for name in self.shared}
        made: dict[str, LazyTensor] = {}
        dropped: list[LazyTensor] = []
        try:
            for op in self.ops:
                # Noted before it goes: a conversion names what it leaves out.
                if isinstance(op, Drop):
                    dropped += work[op.position]
                work = op.apply(work)
            if len(work) != len(self.targets):
                raise ModelFolderError(
                    f"its operations make {len(work)}, and the rule has {len(self.targets)} targets (rule {self})",
                    key=keys[0],
                    way_out="Concat and Split take two equal parts, unless `sizes` or `ratio` say otherwise.",
                )
            for pattern, column in zip(self.targets, work, strict=True):
                made |= self._named(pattern, column, values)
        except IndexError as error:
            shapes = ", ".join(str(list(tensors[key].shape)) for key in keys)
            what = f"a tensor of shape {shapes} does not have the dims that the rule speaks of (rule {self})"
            raise ModelFolderError(what, key=keys[0]) from error
        except ValueError as error:
            way_out = error.way_out if isinstance(error, UnknownOrder) else ""
            raise ModelFolderError(f"{error} (rule {self})", key=keys[0], way_out=way_out) from error
        return RuleMatch(tuple(keys), made, tuple(dropped))

    def _named(self, pattern: str, column: Column, values: dict[str, str]) -> dict[str, LazyTensor]:
        """The tensors of a target pattern: one, or as many as a placeholder that only the targets have deals out."""
        dealt = [name for name in _names([pattern]) if name not in values]
        if not dealt and len(column) == 1:
            return {_filled_pattern(pattern, values): column[0]}
        if len(dealt) != 1:
            raise ValueError(f"{len(column)} tensors for the one target {pattern}")
        made: dict[str, LazyTensor] = {}
        for i, tensor in enumerate(column):
            made[_filled_pattern(pattern, {**values, dealt[0]: str(i)})] = tensor
        return made

    def __repr__(self) -> str:
        return f"{' + '.join(self.sources)} -> {' + '.join(self.targets)}"


class KeyMap:
    """Rules; a key goes to the narrowest that takes it, of equals to the first.

    Args:
        rules: The rules.
        keep_others: Pass a key that no rule takes on under its own name, instead of leaving it over.
        way_there: The map of which this one is the inverse, with the rules in the same order.
    """

    def __init__(self, rules: Iterable[KeyRule], *, keep_others: bool = False, way_there: KeyMap | None = None) -> None:
        self.rules, self.keep_others, self._way_there = list(rules), keep_others, way_there

    @property
    def inverse(self) -> KeyMap:
        """The map that leads back."""
        if self._way_there is not None:
            return self._way_there
        return KeyMap([rule.inverse for rule in self.rules], keep_others=self.keep_others, way_there=self)

    def steps(self, tensors: Mapping[str, LazyTensor]) -> list[RuleMatch]:
        """What becomes of these tensors. Keys that no rule takes are in no step.

        Raises:
            ModelFolderError: As `KeyRule.build`; or two steps make one key; or an inverse makes a key that the way
                there gives to another rule: it would not have made this tensor of it.
        """
        # One application of a rule: its position and the values of the placeholders that sources and targets share.
        applications: dict[tuple[int, tuple[str, ...]], list[list[KeyMatch]]] = {}
        others: list[str] = []
        # In numerical order, so that experts.2 is collected before experts.10.
        for key in sorted(tensors, key=natural_order):
            found = self._match(key)
            if found is None:
                others.append(key)
                continue
            position, column, values = found
            rule = self.rules[position]
            shared_values = tuple(values.get(name, "") for name in rule.shared)
            application = position, shared_values
            if application not in applications:
                applications[application] = [[] for _ in rule.sources]
            applications[application][column].append(KeyMatch(key, values))
        steps: list[RuleMatch] = []
        for (position, _), columns in applications.items():
            step = self.rules[position].build(columns, tensors)
            # Which rule is narrower may change when both are turned round: a key could come back by another.
            self._check_way_there(position, step)
            steps.append(step)
        if self.keep_others:
            for key in others:
                steps.append(RuleMatch((key,), {key: tensors[key]}))
        _check_made_once(steps)
        return steps

    def _match(self, key: str) -> tuple[int, int, dict[str, str]] | None:
        """The rule that has a key, the column of it, and what stands for each placeholder."""
        found: tuple[int, int, dict[str, str]] | None = None
        narrowest = ""
        for position, rule in enumerate(self.rules):
            for column, regex in enumerate(rule.regexes):
                match = regex.fullmatch(key)
                if match is None:
                    continue
                pattern = rule.sources[column]
                if found is None or _is_narrower(pattern, narrowest):
                    found, narrowest = (position, column, match.groupdict()), pattern
                break
        return found

    def _check_way_there(self, position: int, step: RuleMatch) -> None:
        if self._way_there is None:
            return
        for key in step.targets:
            found = self._way_there._match(key)
            if found is None or found[0] != position:
                other = "no rule" if found is None else f"rule {self._way_there.rules[found[0]]}"
                raise ModelFolderError(
                    f"rule {self.rules[position]} makes {key} of it, but on the way there {other} takes that key",
                    key=step.sources[0],
                    way_out="Take what the rules have in common out of one of them, by longer patterns.",
                )


def renamings(names: Mapping[str, str], hub: str = "", own: str = "", end: str = ".{p}") -> list[KeyRule]:
    """Rules for tensors that only get another name.

    Args:
        names: Source → target.
        hub: Stands before every source.
        own: Stands before every target.
        end: Stands behind all of them: by default the weight and the bias of a module.
    """
    return [KeyRule(f"{hub}{source}{end}", f"{own}{target}{end}") for source, target in names.items()]


def names_behind(names: Iterable[str], prefix: str) -> set[str]:
    """What follows a prefix, up to the next dot: the numbers of layers, as they are written."""
    found = set()
    for name in names:
        if name.startswith(prefix):
            found.add(name.removeprefix(prefix).partition(".")[0])
    return found


def made_by(steps: Iterable[RuleMatch]) -> dict[str, LazyTensor]:
    """All tensors that steps make, by key."""
    made: dict[str, LazyTensor] = {}
    for step in steps:
        made |= step.targets
    return made


def _check_made_once(steps: Iterable[RuleMatch]) -> None:
    """Of two tensors under one key, one would be lost."""
    sources: dict[str, str] = {}
    for step in steps:
        for key in step.targets:
            if key in sources:
                raise ModelFolderError(
                    f"is made of {sources[key]} and of {step.sources[0]}",
                    key=key,
                    way_out="Give one of the rules of the key map another target.",
                )
            sources[key] = step.sources[0]


def check_used_once(steps: Iterable[RuleMatch], sources: Iterable[str], targets: Iterable[str]) -> None:
    """The ledger: every source key used exactly once, every target key made exactly once.

    Raises:
        ModelFolderError: Naming the keys (the first five of each kind, and how many there are).
    """
    used: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for step in steps:
        used.update(step.sources)
        made.update(step.targets.keys())
    stored, wanted = set(sources), set(targets)
    faults = {
        "is not used": stored - used.keys(),
        "is used more than once": _repeated(used),
        "is not made": wanted - made.keys(),
        "is made more than once": _repeated(made),
        "is made but not wanted": made.keys() - wanted,
    }
    problems: list[Problem] = []
    for what, keys in faults.items():
        # Five of each kind, not of all: one fault often shows as hundreds of one kind.
        problems += first_problems(Problem(what, key=key) for key in sorted(keys, key=natural_order))
    if problems:
        raise ModelFolderError("the key map does not fit", problems=problems)


def _repeated(counted: Counter[str]) -> set[str]:
    return {key for key, times in counted.items() if times > 1}


def in_natural_order(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """The same, sorted by key as `natural_order` has it."""
    return {key: values[key] for key in sorted(values, key=natural_order)}


def natural_order(key: str) -> list[tuple[int, str]]:
    """Sort key that puts `layers.2` before `layers.10`."""
    return list(map(_order_of_part, key.split(".")))


def _order_of_part(part: str) -> tuple[int, str]:
    if is_number(part):
        return int(part), ""
    return -1, part


def is_number(part: str) -> bool:
    """Whether a part of a key is a number as programs write it: ASCII digits, and not thousands of them."""
    return part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS


_PLACEHOLDER = re.compile(r"\{(\w+)(\*?)\}")


@cache
def _is_narrower(pattern: str, other: str) -> bool:
    """Whether the other takes every key that a pattern takes, and more besides."""
    return _covers(other, pattern) and not _covers(pattern, other)


def _covers(wide: str, narrow: str) -> bool:
    """Whether a pattern takes every key that another takes: tried with a placeholder's shortest and a longer value."""
    regex = _compile(wide)
    for parts in (1, 3):
        # NUL stands in no key, so a fixed part of the other pattern never fits a placeholder's value by chance.
        values = {name: f"\0{name}" for name in _names([narrow])}
        for match in _PLACEHOLDER.finditer(narrow):
            if match[2]:
                values[match[1]] = ".".join([values[match[1]]] * parts)
        if not regex.fullmatch(_filled_pattern(narrow, values)):
            return False
    return True


def _as_tuple(patterns: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        return (patterns,)
    return tuple(patterns)


def _compile(pattern: str) -> re.Pattern[str]:
    text, position, seen = "", 0, set()
    for match in _PLACEHOLDER.finditer(pattern):
        name, star = match.groups()
        text += re.escape(pattern[position : match.start()])
        if name in seen:
            text += f"(?P={name})"  # a second time it stands for the same
        else:
            anything = ".+" if star else "[^.]+"
            text += f"(?P<{name}>{anything})"
        position = match.end()
        seen.add(name)
    return re.compile(text + re.escape(pattern[position:]))


def _names(patterns: Sequence[str]) -> list[str]:
    """The placeholders of patterns, each once."""
    found: dict[str, None] = {}
    for pattern in patterns:
        found |= dict.fromkeys(match[1] for match in _PLACEHOLDER.finditer(pattern))
    return list(found)


def _filled_pattern(pattern: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], pattern)


def _check_sources(rule: KeyRule, columns: list[list[KeyMatch]]) -> None:
    present = next(chain.from_iterable(columns)).key
    for pattern, column in zip(rule.sources, columns, strict=True):
        if not column:
            raise ModelFolderError(f"there is nothing for '{pattern}' beside it (rule {rule})", key=present)
        collected = [name for name in _names([pattern]) if name not in rule.shared]
        if not collected:
            continue
        indices: list[str] = []
        for match in column:
            indices += [match.values[name] for name in collected]
        # A hole would shift all behind it: expert 7 in the place of expert 6.
        if indices != list(map(str, range(len(column)))):
            raise ModelFolderError(f"'{pattern}' is not numbered from 0 without holes: {indices}", key=present)
