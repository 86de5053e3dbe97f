"""What the host waits for in a step on a simulated device: never for the step that it has just launched, where the
device can leave out an update; once a step elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.utils.device import ArrivingNumbers
from tests.helpers.runs import train
from tests.helpers.simulated_device import NAME
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

STEPS = 4


class Wait(NamedTuple):
    """A wait of the host for the device."""

    for_step: int
    """Whose work is waited for."""
    launched: int
    """The step whose passes were launched last."""
    what: str


class Watched(TorchDispatchMode):
    """Notes waits from the first step on; the training thread's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.launched = 0

    def note(self, what: str, for_step: int | None = None) -> None:
        if self.launched:
            self.waits.append(Wait(self.launched if for_step is None else for_step, self.launched, what))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_read = name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero")
        if is_read and args[0].device.type == NAME:
            self.note(name)
        if name == "_to_copy" and args[0].device.type == NAME and result.device.type == "cpu":
            self.note(name)
        if name == "copy_" and args[1].device.type == NAME and args[0].device.type == "cpu":
            is_late = args[0].is_pinned() and ((*args, False)[2] or (kwargs or {}).get("non_blocking"))
            if not is_late:
                self.note(name)
        return result


@contextmanager
def watched() -> Iterator[Watched]:
    """While inside, waits of runs that save nothing are noted, from the first step on."""
    found = Watched()
    passes, step, synchronize = TrainEngine._forward_backward, TrainEngine.train_step, torch.accelerator.synchronize
    made, read = ArrivingNumbers.__init__, ArrivingNumbers.tolist
    steps_of: dict[int, int] = {}
    kept = []

    def launch(engine: TrainEngine, *given: Any) -> Any:
        result = passes(engine, *given)
        found.launched = engine.iteration + 1
        return result

    def train_step(engine: TrainEngine, *given: Any, **settings: Any) -> Any:
        with found:
            return step(engine, *given, **settings)

    def begin(arriving: ArrivingNumbers, numbers: torch.Tensor) -> None:
        kept.append(arriving)  # so that no address is used twice
        steps_of[id(arriving)] = found.launched
        made(arriving, numbers)

    def reading(arriving: ArrivingNumbers) -> list[float]:
        if arriving._arrived is not None:  # once read, they are the host's
            found.note("numbers", steps_of[id(arriving)])
        return read(arriving)

    def waiting(*given: Any) -> None:
        found.note("synchronize")
        synchronize(*given)

    with (
        mock.patch.object(TrainEngine, "_forward_backward", launch),
        mock.patch.object(TrainEngine, "train_step", train_step),
        mock.patch.object(ArrivingNumbers, "__init__", begin),
        mock.patch.object(ArrivingNumbers, "tolist", reading),
        mock.patch.object(torch.accelerator, "synchronize", waiting),
    ):
        yield found


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    make_tiny_qwen3(folder / "model")
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, training={"train_iters": STEPS, "micro_batch_size": 4})


@pytest.mark.edge("D3")
@pytest.mark.parametrize("words", [(), ("training.ema.enable=true", "training.gradient_accumulation_steps=2")])
def test_the_host_never_waits_for_the_step_just_launched(words: tuple[str, ...], yaml: Path) -> None:
    with watched() as found:
        said = train(yaml, None, *words)
    assert "the host waits" not in said
    assert found.waits == [
        *(Wait(step, step + 1, "numbers") for step in range(1, STEPS)),
        Wait(STEPS, STEPS, "numbers"),  # the run ends with it
    ]


@pytest.mark.edge("D3")
@pytest.mark.parametrize(
    "words", ["training.adam_fused=false", "training.optimizer=adamw_swap", "parallel.fsdp_plan.cpu_offload=true"]
)
def test_who_cannot_leave_out_an_update_waits_once_a_step(words: str, yaml: Path) -> None:
    with watched() as found:
        said = train(yaml, None, words)
    assert said.count("the host waits for every step to end before it launches the next one") == 1
    waits = [wait for wait in found.waits if wait.what == "numbers" or "cpu_offload" not in words]
    assert waits == [Wait(step, step, "numbers") for step in range(1, STEPS + 1)]


def test_a_planted_wait_is_seen(yaml: Path) -> None:
    def arriving(numbers: torch.Tensor) -> Any:
        numbers.cpu()
        return ArrivingNumbers(numbers)

    with watched() as found, mock.patch("mindspeed_mm.fsdp.train.train_engine.ArrivingNumbers", arriving):
        train(yaml, None)
    assert [wait for wait in found.waits if wait.what != "numbers"] == [
        Wait(step, step, "_to_copy") for step in range(1, STEPS + 1)
    ]
