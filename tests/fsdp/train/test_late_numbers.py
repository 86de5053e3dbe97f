"""A step's numbers are read when the next one is launched, and the device leaves out what is not finite: the weights,
lines, events, checkpoints and endings of a run are those of one that waits for every step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.train import train_engine
from mindspeed_mm.fsdp.train.build_engine import why_steps_wait
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.checkpoint import CheckpointHook
from mindspeed_mm.fsdp.train.hooks.log import LogHook
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.step.tally import LaunchedStep, left_out_on_device
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils.device import ArrivingNumbers
from tests.helpers.distributed import run_ranks
from tests.helpers.late_steps import late_steps
from tests.helpers.planned_steps import Quiet
from tests.helpers.runs import differing, lines, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

VARYING = {"time", "seconds", "tokens_per_s", "samples_per_s", "step_ms", "data_share", "memory_gib", "eta_s"}
"""What depends on how fast the machine is, beside utilisations."""
AVERAGE = ("training.ema.enable=true", "training.ema.decay=0.5")
SKIP = ("training.on_nonfinite=skip", "training.max_skipped_steps=2")
VALIDATED = ("training.val_interval=2",)
CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "saved": (
        (
            "training.save_interval=3",
            "training.micro_batch_size=1",
            "data.dataset_param.basic_parameters.packing=true",
            "data.dataset_param.basic_parameters.cutoff_len=128",
        ),
        (),
    ),
    "average, validated, a line every second step": ((*AVERAGE, *VALIDATED, "training.log_interval=2"), ()),
    "skipped, average": ((*SKIP, *AVERAGE, "training.save_interval=3"), (1, 3, 4)),
    "bad samples, two epochs": (
        (
            "training.micro_batch_size=6",
            "data.dataset_param.basic_parameters.on_bad_sample=skip",
            "data.dataset_param.basic_parameters.max_bad_fraction=0.1",
        ),
        (),
    ),
    "ended by patience": (
        (
            *VALIDATED,
            "training.evaluate.best_metric=val_loss",
            "training.evaluate.patience=1",
            "training.evaluate.min_delta=100.",
        ),
        (),
    ),
}
"""Overrides, and steps that are not finite."""


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    make_tiny_qwen3(folder / "model", attention_dropout=0.2)
    rows = [json.loads(line) for line in make_rows(folder, images=(0,)).read_text().splitlines()]
    rows[3]["messages"][-1]["role"] = "nobody"
    (folder / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"train_iters": 7, "micro_batch_size": 4, "save_interval": 100, "lr_decay_style": "cosine"}
    return make_tiny_run(folder, training=training)


def words_of(case: str, yaml: Path) -> list[str]:
    words = list(CASES[case][0])
    if "training.val_interval=2" in words:
        words.append(f"data.dataset_param.basic_parameters.val_dataset={yaml.parent / 'rows.jsonl'}")
    if case.startswith("bad samples"):
        words.append(f"data.dataset_param.basic_parameters.dataset={yaml.parent / 'bad.jsonl'}")
    return words


def not_finite(steps: tuple[int, ...], rank: int = 0) -> Any:
    """The losses of these steps, of one micro-batch each, are not numbers on a rank."""
    real, calls = TokenCrossEntropy.terms, iter(range(1, 10_000))

    def terms(self: Any, model: Any, batch: Any) -> Any:
        is_here = not dist.is_initialized() or dist.get_rank() == rank
        factor = math.nan if next(calls) in steps and is_here else 1.0
        return {name: loss * factor for name, loss in real(self, model, batch).items()}

    return mock.patch.object(TokenCrossEntropy, "terms", terms)


def recorded(save: Path, name: str) -> list[str]:
    """Lines without what varies, notes of the start left out."""
    found = []
    for line in lines(save / name):
        if line.get("kind") != "note" or line["step"]:
            kept = {k: v for k, v in line.items() if k not in VARYING and not k.startswith(("mfu", "hfu", "tflops"))}
            found.append(json.dumps(kept))
    return found


def differences(
    case: str, yaml: Path, folder: Path, planted: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[str]:
    """Between a run that waits for every step and one that does not, in which a fault may be planted."""
    words, broken = words_of(case, yaml), CASES[case][1]
    with not_finite(broken):
        train(yaml, folder / "waits", *words)
    with not_finite(broken), late_steps(), planted():
        said = mm("train", yaml, f"training.save={folder / 'late'}", *words)
    is_recorded = (folder / "late" / "metrics.jsonl").is_file()
    return differing_runs(folder) if is_recorded else [f"ended with {said.code}: {said.err}"]


def differing_runs(folder: Path) -> list[str]:
    """What differs between `waits` and `late`."""
    found = []
    for name in ("metrics.jsonl", "events.jsonl"):
        ours, theirs = (recorded(folder / run, name) for run in ("late", "waits"))
        found += [f"{name}: {own} instead of {other}" for own, other in zip_longest(ours, theirs) if own != other]
    checkpoints = [sorted(path.name for path in (folder / run).glob("iter_*")) for run in ("waits", "late")]
    if checkpoints[0] != checkpoints[1]:
        return [*found, f"checkpoints: {checkpoints}"]
    for path in checkpoints[0]:
        step = int(path.removeprefix("iter_"))
        found += differing(tensors(folder / "waits", step), tensors(folder / "late", step))
        states = [json.loads((folder / run / path / "trainer_state.json").read_text()) for run in ("waits", "late")]
        if states[0] != states[1]:
            found.append(f"state of step {step}: {states}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_one_that_waits(case: str, yaml: Path, tmp_path: Path) -> None:
    assert differences(case, yaml, tmp_path) == []
    if case.startswith("bad samples"):
        told = [line["step"] for line in lines(tmp_path / "late" / "events.jsonl") if line["kind"] == "data"]
        assert told == [5, 7]
    expected = {"ended by patience": 4, "average, validated, a line every second step": 5}.get(case, 7)
    assert len(losses(tmp_path / "late")) == expected


class NothingAtOnce(LaunchedStep):
    """A step whose numbers nobody waits for, whoever asks."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts | {"at_once": False})


