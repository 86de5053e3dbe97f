"""`mm doctor`: each line is ok, a warning or a problem with its fix; a broken machine is told, not raised."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_mm.tasks.doctor import doctor
from tests.helpers.runs import mm


def by_name() -> dict[str, doctor.Diagnosis]:
    return {finding.name: finding for finding in doctor.run()}


def test_a_machine_that_works_has_no_problem() -> None:
    found = by_name()
    assert {"python", "torch", "transformers", "torch build", "device", "disk", "memory", "ports", "clock"} <= set(
        found
    )
    assert [finding for finding in found.values() if finding.level == "problem"] == []
    assert found["torch"].found == metadata.version("torch")
    assert all(finding.fix.endswith(".") for finding in found.values() if finding.fix)
    assert all(finding.fix for finding in found.values() if finding.level != "ok")


def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.9.0" if name == "torch" else plain(name))


def no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(metadata, "version", version)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda _path: 2**30)


def small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=64 * 2**20))
    monkeypatch.setattr(doctor, "_SHARED", Path("/"))


def nameless_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)


def old_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)


def unseen_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_driver", lambda: ", driver 550.54")


def unseen_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/npu-smi" if name == "npu-smi" else plain(name))


@pytest.mark.parametrize(
    ("plant", "name", "level", "words"),
    [
        (old_torch, "torch", "problem", "2.9.0 (wanted: >=2.11)"),
        (no_peft, "peft", "problem", "not installed"),
        (full_disk, "disk", "warning", "1 GiB free"),
        (small_shm, "/dev/shm", "warning", "0.1 GiB free"),
        (nameless_host, "host name", "warning", "leads nowhere: Name or service not known"),
        (old_clock, "clock", "warning", "1970-01-01"),
        (unseen_gpu, "device", "problem", "a CUDA driver is here, driver 550.54, and torch sees no device"),
        (unseen_npu, "device", "problem", "an Ascend device is here, and torch sees none"),
    ],
)
def test_what_is_wrong_is_told_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], name: str, level: str, words: str
) -> None:
    plant(monkeypatch)
    finding = by_name()[name]
    assert (finding.level, words in finding.found) == (level, True), finding
    assert finding.fix and finding.line().startswith(level)


def test_a_look_that_fails_is_a_problem_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: Path) -> int:
        raise OSError("stale file handle")

    monkeypatch.setattr(doctor, "free_bytes", broken)
    found = by_name()
    assert found["room"].found == "could not be looked at: OSError: stale file handle" and "ports" in found


def test_the_command_prints_lines_or_json_and_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    said = mm("doctor")
    assert said.code == 0 and said.out.splitlines()[-1] == "no problems"
    no_peft(monkeypatch)
    said = mm("doctor", "--json")
    told = json.loads(said.out)
    assert said.code == 3 and told["problems"] == 1
    assert {"name", "level", "found", "fix"} == set(told["findings"][0])


@pytest.mark.slow
def test_ranks_of_this_host_meet() -> None:
    (group,) = [finding for finding in doctor.run(2) if finding.name == "group"]
    assert group.level == "ok" and "2 ranks met" in group.found, group


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell: str) -> None:
    said = mm("completion", shell)
    assert said.code == 0 and "_MM_COMPLETE" in said.out
