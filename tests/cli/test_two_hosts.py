"""One run over two hosts, which are two network namespaces with a link: started by `mm train --nproc N` and by torchrun
it ends with the weights of a run on one host, to the bit; with the link cut in mid-step both hosts end in time, say who
is missing and where to go on, and the same command goes on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.processes import ranks_of
from tests.helpers.runs import differing, newest, tensors, train
from tests.helpers.tiny_run import make_tiny_run
from tests.helpers.two_hosts import TwoHosts, two_hosts

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
STEP_LIMIT_S = 10.0


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = {"train_iters": 4, "save_interval": 2, "step_timeout_s": STEP_LIMIT_S, "save_timeout_s": STEP_LIMIT_S}
    return make_tiny_run(tmp_path_factory.mktemp("hosts"), training=training)


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def start(hosts: TwoHosts, yaml: Path, save: Path, *extra: str, nproc: int = 1) -> list[subprocess.Popen[str]]:
    port = free_port()
    words = ("train", yaml, f"training.save={save}", *extra)
    return [hosts.start_mm(nproc, *words, port=port, host=host) for host in hosts]


def start_torchrun(hosts: TwoHosts, yaml: Path, save: Path, *extra: str) -> list[subprocess.Popen[str]]:
    """The hosts' names resolve nowhere: torchrun is told who hosts the rendezvous, and each host's own address."""
    port, script = free_port(), ROOT / "mindspeed_mm" / "fsdp" / "train" / "trainer.py"
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.first.address}:{port}", "--rdzv-id=two-hosts"]
    return [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *rendezvous),
            *(f"--rdzv-conf=is_host={host is hosts.first}", f"--local-addr={host.address}"),
            *(str(script), str(yaml), f"training.save={save}", *extra),
        )
        for host in hosts
    ]


def endings(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; a job that hangs is killed and fails the test."""
    deadline = time.monotonic() + LIMIT_S
    found = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        finally:
            if process.poll() is None:
                for other in processes:
                    os.killpg(other.pid, 9)
        found.append((process.returncode, out, err))
    return found


def wait_for_step(processes: list[subprocess.Popen[str]], save: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while newest(save) < step:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)


def train_on_one_host(yaml: str, save: str, steps: int) -> None:
    train(yaml, save, f"training.train_iters={steps}")


def check_equal_to_one_host(yaml: Path, save: Path, steps: int) -> None:
    whole = save.with_name(f"{save.name}-one-host")
    run_ranks(2, train_on_one_host, str(yaml), str(whole), steps)
    assert newest(save) == newest(whole) == steps
    assert differing(tensors(save), tensors(whole)) == []


@pytest.mark.slow
def test_two_hosts_train_like_one(hosts: TwoHosts, yaml: Path, tmp_path: Path) -> None:
    (code, out, said), (code_b, _, said_b) = endings(start(hosts, yaml, tmp_path / "save"))
    assert (code, code_b) == (0, 0), said + said_b
    assert "cpu × 2" in out
    assert "host host-a: gloo uses wire0 (10.77.0.1)" in said
    assert "host host-b: gloo uses wire1 (10.77.0.2), the interface that reaches 10.77.0.1" in said_b
    check_equal_to_one_host(yaml, tmp_path / "save", 4)


@pytest.mark.slow
def test_torchrun_over_two_hosts(hosts: TwoHosts, yaml: Path, tmp_path: Path) -> None:
    for code, _, said in endings(start_torchrun(hosts, yaml, tmp_path / "save")):
        assert code == 0, said
    check_equal_to_one_host(yaml, tmp_path / "save", 4)


