"""The functions of a user are called with what they take, and what they return is read in every form."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks, read_loss
from mindspeed_mm.fsdp.train.provider.loader import as_batch
from mindspeed_mm.fsdp.train.provider.objective import ProviderObjective


def provider_without(*, made: list[Any]) -> nn.Module:
    made.append(())
    return nn.Linear(1, 1)


def provider_of_stages(pre_process: bool = True, post_process: bool = False, *, made: list[Any]) -> nn.Module:
    made.append((pre_process, post_process))
    return nn.Linear(1, 1)


def provider_of_modules(pre_process: Any, post_process: Any, modules: Any = None, *, made: list[Any]) -> nn.Module:
    made.append((pre_process, post_process, modules))
    return nn.Linear(1, 1)


def provider_of_anything(*args: Any, made: list[Any], **kwargs: Any) -> nn.Module:
    made.append((args, kwargs))
    return nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        (provider_without, ()),
        (provider_of_stages, (True, True)),
        (provider_of_modules, (True, True, None)),
        (provider_of_anything, ((), {"pre_process": True, "post_process": True})),
    ],
)
def test_model_provider_gets_what_it_takes(provider: Any, expected: Any) -> None:
    made: list[Any] = []
    assert isinstance(Callbacks(partial(provider, made=made)).build_model(), nn.Linear)
    assert made == [expected]


def test_model_provider_that_asks_for_more() -> None:
    with pytest.raises(ConfigError, match="takes 'config', which nobody gives"):
        Callbacks(lambda config: nn.Linear(1, 1)).build_model()
    with pytest.raises(ConfigError, match="returned str, not a module"):
        Callbacks(lambda: "a model").build_model()  # type: ignore[arg-type, return-value]


def test_data_provider() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(3)))
    asked: list[Any] = []

    def with_numbers(numbers: list[int]) -> Any:
        asked.append(numbers)
        return loader, None

    def build(provider: Any) -> Any:
        return Callbacks(data_provider=provider).build_data([8, 4, 2])

    assert build(with_numbers) == (loader, None, None)
    assert asked == [[8, 4, 2]]
    assert build(lambda: loader) == (loader, None, None)
    assert build(lambda *a, **k: [loader, loader, loader]) == (loader, loader, loader)
    samples = [torch.zeros(1), torch.ones(1)]
    assert build(lambda: samples) == (samples, None, None)
    with pytest.raises(ConfigError, match="returned 4 values"):
        build(lambda: (1, 2, 3, 4))
    with pytest.raises(ConfigError, match="returned no training data"):
        build(lambda: (None, loader))
    with pytest.raises(ConfigError, match="takes 'more'"):
        build(lambda numbers, more: loader)


def test_forms_of_losses() -> None:
    loss = torch.ones((), requires_grad=True)
    assert read_loss(loss).tokens is None
    assert read_loss((loss, {"lm loss": 1.0})).report == {"lm loss": 1.0}
    three = read_loss((loss.reshape(1), torch.tensor([7]), {}))
    assert three.tokens == 7
    assert three.loss.shape == ()
    assert read_loss((loss, 7, {})).tokens == 7


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(8, 16, requires_grad=True), r"returned shape \(8, 16\)"),
        ("loss", "returned str"),
        ((torch.ones(()), torch.ones(())), "returned 2 values"),
        (torch.ones(()), "depends on no trained parameter"),
        (None, "returned NoneType"),
    ],
)
def test_what_is_no_loss(returned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_loss(returned)


def test_stages_need_token_ids() -> None:
    objective = ProviderObjective(Callbacks(), needs_ids=True)
    good = as_batch({"input_ids": torch.zeros(2, 3)}, 0, 2)
    assert objective.prepare(good) is good
    for given in ((torch.zeros(2, 3),), {"x": torch.zeros(2, 3)}):
        with pytest.raises(ConfigError, match="yields batches without 'input_ids'"):
            objective.prepare(as_batch(given, 0, 2))


def test_forward_step_returns_two_values_and_takes_one_batch() -> None:
    model = nn.Linear(1, 1)

    def run(step: Any) -> Any:
        return Callbacks(forward_step=step).run_forward(torch.ones(1), model)

    assert run(lambda batches, m: (m(next(batches)), torch.sum)).loss.ndim == 0
    with pytest.raises(ConfigError, match=r"forward_step.*returned 2 values \(Tensor, Tensor\)"):
        run(lambda batches, m: (m(next(batches)), torch.ones(1)))
    with pytest.raises(ConfigError, match="took a second batch"):
        run(lambda batches, m: (m(next(batches) + next(batches)), torch.sum))
