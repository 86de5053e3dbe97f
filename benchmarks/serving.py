"""`mm serve` under 32 clients at once: how long they wait, tokens a second over the engine without HTTP, and memory.

The quick start's model, widened to eleven million random weights, answers pictures of digits with up to 32 sampled
tokens, streamed; a token of a batch takes about as long as one of a large model on an accelerator. One thread computes,
the clients are a process of their own. Server and engine take turns. What HTTP costs by itself, and would cost a model
that answers in no time, is the server's own processor time of a request, by its thread. Where `transformers serve` can
run, it is asked too, for text alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.digits import prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.machine import ROOT
from benchmarks.rounds import spread
from mindspeed_mm.core.outbound import OutboundError, RequestLimits, Server

CLIENTS = 32
REQUESTS = 128
ROUNDS, PEER_ROUNDS = 5, 3
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
            before_s, http_before_s = cpu_s(process.pid), loop_s(process.pid)
            served = loaded(address, rows, REQUESTS)
            served["cpu_s"] = cpu_s(process.pid) - before_s
            http_s = (loop_s(process.pid) - http_before_s) / REQUESTS
            rounds.append({"served": served, "http_s": http_s, "direct": direct(wide, rows)})
    with server(workload.model, rows.parent) as (process, address):
        loaded(address, rows, WARM)
        warm_mib = resident_mib(process.pid)
        loaded(address, rows, SOAK)
        growth_mib = resident_mib(process.pid) - warm_mib
    peers = beside_transformers(wide, rows)
    shown = figures(rounds, growth_mib, peers)
    return {
        "clients": CLIENTS,
        "requests": REQUESTS,
        "rounds": rounds,
        "warm_mib": warm_mib,
        "transformers serve": peers or f"not measured: {' and '.join(lacking_for_peer())} not installed",
        "figures": [figure.to_dict() for figure in shown],
    }


def lacking_for_peer() -> list[str]:
    """What `transformers serve` needs and is not here."""
    return [package for package in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(package) is None]


def beside_transformers(model: Path, rows: Path) -> list[dict[str, Any]]:
    """Text alone, to `transformers serve` and to ours in turns; nothing where it cannot run."""
    if lacking_for_peer():
        return []
    with server(model, rows.parent) as (_, ours), transformers_server(model) as peer:
        contenders = {"ours": (ours, model.name), "peer": (peer, str(model))}
        for address, name in contenders.values():
            loaded(address, rows, CLIENTS, name)
        return [
            {who: loaded(address, rows, REQUESTS, name) for who, (address, name) in contenders.items()}
            for _ in range(PEER_ROUNDS)
        ]


@contextlib.contextmanager
def transformers_server(model: Path) -> Iterator[str]:
    """`transformers serve`, ready: its address."""
    port = free_port()
    words = ["serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", _TRANSFORMERS, *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, stdout=sys.stderr,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/health", process)
        yield address
    finally:
        process.kill()
        process.wait(60)


_TRANSFORMERS = """
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()
from transformers.cli.transformers import main
main()
"""


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until an address is answered."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OutboundError):
            Server(address, RequestLimits(5)).ask("GET")
            return
        time.sleep(0.2)
    raise RuntimeError(f"{address} does not answer")


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


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


def loaded(address: str, rows: Path, requests: int, *model: str) -> dict[str, Any]:
    """What clients see of so many requests; those that name a model show no pictures."""
    words = [address, str(rows), str(CLIENTS), str(requests), *model]
    command = [sys.executable, "-m", "benchmarks.serving_load", *words]
    result: dict[str, Any] = processes.run(command, timeout_s=TIMEOUT_S).last_json()
    return result


def direct(model: Path, rows: Path) -> dict[str, Any]:
    """The engine without HTTP."""
    words = ["direct", str(model), str(rows), str(CLIENTS), str(REQUESTS)]
    command = [sys.executable, "-m", "benchmarks.serving_load", *words]
    result: dict[str, Any] = processes.run(command, timeout_s=TIMEOUT_S).last_json()
    return result


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def loop_s(pid: int) -> float:
    """Processor seconds so far of a server's first thread, which speaks HTTP."""
    import psutil

    return next(float(each.user_time + each.system_time) for each in psutil.Process(pid).threads() if each.id == pid)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    import psutil

    return float(psutil.Process(pid).memory_info().rss / 2**20)


def figures(rounds: list[dict[str, Any]], growth_mib: float, peers: list[dict[str, Any]]) -> list[Figure]:
    """Rates, times, memory."""
    work = spread([one["served"]["cpu_s"] / one["direct"]["cpu_s"] for one in rounds])
    beside = spread([one["ours"]["tokens_per_s"] / one["peer"]["tokens_per_s"] for one in peers])
    of_peer = [of_spread("mm serve / transformers serve, tokens/s, text", beside, "×")] if peers else []
    ratio = spread([one["served"]["tokens_per_s"] / one["direct"]["tokens_per_s"] for one in rounds])
    times = [
        of_spread(f"{told}, {share}", spread([1000 * one["served"][name][share] for one in rounds]), "ms")
        for name, told in (("first_s", "first token"), ("whole_s", "whole answer"))
        for share in ("p50", "p99")
    ]
    return [
        of_spread(f"mm serve / engine, tokens/s, {CLIENTS} clients", ratio, "×", at_least=TARGET),
        of_spread("mm serve / engine, processor time of the same answers", work, "×"),
        of_spread("mm serve, tokens/s", spread([one["served"]["tokens_per_s"] for one in rounds]), "tokens/s"),
        of_spread("processor time of HTTP, a request", spread([1000 * one["http_s"] for one in rounds]), "ms"),
        *times,
        Figure(f"resident memory grown over {SOAK:,} requests", growth_mib, "MiB", at_most=MOST_GROWTH_MIB),
        *of_peer,
    ]
