"""`mm serve` under 32 clients at once: how long they wait, tokens a second over the engine without HTTP, and memory.

The quick start's model, widened to eleven million random weights, answers pictures of digits with up to 32 sampled
tokens, streamed; a token of a batch takes about as long as one of a large model on an accelerator. One thread computes,
the clients are a process of their own. Server and engine take turns. What HTTP costs by itself, and would cost a model
that answers in no time, is the server's own processor time of a request, by its thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.digits import prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.machine import ROOT
from benchmarks.rounds import spread

CLIENTS = 32
REQUESTS = 128
ROUNDS = 5
WARM, SOAK = 200, 2000
TIMEOUT_S = 600.0
TARGET = 0.9
MOST_GROWTH_MIB = 32.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    workload = prepare(work / "digits", 1)
    rows, wide = workload.folder / "data" / "test.jsonl", workload.folder / "wide"
    words = [sys.executable, "-m", "benchmarks.serving_load", "widen", str(workload.model), str(wide)]
    processes.run(words, timeout_s=TIMEOUT_S)
    rounds = []
    with server(wide, rows.parent) as (process, address):
        loaded(address, rows, CLIENTS)
        for _ in range(ROUNDS):
            before_s = loop_s(process.pid)
            served = loaded(address, rows, REQUESTS)
            http_s = (loop_s(process.pid) - before_s) / REQUESTS
            rounds.append({"served": served, "http_s": http_s, "direct": direct(wide, rows)})
    with server(workload.model, rows.parent) as (process, address):
        loaded(address, rows, WARM)
        warm_mib = resident_mib(process.pid)
        loaded(address, rows, SOAK)
        growth_mib = resident_mib(process.pid) - warm_mib
    shown = figures(rounds, growth_mib)
    return {
        "clients": CLIENTS,
        "requests": REQUESTS,
        "rounds": rounds,
        "warm_mib": warm_mib,
        "figures": [figure.to_dict() for figure in shown],
    }


@contextlib.contextmanager
def server(model: Path, media: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mm serve`, ready, and its address."""
    words = [str(model), "--port", "0", "--media-folder", str(media)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_mm", "serve", *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        yield process, address.removesuffix("/v1")
    finally:
        process.terminate()
        process.wait(60)


def loaded(address: str, rows: Path, requests: int) -> dict[str, Any]:
    """What clients see of so many requests."""
    words = [sys.executable, "-m", "benchmarks.serving_load", address, str(rows), str(CLIENTS), str(requests)]
    result: dict[str, Any] = processes.run(words, timeout_s=TIMEOUT_S).last_json()
    return result


def direct(model: Path, rows: Path) -> dict[str, Any]:
    """The engine without HTTP."""
    words = ["direct", str(model), str(rows), str(CLIENTS), str(REQUESTS)]
    command = [sys.executable, "-m", "benchmarks.serving_load", *words]
    result: dict[str, Any] = processes.run(command, timeout_s=TIMEOUT_S).last_json()
    return result


def loop_s(pid: int) -> float:
    """Processor seconds so far of a server's first thread, which speaks HTTP."""
    import psutil

    return next(float(each.user_time + each.system_time) for each in psutil.Process(pid).threads() if each.id == pid)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    import psutil

    return float(psutil.Process(pid).memory_info().rss / 2**20)


def figures(rounds: list[dict[str, Any]], growth_mib: float) -> list[Figure]:
    """Rates, times, memory."""
    ratio = spread([one["served"]["tokens_per_s"] / one["direct"]["tokens_per_s"] for one in rounds])
    times = [
        of_spread(f"{told}, {share}", spread([1000 * one["served"][name][share] for one in rounds]), "ms")
        for name, told in (("first_s", "first token"), ("whole_s", "whole answer"))
        for share in ("p50", "p99")
    ]
    return [
        of_spread(f"mm serve / engine, tokens/s, {CLIENTS} clients", ratio, "×", at_least=TARGET),
        of_spread("mm serve, tokens/s", spread([one["served"]["tokens_per_s"] for one in rounds]), "tokens/s"),
        of_spread("processor time of HTTP, a request", spread([1000 * one["http_s"] for one in rounds]), "ms"),
        *times,
        Figure(f"resident memory grown over {SOAK:,} requests", growth_mib, "MiB", at_most=MOST_GROWTH_MIB),
    ]
