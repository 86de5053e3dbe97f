"""Seconds to save a checkpoint of 2 GB, over those of `cp` and `fsync` of the same bytes, with and without hashes.

The state lies in memory, the file that `cp` copies in the page cache. A round is one of each; what one has written is
removed, and the disk is idle, before the next begins. `python -m benchmarks.saving FOLDER ROUNDS BYTES` is the process
that does it; it prints one JSON line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

BYTES = 2_000_000_000
ROUNDS = 8
LAYERS = 28
SETTLE_S = 1.0
"""For what a disk still does about files that were removed."""
TARGET = 1.3
TIMEOUT_S = 1800.0
CP, PLAIN, HASHED = "cp and fsync", "save without hashes", "save"


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    words = [str(work / "saving"), str(ROUNDS), str(BYTES)]
    finished = processes.run([sys.executable, "-m", "benchmarks.saving", *words], timeout_s=TIMEOUT_S)
    told = finished.last_json()
    return told | {"figures": [figure.to_dict() for figure in figures(told["rounds"])]}


def figures(rounds: list[dict[str, Any]]) -> list[Figure]:
    """Ratios within rounds; the hash's own time is that of the same bytes in memory."""
    plain = [each[PLAIN]["seconds"] / each[CP]["seconds"] for each in rounds]
    hashed = [(each[HASHED]["seconds"] - each["hash_s"]) / each[CP]["seconds"] for each in rounds]
    read = max(each[HASHED]["bytes_read"] for each in rounds)
    found = [
        of_spread("save without hashes / cp and fsync", spread(plain), "×", TARGET),
        of_spread("save less the hash's own time / cp and fsync", spread(hashed), "×", TARGET),
        Figure("bytes read back", read / 1e6, "MB", 0.1),
        of_spread("the hash's own time", spread([each["hash_s"] for each in rounds]), "s"),
    ]
    for name in (CP, PLAIN, HASHED):
        found.append(of_spread(f"{name}: time", spread([each[name]["seconds"] for each in rounds]), "s"))
        found.append(of_spread(f"{name}: processor time", spread([each[name]["cpu_s"] for each in rounds]), "s"))
    return found


class Nothing:
    """A hash that takes no time."""

    def update(self, data: object) -> None:
        """Leave it."""

    def hexdigest(self) -> str:
        """No digest."""
        return "0"


def timed(action: Callable[[], object]) -> dict[str, float]:
    """Seconds, those of the processor here and in children, and bytes that this process reads meanwhile."""
    os.sync()
    time.sleep(SETTLE_S)
    read, cpu, began = bytes_read(), processor_s(), time.perf_counter()
    action()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": processor_s() - cpu,
        "bytes_read": bytes_read() - read,
    }


def processor_s() -> float:
    """Of this process and of the children that have ended."""
    return sum(os.times()[:4])


def bytes_read() -> int:
    """From files, the page cache included."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def copy(source: Path, target: Path) -> None:
    """As a person would, and wait for the disk."""
    subprocess.run(["cp", str(source), str(target)], check=True)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main(work: Path, rounds: int, size: int) -> None:
    """As the process that measures."""
    real, is_hashed = xxhash.xxh3_128, True
    xxhash.xxh3_128 = lambda: real() if is_hashed else Nothing()  # type: ignore[assignment,misc]
    import torch

    from mindspeed_mm.fsdp.checkpoint.commit import CheckpointContents, commit_checkpoint
    from mindspeed_mm.fsdp.utils.ranks import Ranks

    numbers = torch.randn(size // (3 * LAYERS * 4), generator=torch.Generator().manual_seed(0))
    tree: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for layer in range(LAYERS):
        tree["model"][f"layers.{layer}.weight"] = numbers.clone()
        for name in ("exp_avg", "exp_avg_sq"):
            tree["optimizer"][f"state.layers.{layer}.weight.{name}"] = numbers.clone()
    contents = CheckpointContents(1, tree, "{}", {"cpu": torch.get_rng_state()}, "AdamW")
    work.mkdir(parents=True, exist_ok=True)

    def save() -> Path:
        return commit_checkpoint(work, contents, {}, Ranks(), print)

    source = work / "source"
    shutil.move(save() / "__0_0.distcp", source)
    found = []
    for number in range(rounds):
        one: dict[str, Any] = {}
        names = (CP, PLAIN, HASHED)
        for name in names if number % 2 else reversed(names):  # what a file system has just done slows what comes next
            shutil.rmtree(work / "iter_0000001", ignore_errors=True)
            (work / "copy").unlink(missing_ok=True)
            is_hashed = name == HASHED
            one[name] = timed((lambda: copy(source, work / "copy")) if name == CP else save)
        began = time.perf_counter()
        for tensor in (*tree["model"].values(), *tree["optimizer"].values()):
            real(memoryview(tensor.numpy())).digest()
        one["hash_s"] = time.perf_counter() - began
        found.append(one)
    shutil.rmtree(work)
    print(json.dumps({"bytes": size, "rounds": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
