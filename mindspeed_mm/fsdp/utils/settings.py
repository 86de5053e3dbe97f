"""Reads what only some objects of other libraries have, or have under several names: modules, configurations,
processors."""

from __future__ import annotations

from typing import TypeVar

Kind = TypeVar("Kind")


def setting_of(holder: object, kind: type[Kind], *names: str) -> Kind | None:
    """The first of these attributes whose value is of this kind; None where the object has none of them."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, kind):
            return value
    return None
