"""A model provider that builds what the configuration names gives the very run that `mm train` gives; a forward step of
one's own gives the same under pipelines and shards as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.data.data_utils.utils import build_iterations
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.fsdp.train.provider.live import LIVE
from mindspeed_mm.fsdp.train.provider.trainer import ProviderOptions, ProviderTrainer
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3_vl, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_tiny_run

PLANS: dict[str, tuple[str, ...]] = {
    "sharded": (),
    "tensors": ("parallel.tensor_parallel_size=2",),
    "stages": ("parallel.pipeline_parallel_size=2", "training.gradient_accumulation_steps=2"),
    "virtual stages": (
        "parallel.pipeline_parallel_size=2",
        "parallel.pp_plan.schedule=interleaved1f1b",
        "parallel.pp_plan.virtual_stages=2",
        "training.gradient_accumulation_steps=2",
    ),
}


def model_provider(*_args: Any, **_kwargs: Any) -> nn.Module:
    return TransformersModel({"model_id": None})


def forward_step(data_iterator: Any, model: nn.Module) -> Any:
    """The mean over label tokens, by torch's own cross-entropy, in the logits' own precision."""
    assert isinstance(model, TransformersModel) and model.module.module is model
    batch = next(data_iterator)
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1]

    def loss_func(output: torch.Tensor) -> Any:
        total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels != -100).sum(), {}

    return logits, loss_func


def steps(
    config: str, overrides: tuple[str, ...], callbacks: Callbacks | None, options: TrainOptions | None = None
) -> list[Any]:
    recorder = StepRecorder()
    resolved = load_with_plugins(Path(config), ["training.train_iters=3", *overrides])
    if callbacks is None:
        Trainer(resolved, options, hooks=[recorder]).train()
    else:
        ProviderTrainer(resolved, callbacks, options=options, hooks=[recorder]).train()
        assert LIVE.trainer is None
    return recorder.steps


def both(config: str, overrides: tuple[str, ...]) -> list[list[Any]]:
    return [steps(config, overrides, callbacks) for callbacks in (None, Callbacks(model_provider))]


def assert_bitwise(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second) == 3
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["loss"], other["loss"])
        for part in ("gradients", "weights"):
            assert one[part].keys() == other[part].keys() != set()
            for name, value in one[part].items():
                assert value is other[part][name] is None or torch.equal(value, other[part][name]), (part, name)


def test_one_process(tmp_path: Path) -> None:
    assert_bitwise(*both(str(make_tiny_run(tmp_path)), ()))


@pytest.mark.parametrize("first_is_yaml", [True, False])
def test_a_run_goes_on_through_the_other_door(tmp_path: Path, first_is_yaml: bool) -> None:
    config = str(make_tiny_run(tmp_path))
    whole = steps(config, (), None)
    words = (f"training.save={tmp_path / 'run'}",)
    doors: list[Callbacks | None] = [None, Callbacks(model_provider)]
    first, second = doors if first_is_yaml else doors[::-1]
    begun = steps(config, words, first, TrainOptions(steps=1))
    rest = steps(config, words, second)
    assert_bitwise(whole, begun + rest)


def suite_loader(_numbers: list[int]) -> Any:
    return build_iterations(build_mm_dataloader(build_mm_dataset()))


def plain_loader() -> Any:
    """Somebody's own batches: without what the suite's collator adds."""
    for batch in build_mm_dataloader(build_mm_dataset()):
        yield {key: value for key, value in batch.items() if key not in ("shift_labels", "sample_ids", "epochs")}


@pytest.mark.parametrize("provider", [suite_loader, plain_loader])
def test_own_data_with_the_suites_loss(tmp_path: Path, provider: Any) -> None:
    config = str(make_tiny_run(tmp_path))
    assert_bitwise(steps(config, (), None), steps(config, (), Callbacks(model_provider, provider)))


def test_a_changed_section_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIVE, "data_json", {"dataloader_param": {"shuffle": True}})
    with pytest.raises(ConfigError, match="is not what --mm-data says any more"):
        build_mm_dataloader([], JsonSection({"shuffle": False}))
    with pytest.raises(ConfigError, match="no training is under way"):
        build_mm_dataloader([], JsonSection({"shuffle": True}))


class NothingIsRounded(TorchFunctionMode):
    """Tensors in fp64 stay so where transformers goes through fp32 (RMSNorm, rotary positions): a difference of 1e-16
    between two ways to sum would decide how an element is rounded there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        casts = func is torch.Tensor.float or (
            func is torch.Tensor.to and torch.float32 in (*args, kwargs.get("dtype"))
        )
        if casts and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def whole_flow(config: str) -> list[list[Any]]:
    """By the YAML, then with a model, data, a forward step and a loss of one's own, per token; in fp64."""
    words = (
        "parallel.fsdp_plan.param_dtype=fp64",
        "parallel.fsdp_plan.reduce_dtype=fp64",
        "training.clip_grad=0",
        "training.gradient_accumulation_steps=2",
    )
    resolved = load_with_plugins(Path(config), ["training.train_iters=3", *words])
    callbacks, recorder = Callbacks(model_provider, suite_loader, forward_step), StepRecorder()
    with NothingIsRounded():
        by_yaml = steps(config, words, None)
        ProviderTrainer(resolved, callbacks, ProviderOptions(per_token=True), hooks=[recorder]).train()
    return [by_yaml, recorder.steps]


def test_the_call_flow_on_two_ranks_gives_the_yaml_s_numbers(tmp_path: Path) -> None:
    """Document 003's: every function is the caller's."""
    for by_yaml, own in run_ranks(2, whole_flow, str(make_tiny_run(tmp_path))):
        assert len(by_yaml) == len(own) == 3
        for one, other in zip(by_yaml, own, strict=True):
            assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-9)
            assert one["gradients"].keys() == other["gradients"].keys() != set()
            gaps = {
                name: float((value - other["gradients"][name]).abs().max())
                for name, value in one["gradients"].items()
                if value is not None
            }
            assert max(gaps.values()) < 1e-14, gaps


@pytest.mark.slow
def test_experts_on_two_ranks(tmp_path: Path) -> None:
    make_tiny_qwen3_vl_moe(tmp_path / "model")
    config = str(make_tiny_run(tmp_path))
    for measured in run_ranks(2, both, config, ("parallel.expert_parallel_size=2",)):
        assert_bitwise(*measured)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks(tmp_path: Path, plan: str) -> None:
    make_tiny_qwen3_vl(tmp_path / "model", num_hidden_layers=4)
    for measured in run_ranks(2, both, str(make_tiny_run(tmp_path)), PLANS[plan]):
        assert_bitwise(*measured)


def own_steps(config: str, overrides: tuple[str, ...]) -> list[Any]:
    words = (*overrides, "parallel.fsdp_plan.param_dtype=fp64", "training.clip_grad=0")
    return steps(config, words, Callbacks(model_provider, forward_step=forward_step))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_own_forward_step_on_two_ranks(tmp_path: Path, plan: str) -> None:
    make_tiny_qwen3_vl(tmp_path / "model", num_hidden_layers=4)
    config = str(make_tiny_run(tmp_path))
    one = f"training.gradient_accumulation_steps={2 if plan != 'tensors' else 1}"
    expected = own_steps(config, (one,))
    measured = run_ranks(2, own_steps, config, PLANS[plan])
    for found in measured:
        for one_step, other in zip(expected, found, strict=True):
            for name, value in one_step["gradients"].items():
                if value is not None:
                    assert float((value - other["gradients"][name]).abs().max()) < 1e-9, name
