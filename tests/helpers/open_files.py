"""Which files a process holds open."""

from __future__ import annotations

from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """Files in a folder that this process holds open; others of a test process come and go as garbage is collected."""
    held = []
    for number in list(Path("/proc/self/fd").iterdir()):
        try:
            held.append(str(number.readlink()))
        except FileNotFoundError:  # of the listing itself
            continue
    return [each for each in held if each.startswith(f"{folder}/")]
