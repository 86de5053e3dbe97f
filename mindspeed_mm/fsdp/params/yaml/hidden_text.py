"""A YAML file, and the words of a command, as they were written but for the secrets in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.redaction import REDACTED, is_below_secret, remember_secrets, without_secrets
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import Node, plain

Span = tuple[tuple[int, int], tuple[int, int]]
"""(line, column) from 1 of the first character, and behind the last one."""


def yaml_without_secrets(text: str, key: str = "") -> str:
    """A YAML text whose values under secret keys are hidden wherever they are written, comments and anchors too.

    Args:
        text: The file; what is no YAML is cleaned as any other text.
        key: The dotted key that holds all of it.
    """
    try:
        root = parse_yaml(text, "").root
    except ConfigError:
        return without_secrets(text)
    remember_secrets(plain(root), key.rpartition(".")[2])
    lines = text.split("\n")
    # From the end on, so that the places in front stay right.
    for (first, start), (last, end) in sorted(_spans(root, *key.split(".")), reverse=True):
        before, behind = lines[first - 1][: start - 1], lines[last - 1][end - 1 :] if last <= len(lines) else ""
        is_block = last > first and end == 1  # `|` and `>` end where the next line begins
        kept = [behind] if is_block else []
        lines[first - 1 : last] = [f"{before}{REDACTED}{'' if is_block else behind}", *kept]
    return without_secrets("\n".join(lines))


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line; overrides are `section.key=value`."""
    found = []
    for word in words:
        key, sign, value = word.partition("=")
        found.append(f"{key}={yaml_without_secrets(value, key)}" if sign else without_secrets(word))
    return [without_secrets(word) for word in found]


def _spans(node: Node, *names: str) -> Iterator[Span]:
    """Yield the span of each value that stands under a secret key."""
    if isinstance(node.value, dict) and node.end is None:
        for name, entry in node.value.items():
            yield from _spans(entry.node, *names, name)
    elif isinstance(node.value, list) and node.end is None:
        for item in node.value:
            yield from _spans(item, *names)
    elif node.end is not None and is_below_secret(names) and node.value not in (None, True, False, ""):
        yield (node.place.line, node.place.column), node.end
