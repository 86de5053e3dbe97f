"""The matrix of families × parallel plans: what each cell runs, how cells are run together, and what they are held to.

A family is a tiny model with rows of its own; a plan is a number of ranks with overrides of the configuration. Every
cell goes through the real trainer in fp64 and must equal one process. A cell that cannot be has an entry in `REFUSED`,
and the trainer must refuse it: there are no holes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import tiny_models
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.planned_steps import GLOBAL_BATCH, train_steps
from tests.helpers.schedules import ZBV, is_possible
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_omni import make_tiny_omni_run
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-9
BATCH_LIMIT_S, CASE_LIMIT_S = 1500.0, 600.0

FP64 = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}
LAYERS = {"num_hidden_layers": 4}
"""Enough for two stages of two chunks."""
ROUTED = LAYERS | {"initializer_range": 0.3}
"""Weights large enough that routers decide clearly."""
DECODER = '"*.layers.{*}.input_layernorm", "*.layers.{*}.post_attention_layernorm"'
TOWER = '"*.visual.blocks.{*}.norm1", "*.visual.blocks.{*}.norm2"'


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Args:
        make: Writes model, rows and YAML into a folder; returns the YAML.
        sequence: Patterns of modules that sequence parallelism works on.
    """

    make: Callable[[Path], Path]
    sequence: str


@dataclass(frozen=True)
class Plan:
    """One way to spread a run.

    Args:
        ranks: Processes.
        data_ranks: Of those, how many read rows of their own.
        accumulation: Micro-batches of a step on each.
        words: Overrides.
        sequence: Sequence parallelism on top, of the family's modules.
    """

    ranks: int
    data_ranks: int
    accumulation: int
    words: tuple[str, ...] = ()
    sequence: bool = False


TP, PP, EP, RING, ULYSSES = (
    f"parallel.{key}=2"
    for key in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "expert_parallel_size",
        "ring_attention_size",
        "ulysses_parallel_size",
    )
)
HYBRID = "parallel.fully_shard_parallel_size=2"
GPIPE, ONE_F_ONE_B = (f"parallel.pp_plan.schedule={name}" for name in ("gpipe", "1f1b"))
INTERLEAVED = ("parallel.pp_plan.schedule=interleaved1f1b", "parallel.pp_plan.virtual_stages=2")

PLANS = {
    "fsdp2": Plan(2, 2, 2),
    "tp2": Plan(2, 1, 2, (TP,)),
    "tp2 × sp": Plan(2, 1, 2, (TP,), sequence=True),
    "pp2 gpipe": Plan(2, 1, 4, (PP, GPIPE)),
    "pp2 1f1b": Plan(2, 1, 4, (PP, ONE_F_ONE_B)),
    "pp2 × vpp2 interleaved1f1b": Plan(2, 1, 4, (PP, *INTERLEAVED)),
    "pp2 zbv": Plan(2, 1, 4, (PP, ZBV)),
    "ulysses2": Plan(2, 1, 2, (ULYSSES,)),
    "ring2": Plan(2, 1, 2, (RING,)),
    "ep2": Plan(2, 2, 2, (EP,)),
    "hsdp2×2": Plan(4, 4, 1, (HYBRID,)),
    "ulysses2 × ring2": Plan(4, 1, 2, (ULYSSES, RING)),
    "ep2 × efsdp2": Plan(4, 4, 1, (EP,)),
    "fsdp2 × tp2": Plan(4, 2, 2, (TP,)),
    "fsdp2 × ulysses2": Plan(4, 2, 1, (ULYSSES,)),
    "fsdp2 × ring2": Plan(4, 2, 2, (RING,)),
    "fsdp2 × ep2, copies": Plan(4, 4, 1, (EP, HYBRID)),
    "pp2 × fsdp2": Plan(4, 2, 2, (PP, ONE_F_ONE_B)),
    "pp2 × ep2": Plan(4, 2, 2, (PP, EP, ONE_F_ONE_B)),
    "pp2 × vpp2 × ep2": Plan(4, 2, 2, (PP, EP, *INTERLEAVED)),
    "pp2 zbv × ep2": Plan(4, 2, 2, (PP, EP, ZBV)),
    "pp2 × ep2 × efsdp2": Plan(8, 4, 2, (PP, EP, GPIPE)),
    "pp2 × tp2 × fsdp2": Plan(8, 2, 2, (PP, TP, ONE_F_ONE_B)),
}
"""`pp2 × vpp2` and the schedule interleaved1f1b are one cell: neither is without the other."""


def _text(folder: Path) -> Path:
    tiny_models.make_tiny_qwen3(folder / "model", **LAYERS)
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, **FP64)


