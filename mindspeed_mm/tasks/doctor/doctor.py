"""`mm doctor`: what this machine and its packages are good for, and how to mend what is not."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from mindspeed_mm.core.artifacts import free_bytes
from mindspeed_mm.core.started_python import own_python, safe_environment
from mindspeed_mm.core.version import __version__
from mindspeed_mm.tasks.doctor import group_probe

Level = Literal["ok", "warning", "problem"]

PACKAGE = "mindspeed-mm"
_GIB = 2**30
_ROOM_BYTES, _SHARED_BYTES, _MEMORY_BYTES = 20 * _GIB, _GIB, 4 * _GIB
"""Below these free bytes of disk, of shared memory and of memory something is likely to go wrong."""
_CLOCK_S, _FIRST_YEAR, _PROBE_S = 5.0, 2025, 180.0
_SHARED = Path("/dev/shm")
_SPEED = {"cuda": {"liger_kernel": "liger-kernel"}, "npu": {}, "xpu": {}, "cpu": {}}
"""Kind of device → module that makes training faster there, and the package that brings it."""


@dataclass(frozen=True)
class Diagnosis:
    """One line: what was looked at, what was found, and how to mend it."""

    name: str
    level: Level
    found: str
    fix: str = ""
    """A full sentence; empty where there is nothing to mend."""

    def line(self) -> str:
        """Return the finding as a line of text."""
        return f"{self.level:8} {self.name:14} {self.found}{f'. {self.fix}' if self.fix else ''}"


def run(nproc: int | None = None) -> list[Diagnosis]:
    """Look at everything; nothing is raised for what is found.

    Args:
        nproc: Number of ranks on this host that a group is tried with; None: no group is tried.
    """
    findings = [finding for look in _LOOKS for finding in _guarded(look)]
    if nproc is not None:
        findings += _guarded(partial(_group, nproc))
    return findings


def _guarded(look: Callable[[], Iterator[Diagnosis]]) -> list[Diagnosis]:
    """What a look finds; where it fails itself, that is what was found."""
    try:
        return list(look())
    except Exception as error:  # noqa: BLE001 - a broken machine breaks in ways that nobody foresees
        name = getattr(look, "__name__", "group").strip("_<>")
        return [Diagnosis(name, "problem", f"could not be looked at: {type(error).__name__}: {error}")]


def _python() -> Iterator[Diagnosis]:
    version = platform.python_version()
    where = f"{version}, {sys.executable}"
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        yield Diagnosis("python", "warning", where, "Tested are 3.11 and 3.12: make an environment with one of them.")
    elif sys.prefix == sys.base_prefix:
        fix = "Make a virtual environment, so that packages of the system stay apart: make install."
        yield Diagnosis("python", "warning", f"{where}, in no virtual environment", fix)
    else:
        yield Diagnosis("python", "ok", where)


def _packages() -> Iterator[Diagnosis]:
    """The requirements of the installed package, each against what is installed."""
    yield Diagnosis(PACKAGE, "ok", __version__)
    required, extras = _requirements()
    for requirement in required:
        yield _of_requirement(requirement, "problem", f"pip install '{requirement}' -c constraints.txt")
    for extra, requirements in extras.items():
        lacking = [each.name for each in requirements if _installed(each.name) is None]
        if not lacking:
            yield Diagnosis(f"[{extra}]", "ok", "installed")
        else:
            fix = f"For {_EXTRAS.get(extra, extra)}: pip install '{PACKAGE}[{extra}]'."
            yield Diagnosis(f"[{extra}]", "ok", f"not installed: {', '.join(lacking)}", fix)


_EXTRAS = {
    "diffusion": "generators of pictures and clips",
    "serve": "mm serve",
    "ui": "a page in the browser",
    "track": "trackers of runs",
    "lowbit": "QLoRA, and products and states in 8 bits",
    "gguf": "models in GGUF",
    "cuda": "fused kernels",
    "npu": "Ascend",
    "speech": "CosyVoice3 with the voice of a recording",
    "eval": "LPIPS and accuracies by classifiers",
}


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """What the package needs, and what its extras do; nothing where it is not installed."""
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return [], {}
    required: list[Requirement] = []
    extras: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required.append(requirement)
            continue
        for extra in _EXTRAS:
            if requirement.marker.evaluate({"extra": extra}):
                extras.setdefault(extra, []).append(requirement)
    return required, extras


def _of_requirement(requirement: Requirement, level: Level, command: str) -> Diagnosis:
    version = _installed(requirement.name)
    wanted = f" (wanted: {requirement.specifier})" if requirement.specifier else ""
    if version is None:
        return Diagnosis(requirement.name, level, f"not installed{wanted}", f"Install it: {command}.")
    if not requirement.specifier.contains(version, prereleases=True):
        return Diagnosis(requirement.name, level, f"{version}{wanted}", f"Install another one: {command}.")
    return Diagnosis(requirement.name, "ok", version)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Iterator[Diagnosis]:
    """torch itself, whether torchvision was built for it, and the accelerator."""
    import torch  # seconds, and the first thing that a broken environment cannot import

    from mindspeed_mm.fsdp.ops.attention_kernels import Need, choose_kernel
    from mindspeed_mm.fsdp.ops.kernels_in_force import device_facts
    from mindspeed_mm.fsdp.utils.device import get_device_type
    from mindspeed_mm.fsdp.utils.torchvision_guard import clash

    kind = get_device_type()
    build = torch.version.cuda or torch.version.hip or "CPU alone"
    yield Diagnosis("torch build", "ok", f"{torch.__version__}, built for {build}")
    if sentence := clash():
        fix = "Install the torchvision of this torch: pip install torch torchvision -c constraints.txt."
        yield Diagnosis("torchvision", "warning", sentence, fix)
    yield _device(kind)
    kernel, reason, install = choose_kernel(Need(), device_facts())
    found = f"{kernel.name} ({reason})" if reason else kernel.name
    yield Diagnosis("attention", "warning" if install else "ok", found, f"{install}." if install else "")
    for module, package in _SPEED.get(kind, {}).items():
        if importlib.util.find_spec(module) is None:
            yield Diagnosis(
                package, "warning", "not installed", f"It makes training faster here: pip install {package}."
            )
        else:
            yield Diagnosis(package, "ok", _installed(package) or "installed")


def _device(kind: str) -> Diagnosis:
    """The accelerator that torch sees; or the one that is there and that it does not see."""
    import torch

    if kind != "cpu":
        count = torch.accelerator.device_count()
        module = torch.get_device_module(kind)
        name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind
        free, total = module.mem_get_info(0) if hasattr(module, "mem_get_info") else (0, 0)
        memory = f", {free / _GIB:.0f} of {total / _GIB:.0f} GiB free" if total else ""
        return Diagnosis("device", "ok", f"{count} × {name}{memory}{_driver()}")
    if (driver := _driver()) or Path("/proc/driver/nvidia").exists():
        fix = "Install a torch that is built for CUDA: https://pytorch.org/get-started names the index."
        return Diagnosis("device", "problem", f"a CUDA driver is here{driver}, and torch sees no device", fix)
    if shutil.which("npu-smi") or Path("/dev/davinci0").exists():
        fix = f"Install the torch_npu of torch {torch.__version__.split('+')[0]} and source CANN's set_env.sh."
        return Diagnosis("device", "problem", "an Ascend device is here, and torch sees none", fix)
    return Diagnosis("device", "ok", f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process")


def _driver() -> str:
    """`, driver 550.54`; empty where nvidia-smi is not there or knows none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    version = done.stdout.strip().partition("\n")[0]
    if done.returncode == 0 and version:
        return f", driver {version}"
    return ""