@pytest.mark.slow
def test_a_cut_link(hosts: TwoHosts, yaml: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    processes = start(hosts, yaml, save, "training.train_iters=100000", nproc=2)
    wait_for_step(processes, save, 4)
    hosts.cut()
    cut = time.monotonic()
    (code, _, said), (code_b, _, said_b) = endings(processes)
    assert time.monotonic() - cut < LIMIT_S  # and not when gloo gives up, after half an hour
    assert (code, code_b) == (3, 3), said + said_b
    reached = newest(save)
    last = f"{save}: the last committed step is {reached}. Run the same command again to continue from it."
    assert said.splitlines()[-1] == said_b.splitlines()[-1] == last
    assert "  rank 0 on host-a: " in said and "  rank 1 on host-a: " in said
    assert "  ranks 2, 3 on host-b: no answer (dead, frozen, cut off" in said
    assert "ranks 0, 1 on host-a: no answer (from this host the ranks' meeting place cannot be reached)" in said_b
    assert "Traceback" not in said + said_b and "c10::Error" not in said + said_b

    hosts.mend()
    steps = f"training.train_iters={reached + 2}"
    ends = endings(start(hosts, yaml, save, steps, nproc=2))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"resume from {save / f'iter_{reached:07d}'}" in ends[0][1]
    whole = tmp_path / "whole"
    run_ranks(4, train_on_one_host, str(yaml), str(whole), reached + 2)
    assert newest(save) == newest(whole) == reached + 2
    assert differing(tensors(save), tensors(whole)) == []


@pytest.mark.slow
@pytest.mark.parametrize("event", ["a rank is killed", "the launcher is killed", "the launcher is asked to stop"])
def test_the_other_host(hosts: TwoHosts, yaml: Path, tmp_path: Path, event: str) -> None:
    save = tmp_path / "save"
    processes = start(hosts, yaml, save, "training.train_iters=100000")
    wait_for_step(processes, save, 2)
    launcher = processes[1].pid
    if event == "a rank is killed":
        os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    else:
        os.kill(launcher, signal.SIGKILL if "killed" in event else signal.SIGTERM)
    (code, _, said), (code_b, _, said_b) = endings(processes)
    if event == "a rank is killed":
        assert (code, code_b) == (3, 3), said + said_b
        assert said.splitlines()[-2].startswith("lost other ranks: rank 1 on host-b: no answer (dead")
        assert said_b.splitlines()[-2] == "rank 1 was killed by SIGKILL"
        assert f"the last committed step is {newest(save)}" in said.splitlines()[-1]
    else:
        assert (code, code_b) == (75, -signal.SIGKILL if "killed" in event else 75), said + said_b
        assert f"stopped after step {newest(save)}; the checkpoint is saved" in said.splitlines()[-1]


@pytest.mark.slow
def test_the_demo(yaml: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    """`hosts` only skips it where there can be none: the demo makes its own."""
    (tmp_path / "mm").write_text(f'#!/bin/sh\nexec {sys.executable} -m mindspeed_mm "$@"\n')
    (tmp_path / "mm").chmod(0o755)
    env = {**os.environ, "NPROC": "1", "OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    demo = ["bash", str(ROOT / "examples" / "launch" / "demo_two_namespaces.sh"), str(yaml)]
    done = subprocess.run(
        [*demo, f"training.save={tmp_path / 'save'}"], env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "host-1: host host-1: gloo uses wire1" in done.stderr
    check_equal_to_one_host(yaml, tmp_path / "save", 4)


@pytest.mark.slow
def test_other_rows_on_the_other_host(hosts: TwoHosts, yaml: Path, tmp_path: Path) -> None:
    shorter = tmp_path / "rows.jsonl"
    rows = (yaml.parent / "rows.jsonl").read_text().splitlines(keepends=True)
    shorter.write_text("".join(rows[:-1]))
    port = free_port()
    # What differs is the file behind one path: host-b looks through a mount of its own.
    command = [sys.executable, "-m", "mindspeed_mm", "train", str(yaml), "--nproc", "1"]
    mounted = f'mount --bind {shorter} {yaml.parent / "rows.jsonl"} && exec "$@"'
    first = hosts.start_mm(1, "train", yaml, port=port, host=hosts.first)
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": hosts.first.address, "MASTER_PORT": str(port)}
    second = hosts.second.start("unshare", "--mount", "sh", "-c", mounted, "sh", *command, env=env)
    (code, _, said), (code_b, _, said_b) = endings([first, second])
    assert (code, code_b) == (4, 4), said + said_b
    assert "rank 0 and rank 1 have read different data: data.files" in said