def numbers_of_another() -> Any:
    """A step has those of the one before it, where there is one."""
    seen: list[list[float]] = []

    def read(launched: LaunchedStep) -> Any:
        seen.append(launched.numbers.tolist())
        *terms, norm = seen[-2:][0]
        return dict(zip(launched.names, terms, strict=True)), norm

    return mock.patch.object(LaunchedStep, "read", read)


REAL_UPDATE = TrainEngine._update


def updated_always(engine: TrainEngine, norm: torch.Tensor, _left_out: torch.Tensor | None = None) -> None:
    """An update whatever the device says."""
    REAL_UPDATE(engine, norm)


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "what is not finite is applied": (
        "skipped, average",
        lambda: mock.patch.object(TrainEngine, "_update", updated_always),
    ),
    "a step has the numbers of another": ("saved", numbers_of_another),
    "the last line is lost, saves are late": (
        "saved",
        lambda: mock.patch.object(train_engine, "LaunchedStep", NothingAtOnce),
    ),
    "patience ends the run late": (
        "ended by patience",
        lambda: mock.patch.object(train_engine, "LaunchedStep", NothingAtOnce),
    ),
    "counts of a line are taken late": (
        "saved",
        lambda: mock.patch.object(LogHook, "on_step_launched", lambda *_: None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, yaml: Path, tmp_path: Path) -> None:
    case, planted = FAULTS[fault]
    assert differences(case, yaml, tmp_path, planted) != []


# --- what the host waits for ------------------------------------------------------------------------------------------


def order_of(yaml: Path, *words: str, hooks: tuple[Hook, ...] = ()) -> list[str]:
    """What the host does, in order: steps whose passes are launched, steps whose numbers are read, updates."""
    seen: list[str] = []
    passes, update, read = TrainEngine._forward_backward, TrainEngine._update, ArrivingNumbers.tolist
    count = TrainEngine._tally
    numbers: dict[int, int] = {}

    def tally(engine: TrainEngine, *given: Any) -> Any:
        seen.append(f"tally {engine.iteration + 1}")
        return count(engine, *given)

    def launch(engine: TrainEngine, *given: Any) -> Any:
        seen.append(f"passes {engine.iteration + 1}")
        return passes(engine, *given)

    def updated(engine: TrainEngine, *given: Any) -> None:
        assert engine.launched is not None
        numbers[id(engine.launched.numbers)] = engine.iteration + 1
        seen.append(f"update {engine.iteration + 1}")
        update(engine, *given)

    def reading(arriving: ArrivingNumbers) -> list[float]:
        seen.append(f"read {numbers.get(id(arriving), 'before its update')}")
        return read(arriving)

    with (
        late_steps(),
        mock.patch.object(TrainEngine, "_tally", tally),
        mock.patch.object(TrainEngine, "_forward_backward", launch),
        mock.patch.object(TrainEngine, "_update", updated),
        mock.patch.object(ArrivingNumbers, "tolist", reading),
    ):
        config = load_with_plugins(yaml, ["training.train_iters=3", *words])
        Quiet(config, TrainOptions(), hooks=hooks).train()
    return seen


def test_the_host_reads_the_step_before(yaml: Path) -> None:
    """And counts the next step over ranks before it waits for anything."""
    assert order_of(yaml) == [
        *("tally 1", "passes 1", "update 1"),
        *("tally 2", "passes 2", "read 1", "update 2"),
        *("tally 3", "passes 3", "read 2", "update 3", "read 3"),
    ]


class Asks(Hook):
    """Asks for the second step, with what it saw then."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return step == 2

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        has_gradients = any(parameter.grad is not None for parameter in engine.model.parameters())
        self.seen.append((result.step, engine.iteration, has_gradients))


def test_a_hook_that_asks_is_called_at_once(yaml: Path) -> None:
    hook = Asks()
    assert order_of(yaml, hooks=(hook,)) == [
        *("tally 1", "passes 1", "update 1"),
        *("tally 2", "passes 2", "read 1", "update 2", "read 2"),
        *("tally 3", "passes 3", "update 3", "read 3"),
    ]
    assert hook.seen == [(1, 1, True), (2, 2, False), (3, 3, False)]


class Tells(Hook):
    """As a hook of a user's, which says nothing about when it is called."""

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None: ...


class Begins(Hook):
    """Has nothing to do with a step's result."""

    def on_train_begin(self, engine: TrainEngine) -> None: ...


def test_who_says_nothing_is_called_at_once(yaml: Path) -> None:
    assert order_of(yaml, hooks=(Begins(),)) == order_of(yaml)
    waits = [line for line in order_of(yaml, hooks=(Tells(),)) if line[:4] in ("pass", "read")]
    assert waits == ["passes 1", "read 1", "passes 2", "read 2", "passes 3", "read 3"]


@pytest.mark.parametrize(
    "words", [("training.adam_fused=false",), ("training.optimizer=muon",), ("parallel.fsdp_plan.param_dtype=fp16",)]
)
def test_who_cannot_decide_on_the_device_waits(words: tuple[str, ...], yaml: Path) -> None:
    read = "before its update"
    assert [line for line in order_of(yaml, *words) if line[:4] in ("pass", "read")][:4] == [
        *("passes 1", f"read {read}", "read 1", "passes 2"),
    ]


def test_why_steps_wait_is_said(yaml: Path, tmp_path: Path) -> None:
    """Where there is something to wait for: a device is made up."""
    said = []

    class Device(Quiet):
        def _note_waits(self, engine: TrainEngine, record: Any) -> None:
            engine.device = torch.device("meta")
            said.append(
                why_steps_wait(
                    self.arguments.parallel,
                    self.arguments.training,
                    self.arguments.posttrain,
                    engine.optimizer,
                    engine.ema,
                    torch.device("cpu"),
                )
            )
            super()._note_waits(engine, record)
            engine.device = torch.device("cpu")

    words = ["training.train_iters=1", f"training.save={tmp_path}", "training.optimizer=muon"]
    Device(load_with_plugins(yaml, words), TrainOptions()).train()
    assert said == ["Muon as it is configured cannot leave out an update on the device"]
    notes = [line["message"] for line in lines(tmp_path / "events.jsonl") if line["kind"] == "note"]
    assert sum("the host waits for every step" in note and said[0] in note for note in notes) == 1


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, math.nan], [math.inf, 1.0], [1.0, -math.inf]])
def test_what_the_device_decides_is_what_the_host_would(values: list[float]) -> None:
    assert bool(left_out_on_device(torch.tensor(values))) is not all(map(math.isfinite, values))


