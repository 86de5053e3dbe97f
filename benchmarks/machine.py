"""What a figure was measured on, and where it is kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "diffusers", "numpy", "pillow", "safetensors")


def describe() -> dict[str, Any]:
    """Machine, versions and commit."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "commit": _git("rev-parse", "HEAD"),
        # The figures of the benchmark before this one are no change of what is measured.
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results")),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_result(name: str, command: str, result: dict[str, Any], path: Path | None = None) -> Path:
    """Write `results/<name>.json`, or `path`, with the machine and the command that makes it again."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "command": command, "machine": describe(), **result}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{name}: written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}", flush=True)
    return path


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    """What git says, or None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
