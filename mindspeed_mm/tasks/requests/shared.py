"""What several commands are asked alike: a checkpoint, adapters by name, a server and its key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.request import option

_SHORTEST_KEY = 8


def is_address(model: str | Path) -> bool:
    """Whether what is named is a server, not a folder."""
    return str(model).lower().startswith(("http://", "https://"))


def checkpoint_option() -> Any:
    """Declare the option that chooses a checkpoint of the run which the request's `model` names."""
    told = "Checkpoint of a run to use; default: the best one if the run keeps one, else the newest."
    return option(told, metavar="best|newest|STEP")


def plugin_option() -> Any:
    """Declare the option that names packages of plugins, for commands without a configuration that lists them."""
    told = "Package to import first that registers the model's family, or what prepares its rows and media."
    return option(told, (), flag="--plugin")


def height_and_width(text: str, key: str) -> tuple[int, int]:
    """`480x832` → height and width in pixels; `key` names the option.

    Raises:
        UsageError: It is something else.
    """
    found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not a size", key=key, way_out=f"Give height and width: {key} 480x832.")
    return int(found[1]), int(found[2])


def adapters_of(words: Sequence[str]) -> dict[str, Path]:
    """`NAME=FOLDER` → folders by name.

    Raises:
        UsageError: A word is something else, or a name stands twice.
    """
    found: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not re.fullmatch(r"\w[\w-]*", name) or not equals or not folder or name in found:
            way_out = "Give each a different name: --adapter NAME=FOLDER."
            raise UsageError(f"'{word}' does not name adapters", key="--adapter", way_out=way_out)
        found[name] = Path(folder)
    return found


def read_key(path: Path | None) -> str | None:
    """The key in a file, without blanks around it; None where no file is named.

    Raises:
        UsageError: There is none, or it is short.
    """
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what, way_out = "the key cannot be read", "Write one: openssl rand -hex 32 > key.txt"
        raise UsageError(what, where=str(path), key="--key-file", way_out=way_out) from error
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable():
        what = f"a key has {_SHORTEST_KEY} characters or more, all of them printable ASCII"
        way_out = "Write one: openssl rand -hex 32 > key.txt"
        raise UsageError(what, where=str(path), key="--key-file", way_out=way_out)
    return key
