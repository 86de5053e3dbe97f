"""Optimizers through the whole trainer: bitwise or equal to one process under plans, resumed as if never stopped, and
untouched by a step that is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.optimizer import adamw, state_formats
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import Quiet, overrides, train_steps
from tests.helpers.runs import differing, losses, mm, tensors, train
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

SWAP, MUON, LION, BF16, INT8, OFFLOAD = (
    "training.optimizer=adamw_swap",
    "training.optimizer=muon",
    "training.optimizer=lion",
    "training.optimizer_state_dtype=bf16",
    "training.optimizer_state_dtype=int8",
    "features.enable_gradient_offload=true",
)
NO_KEY_BIAS = "model.freeze=[model.visual]"
"""Its gradient is zero but for rounding, and to Lion only the sign matters."""
EP, TP, PP = (f"parallel.{name}_parallel_size=2" for name in ("expert", "tensor", "pipeline"))
EMA = ("training.ema.enable=true", "training.ema.decay=0.5")
ONE_ROUND, TWO_ROUNDS = overrides(2, 1), overrides(2, 2)
DOUBLE = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}

BITWISE = {  # name → (what it is compared with, overrides of both, its own)
    "swap": ((), ONE_ROUND, (SWAP,)),
    "offload": ((), ONE_ROUND, (OFFLOAD,)),
    "swap, offload": ((), ONE_ROUND, (SWAP, OFFLOAD)),
    "swap in bf16, zero-2": ((BF16,), ("parallel.fsdp_plan.reshard_after_forward=false", *ONE_ROUND), (SWAP,)),
    "muon, offload": ((MUON,), ONE_ROUND, (OFFLOAD,)),
}
EQUAL = {  # name → (model, what one process does, what two ranks do)
    "offload, two rounds": ("vlm", (), (OFFLOAD, *TWO_ROUNDS)),
    "swap, offload, ep2": ("moe", (SWAP,), (OFFLOAD, EP, *TWO_ROUNDS)),
    "muon fsdp2": ("vlm", (MUON,), TWO_ROUNDS),
    "muon ep2": ("moe", (MUON,), (EP, *ONE_ROUND)),
    "muon fsdp2, experts": ("moe", (MUON,), ONE_ROUND),
    "muon tp2": ("vlm", (MUON,), (TP, *overrides(1, 1))),
    "muon pp2": ("vlm", (MUON,), (PP, *overrides(1, 2))),
    "lion fsdp2, offload": ("vlm", (LION, NO_KEY_BIAS), (OFFLOAD, *TWO_ROUNDS)),
    "int8 fsdp2": ("vlm", (INT8,), TWO_ROUNDS),
    "int8 ep2, swap": ("moe", (INT8,), (SWAP, EP, *ONE_ROUND)),
}
SLOW = {
    "swap",
    "offload",
    "swap in bf16, zero-2",
    "muon, offload",
    "swap, offload, ep2",
    "muon fsdp2, experts",
    "muon tp2",
    "muon pp2",
    "int8 fsdp2",
}
GRIDS = {
    "muon tp2 × fsdp2": ("vlm", (MUON,), (TP, *overrides(2, 2))),
    "muon hybrid, ep2": ("moe", (MUON,), (EP, "parallel.fully_shard_parallel_size=2", *overrides(4, 1))),
    "int8 tp2 × fsdp2": ("vlm", (INT8,), (TP, OFFLOAD, *overrides(2, 2))),
}
"""On four ranks."""
TINY = {"LEAST_NUMEL": 512, "BLOCK": 16, "LEAST_BLOCK": 16}
"""Packs the small matrices of the tiny models in 8 bits, and rows that ranks cut as well."""


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ...]:
    folder = tmp_path_factory.mktemp("optimizers")
    make_tiny_qwen3_vl(folder / "vlm" / "model")
    make_tiny_qwen3_moe(folder / "moe" / "model", initializer_range=0.3, num_hidden_layers=2)
    make_rows(folder / "moe", images=(0,))
    return tuple((name, str(make_tiny_run(folder / name, **DOUBLE))) for name in ("vlm", "moe"))


@pytest.fixture
def packs_tiny() -> Iterator[None]:
    with packing_tiny():
        yield


def packing_tiny() -> Any:
    return mock.patch.multiple(state_formats, **TINY)


def run_cases(ranks: int, yamls: dict[str, str], slow: bool) -> dict[str, Any]:
    """Every case on this rank, and what it is compared with."""
    found: dict[str, Any] = {}
    equal = GRIDS if ranks == 4 else {name: case for name, case in EQUAL.items() if (name in SLOW) == slow}
    bitwise = {name: case for name, case in BITWISE.items() if (name in SLOW) == slow and ranks == 2}
    with keeping_double(), packing_tiny():
        if ranks == 1:
            wanted = {(model, words) for model, words, _ in (EQUAL | GRIDS).values()}
            return {f"{m} {w}": train_steps(yamls[m], [*w, *overrides(1, 1)]) for m, w in wanted}
        for name, (model, words, more) in equal.items():
            found[name] = train_steps(yamls[model], [*words, *more])
    fp32 = ["parallel.fsdp_plan.param_dtype=fp32", "training.adam_fused=true", "training.train_iters=3"]
    with mock.patch.object(adamw, "PIECE", 256), mock.patch.object(adamw, "bucket_bytes", lambda _room: 4096):
        for name, (words, both, own) in bitwise.items():
            found[f"{name}, without"] = train_steps(yamls["vlm"], [*fp32, *words, *both])
            found[name] = train_steps(yamls["vlm"], [*fp32, *words, *both, *own])
    return found


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...], slow: bool = False) -> list[dict[str, list[StepRecord]]]:
    return run_ranks(ranks, run_cases, ranks, dict(yamls), slow)


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", marked(BITWISE))
def test_two_ranks_to_the_bit(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    for measured in results_of(2, yamls, name in SLOW):
        compare_steps(measured[f"{name}, without"], measured[name], 0)


def check_equal(case: tuple[str, Any, Any], name: str, ranks: int, yamls: Any, slow: bool) -> None:
    model, words, _ = case
    expected = results_of(1, yamls)[0][f"{model} {words}"]
    for measured in results_of(ranks, yamls, slow):
        compare_steps(expected, measured[name], 1e-10)


@pytest.mark.parametrize("name", marked(EQUAL))
def test_two_ranks_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check_equal(EQUAL[name], name, 2, yamls, name in SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_four_ranks_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check_equal(GRIDS[name], name, 4, yamls, slow=True)


def test_another_optimizer_is_seen(yamls: tuple[tuple[str, str], ...]) -> None:
    """The control: weights of AdamW, of packed states and of Muon are no closer than that."""
    one = results_of(1, yamls)[0]
    for words in ((INT8,), (MUON,)):
        with pytest.raises(ParityError):
            compare_steps(one[f"vlm {()}"], one[f"vlm {words}"], 1e-6)


# --- resumed ---------------------------------------------------------------------------------------------------------

RESUMED = {
    "swap": (SWAP,),
    "bf16": (BF16, SWAP),
    "int8, offload, average": (INT8, OFFLOAD, *EMA),
    "muon": (MUON,),
    "lion, offload": (LION, OFFLOAD),
}


@pytest.mark.parametrize("name", RESUMED)
def test_pieces_equal_the_whole(name: str, yaml: Path, tmp_path: Path, packs_tiny: None) -> None:
    steps = ("training.train_iters=5", *RESUMED[name])
    train(yaml, tmp_path / "whole", *steps)
    train(yaml, tmp_path / "save", *steps, "--steps", 2)
    train(yaml, tmp_path / "save", *steps)
    assert losses(tmp_path / "save") == losses(tmp_path / "whole")
    assert differing(tensors(tmp_path / "save"), tensors(tmp_path / "whole")) == []


def test_the_same_state_is_gone_on_with_elsewhere(yaml: Path, tmp_path: Path) -> None:
    steps = ("training.train_iters=4",)
    train(yaml, tmp_path / "whole", *steps)
    train(yaml, tmp_path / "save", *steps, SWAP, "--steps", 1)
    out = train(yaml, tmp_path / "save", *steps, OFFLOAD, "--steps", 1)
    assert 'training.optimizer  was "adamw_swap", is "adamw"' in out
    train(yaml, tmp_path / "save", *steps, SWAP, OFFLOAD)
    assert differing(tensors(tmp_path / "save"), tensors(tmp_path / "whole")) == []


@pytest.mark.parametrize(("words", "key"), [((BF16,), "optimizer_state_dtype"), ((LION,), "training.optimizer")])
def test_another_state_is_refused(words: tuple[str, ...], key: str, yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path, "--steps", 1)
    said = mm("train", yaml, f"training.save={tmp_path}", *words)
    assert said.code == 4 and key in said.err


def begin_on_two(yaml: str, folder: str) -> None:
    for name, words in RESHARDED.items():
        with packing_tiny():
            train(yaml, Path(folder) / name, *words, *TWO_ROUNDS, "--steps", 2)
            dist.barrier()


RESHARDED = {"muon": (MUON,), "int8": (INT8, OFFLOAD, "training.train_iters=4")}


def test_two_ranks_then_one(yamls: tuple[tuple[str, str], ...], tmp_path: Path, packs_tiny: None) -> None:
    yaml = str(
        make_tiny_run(Path(dict(yamls)["vlm"]).parent, **DOUBLE | {"training": DOUBLE["training"] | {"train_iters": 4}})
    )
    run_ranks(2, begin_on_two, yaml, str(tmp_path))
    for name, words in RESHARDED.items():
        train(yaml, tmp_path / name, *words, *overrides(1, 1))
        train(yaml, tmp_path / f"{name} whole", *words, *overrides(1, 1))
        resumed, whole = losses(tmp_path / name), losses(tmp_path / f"{name} whole")
        assert resumed.keys() == whole.keys()
        assert all(abs(resumed[step] / whole[step] - 1) < 1e-6 for step in whole), name


# --- trained for longer ----------------------------------------------------------------------------------------------


def last_losses(yaml: Path, *words: str) -> float:
    """Mean loss of the last six of 30 steps: an epoch."""
    steps = train_steps(str(yaml), ["training.train_iters=30", "training.lr=3e-3", *words])
    return sum(float(step["loss"]) for step in steps[-6:]) / 6


def test_packed_states_train_as_well(yaml: Path, packs_tiny: None) -> None:
    """Within 1 % of the loss of fp32 states after 30 steps, where it has fallen by far more."""
    begin = float(train_steps(str(yaml), ["training.train_iters=1"])[0]["loss"])
    expected = last_losses(yaml)
    assert expected < 0.8 * begin
    for words in ((BF16,), (INT8,)):
        assert abs(last_losses(yaml, *words) / expected - 1) < 0.01, words
    assert last_losses(yaml, MUON) < 0.8 * begin


# --- a step that is refused, and what a step waits for ----------------------------------------------------------------


class Watch(Hook):
    """Copies of the optimizer's state after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []
        self.skipped: list[bool] = []

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        state = engine.optimizer.state
        self.states.append({f"{n} {k}": t.clone() for n, s in enumerate(state.values()) for k, t in s.items()})
        self.skipped.append(bool(result.skipped))


