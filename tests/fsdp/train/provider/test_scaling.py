"""A user's forward step gives the gradients that Megatron-Core gives, under every form of loss and every sharding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.train.provider.objective import PerTokenForwardBackward, ProviderObjective
from mindspeed_mm.fsdp.train.step.tally import Tally
from tests.fsdp.train.provider.user_run import FORMS, MICRO_BATCHES, ROWS, by_formula, data_provider, train
from tests.helpers.distributed import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "ZeRO-2": {"parallel": {"fsdp_plan": {"reshard_after_forward": False}}},
    "copies": {"parallel": {"fully_shard_parallel_size": 1}},
    "recompute": {"features": {"recompute": True, "recompute_plan": {"apply_modules": ["blocks.{*}"]}}},
}


def deviation(expected: dict[str, torch.Tensor], measured: dict[str, torch.Tensor]) -> float:
    assert expected.keys() == measured.keys()
    return max(float((expected[name] - measured[name]).abs().max()) for name in expected)


@contextmanager
def dropped_micro_batches() -> Iterator[None]:
    with mock.patch.object(ProviderObjective, "count", lambda self, _: {"loss": 1}):
        yield


@contextmanager
def dropped_ranks() -> Iterator[None]:
    with mock.patch.object(Tally, "summed_over", lambda self, *_: self):
        yield


@contextmanager
def own_tokens() -> Iterator[None]:
    real = PerTokenForwardBackward.__init__

    def without_groups(self: Any, inner: Any, model: Any, objective: Any, _groups: Any, *others: Any) -> None:
        real(self, inner, model, objective, (), *others)

    with mock.patch.object(PerTokenForwardBackward, "__init__", without_groups):
        yield


FAULTS = {
    "a dropped N": ("loss", dropped_micro_batches),
    "a dropped D": ("loss", dropped_ranks),
    "a rank's own tokens": ("per token", own_tokens),
}


def train_all(ranks: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Every case, and every fault, on this rank."""
    count = MICRO_BATCHES * ROWS * ranks
    provider = partial(data_provider, count)
    found = {f"{form}, {plan}": train(form, PLANS[plan], provider=provider) for form, plan in cases}
    for name, (form, planted) in FAULTS.items() if ranks == 2 else ():
        with planted():
            found[name] = train(form, {}, provider=provider)
    if ranks > 1:
        found["unsharded"] = train("loss", {}, provider=partial(data_provider, count, sharded=False))
        with pytest.raises(ConfigError) as caught:
            train("loss", {}, provider=partial(data_provider, count, sharded=False, loader=MyLoader))
        found["a class of one's own"] = str(caught.value)
    return found


class MyLoader(DataLoader[Any]):
    """A loader that may do more than torch's: nobody but its author can make it anew."""


def cases(ranks: int) -> list[tuple[str, str]]:
    sharded = [("loss and dict", plan) for plan in PLANS] + [("per token", "ZeRO-2"), ("per token", "copies")]
    return list(dict.fromkeys([(form, "ZeRO-3") for form in FORMS] + (sharded if ranks > 1 else [])))


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_formula(ranks: int) -> None:
    measured = run_ranks(ranks, train_all, ranks, cases(ranks))
    for form, plan in cases(ranks):
        for found in measured:
            assert deviation(by_formula(form, ranks), found[f"{form}, {plan}"]) < 1e-14, (form, plan)
    if ranks == 2:
        for name, (form, _) in FAULTS.items():
            assert deviation(by_formula(form, ranks), measured[0][name]) > 1e-4, name
    if ranks > 1:
        assert "every data rank reads the same rows" in measured[0]["a class of one's own"]
        for found in measured:
            assert deviation(by_formula("loss", ranks), found["unsharded"]) < 1e-14
