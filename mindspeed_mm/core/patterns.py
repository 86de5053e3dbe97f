"""The one matcher of module patterns: `model.layers.{0-23}`, `visual.blocks.{*}`, `*.mlp.experts`.

A pattern is matched against whole dotted names. `.` is literal, `*` any characters, `?` one character, `{*}` one run of
digits, `{0-23}` an inclusive range, `{1,3,5}` a list, `{0-20,22-40}` both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.suggest import nearest

_TOKEN = re.compile(r"\{(?P<braces>[^{}]*)\}|(?P<star>\*)|(?P<mark>\?)|(?P<text>[^{}*?]+)|(?P<stray>[{}])")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_LONGEST_RANGE = 100_000


def pattern_of(name: str) -> str:
    """A module's name with `{*}` for the numbers in it: the pattern of all modules like it, as plans take it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{*}", name)


def resolve_patterns(
    patterns: Sequence[str], names: Iterable[str], *, key: str, allow_suffix: bool = False
) -> list[str]:
    """Names that any of the patterns matches, each once, in the order of `names`.

    Args:
        patterns: Module patterns.
        names: Dotted names, as `named_modules()` gives them.
        key: Configuration key of the patterns, for messages.
        allow_suffix: A pattern may also match the last parts of a name (`q_proj`).

    Raises:
        ConfigError: Patterns that are malformed or match nothing, all at once, each with the nearest real names.
    """
    known = [name for name in names if name]
    matched: set[str] = set()
    problems = []
    for pattern in patterns:
        expression = compile_pattern(pattern, key=key, allow_suffix=allow_suffix)
        found = [name for name in known if expression.fullmatch(name)]
        matched.update(found)
        if not found:
            problems.append(_no_match(pattern, known, key, allow_suffix))
    if problems:
        raise ConfigError(f"{key}: {len(problems)} patterns match nothing", problems=problems)
    return [name for name in known if name in matched]


def compile_pattern(pattern: str, *, key: str, allow_suffix: bool = False) -> re.Pattern[str]:
    """The regular expression of a pattern, for `fullmatch`.

    Raises:
        ConfigError: Braces that do not close, or hold something else than digits, ranges and `*`.
    """
    # any prefix that ends at a dot: `q_proj` matches `layers.0.q_proj`, not `layers.0.my_q_proj`
    parts = [r"(?:.*\.)?"] if allow_suffix else []
    for token in _TOKEN.finditer(pattern):
        if token["stray"]:
            raise ConfigError(f"pattern '{pattern}' has an unmatched brace", key=key)
        if token["braces"] is not None:
            parts.append(_digits(token["braces"], pattern, key))
        elif token["text"]:
            parts.append(re.escape(token["text"]))
        elif token["star"]:
            parts.append(".*")
        else:
            parts.append(".")
    return re.compile("".join(parts))


def is_inside(name: str, modules: Iterable[str], *, strict: bool = False) -> bool:
    """Whether a dotted name is that of one of these modules or of something inside one; with `strict`, only inside."""
    return any(name.startswith(f"{module}.") or (name == module and not strict) for module in modules)


def holding_others(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Those of these modules that have one of the others inside."""
    return [name for name in names if any(is_inside(other, (name,), strict=True) for other in others)]


def _digits(inside: str, pattern: str, key: str) -> str:
    """Expression for what stands inside braces: any number, or one of those listed."""
    if inside.strip() == "*":
        return r"\d+"
    numbers: dict[int, None] = {}
    for entry in inside.split(","):
        span = _SPAN.fullmatch(entry.strip())
        first, last = 1, 0  # no range
        if span is not None:
            first, last = int(span[1]), int(span[2] or span[1])
        # also of `{5-3}`, and of what is no range
        if not 0 <= last - first < _LONGEST_RANGE:
            raise ConfigError(
                f"pattern '{pattern}': '{{{inside}}}' is not a range",
                key=key,
                way_out="Write {*} for every number, {0-23} for a range, {1,3,5} for a list.",
            )
        numbers.update(dict.fromkeys(range(first, last + 1)))
    return f"(?:{'|'.join(map(str, numbers))})"


def _no_match(pattern: str, names: Sequence[str], key: str, allow_suffix: bool) -> Problem:
    plain = re.sub(r"\{[^{}]*\}", "0", pattern)
    found = nearest(plain, names, most=3)
    if not found and allow_suffix:
        parts = plain.count(".") + 1
        endings = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names)
        found = nearest(plain, endings, most=3)
    if not found:
        last_part = plain.rpartition(".")[2]
        found = [name for name in names if last_part in name.split(".")][:3]
    way_out = f"The model has {len(names)} modules; none has a similar name."
    if found:
        listed = ", ".join(f"'{name}'" for name in found)
        way_out = f"Nearest real names: {listed}."
    return Problem(f"pattern '{pattern}' matches no module", key=key, way_out=way_out)