@pytest.mark.parametrize("words", [(SWAP,), (BF16,), (MUON,), (OFFLOAD,)], ids=" ".join)
def test_a_step_that_is_not_finite_leaves_the_state_alone(words: tuple[str, ...], yaml: Path) -> None:
    real, calls = TokenCrossEntropy.terms, iter(range(1, 100))

    def terms(self: Any, model: Any, batch: Any) -> Any:
        factor = math.nan if next(calls) == 2 else 1.0
        return {name: loss * factor for name, loss in real(self, model, batch).items()}

    watch = Watch()
    settings = ["training.on_nonfinite=skip", "training.train_iters=3", *words]
    with mock.patch.object(TokenCrossEntropy, "terms", terms):
        Quiet(load_with_plugins(yaml, settings), TrainOptions(), hooks=[watch]).train()
    before, after, later = watch.states
    assert watch.skipped == [False, True, False]
    assert before and all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(before[key], later[key]) for key in before)
    assert all(tensor.isfinite().all() for tensor in later.values() if tensor.is_floating_point())


class NoHostSync(TorchDispatchMode):
    """Raises when a tensor is read on the host, other than the numbers of steps, which live there."""

    def __init__(self, on_host: set[int]) -> None:
        super().__init__()
        self._on_host = on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func) and args[0].data_ptr() not in self._on_host:
            raise AssertionError("a tensor was read on the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("words", [(SWAP,), (BF16,), (INT8,), (MUON,), (OFFLOAD,), (SWAP, OFFLOAD)], ids=" ".join)
def test_the_update_waits_for_nothing(words: tuple[str, ...], yaml: Path, packs_tiny: None) -> None:
    real, updates = TrainEngine._update, []

    def update(engine: TrainEngine, norm: torch.Tensor) -> None:
        state = engine.optimizer.state.values()
        with NoHostSync({s["step"].data_ptr() for s in state if "step" in s}) if state else mock.MagicMock():
            real(engine, norm)
        updates.append(len(state))

    with mock.patch.object(TrainEngine, "_update", update):
        train_steps(str(yaml), ["training.train_iters=2", *words])
    assert len(updates) == 2 and all(updates)
