"""Models that derive from `FSDP2Mixin` train as those that do not, whether they shard themselves or the engine does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.distributed.sharding.own import check_own_sharding, own_sharding
from mindspeed_mm.fsdp.models.loading.initialization import initialize
from mindspeed_mm.fsdp.models.loading.materialize import materialize
from mindspeed_mm.fsdp.ops.forward_stack import describe_forwards
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.trainer import ProviderTrainer
from mindspeed_mm.models.transformers.base_model import get_submodules_by_path
from tests.fsdp.train.provider.user_run import (
    MICRO_BATCHES,
    ROWS,
    PlainModel,
    by_formula,
    configuration,
    data_provider,
    forward_step,
)
from tests.helpers.distributed import run_ranks
from tests.models.document_002 import CustomModel, YourModel, build, units

RECOMPUTE = {"features": {"recompute": True, "recompute_plan": {"apply_modules": ["blocks.{*}"]}}}
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
    for found in run_ranks(2, train_all, timeout_s=120):
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
    check_own_sharding(custom)
    with pytest.raises(ConfigError, match="YourModel shards itself"):
        check_own_sharding(own)


def test_functions_without_a_model_at_hand() -> None:
    assert [type(m) for m in get_submodules_by_path(CustomModel({}), ["blocks.{0}"])] == [nn.Linear]
    with pytest.raises(ConfigError, match="no model is being sharded"):
        get_submodules_by_path(None, ["blocks.{*}"])


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