def _text_moe(folder: Path) -> Path:
    tiny_models.make_tiny_qwen3_moe(folder / "model", **ROUTED)
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, **FP64)


def _vlm(folder: Path) -> Path:
    with mock.patch.dict(tiny_models._VISION, {"deepstack_visual_indexes": [0, 1]}):
        tiny_models.make_tiny_qwen3_vl(folder / "model", **LAYERS)
    return make_tiny_run(folder, **FP64)


def _vlm_moe(folder: Path) -> Path:
    tiny_models.make_tiny_qwen3_vl_moe(folder / "model", **ROUTED)
    return make_tiny_run(folder, **FP64)


def _omni(folder: Path) -> Path:
    return make_tiny_omni_run(folder, LAYERS, **FP64)


def _flux(folder: Path) -> Path:
    make_tiny_flux(folder / "model", num_layers=2, num_single_layers=2)
    return make_tiny_generator_run(folder, "flux", **FP64)


def _wan(folder: Path) -> Path:
    make_tiny_wan(folder / "model", task="t2v", num_layers=4)
    return make_tiny_generator_run(folder, "t2v", side=32, **FP64)


FAMILIES = {
    "text": Family(_text, DECODER),
    "text moe": Family(_text_moe, DECODER),
    "vlm": Family(_vlm, f"{DECODER}, {TOWER}"),
    "vlm moe": Family(_vlm_moe, f"{DECODER}, {TOWER}"),
    "omni": Family(_omni, DECODER),
    "flux": Family(_flux, '"transformer_blocks.{*}"'),
    "wan": Family(_wan, '"blocks.{*}"'),
}

REFUSED: dict[tuple[str, str], str] = {
    # Only models with experts have any to spread.
    **{(f, p): "expert_parallel_size" for f in FAMILIES for p in PLANS if EP in PLANS[p].words and "moe" not in f},
    # Routers keep statistics of the tokens they see: of a slice they would be one rank's.
    **{(family, "tp2 × sp"): "router's statistics" for family in ("text moe", "vlm moe")},
    # Its blocks take text and picture side by side, which are one sequence in attention only.
    ("flux", "tp2 × sp"): "sequence_parallel",
    # Older releases of torch compute some gradients of this schedule wrong.
    **{(f, p): "'zbv' needs torch" for f in FAMILIES for p in PLANS if not is_possible(PLANS[p].words)},
}
"""(family, plan) → words of the refusal."""

FAULTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("text", "fsdp2"): (
        "averaged-gradients", "wrong-divisor", "averaged-micro-batches", "local-clip-norm", "labels-off-by-one",
    ),
    ("text", "hsdp2×2"): ("dropped-all-reduce",),
    ("text", "tp2"): ("missing-norm-sum", "dropped-tensor-sum", "local-clip-norm"),
    ("text", "tp2 × sp"): ("missing-norm-sum",),
    ("text", "ring2"): ("lost-border-token",),
    ("text", "ulysses2 × ring2"): ("lost-border-token",),
    ("text", "pp2 1f1b"): ("stage-norm",),
    ("text", "pp2 × fsdp2"): ("stage-norm", "wrong-divisor"),
    ("text moe", "ep2"): ("doubled-expert-gradient", "local-clip-norm"),
    ("text moe", "ep2 × efsdp2"): ("doubled-expert-gradient", "averaged-gradients"),
    ("text moe", "fsdp2 × ep2, copies"): ("dropped-all-reduce",),
    ("text moe", "pp2 × ep2"): ("doubled-expert-gradient", "stage-norm"),
    ("vlm", "hsdp2×2"): ("dropped-all-reduce",),
    ("vlm", "tp2 × sp"): ("missing-norm-sum",),
    ("vlm", "fsdp2 × ring2"): ("lost-border-token", "wrong-divisor"),
    ("vlm", "pp2 zbv"): ("stage-norm",),
    ("vlm moe", "ep2"): ("doubled-expert-gradient",),
    ("vlm moe", "pp2 × ep2"): ("wrong-divisor",),
    ("omni", "fsdp2"): ("averaged-gradients", "wrong-divisor"),
    ("omni", "ulysses2"): ("lost-border-token",),
    ("flux", "hsdp2×2"): ("dropped-all-reduce",),
    ("flux", "ring2"): ("lost-border-token",),
    ("flux", "pp2 1f1b"): ("stage-norm",),
    ("wan", "ulysses2"): ("lost-border-token",),
    ("wan", "fsdp2 × tp2"): ("averaged-gradients",),
    ("wan", "pp2 1f1b"): ("stage-norm",),
}  # fmt: skip
"""(family, plan) → faults of `mm verify --inject` that must be found there."""


# --- what is tested ---------------------------------------------------------------------------------------------------