def _room() -> Iterator[Diagnosis]:
    """Disk, shared memory and memory."""
    free = free_bytes(Path.cwd())
    told = f"{free / _GIB:.0f} GiB free in the working directory"
    low = free < _ROOM_BYTES
    yield Diagnosis("disk", "warning" if low else "ok", told, "A model and its checkpoints may not fit." if low else "")
    if _SHARED.is_dir():
        size = shutil.disk_usage(_SHARED).free
        low = size < _SHARED_BYTES
        fix = "Workers hand batches over through it: docker run --ipc=host, or --shm-size=16g." if low else ""
        yield Diagnosis("/dev/shm", "warning" if low else "ok", f"{size / _GIB:.1f} GiB free", fix)
    from mindspeed_mm.fsdp.utils.host_memory import available_bytes, total_bytes

    room, whole = available_bytes(), total_bytes()
    low = room < _MEMORY_BYTES
    told = f"{room / _GIB:.0f} of {whole / _GIB:.0f} GiB free"
    yield Diagnosis("memory", "warning" if low else "ok", told, "Close other programs." if low else "")


def _network() -> Iterator[Diagnosis]:
    """Whether ranks of this host could meet."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    yield Diagnosis("ports", "ok", f"a free one is {port}")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        fix = f"Add it to /etc/hosts: 127.0.1.1 {name}. Several hosts meet by such names."
        yield Diagnosis("host name", "warning", f"'{name}' leads nowhere: {error.strerror or error}", fix)
    else:
        yield Diagnosis("host name", "ok", name)


def _clock() -> Iterator[Diagnosis]:
    """Whether files get the time of this machine."""
    now_s = time.time()
    if time.gmtime(now_s).tm_year < _FIRST_YEAR:
        yield Diagnosis("clock", "warning", time.strftime("%Y-%m-%d", time.gmtime(now_s)), "Set the clock.")
        return
    with tempfile.NamedTemporaryFile(dir=Path.cwd() if os.access(Path.cwd(), os.W_OK) else None) as file:
        off_s = abs(Path(file.name).stat().st_mtime - now_s)
    if off_s > _CLOCK_S:
        fix = "Set the clocks of both alike: checkpoints are told apart by their dates."
        yield Diagnosis("clock", "warning", f"the file system is {off_s:.0f} s off this machine", fix)
    else:
        yield Diagnosis("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)))


def _group(nproc: int) -> Iterator[Diagnosis]:
    """A group of so many ranks that add numbers."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(group_probe.__file__)]
    environment = safe_environment({"OMP_NUM_THREADS": "1"})
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            own_python(words), env=environment, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        fix = "See whether a firewall keeps processes of this host apart, or another job holds the devices."
        yield Diagnosis("group", "problem", f"{nproc} ranks did not meet within {_PROBE_S:.0f} s", fix)
        return
    if done.returncode == 0:
        yield Diagnosis("group", "ok", f"{nproc} ranks met and added numbers in {time.monotonic() - began_s:.0f} s")
        return
    said = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailedError" not in line]
    last = said[-1].strip() if said else f"exit code {done.returncode}"
    yield Diagnosis("group", "problem", f"{nproc} ranks did not add numbers: {last[-300:]}", "Mend that first.")


_LOOKS = (_python, _packages, _torch, _room, _network, _clock)
