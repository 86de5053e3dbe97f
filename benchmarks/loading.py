"""Loading a model of more than 1 GB: peak anonymous memory of each rank, and seconds, beside plain `from_pretrained`.

Our ranks build the model without memory, shard it, and stream the file into the shards (`fsdp.train.assemble`). The
weights lie in bf16 and are held in fp32, as training holds them.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.rounds import spread

REPEATS = 3
SAMPLE_EVERY_S = 0.003
TIMEOUT_S = 300.0
MIB = 2**20


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    folder = work / "loading"
    print("  writing a Qwen3 of 0.6 B parameters with random weights, bf16", flush=True)
    processes.run([sys.executable, "-m", "benchmarks.loading_rank", "make", str(folder)], timeout_s=TIMEOUT_S)
    runs: dict[str, list[list[dict[str, Any]]]] = {"ours, 1 rank": [], "ours, 2 ranks": [], "from_pretrained": []}
    for _ in range(REPEATS):
        runs["from_pretrained"].append(start("plain", folder, ranks=1))
        runs["ours, 1 rank"].append(start("ours", folder, ranks=1))
        runs["ours, 2 ranks"].append(start("ours", folder, ranks=2))
    check_same_weights(runs)
    cases = {name: summary(repeats) for name, repeats in runs.items()}
    return {
        "model": "Qwen3ForCausalLM, hidden 1024, 28 layers, vocabulary 151,936, tied head; bf16 file, fp32 in memory",
        "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "limit": "bytes as held / ranks × 1.3 + the largest tensor as held",
        "cases": cases,
        "runs": runs,
        "figures": [figure.to_dict() for figure in figures(cases)],
    }


@dataclass
class Rank:
    """One process that loads."""

    process: subprocess.Popen[bytes]
    output: Path
    samples: list[tuple[float, int]] = field(default_factory=list)

    def sample(self) -> None:
        """Note its anonymous memory, and what it shares with others through memory."""
        pid = self.process.pid
        self.samples.append((time.time(), processes.status_kb(pid, "RssAnon") + processes.status_kb(pid, "RssShmem")))

    def report(self) -> dict[str, Any]:
        """What it said, and its peak between the two times that it named, above its value at the first."""
        said = json.loads(self.output.read_text().strip().splitlines()[-1])
        peak_kb = max(kb for when, kb in self.samples if said["begin"] <= when <= said["end"])
        return said | {
            "peak_mib": (peak_kb - said["anonymous_kb_before"]) / 1024,
            "seconds": said["end"] - said["begin"],
        }


def start(what: str, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Run `ranks` processes together, watched from outside: a thread inside would wait for Python's lock just when
    memory is at its peak."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as errors:
        environment = processes.environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            output = Path(scratch) / f"{rank}.json"
            with output.open("wb") as out:
                command = [sys.executable, "-m", "benchmarks.loading_rank", what, str(folder)]
                process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment | place)
            started.append(Rank(process, output))
        watch(started)
        if any(one.process.returncode for one in started):
            errors.seek(0)
            raise processes.ProcessFailed(errors.read().decode("utf-8", "replace")[-4000:])
        return [one.report() for one in started]


def watch(ranks: list[Rank]) -> None:
    """Sample until all have ended; kill them at the time limit."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(one.process.poll() is None for one in ranks):
        for one in ranks:
            one.sample()
        if time.monotonic() > deadline:
            for one in ranks:
                one.process.kill()
        time.sleep(SAMPLE_EVERY_S)


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_same_weights(runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Raise when a first rank does not hold what the plain way loads."""
    sums = {repeat[0]["checksum"] for repeats in runs.values() for repeat in repeats}
    if len(sums) != 1:
        raise ValueError(f"the first values of the parameters differ between ways of loading: {sorted(sums)}")


def summary(repeats: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The worst rank of every repeat, and the limit that holds for each."""
    one = repeats[0][0]
    limit = one["held_bytes"] / len(repeats[0]) * 1.3 + one["largest_bytes"]
    return {
        "peak_mib": spread([max(rank["peak_mib"] for rank in ranks) for ranks in repeats]),
        "limit_mib": limit / MIB,
        "held_mib": one["held_bytes"] / MIB,
        "largest_tensor_mib": one["largest_bytes"] / MIB,
        "seconds": spread([max(rank["seconds"] for rank in ranks) for ranks in repeats]),
    }


def figures(cases: dict[str, dict[str, Any]]) -> list[Figure]:
    """Peaks, ours with their limits; seconds beside the plain way."""
    found = []
    for name, case in cases.items():
        limit = case["limit_mib"] if name.startswith("ours") else None
        peak, seconds = case["peak_mib"], case["seconds"]
        found.append(Figure(f"{name}: peak anonymous memory", peak["max"], "MiB", limit, peak["min"], peak["max"]))
        found.append(of_spread(f"{name}: time", seconds, "s"))
    return found
