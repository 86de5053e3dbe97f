"""`mm schema`: what a key means, which values it takes, and what this version can do with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.params.schema import KeyReference, json_schema, reference

SCHEMA_FILE = Path(__file__).parents[1] / "run.schema.json"
"""What `mm schema --json` prints, for editors; it travels with the package."""


def run(key: str = "") -> list[KeyReference]:
    """References of a key, of a section, or of everything.

    Raises:
        UsageError: No such key.
    """
    return reference(key)


def as_text(references: list[KeyReference]) -> str:
    """A paragraph for each key."""
    return "\n\n".join(_paragraph(entry) for entry in references)


def as_dict(key: str = "") -> Any:
    """For machines: the JSON schema of everything, or the references of a key."""
    if key:
        return list(map(asdict, reference(key)))
    return json_schema()


def editor_line() -> str:
    """The first line of a YAML file that tells editors (yaml-language-server) to check and complete its keys."""
    return f"# yaml-language-server: $schema={SCHEMA_FILE.resolve().as_uri()}"


def _paragraph(entry: KeyReference) -> str:
    default = f" = {entry.default}" if entry.default else ""
    lines = [f"{entry.key}: {entry.type}{default}", f"    {entry.help}"]
    if entry.other_names:
        lines.append(f"    Other names: {', '.join(entry.other_names)}.")
    if entry.this_version:
        who = "`mm train`" if entry.key.startswith("data.") else "This version"  # rows may be looked at all the same
        lines.append(f"    {who} takes {entry.this_version}.")
    return "\n".join(lines)
