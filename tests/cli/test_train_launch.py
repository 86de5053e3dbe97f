"""`mm train --nproc 2` with ranks as real commands: asked to stop, it saves and ends with 75; when a rank is killed it
ends at once and says which; the same command goes on, to the bit. The agent is also run in this process, for what fails
early.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.distributed.job.launcher_life import LAUNCHER_VARIABLE
from mindspeed_mm.fsdp.train.run import launched
from mindspeed_mm.fsdp.train.run.launched import (
    FOLDER_VARIABLE,
    LaunchFolder,
    correct_ending,
    how_to_go_on,
    starts_ranks,
)
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.tasks.launch import launcher, rank_start
from mindspeed_mm.tasks.launch.launcher import _last_words, told_meeting_place
from tests.helpers.distributed import run_ranks, start_mm
from tests.helpers.processes import ranks_of, wait_until_gone
from tests.helpers.runs import differing, mm, newest, tensors, train
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

ENDLESS = 100_000
LIMIT_S = 600.0
"""Jobs wait 1,800 s where nothing else is said (`step_timeout_s`): one that ends within this did not wait."""


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    make_tiny_qwen3_vl(folder / "model", attention_dropout=0.2)
    training = {"train_iters": ENDLESS, "save_interval": 1, "save_total_limit": 3, "log_interval": 10}
    return make_tiny_run(folder, training=training)


def start(yaml: Path, save: Path, *extra: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    words = ["train", str(yaml), f"training.save={save}", "--nproc", "2", *extra]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "mindspeed_mm", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], save: Path, step: int) -> None:
    wait_for(lambda: newest(save) >= step, lambda: process.poll() is None, lambda: process.communicate()[1])


def wait_for(arrived: Callable[[], bool], is_alive: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not arrived():
        assert is_alive(), said()
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Launched:
    """The same command, whose launcher is a copy of a process that has imported what it needs."""

    def __init__(self, yaml: Path, save: Path, folder: Path) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        words = ("train", yaml, f"training.save={save}", "--nproc", 2)
        self.process, self._save = start_mm(*words, log=self._out, errors=self._err), save
        assert self.process.pid is not None
        self.pid = self.process.pid

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: newest(self._save) >= step, self.process.is_alive, self._err.read_text)

    def end(self) -> tuple[int | None, str, str]:
        """Exit code, output and errors."""
        self.process.join(LIMIT_S)
        return self.process.exitcode, self._out.read_text(), self._err.read_text()


def finish(yaml: str, saves: list[str], last_step: int) -> None:
    """Train both to the same step on this rank."""
    for save in saves:
        train(yaml, save, "training.save_interval=0", f"training.train_iters={last_step}")


def test_stopped_then_killed_then_continued(yaml: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    with socket.socket() as taken:  # torchrun's usual port: the ranks find another one
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()

        launched = Launched(yaml, save, tmp_path)
        launched.wait_for_step(2)
        os.kill(launched.pid, signal.SIGTERM)
        code, _, said = launched.end()
        assert code == 75, said
        stopped_at = newest(save)
        assert stopped_at >= 2
        assert said.splitlines()[-1] == (
            f"{save}  stopped after step {stopped_at}; the checkpoint is saved. Run the same command again to continue."
        )

        launched = Launched(yaml, save, tmp_path)
        launched.wait_for_step(stopped_at + 2)
        pids = ranks_of(launched.pid)
        os.kill(pids[1], signal.SIGKILL)
        code, out, said = launched.end()
        assert f"resume from {save / f'iter_{stopped_at:07d}'}" in out
        assert code == 3, said
        assert said.splitlines()[-2:] == [
            "rank 1 was killed by SIGKILL",
            f"{save}: the last committed step is {newest(save)}. Run the same command again to continue from it.",
        ]
        assert "Traceback" not in said
        assert not Path(f"/proc/{pids[0]}").exists()

    whole = tmp_path / "whole"
    last_step = newest(save) + 3
    run_ranks(2, finish, str(yaml), [str(save), str(whole)], last_step)
    assert newest(save) == newest(whole) == last_step
    assert differing(tensors(save), tensors(whole)) == []


@pytest.mark.slow
@pytest.mark.edge("BS15")
def test_a_frozen_rank_ends_the_job_soon_after_the_limit_of_a_step(yaml: Path, tmp_path: Path) -> None:
    process = start(yaml, tmp_path / "save", "training.step_timeout_s=6", "training.save_timeout_s=6")
    wait_for_step(process, tmp_path / "save", 2)
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, said
    assert "rank 1: no answer (dead, frozen" in said


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(yaml: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    process = start(yaml, save)
    wait_for_step(process, save, 1)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)  # ranks hold the other ends of the pipes: this returns when they leave
    wait_until_gone(ranks.values(), LIMIT_S)
    assert json.loads((save / "run.json").read_text())["status"] == "stopped"  # they agreed on a step and saved


DIES_IN_A_SAVE = """
import os, signal, time
from mindspeed_mm.fsdp.checkpoint import commit

