"""The text of a configuration file, with the faults that a file as such can have."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.suggest import near_path

MOST_BYTES = 1_000_000


def read_config_text(path: Path) -> str:
    """The file as text.

    Raises:
        ConfigError: Not there, a folder, unreadable, above 1 MB, not UTF-8, or holding NUL bytes.
    """
    if not path.exists():
        near = near_path(path, lambda entry: entry.suffix in (".yaml", ".yml"))
        hint = f"Did you mean '{near}'?" if near is not None else f"Working directory: {Path.cwd()}."
        raise ConfigError("no such file", where=str(path), way_out=hint)
    if path.is_dir():
        raise ConfigError("a folder, not a file", where=str(path), way_out="Name the YAML file in it.")
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(
            f"{path.stat().st_size} bytes; a configuration has at most {MOST_BYTES}",
            where=str(path),
            way_out="Is this a data file?",
        )
    try:
        return _decoded_text(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _decoded_text(content: bytes, where: str) -> str:
    try:
        # Some editors put a byte-order mark in front.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8",
            where=where,
            way_out="Save the file as UTF-8.",
        ) from None
    if "\0" in text:
        raise ConfigError(f"NUL byte at offset {content.index(0)}", where=where, way_out="Is this a text file?")
    return text.replace("\r\n", "\n")
