"""Freed memory that stays at hand costs no page faults when it is taken again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.utils import host_memory
from mindspeed_mm.fsdp.utils.device import memory_room_bytes

PROGRAM = """
import resource, sys
from mindspeed_mm.fsdp.utils.host_memory import keep_freed_memory
done = keep_freed_memory() if sys.argv[1] == "keep" else None
for round in range(6):
    if round == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    several = [b"x" * 20_000_000 for _ in range(6)]  # more than glibc keeps of its own accord
    del several
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(word: str, **environment: str) -> tuple[str, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, word]
    done, faults = subprocess.run(
        command, env=plain | environment, capture_output=True, text=True, check=True
    ).stdout.split()
    return done, int(faults)


@pytest.mark.skipif(sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="of glibc")
def test_freed_memory_is_not_faulted_in_again() -> None:
    assert run("leave")[1] > 10_000
    done, faults = run("keep")
    assert done == "True"
    assert faults < 1_000


def test_what_the_disk_cache_holds_is_room_and_a_container_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(f"MemFree: 100 kB\nMemAvailable: {total // 1024} kB\n")
    assert memory_room_bytes(0.8) == pytest.approx(0.8 * total, rel=1e-6)
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.stat").write_text("anon 300000\nfile 600000\n")
    assert memory_room_bytes(0.8) == 500_000


def test_the_environment_wins() -> None:
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    assert run("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0] == "False"