real = commit._write

def dying(contents, draft, ranks):
    records = real(contents, draft, ranks)
    if ranks.rank == 2 and "iter_0000003" in draft.name:
        time.sleep(1.0)  # the others wait for this one by then, in the background and in the next step's save
        os.kill(os.getpid(), signal.SIGKILL)
    return records

commit._write = dying
"""
ALIEN = "from pathlib import Path; Path(__file__).with_name('was-imported').touch()"


@pytest.mark.slow
@pytest.mark.edge("S4", "S9", "S10")
def test_a_rank_that_is_killed_in_a_save_in_the_background_ends_the_job_at_once(yaml: Path, tmp_path: Path) -> None:
    """Started where files lie that Python would rather import than its own."""
    save = tmp_path / "save"
    (tmp_path / "dying_in_a_save.py").write_text(DIES_IN_A_SAVE)
    for name in ("random.py", "uuid.py", "mindspeed_mm.py"):
        (tmp_path / name).write_text(ALIEN)
    words = ["training.save_async=true", "training.plugin=[dying_in_a_save]", "training.micro_batch_size=1"]
    process = start(yaml, save, *words, "--nproc", "4", cwd=tmp_path)
    wait_for_step(process, save, 2)
    ranks = ranks_of(process.pid)
    wait_until_gone([ranks[2]], LIMIT_S)
    _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, "rank 2 was killed by SIGKILL" in said) == (3, True), said
    record = json.loads((save / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("failed", 3)
    assert not (tmp_path / "was-imported").exists()


# --- the launcher, in this process -----------------------------------------------------------------------------------


def test_configuration_is_judged_once(yaml: Path) -> None:
    said = mm("train", yaml, "--nproc", 2, "training.lrr=1")
    assert said.code == 2
    assert said.err.count("Did you mean 'lr'?") == 1


def test_port_that_is_in_use(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        before = dict(os.environ)
        said = mm("train", yaml, "--nproc", 2)
    assert said.code == 3
    assert "MASTER_PORT" in said.err and "port is free" in said.err
    assert dict(os.environ) == before


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_several_hosts_need_a_meeting_place_and_a_number(
    yaml: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    said = mm("train", yaml)  # one rank a host is a job of several ranks too
    assert said.code == 3
    assert f"NNODES is 2, but {missing} is not set" in said.err


@pytest.mark.parametrize(
    ("environment", "nproc", "starts"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"RANK": "0"}, 2, False),
        ({"NNODES": "1"}, 1, False),
        ({"NNODES": "2"}, 1, True),
        ({"PET_NNODES": "2"}, 1, True),
        ({"PET_NNODES": "1:4"}, 1, True),
        ({"NNODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, 1, False),
        ({"NNODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, 8, True),
    ],
)
def test_who_starts_ranks(environment: dict[str, str], nproc: int, starts: bool) -> None:
    assert starts_ranks(nproc, environment) == starts


def test_meeting_places_of_launchers() -> None:
    assert told_meeting_place({}) is None
    assert told_meeting_place({"PET_NNODES": "2", "PET_MASTER_ADDR": "job-node-0-0.job"}) == []
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert told_meeting_place(several) == ["--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=1"]


@pytest.mark.edge("S4")
def test_a_rank_imports_what_its_launcher_imports(tmp_path: Path) -> None:
    for name in ("random.py", "mindspeed_mm.py", "json.py"):
        (tmp_path / name).write_text(ALIEN)
    command = [sys.executable, "-u", rank_start.__file__, "--version"]
    environment = {**os.environ, **rank_start.imports_of_this_process(os.environ)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mm, version {__version__}\n"), done.stderr
    assert not (tmp_path / "was-imported").exists()


def run_by_the_agent(script: Path, text: str, nproc: int) -> list[str]:
    """What `script` wrote in each rank, run as the launcher runs ranks."""
    script.write_text(text)
    with launcher.meeting_place({}) as (words, inherited), mock.patch.dict(os.environ, inherited):
        run(parse_args([*words, f"--nproc-per-node={nproc}", str(script), str(script.parent)]))
    return [path.read_text() for path in sorted(script.parent.glob("rank*"))]


@pytest.mark.edge("S14")
def test_ranks_of_one_host_meet_where_no_other_host_can(tmp_path: Path) -> None:
    """Of Linux's loopback addresses a store that listens on one answers at that one alone."""
    text = """
import os, pathlib, socket, sys
import torch.distributed as dist
dist.init_process_group("gloo")
port = int(os.environ["MASTER_PORT"])
answers = [socket.socket().connect_ex((address, port)) == 0 for address in ("127.0.0.1", "127.0.0.2")]
pathlib.Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(str(answers))
dist.barrier()
dist.destroy_process_group()
"""
    assert run_by_the_agent(tmp_path / "script.py", text, 2) == ["[True, False]"] * 2


