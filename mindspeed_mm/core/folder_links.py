"""What may be read and copied of a model's folder: files and folders of its own, whether links or not."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.errors import ModelFolderError


def check_links(folder: Path, *, deep: bool = False) -> None:
    """Refuse what a model's folder has no use for: links that lead out of it or nowhere, pipes, sockets and devices.

    The hub's cache links within its own repository, also from the folders of a generator's components.

    Args:
        folder: Of a model, or a folder in it.
        deep: What lies in its folders too, as where all of it is copied.

    Raises:
        ModelFolderError: Naming the entry.
    """
    home = folder.resolve()
    allowed = (home, *_blobs_of(home))
    entries = folder.iterdir()
    if deep:
        entries = folder.rglob("*")
    for path in sorted(entries):
        if fault := _fault(path, allowed):
            way_out = "Take it away."
            if path.is_symlink():
                way_out = "Replace the link by the file itself."
            raise ModelFolderError(fault, where=str(path), way_out=way_out)


def _fault(path: Path, allowed: tuple[Path, ...]) -> str:
    if path.is_symlink():
        try:
            target = path.resolve()
        except (OSError, RuntimeError):
            return "is a link that leads in a circle"
        if not any(target.is_relative_to(place) for place in allowed):
            return f"links out of the folder, to {target}"
        if not target.exists():
            return f"is a link that leads nowhere, to {target}"
        # copying it with all that it holds would never end
        if path.parent.resolve().is_relative_to(target):
            return f"is a link to a folder that it lies in, {target}"
    if not (path.is_file() or path.is_dir()):
        return "is neither a file nor a folder"
    return ""


def _blobs_of(home: Path) -> list[Path]:
    """Where the hub's cache keeps the files that a snapshot, or a component's folder in one, links to."""
    for place in (home, *home.parents):
        # models--OWNER--NAME/snapshots/REVISION/… links into models--OWNER--NAME/blobs
        if place.parent.name == "snapshots":
            return [place.parent.parent / "blobs"]
    return []
