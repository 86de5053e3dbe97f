"""Models that derive from `FSDP2Mixin` train as those that do not, whether they shard themselves or the engine does."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.distributed.pipeline.apply import check_composition
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import own_sharding
from mindspeed_mm.fsdp.distributed.towers.groups import check_tower_sums
from mindspeed_mm.fsdp.models.loading.initialization import initialize
from mindspeed_mm.fsdp.models.loading.meta_device import materialize
from mindspeed_mm.fsdp.ops.forward_stack import describe_forwards
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.trainer import ProviderTrainer
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, get_submodules_by_path
from tests.fsdp.train.provider.user_run import (
    MICRO_BATCHES,
    ROWS,
    PlainModel,
    by_formula,
    configuration,
    data_provider,
    forward_step,
    loss_func,
)
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_more_families import MORE
from tests.models.document_002 import CustomModel, YourModel, build, units

RECOMPUTE = {"features": {"recompute": True, "recompute_plan": {"apply_modules": ["blocks.{*}"]}}}
LLAVA = MORE["llava"]
PREFETCH = {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}


def train(model_class: type[nn.Module]) -> dict[str, Any]:
    recorder = StepRecorder()
    provider = partial(data_provider, MICRO_BATCHES * ROWS * 2)
    config = configuration(parallel={"fsdp_plan": PREFETCH}, **RECOMPUTE)
    callbacks = Callbacks(partial(build, model_class), provider, partial(forward_step, "loss"))
    engine = ProviderTrainer(config, callbacks, hooks=[recorder]).train()
    assert engine is not None
    step = recorder.steps[0]
    return {
        "units": units(engine.model),
        "forwards": describe_forwards(engine.model),
        "step": {"loss": step["loss"], **step["gradients"]},
    }


def of_each_rank() -> nn.Module:
    torch.manual_seed(torch.distributed.get_rank())
    return PlainModel().double()


def train_all() -> dict[str, Any]:
    found = {model.__name__: train(model) for model in (CustomModel, YourModel)}
    callbacks = Callbacks(of_each_rank, partial(data_provider, 8), partial(forward_step, "loss"))
    with pytest.raises(MachineError) as caught:
        ProviderTrainer(configuration(), callbacks).train()
    return found | {"differ": str(caught.value)}


def test_gradients_and_units() -> None:
    expected = by_formula("loss", 2)
    for found in run_ranks(2, train_all):
        for name in ("CustomModel", "YourModel"):
            assert found[name]["units"] == ["", "blocks.0", "blocks.1"]
            assert "2 Linear (recompute)" in found[name]["forwards"]
            deviations = [float((expected[key] - value).abs().max()) for key, value in found[name]["step"].items()]
            assert max(deviations) < 1e-14
        assert "have built different models: 'blocks.0.weight' and 5 more" in found["differ"]


def test_who_shards() -> None:
    custom, own = CustomModel({}), YourModel({})
    assert own_sharding(custom) is None
    assert own_sharding(own) is not None
    assert own_sharding(nn.Linear(1, 1)) is None
    check_composition(custom, ParallelArguments())
    with pytest.raises(ConfigError, match="YourModel shards itself"):
        check_composition(own, ParallelArguments())
    check_tower_sums(custom, ["blocks"], ())
    with pytest.raises(ConfigError, match="YourModel shards itself: nothing would sum"):
        check_tower_sums(own, ["blocks"], ())


def test_functions_without_a_model_at_hand() -> None:
    assert [type(m) for m in get_submodules_by_path(CustomModel({}), ["blocks.{0}"])] == [nn.Linear]
    with pytest.raises(ConfigError, match="no model is being sharded"):
        get_submodules_by_path(None, ["blocks.{*}"])


class PicturesAndWords(torch.utils.data.Dataset[Any]):
    """Rows of 16 tokens that stand for a picture, and some of text."""

    def __len__(self) -> int:
        return MICRO_BATCHES * ROWS * 2

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        marks, tensors = LLAVA.media["image"](draw)
        words = torch.randint(20, 200, (9,), generator=draw)
        return {"input_ids": torch.cat([torch.tensor(marks), words]), "pixel_values": tensors["pixel_values"][0]}


def next_word(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    logits = model(**batch).logits[:, :-1]
    words = batch["input_ids"][:, 1:]
    return logits, lambda given: nn.functional.cross_entropy(given.flatten(0, 1), words.flatten())


def library_model(own_strategy: bool) -> nn.Module:
    """A class of transformers whose tower is asked for the output of every layer."""
    from transformers import LlavaForConditionalGeneration

    sharding = {"_fully_shard": YourModel._fully_shard} if own_strategy else {}
    model_class = type("Seeing", (LlavaForConditionalGeneration, FSDP2Mixin), sharding)
    torch.manual_seed(0)
    model: nn.Module = model_class._from_config(LLAVA.config(), dtype=torch.float64)  # type: ignore[attr-defined]
    return model


def train_seeing() -> list[dict[str, Any]]:
    wrapped = ["model.vision_tower", "model.language_model.layers.{*}"]
    found = []
    for own_strategy in (False, True):
        recorder = StepRecorder()
        plan = {"fsdp_plan": {"apply_modules": wrapped}}
        config = configuration(parallel=plan, data={"dataloader_param": {"num_workers": 0}})
        callbacks = Callbacks(partial(library_model, own_strategy), PicturesAndWords, next_word)
        engine = ProviderTrainer(config, callbacks, hooks=[recorder]).train()
        assert engine is not None and "model.vision_tower" in units(engine.model)
        found.append({"loss": recorder.steps[0]["loss"], **recorder.steps[0]["gradients"]})
    return found


class Told(CustomModel):
    """Returns an object that torch's pytree does not look into."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(values=super().forward(x), name="told")