@pytest.mark.edge("S9")
def test_a_rank_that_does_not_listen_does_not_hold_up_the_end(tmp_path: Path) -> None:
    text = """
import os, pathlib, signal, sys, time
there = pathlib.Path(sys.argv[1], "rank1")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    there.touch()
    time.sleep(400)
while not there.exists():
    time.sleep(0.01)
sys.exit(3)
"""
    started = time.monotonic()
    with launcher.ending_within(lambda: 1.0), pytest.raises(ChildFailedError):
        run_by_the_agent(tmp_path / "script.py", text, 2)
    assert time.monotonic() - started < 200


@pytest.mark.edge("S9")
def test_the_ranks_of_a_job_that_hangs_are_not_waited_for(folder: LaunchFolder) -> None:
    report(folder, 0, "lost the other ranks", 3, lost_peers=True)
    assert folder.grace_s() == 5.0
    folder.report(1, "the job hangs", 3, lost_peers=False, printed=False, hangs=True)
    assert folder.grace_s() == 0.5


@pytest.mark.edge("S9")
def test_a_rank_that_failed_ends_without_taking_its_interpreter_down(tmp_path: Path) -> None:
    """A thread that waits for ever stands for a collective that does."""
    script = (
        "import threading; threading.Thread(target=threading.Event().wait).start()\n"
        "from mindspeed_mm.cli.main import main; main(['train', 'absent.yaml'])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "absent.yaml" in done.stderr


# --- how it ended, in run.json ---------------------------------------------------------------------------------------


def recorded(path: Path) -> tuple[str, int | None]:
    record = json.loads(path.read_text())
    return record["status"], record["exit_code"]


@pytest.mark.edge("S10")
@pytest.mark.parametrize(
    ("before", "code", "after"),
    [
        (("running", None), 3, ("failed", 3)),  # rank 0 was killed
        (("failed", 3), 4, ("failed", 4)),  # it only lost the rank that failed
        (("running", None), 130, ("stopped", 130)),
        (("stopped", 5), 5, ("stopped", 5)),
    ],
)
def test_the_launcher_records_how_the_job_ended(
    before: tuple[str, int | None], code: int, after: tuple[str, int], folder: LaunchFolder, tmp_path: Path
) -> None:
    record = tmp_path / "run.json"
    record.write_text(json.dumps(dict(zip(("status", "exit_code"), before, strict=True))))
    correct_ending(folder, code)
    assert recorded(record) == before  # of an earlier start: this one has not begun
    folder.note_record(record)
    correct_ending(folder, code)
    assert recorded(record) == after


@pytest.mark.edge("S10")
def test_a_lost_rank_is_recorded_with_the_exit_code_of_the_process(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    monkeypatch.setattr(TrainEngine, "train_step", lose)
    said = mm("train", yaml, f"training.save={tmp_path}")
    assert (said.code, recorded(tmp_path / "run.json")) == (3, ("failed", 3))


@pytest.mark.edge("S10")
def test_a_second_signal_is_recorded(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[object] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with StopSignal(record_end=lambda *end: ends.append(end)):
        os.kill(os.getpid(), signal.SIGINT)
        assert ends == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends == [("stopped", 130), 130]


@pytest.fixture
def folder(tmp_path: Path) -> LaunchFolder:
    return LaunchFolder(tmp_path)


def report(folder: LaunchFolder, rank: int, message: str, code: int, lost_peers: bool = False) -> None:
    folder.report(rank, message, code, lost_peers=lost_peers, printed=False)


def test_the_first_failure_is_blamed(folder: LaunchFolder, capsys: pytest.CaptureFixture[str]) -> None:
    report(folder, 0, "lost the other ranks", 3, lost_peers=True)
    report(folder, 2, "the picture is broken\nin two lines", 4)
    report(folder, 1, "what follows from it", 5)
    assert _last_words({0: 3, 1: 5, 2: 4, 3: -signal.SIGKILL, 4: -signal.SIGTERM}, folder, None) == 4
    assert capsys.readouterr().err == "[rank 2] the picture is broken\n[rank 2] in two lines\n"


def test_a_killed_rank_is_blamed_before_those_who_lost_it(
    folder: LaunchFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    report(folder, 0, "lost the other ranks", 3, lost_peers=True)
    assert _last_words({0: 3, 1: -signal.SIGSEGV, 2: -signal.SIGTERM}, folder, None) == 3
    assert capsys.readouterr().err == "rank 1 was killed by SIGSEGV\n"


def test_what_all_ranks_say_is_said_once_and_without_a_rank(
    folder: LaunchFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    report(folder, 1, "the disk is full", 4)
    report(folder, 0, "the disk is full", 4)
    assert _last_words({0: 4, 1: 4}, folder, None) == 4
    assert capsys.readouterr().err == "the disk is full\n"


# --- stopping, as a rank sees it -------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    assert before == {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.edge("U5")
def test_the_first_signal_is_answered_at_once(
    handlers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for launch, rank, answers in [(None, "0", True), (None, "1", False), (LaunchFolder(tmp_path), "0", False)]:
        monkeypatch.setenv("RANK", rank)
        with StopSignal(launch):
            os.kill(os.getpid(), signal.SIGINT)
            assert ("stopping after this step" in capsys.readouterr().err) == answers
    monkeypatch.setattr(launcher, "STOPPING_SIGNALS", (signal.SIGINT,))
    with launcher._stopping(LaunchFolder(tmp_path), RuntimeError):
        os.kill(os.getpid(), signal.SIGINT)
        assert capsys.readouterr().err.count("stopping after this step") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_ask_for_a_stop(number: signal.Signals, handlers: None) -> None:
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested


def test_a_second_signal_stops_at_once(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert codes == [130]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with StopSignal():  # torchrun passes on what the terminal has sent already
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == [130]


def test_ignored_signals_stay_ignored(handlers: None) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_launcher_asks_by_its_folder(folder: LaunchFolder, handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder.path))
    with StopSignal(LaunchFolder.of_this_rank()) as stop:
        assert not stop.requested
        folder.ask_to_stop()
        assert stop.requested


@pytest.mark.parametrize(("name", "value"), [(LAUNCHER_VARIABLE, str(os.getppid())), ("TORCHELASTIC_RUN_ID", "1")])
def test_a_rank_without_its_launcher_stops(
    name: str, value: str, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with StopSignal() as stop:
        assert not stop.requested
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.requested
    monkeypatch.delenv(name)
    with StopSignal() as stop:
        assert not stop.requested


def test_a_run_folder_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_to_go_on(None) == how_to_go_on(str(tmp_path)) == []
    monkeypatch.setattr(launched, "LOOK_S", 0.05)
    monkeypatch.setattr(launched, "list_iterations", lambda save: threading.Event().wait())
    assert "does not answer" in how_to_go_on(str(tmp_path))[0]
