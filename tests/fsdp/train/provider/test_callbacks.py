"""The functions of a user are called with what they take, and what they return is read in every form."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.dataloader.order import Deal
from mindspeed_mm.fsdp.params.data_args import DataloaderParam
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks, read_loss
from mindspeed_mm.fsdp.train.provider.loader import as_batch, as_loader
from mindspeed_mm.fsdp.train.provider.objective import ProviderObjective, reduce_reports


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
    with pytest.raises(ConfigError, match="takes 'config', which is not given"):
        Callbacks(lambda config: nn.Linear(1, 1)).build_model()
    with pytest.raises(ConfigError, match="returned 'a model', not a module"):
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
        ("loss", "returned 'loss'"),
        ((torch.ones(()), torch.ones(())), "returned 2 values"),
        (torch.ones(()), "depends on no trained parameter"),
        (None, "returned NoneType"),
    ],
)
def test_what_is_no_loss(returned: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_loss(returned)


def loss_of_two(first: Any, second: Any) -> Any:
    return first + second


def no_loss() -> Any:
    return 1


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda it: 1, ["<lambda>  forward_step  takes (it)", "the data iterator and the model"]),
        (
            lambda it, m: (next(it), loss_of_two),
            ["loss_of_two  loss_func  takes (first", "the output that forward_step"],
        ),
        (lambda it, m: (next(it), no_loss), ["no_loss  loss_func  takes ()"]),
        (lambda it, m: next(it), ["forward_step  returned 1.0", "Return two values"]),
    ],
)
def test_functions_of_another_kind_are_named(step: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Callbacks(forward_step=step).run_forward(torch.ones(1), nn.Linear(1, 1))
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (({"a": "hello"},), ["reports 'hello' as 'a'", "one number, or a pair"]),
        (({"a": torch.ones(3)},), ["reports a tensor of shape (3,) as 'a'"]),
        (({"a": (1.0, "b")},), ["reports 2 values (float, str) as 'a'"]),
        ((torch.tensor([1, 2]), {}), ["returned a tensor of shape (2,) as the number of tokens"]),
        ((-5, {}), ["returned -5 as the number of tokens", "not below 0"]),
        (("many", {}), ["returned 'many' as the number of tokens"]),
        ((1, 2, {}), ["returned 4 values"]),
    ],
)
def test_wrong_reports_and_numbers_of_tokens(rest: tuple[Any, ...], words: list[str]) -> None:
    def mine(output: torch.Tensor) -> Any:
        return output.sum(), *rest

    def step(batches: Any, model: nn.Module) -> Any:
        return model(next(batches)), mine

    with pytest.raises(ConfigError) as raised:
        Callbacks(forward_step=step).run_forward(torch.ones(1), nn.Linear(1, 1))
    assert all(word in str(raised.value) for word in (*words, "mine  loss_func")), str(raised.value)


@pytest.mark.edge("BN10")
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_report_of_two_numbers_is_a_pair(kind: Any, shape: tuple[int, ...]) -> None:
    """As `loss_func` of Megatron-LM's pretrain_gpt.py has returned it since 0.13: a sum and the tokens that it is over.
    Over micro-batches of 6 and 2 tokens the mean is (12 + 1) / 8, not the mean of 2 and 0.5."""
    reports = []
    for total, tokens in ((12.0, 6.0), (1.0, 2.0)):
        read = read_loss((torch.ones(1, requires_grad=True), 3, {"lm loss": kind([total, tokens]).reshape(shape)}))
        reports.append(read.report)
    total, tokens = reduce_reports(reports)["lm loss"].tolist()
    assert total / tokens == 13 / 8


class Own(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)


class OwnOfStages(nn.Module):
    def __init__(self, pre_process: bool = False) -> None:
        super().__init__()
        self.first = pre_process


class OwnWithoutInit(nn.Module):
    pass


def test_a_class_is_a_model_provider() -> None:
    assert isinstance(Callbacks(Own).build_model(), Own)
    assert isinstance(Callbacks(OwnWithoutInit).build_model(), OwnWithoutInit)
    assert Callbacks(OwnOfStages).build_model().first is True


def test_data_that_are_none_of_these() -> None:
    for given, shown in (("train.json", "'train.json'"), ({"a": 1}, "dict"), (3, "int")):
        with pytest.raises(ConfigError, match=f"returned {shown}. Return a DataLoader"):
            as_loader(given, Deal(1, 1, 0, 1), DataloaderParam(num_workers=0))


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