class ToldAndSharded(Told, YourModel):
    """The same, with a strategy of its own."""


def by_attribute(data_iterator: Any, model: nn.Module) -> Any:
    x, y, mask = next(data_iterator)
    told = model(x)
    assert told.name == "told"
    return told.values, partial(loss_func, "loss", y, mask)


def train_told() -> list[dict[str, Any]]:
    found = []
    for model_class in (Told, ToldAndSharded):
        recorder = StepRecorder()
        provider = partial(data_provider, MICRO_BATCHES * ROWS * 2)
        callbacks = Callbacks(partial(build, model_class), provider, by_attribute)
        ProviderTrainer(configuration(), callbacks, hooks=[recorder]).train()
        found.append({"loss": recorder.steps[0]["loss"], **recorder.steps[0]["gradients"]})
    return found


def test_an_output_stays_what_it_is() -> None:
    expected = by_formula("loss", 2)
    for found in run_ranks(2, train_told):
        for step in found:
            assert max(float((expected[name] - value).abs().max()) for name, value in step.items()) < 1e-14


def test_a_library_s_tower_gives_its_hidden_states() -> None:
    for by_engine, by_itself in run_ranks(2, train_seeing):
        assert by_engine.keys() == by_itself.keys()
        assert any(
            "vision_tower" in name and value is not None and bool(value.any()) for name, value in by_itself.items()
        )
        for name, value in by_engine.items():  # the tower's last norm is not trained on
            other = by_itself[name]
            assert value is other is None or float((value - other).abs().max()) < 1e-14, name


class Mixed(CustomModel):
    def __init__(self) -> None:
        super().__init__({})
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.table = nn.Parameter(torch.ones(64, 64))


@pytest.mark.parametrize("by_engine", [False, True])
def test_weights_from_scratch(by_engine: bool) -> None:
    torch.manual_seed(0)
    model = Mixed()
    if by_engine:
        model.to("meta")
        materialize(model, torch.device("cpu"))
        initialize(model, seed=3, units=["blocks.0"])
    else:
        model.init_weights()
    assert bool((model.norm.weight == 1).all()) and bool((model.norm.bias == 0).all())
    assert bool((model.scale == 0).all()) and bool((model.out.bias == 0).all())
    assert float(model.table.std()) == pytest.approx(0.02, rel=0.05)
    assert 0.01 < float(model.blocks[0].weight.std()) < 0.03


def test_module_reaches_the_model() -> None:
    model = CustomModel({"a": 1})
    assert model.module.module is model
    assert list(model.state_dict()) == list(PlainModel().state_dict())
    model.set_input_tensor([torch.ones(1)])
    assert model.input_tensor is not None and model.config == {"a": 1}
