"""Every feature together with every other one: what they must not change is not changed, and what cannot be is refused
before the first step.

By default each feature runs once, in a handful of combinations; `-m slow` runs a set of configurations in which every
pair of features occurs, on one process and on two. One that fails is narrowed down to the feature or the pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mindspeed_mm.fsdp.features.memory.chunk_mbs import SlicedForward
from mindspeed_mm.fsdp.train import trainer as trainers
from mindspeed_mm.tasks.check import check as check_task
from tests.helpers.covering import pairs_in, smallest_failing
from tests.helpers.distributed import run_ranks
from tests.helpers.feature_pairs import (
    CHANGING,
    FEATURES,
    OF_LANGUAGE,
    PLANS,
    REFUSED,
    SHORT,
    SHORT_TOLERANCE,
    TOLERANCE,
    configurations,
    features_of,
    is_short,
    may_meet,
    outcome,
    shows,
    words_of,
)
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_tiny_run

TOGETHER = (
    ("selective", "activation offload", "chunk loss", "swap", "gradient offload"),
    ("recompute", "compile", "dynamic chunk loss", "lora"),
    ("chunk_mbs", "activation offload", "chunk loss", "muon", "z-loss"),
    ("recompute", "attention kept", "zero-2", "pregather", "by sample", "memory profile"),
)
"""What is tried at once before every pair is."""

ALL = [(family, names) for family in ("vlm", "wan") for names in configurations(family)]


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


def measured(root: str, family: str, names: tuple[str, ...]) -> Any:
    """The recorded steps of a configuration, under the plan that it names."""
    ranks, words = PLANS[names[0]] if names[0] in PLANS else (1, overrides(1, 2))
    family, features = _model_of(family, names)
    told = [*words, *words_of(family, features, root)]
    if ranks == 1:
        return outcome(yaml_of(root, family), told)
    return run_ranks(ranks, outcome, yaml_of(root, family), told)[0]


def check(root: str, family: str, names: tuple[str, ...]) -> None:
    """A configuration equals one process without what must not change anything."""
    found = measured(root, family, names)
    assert not isinstance(found, str), found
    family, features = _model_of(family, names)
    short = is_short(family, features)
    plain = expected(root, family, SHORT if short else (), *(name for name in features if name in CHANGING))
    compare_steps(plain, found, SHORT_TOLERANCE if short else TOLERANCE)


def check_and_narrow(root: str, family: str, names: tuple[str, ...]) -> None:
    """`check`; what fails is said with the fewest features that make it fail."""
    try:
        check(root, family, names)
    except AssertionError as error:
        least = smallest_failing(names, lambda part: _fails(root, family, part))
        raise AssertionError(f"{family}: {' + '.join(least)} (of {' + '.join(names)})\n{error}") from error


def _model_of(family: str, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The family that is trained, which needs experts where they are spread, and the features without the plan."""
    return f"{family} moe" if "ep2" in names else family, tuple(name for name in names if name not in PLANS)


def _fails(root: str, family: str, names: tuple[str, ...]) -> bool:
    try:
        check(root, family, names)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "names",
    [names if "compile" not in names else pytest.param(names, marks=pytest.mark.slow) for names in TOGETHER],
    ids=" + ".join,
)
def test_several_at_once(root: str, names: tuple[str, ...]) -> None:
    check(root, "vlm", names)


def test_a_fault_is_seen(root: str) -> None:
    """The comparison is not blind: a chunk of the loss that is lost."""
    from mindspeed_mm.fsdp.loss import objectives

    real = objectives.labelled_rows
    plain = expected(root, "vlm", ())
    with mock.patch.object(objectives, "labelled_rows", lambda labels: real(labels)[1:]):
        found = measured(root, "vlm", TOGETHER[0])
    with pytest.raises(ParityError):
        compare_steps(plain, found, TOLERANCE)


@pytest.mark.parametrize("family", ["vlm", "wan"])
def test_every_pair_is_in_a_configuration_or_refused(family: str) -> None:
    assert all(may_meet(*pair) for names in configurations(family) for pair in pairs_in(names))
    seen = {pair for names in configurations(family) for pair in pairs_in(names) if shows(family, names, pair)}
    plans = PLANS if family == "vlm" else {}
    assert seen == {pair for pair in pairs_in([*plans, *features_of(family)]) if may_meet(*pair)}


@contextmanager
def fault_of_two() -> Iterator[None]:
    """Slices of rows come out wrong, by a millionth, where moments are on the host."""
    real_build, real_call, swaps = trainers.build_optimizer, SlicedForward.__call__, [False]

    def build(model: Any, training: Any, *args: Any, **kwargs: Any) -> Any:
        swaps[0] = training.optimizer == "adamw_swap"
        return real_build(model, training, *args, **kwargs)

    def call(self: SlicedForward, *args: Any, **kwargs: Any) -> Any:
        return real_call(self, *args, **kwargs) * (1 + 1e-6 * swaps[0])

    with mock.patch.object(trainers, "build_optimizer", build), mock.patch.object(SlicedForward, "__call__", call):
        yield


@pytest.mark.slow
def test_a_fault_of_two_features_is_seen_and_named(root: str) -> None:
    together = [names for names in configurations("vlm") if {"chunk_mbs", "swap"} <= set(names)]
    names = tuple(name for name in together[0] if name not in PLANS)  # the fault is planted in this process
    with (
        fault_of_two(),
        pytest.raises(AssertionError, match=r"^vlm: chunk_mbs \+ swap \(of (.|\n)*deviate by more than"),
    ):
        check_and_narrow(root, "vlm", names)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "names"), ALL, ids=[f"{family}: {' + '.join(names)}" for family, names in ALL])
def test_every_pair(root: str, family: str, names: tuple[str, ...]) -> None:
    check_and_narrow(root, family, names)


@pytest.mark.parametrize("family", ["vlm", "wan"])
def test_what_cannot_be_together_is_refused(root: str, family: str) -> None:
    for pair, key in REFUSED.items():
        if not pair <= {*features_of(family), *(PLANS if family == "vlm" else ())}:
            continue
        plan = next((name for name in PLANS if name in pair), None)
        ranks, words = PLANS[plan] if plan else (1, overrides(1, 2))
        features = tuple(name for name in FEATURES if name in pair)
        found = check_task.run(Path(yaml_of(root, family)), [*words, *words_of(family, features, root)], nproc=ranks)
        assert any(key in str(problem) for problem in found.problems), f"{set(pair)} trains"


def test_generators_refuse_what_is_of_language(root: str) -> None:
    for name in sorted(OF_LANGUAGE - {"by sample"}):  # which is what flow matching does anyway
        found = check_task.run(Path(yaml_of(root, "wan")), [*overrides(1, 2), *words_of("wan", (name,), root)])
        assert found.problems, f"{name} trains with a generator"
