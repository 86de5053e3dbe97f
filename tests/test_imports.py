"""Importing the package does nothing, and its ground floor imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests.helpers.fresh_process import run_after

ROOT = Path(__file__).parents[1]

LOOK = """
import gc, importlib, json, logging, os, pkgutil, signal, sys, threading, warnings
def state():
    handlers = {n.name: repr(signal.getsignal(n)) for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)}
    return {
        "signal handlers": handlers, "environment": dict(os.environ), "path": list(sys.path), "gc": gc.isenabled(),
        "log handlers": len(logging.root.handlers), "threads": [t.name for t in threading.enumerate()],
        "hooks": [repr(sys.excepthook), repr(sys.settrace)], "warning filters": len(warnings.filters),
    }
"""

LIGHT = (
    LOOK
    + """
import click, pydantic, ruamel.yaml  # their own imports are not ours: ruamel.yaml adds a warning filter
import mindspeed_mm
before = state()
for package in ("mindspeed_mm.core", "mindspeed_mm.fsdp.params", "mindspeed_mm.cli"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
    heavy = sorted(sys.modules.keys() & {"torch", "transformers", "numpy"})
    print(json.dumps([package, heavy, [k for k, v in before.items() if v != state()[k]]]))
"""
)

LIBRARIES = """
import click, pydantic, ruamel.yaml, PIL.Image, torch, transformers, torch.distributed.checkpoint
import torch.distributed.fsdp
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()  # a patch that says so; whoever needs transformers' processors calls it
from transformers import AutoModel, AutoProcessor, PreTrainedModel
from diffusers import ModelMixin  # the base of our pixel-space VAE
import scipy.stats  # schedulers of diffusers take it: it adds a warning filter
"""

ALL = (
    LOOK
    + """
import torch
def torch_state():
    return [torch.get_num_threads(), repr(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
            torch.get_rng_state().sum().item(), torch.distributed.is_initialized()]
import mindspeed_mm
before, torch_before = state(), torch_state()
has_verl = importlib.util.find_spec("verl")
needs_verl = () if has_verl else ("mindspeed_mm.verl.engine", "mindspeed_mm.verl.config_classes")
for module in pkgutil.walk_packages(mindspeed_mm.__path__, "mindspeed_mm."):
    if not module.name.endswith("__main__") and module.name not in needs_verl:
        importlib.import_module(module.name)
print(json.dumps([[k for k, v in before.items() if v != state()[k]], torch_before == torch_state()]))
"""
)


def lines_of(program: str, begin: str = "") -> list[list[object]]:
    """The lists that a program prints, in a process that has imported nothing, or what `begin` imports."""
    if begin:
        done = run_after(begin, program)
    else:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_the_ground_floor_and_the_command_line_import_nothing_heavy() -> None:
    told = {package: (heavy, changed) for package, heavy, changed in lines_of(LIGHT)}
    for package in ("mindspeed_mm.core", "mindspeed_mm.fsdp.params", "mindspeed_mm.cli"):
        assert told[package] == ([], []), package


def test_answering_of_a_language_model_imports_no_layout_of_others() -> None:
    checkpoint = "mindspeed_mm.checkpoint"
    others = (f"{checkpoint}.megatron", f"{checkpoint}.original", "mindspeed_mm.fsdp.models.diffusion")
    program = (
        "import json, sys, mindspeed_mm.tasks.answer.infer\n"
        f"print(json.dumps([name for name in sys.modules if name.startswith({others!r})]))"
    )
    assert lines_of(program, LIBRARIES) == [[]]


@pytest.mark.skipif(Version(metadata.version("transformers")) < Version("5.23"), reason="a family's classes are newer")
def test_training_of_a_language_model_imports_only_what_it_uses() -> None:
    """Whatever is imported beside it is memory and time at every start (`python -m benchmarks startup`)."""
    others = (
        "tensorboard",
        "torch.utils.tensorboard",
        "torch.distributed.pipelining",
        "mindspeed_mm.fsdp.tools.memory_model",
        "mindspeed_mm.fsdp.train.rollouts",
        "mindspeed_mm.fsdp.train.step.pipeline",
        "mindspeed_mm.fsdp.sampling.sampler",
        "mindspeed_mm.checkpoint.megatron",
    )
    program = (
        "import json, sys, mindspeed_mm.tasks.train, mindspeed_mm.fsdp.train.trainer, mindspeed_mm.fsdp.data.build\n"
        f"print(json.dumps([name for name in sys.modules if name.startswith({others!r})]))"
    )
    assert lines_of(program) == [[]]


def test_importing_everything_does_nothing() -> None:
    assert lines_of(ALL, LIBRARIES) == [[[], True]]


@pytest.mark.parametrize(
    "fault",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "os.environ['PLANTED'] = '1'",
        "logging.basicConfig()",
        "gc.disable()",
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_a_side_effect_is_found(fault: str) -> None:
    program = f"{LOOK}\nbefore = state()\n{fault}\nprint(json.dumps([k for k, v in before.items() if v != state()[k]]))"
    assert len(lines_of(program)[0]) == 1
