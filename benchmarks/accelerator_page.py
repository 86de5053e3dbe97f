"""One page of text about a run on an accelerator: which promise held, which did not, which could not be tried."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.figures import Figure

WIDTH = 120


def promise_figures(promises: dict[str, Any]) -> list[Figure]:
    """Our time over that of what was replaced; one that could not run misses its bar."""
    found = []
    for name, one in verdicts(promises).items():
        spread = (one.get("lowest"), one.get("highest"))
        found.append(Figure(f"{name}, time over what it replaced", one.get("ratio"), "×", one.get("bar"), *spread))
    return found


def verdicts(promises: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each promise, beside what is said of the whole part."""
    return {name: one for name, one in promises.items() if isinstance(one, dict)}


def page_of(result: dict[str, Any], table: str) -> str:
    """The verdicts in words, and the table of all figures below."""
    device = result["device"]
    lines = [f"{device.get('name', device['type'])}{', tiny sizes: no ratio means anything' * result['tiny']}", ""]
    promises = result.get("promises")
    if promises is not None:
        lines += _verdicts(promises)
    for part, found in result.items():
        if isinstance(found, dict) and isinstance(found.get("error"), str):
            lines += textwrap.wrap(f"{part} could not run: {found['error']}", WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, "", table, ""])


def _verdicts(promises: dict[str, Any]) -> list[str]:
    found = verdicts(promises)
    held = sum(one.get("held", False) for one in found.values())
    lines = [f"{held} of {len(found)} promises held:"]
    for name, one in found.items():
        if "error" in one:
            words = f"NOT RUN  {name}: {one['error']}"
        else:
            words = f"{'held    ' if one['held'] else 'MISSED  '} {name}: {one['ratio']:.3f} × of {one['replaced']}"
            words += f" ({one['lowest']:.3f} to {one['highest']:.3f}, at most {one['bar']:g})"
            words += "".join(f"; {said}" for said in (one["why_not"], one["note"], one["published"]) if said)
        lines += textwrap.wrap(words, WIDTH, initial_indent="  ", subsequent_indent=" " * 11)
    return [*lines, ""]