# --- endings ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_all_lines_up_to_it(yaml: Path, tmp_path: Path) -> None:
    """So that a run that is killed at any moment can be resumed without a line missing."""
    real, seen = CheckpointHook._save, []

    def save(hook: CheckpointHook, engine: TrainEngine) -> None:
        seen.append((engine.iteration, sorted(losses(tmp_path))))
        real(hook, engine)

    with late_steps(), mock.patch.object(CheckpointHook, "_save", save):
        train(yaml, tmp_path, "training.save_interval=3")
    assert seen == [(3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6]), (7, [1, 2, 3, 4, 5, 6, 7])]


def test_pieces_equal_the_whole(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path / "whole")
    with late_steps():
        for steps in (2, 1, 9):
            train(yaml, tmp_path / "parts", "--steps", steps)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts")) == []
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_an_error_of_the_next_step_costs_no_line(yaml: Path, tmp_path: Path) -> None:
    real, calls = TokenCrossEntropy.terms, iter(range(1, 100))

    def terms(*given: Any) -> Any:
        if next(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given)

    with late_steps(), mock.patch.object(TokenCrossEntropy, "terms", terms):
        assert mm("train", yaml, f"training.save={tmp_path}").code == 3
    assert sorted(losses(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("fails_after", [False, True])
def test_a_step_that_is_not_finite_stops_the_run(fails_after: bool, yaml: Path, tmp_path: Path) -> None:
    """With the weights of the step before, also where the next step is under way, or has failed."""
    kept: list[dict[str, torch.Tensor]] = []
    engines: list[TrainEngine] = []

    def keep(engine: TrainEngine, _batches: Any) -> None:
        states = {f"{n}.{k}": t for n, s in enumerate(engine.optimizer.state.values()) for k, t in s.items()}
        kept.append({name: t.detach().clone() for name, t in (states | dict(engine.model.named_parameters())).items()})
        engines.append(engine)
        if fails_after and len(engines) == 4:
            raise MemoryError

    with late_steps(), not_finite((3,)), watched_steps(keep) as seen:
        said = mm("train", yaml, f"training.save={tmp_path}", "training.save_interval=2")
    assert said.code == 5
    assert "step 3 is not finite" in said.err and f"rank 0: samples {', '.join(seen[2])}" in said.err
    assert sorted(losses(tmp_path)) == [1, 2]
    keep(engines[0], None)
    assert len(kept) == 5  # the fourth step was begun
    assert differing(kept[2], kept[3]) == differing(kept[2], kept[4]) == []
    assert differing(kept[1], kept[2]) != []


# --- two ranks --------------------------------------------------------------------------------------------------------


def two_ranks(yaml: str, save: str, late: bool) -> list[tuple[int, int, bool]]:
    """A rank that asks for a step has all of them wait for it; a step that is not finite on one rank is skipped."""
    hook = Asks()
    if dist.get_rank() == 0:
        hook.is_called_at_once = lambda *_: False  # type: ignore[method-assign]
    with late_steps() if late else nullcontext(), not_finite((3, 4), rank=1):
        words = [f"training.save={save}", "training.micro_batch_size=2", *SKIP]
        Trainer(load_with_plugins(Path(yaml), words), TrainOptions(), hooks=[hook]).train()
    return hook.seen


def test_two_ranks_wait_together(yaml: Path, tmp_path: Path) -> None:
    late = run_ranks(2, two_ranks, str(yaml), str(tmp_path / "late"), True)
    run_ranks(2, two_ranks, str(yaml), str(tmp_path / "waits"), False)
    assert late[0] == late[1] == [(step, step, step not in (2, 7)) for step in range(1, 8)]
    assert differing_runs(tmp_path) == []