def cells(*families: str) -> list[tuple[str, str]]:
    """Every (family, plan) that must equal one process."""
    return [(family, plan) for family in families for plan in PLANS if (family, plan) not in REFUSED]


def refusals(*families: str) -> list[tuple[str, str]]:
    """Every (family, plan) that must be refused."""
    return [cell for cell in REFUSED if cell[0] in families]


def faults(*families: str) -> list[tuple[str, str, str]]:
    """Every (family, plan, fault) that must be found."""
    cells_of = {cell: found for cell, found in FAULTS.items() if cell[0] in families and cell not in REFUSED}
    return [(*cell, fault) for cell, found in cells_of.items() for fault in found]


def check_cell(root: str, family: str, plan: str) -> None:
    """The cell equals one process, on every rank."""
    expected = _outcome(root, family, 1, "one process")[0]["steps"]
    for measured in _outcome(root, family, PLANS[plan].ranks, plan):
        compare_steps(expected, _steps_of(measured), TOLERANCE)


def check_refusal(root: str, family: str, plan: str) -> None:
    """The cell ends in an error that names what does not fit, on every rank."""
    for measured in _outcome(root, family, PLANS[plan].ranks, plan):
        assert "refused" in measured, f"{family} trains under {plan}: the cell belongs to those that equal one process"
        assert REFUSED[family, plan] in measured["refused"]


def check_fault(root: str, family: str, plan: str, fault: str) -> None:
    """With the fault planted, the same comparison fails."""
    expected = _outcome(root, family, 1, "one process")[0]["steps"]
    measured = _outcome(root, family, PLANS[plan].ranks, f"{plan}: {fault}")[0]
    with pytest.raises(ParityError):
        compare_steps(expected, _steps_of(measured), TOLERANCE)


def _steps_of(measured: dict[str, Any]) -> Any:
    assert "steps" in measured, measured["refused"]
    return measured["steps"]


# --- running them -----------------------------------------------------------------------------------------------------


@cache
def yaml_of(root: str, family: str) -> str:
    """A family's run, made once in a folder below `root`."""
    folder = Path(root) / family.replace(" ", "_")
    folder.mkdir(parents=True)
    return str(FAMILIES[family].make(folder))


def _outcome(root: str, family: str, ranks: int, case: str) -> list[dict[str, Any]]:
    """What a case gave, by rank.

    Raises:
        RanksFailed: It ended in an error or not at all.
    """
    yaml = yaml_of(root, family)
    try:
        return [found[case] for found in _all_cases(yaml, family, ranks)]
    except RanksFailed:  # one case took the others with it: each by itself
        return [found[case] for found in _one_case(yaml, family, ranks, case)]


@cache
def _all_cases(yaml: str, family: str, ranks: int) -> list[dict[str, Any]]:
    """Every case of a family that takes this many ranks, by rank, in one start of the processes."""
    key = yaml, ranks
    if key in _FAILED:
        raise _FAILED[key]
    try:
        return run_ranks(ranks, run_cases, yaml, family, _cases(family, ranks), timeout_s=BATCH_LIMIT_S)
    except RanksFailed as error:
        _FAILED[key] = error
        raise


_FAILED: dict[tuple[str, int], RanksFailed] = {}
"""Batches that did not come back; the cache keeps results only."""


@cache
def _one_case(yaml: str, family: str, ranks: int, case: str) -> list[dict[str, Any]]:
    return run_ranks(ranks, run_cases, yaml, family, [case], timeout_s=CASE_LIMIT_S)


def _cases(family: str, ranks: int) -> list[str]:
    if ranks == 1:
        return ["one process"]
    plans = [name for name, plan in PLANS.items() if plan.ranks == ranks]
    return plans + [f"{plan}: {fault}" for _, plan, fault in faults(family) if plan in plans]


def run_cases(yaml: str, family: str, cases: list[str]) -> dict[str, dict[str, Any]]:
    """On each rank: case → its recorded steps, or the words of its refusal."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        name, _, fault = case.partition(": ")
        plan = PLANS.get(name, Plan(1, 1, 1))
        try:
            with keeping_double():
                found[case] = {"steps": train_steps(yaml, words_of(family, plan), fault or None)}
        except (ConfigError, MachineError) as error:  # raised on all ranks alike
            found[case] = {"refused": str(error)}
    return found


def words_of(family: str, plan: Plan) -> list[str]:
    """The overrides of a cell."""
    micro = GLOBAL_BATCH // plan.data_ranks // plan.accumulation
    sizes = [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={plan.accumulation}"]
    sequence = [f"parallel.tp_plan.sequence_parallel=[{FAMILIES[family].sequence}]"] if plan.sequence else []
    return [*sizes, *plan.words, *sequence]
