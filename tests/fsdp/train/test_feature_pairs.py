"""Every feature together with every other one: what they must not change is not changed, and what cannot be is refused
before the first step.

By default each feature runs once, in a handful of combinations; `-m slow` runs every pair, on one process and on two.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.feature_pairs import (
    CHANGING,
    NEUTRAL,
    OF_LANGUAGE,
    PLANS,
    SHORT,
    SHORT_TOLERANCE,
    TOLERANCE,
    conflicts,
    is_short,
    outcome,
    outcomes,
    pairs_of,
    words_of,
)
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_tiny_run

REFUSED: dict[tuple[str, str, str], str] = {
    (family, *pair): words
    for family in ("vlm", "wan")
    for pair, words in {
        # A re-entrant pass has no results of single operations to keep.
        ("selective", "reentrant"): "features.recompute_plan.use_reentrant",
        ("reentrant", "attention kept"): "features.recompute_plan.use_reentrant",
        # All is on the host already.
        ("gradient offload", "cpu_offload"): "parallel.fsdp_plan.cpu_offload",
        ("swap", "cpu_offload"): "parallel.fsdp_plan.cpu_offload",
    }.items()
}
"""(family, feature, feature) → words of the refusal."""

REFUSED_PLANS: dict[tuple[str, str], str] = {
    # A rank that has a part of a row cannot measure it.
    ("tp2", "dora"): "training.lora.use_dora",
}
"""(plan, feature) → words of the refusal."""

TOGETHER = (
    ("selective", "activation offload", "chunk loss", "swap", "gradient offload"),
    ("recompute", "compile", "dynamic chunk loss", "lora"),
    ("chunk_mbs", "activation offload", "chunk loss", "muon", "z-loss"),
    ("recompute", "attention kept", "zero-2", "pregather", "by sample", "memory profile"),
)
"""What the default run looks at."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("pairs"))


@cache
def yaml_of(root: str, family: str) -> str:
    folder = Path(root) / family.replace(" ", "_")
    if family == "wan":
        make_tiny_wan(folder / "model", task="t2v", num_layers=2)
        return str(make_tiny_generator_run(folder, "t2v", side=32, **FP64))
    if family == "vlm moe":
        make_tiny_qwen3_vl_moe(folder / "model", initializer_range=0.3)
    return str(make_tiny_run(folder, **FP64))


@cache
def expected(root: str, family: str, short: tuple[str, ...], *changing: str) -> Any:
    """One process with what changes the computation, and nothing else."""
    return outcome(yaml_of(root, family), overrides(1, 2, *words_of(family, changing, root), *short))


def check(root: str, family: str, names: tuple[str, ...], measured: Any) -> None:
    changing = tuple(name for name in names if name in CHANGING)
    assert not isinstance(measured, str), measured
    short = is_short(family, names)
    plain = expected(root, family, SHORT if short else (), *changing)
    compare_steps(plain, measured, SHORT_TOLERANCE if short else TOLERANCE)


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_several_at_once(root: str, names: tuple[str, ...]) -> None:
    check(root, "vlm", names, outcome(yaml_of(root, "vlm"), overrides(1, 2, *words_of("vlm", names, root))))


def test_a_fault_is_seen(root: str) -> None:
    """The comparison is not blind: a chunk of the loss that is lost."""
    from mindspeed_mm.fsdp.loss import objectives

    real = objectives.labelled_rows
    with mock.patch.object(objectives, "labelled_rows", lambda labels: real(labels)[1:]):
        measured = outcome(yaml_of(root, "vlm"), overrides(1, 2, *words_of("vlm", TOGETHER[0], root)))
    with pytest.raises(ParityError):
        check(root, "vlm", TOGETHER[0], measured)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pair"), [(family, pair) for family in ("vlm", "wan") for pair in pairs_of(family)])
def test_every_pair(root: str, family: str, pair: tuple[str, str]) -> None:
    measured = outcome(yaml_of(root, family), overrides(1, 2, *words_of(family, pair, root)))
    if words := conflicts(*pair, family, REFUSED):
        assert isinstance(measured, str), f"{pair} trains: it belongs to the pairs that must equal"
        assert words in measured
    else:
        check(root, family, pair, measured)


@cache
def on_ranks(root: str, plan: str) -> dict[str, Any]:
    """Every feature under a plan, on the first rank."""
    family = "vlm moe" if plan == "ep2" else "vlm"
    ranks, words = PLANS[plan]
    cases = {name: [*words, *words_of(family, (name,), root)] for name in NEUTRAL | CHANGING}
    return run_ranks(ranks, outcomes, yaml_of(root, family), cases, timeout_s=500)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "name"), [(plan, name) for plan in PLANS for name in NEUTRAL | CHANGING])
def test_every_feature_under_every_plan(root: str, plan: str, name: str) -> None:
    measured = on_ranks(root, plan)[name]
    if words := REFUSED_PLANS.get((plan, name)):
        assert isinstance(measured, str), f"{name} trains under {plan}: it belongs to those that must equal"
        assert words in measured
    else:
        check(root, "vlm moe" if plan == "ep2" else "vlm", (name,), measured)


@pytest.mark.slow
def test_generators_refuse_what_is_of_language(root: str) -> None:
    for name in sorted(OF_LANGUAGE - {"by sample"}):  # which is what flow matching does anyway
        measured = outcome(yaml_of(root, "wan"), overrides(1, 2, *words_of("wan", (name,), root)))
        assert isinstance(measured, str), f"{name} trains with a generator"
