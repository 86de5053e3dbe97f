"""What `auto` chooses for fused kernels and compiled blocks: pure functions of the machine and the run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.device import device_capability, get_device_type

Wish = bool | Literal["auto"]
FUSED_KEY = "features.fused_kernels"
LIGER, NPU, COMPILED = "liger", "torch_npu", "torch.compile"
MOST_COMPILATIONS = 2
"""Of a block that `auto` compiles: one for the first sizes, one with sizes as variables."""
LEAST_STEPS = 100
"""Steps of a run from which on `auto` compiles. An estimate: compiling a block takes tens of seconds, and torchtitan
publishes 16 % more tokens a second for it, so about so many steps of a second win it back. Nothing that is kept
measures it."""
TRITON_CAPABILITY = (7, 0)
"""Lowest compute capability that triton makes kernels for."""
_PACKAGES = ("liger_kernel", "triton", "torch_npu")


@dataclass(frozen=True)
class Machine:
    """What decides which kernels can be had."""

    device_type: str
    packages: frozenset[str] = frozenset()
    """Those of liger_kernel, triton and torch_npu that are installed."""
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device."""

    @classmethod
    def here(cls) -> Machine:
        """The machine of this process, by its device and its installed packages."""
        found = frozenset(name for name in _PACKAGES if importlib.util.find_spec(name) is not None)
        return cls(get_device_type(), found, device_capability())

    @property
    def lacks_triton(self) -> str:
        """Why inductor makes no kernels for this CUDA device; empty where it does."""
        if "triton" not in self.packages:
            return "the package triton is not installed"
        if self.capability < TRITON_CAPABILITY:
            return f"triton needs compute capability 7.0, this device has {'.'.join(map(str, self.capability))}"
        return ""


@dataclass(frozen=True)
class SpeedFacts:
    """What `auto` is decided by. The reasons are words such as "training.use_deter_comp is set"; empty: there is
    none."""

    machine: Machine
    steps: int | None = None
    """Of the run; None: not known beforehand."""
    keeps_rounding: str = ""
    """Why results must be rounded as plain operations round them."""
    compiles_nothing: str = ""
    """Why nothing should be compiled at all."""
    keeps_blocks: str = ""
    """Why blocks are not compiled beside what else is done to them."""


@dataclass(frozen=True)
class SpeedChoice:
    """What was chosen, and why."""

    what: str
    """Who makes the kernels; empty: nobody does."""
    reason: str
    more: str = ""
    """What installing would give; empty where nothing would."""

    def __str__(self) -> str:
        return f"{self.what or 'off'} ({self.reason})" + (f"; {self.more}" if self.more else "")


NOT_ASKED = SpeedChoice("", "not asked for")


def choose_fused(wish: Wish, facts: SpeedFacts, *, blocks_compiled: bool = False) -> SpeedChoice:
    """Whose kernels compute norms, rotary embeddings and gated linear units.

    Args:
        wish: `features.fused_kernels`.
        facts: Of the machine and the run.
        blocks_compiled: `auto` compiles the blocks around them: what is made of torch's operations becomes a part of
            their graphs, where a library's kernel would stand between two parts.

    Raises:
        MachineError: The wish is true, and there are none here.
    """
    if wish is False:
        return SpeedChoice("", "as configured")
    machine, is_auto = facts.machine, wish == "auto"
    if machine.device_type not in ("cuda", "npu"):
        if not is_auto:
            way_out = "Set it to auto, which takes none there."
            raise MachineError(f"there are no fused kernels on '{machine.device_type}'", key=FUSED_KEY, way_out=way_out)
        return SpeedChoice("", _on_cpu(machine.device_type))
    if is_auto and facts.keeps_rounding:
        return SpeedChoice("", facts.keeps_rounding)
    if machine.device_type == "npu":
        return _of_npu(machine, is_auto=is_auto)
    if "liger_kernel" in machine.packages and not blocks_compiled:
        return SpeedChoice(LIGER, "liger_kernel is installed")
    why = machine.lacks_triton or (_not_worth_compiling(facts) if is_auto else "")
    if not why:
        reason = "they become parts of the compiled blocks" if blocks_compiled else "liger_kernel is not installed"
        more = "" if blocks_compiled else "pip install liger-kernel: kernels that need no compiler"
        return SpeedChoice(COMPILED, reason, more)
    if not is_auto:
        way_out = "pip install liger-kernel, or set it to auto."
        raise MachineError(
            f"needs the package liger-kernel, which is not installed, or triton: {why}", key=FUSED_KEY, way_out=way_out
        )
    return SpeedChoice("", why, "pip install liger-kernel: norms, rotary embeddings and gates by one kernel each")


def choose_compile(wish: Wish, facts: SpeedFacts, backend: str = "inductor") -> SpeedChoice:
    """Who compiles blocks. What is wrong with a wish that is true is not looked for here.

    Args:
        wish: `features.compile`.
        facts: Of the machine and the run.
        backend: `features.compile_plan.backend`.
    """
    if wish is not True and wish is not False:
        return _compile_where_it_pays(facts, backend)
    return SpeedChoice(backend if wish else "", "as configured")


def _compile_where_it_pays(facts: SpeedFacts, backend: str) -> SpeedChoice:
    machine = facts.machine
    if machine.device_type != "cuda":
        return SpeedChoice("", _on_cpu(machine.device_type))
    if machine.lacks_triton:
        more = "" if "triton" in machine.packages else "pip install triton: compiled blocks"
        return SpeedChoice("", machine.lacks_triton, more)
    if backend != "inductor":
        return SpeedChoice("", f"features.compile_plan.backend '{backend}' makes no kernels")
    why = facts.keeps_rounding or _not_worth_compiling(facts) or facts.keeps_blocks
    if why:
        return SpeedChoice("", why)
    return SpeedChoice(backend, "triton makes kernels for this device")


def _on_cpu(device_type: str) -> str:
    if device_type == "cpu":
        return "a CPU gains little by it, and its runs keep their bits"
    return f"nothing is known to be faster on '{device_type}'"


def _not_worth_compiling(facts: SpeedFacts) -> str:
    if facts.compiles_nothing:
        return facts.compiles_nothing
    if facts.steps is not None and facts.steps < LEAST_STEPS:
        return f"the run has {facts.steps} steps, and compiling pays from {LEAST_STEPS} on"
    return ""


def _of_npu(machine: Machine, *, is_auto: bool) -> SpeedChoice:
    if "torch_npu" in machine.packages:
        return SpeedChoice(NPU, "torch_npu is installed")
    if not is_auto:
        raise MachineError("needs the package torch_npu, which is not installed", key=FUSED_KEY, way_out="Install it.")
    return SpeedChoice("", "the package torch_npu is not installed", "pip install torch_npu: its fused kernels")
