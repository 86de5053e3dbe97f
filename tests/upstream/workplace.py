"""A working directory as somebody has it who keeps launch scripts beside this repository's entries."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def link_entries(root: Path) -> None:
    """Make a folder with this repository's entries and package."""
    root.mkdir()
    for entry in REPOSITORY.glob("*.py"):
        (root / entry.name).symlink_to(entry)
    (root / "mindspeed_mm").symlink_to(REPOSITORY / "mindspeed_mm")


def copy_scripts(scripts: Path, root: Path) -> Path:
    """A working directory with the entries and copies of a folder of scripts; returns it."""
    link_entries(root)
    return Path(shutil.copytree(scripts, root, dirs_exist_ok=True))


def run_script(root: Path, name: str, **variables: str) -> str:
    """Run a script in bash as a person does, in processes that no conftest prepares; returns what it printed to stdout.

    Args:
        root: The working directory.
        name: Of the script in it.
        variables: Of the environment, that the script reads.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": commands, "PYTHONPATH": str(REPOSITORY), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    inherited = {each: value for each, value in os.environ.items() if each not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    said = subprocess.run(
        ["bash", name],
        cwd=root,
        env=inherited | settings | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert said.returncode == 0, f"{name}:\n{said.stdout[-3000:]}\n{said.stderr[-6000:]}"
    return said.stdout
