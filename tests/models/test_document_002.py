"""The migration guide (document 002), followed step by step on two ranks: data, model, callbacks, fsdp2_config.yaml and
the flags that it adds to a command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.fsdp.train.provider.live import LIVE
from mindspeed_mm.training import get_args, pretrain
from tests.fsdp.train.provider.user_run import rows
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import losses
from tests.models.document_002 import CustomModel, YourModel

FSDP2_CONFIG = """\
sharding_size: auto\t
sub_modules_to_wrap:\t
  - "blocks.{*}"\t
param_dtype: "fp32"\t
reduce_dtype: "fp32"\t
cast_forward_inputs: True\t
recompute_modules:\t
  - "blocks.{*}"\t
num_to_forward_prefetch: 2\t
num_to_backward_prefetch: 2
offload_to_cpu: False
"""
ADDED = "--use-torch-fsdp2 --fsdp2-config-path {} --ckpt-format torch_dcp --untie-embeddings-and-output-weights"
FLAGS = "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --lr-decay-style constant --seed 5"


class CustomDataset(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x, y, _ = (part[index] for part in rows(24))
        return {"x": x, "y": y}


def build_dataloader(dataset: CustomDataset) -> DataLoader[Any]:
    """The guide's, which says nothing of ranks: the engine puts the distributed sampler in."""
    return DataLoader(dataset, batch_size=get_args().micro_batch_size)


def train_valid_test_datasets_provider() -> Any:
    """Build train, valid, and test datasets."""
    return build_dataloader(CustomDataset()), build_dataloader(CustomDataset()), build_dataloader(CustomDataset())


def get_batch(data_iterator: Any) -> Any:
    """Generate a batch."""
    if data_iterator is not None:
        batch = next(data_iterator)
    else:
        raise ValueError("Data iterator is None. Unable to retrieve batch.")
    return {key: tensor.to(get_args().params_dtype) for key, tensor in batch.items()}


class Measured(CustomModel):
    """The guide's model, whose output has what the loss needs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) - y


class MeasuredAndSharded(Measured, YourModel):
    """The same, with a strategy of its own."""


def loss_func(output_tensor: torch.Tensor) -> torch.Tensor:
    return output_tensor.square().mean()


def forward_step(data_iterator: Any, model: nn.Module) -> Any:
    """Forward step."""
    batch_data = get_batch(data_iterator)
    output_tensor = model(**batch_data)
    return output_tensor, loss_func


def run(folder: str, own_strategy: bool) -> list[float]:
    """The losses of three steps."""

    def model_provider(*args: Any, **kwargs: Any) -> nn.Module:
        return MeasuredAndSharded({}) if own_strategy else Measured({})

    config = Path(folder) / "fsdp2_config.yaml"
    save = Path(folder) / "run"
    sys.argv = ["pretrain.py", *FLAGS.split(), *ADDED.format(config).split(), "--save", str(save)]
    sys.argv += ["--log-interval", "1", "--eval-interval", "2", "--eval-iters", "1"]
    sys.argv += ["--mm-set", *(f"parallel.fsdp_plan.{key}=fp64" for key in ("param_dtype", "reduce_dtype"))]
    pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step)
    assert LIVE.trainer is None
    dist.barrier()  # the first rank has written
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert {"val_loss", "test_loss"} <= {key for line in lines for key in line}
    assert (save / "iter_0000003").is_dir()
    return [line["loss"] for line in lines if "loss" in line]


def run_in_bf16(folder: str, own_strategy: bool, ignored: str) -> list[float]:
    """The losses of three steps with --bf16, and `ignored_modules` of the file."""
    config = Path(folder) / "fsdp2_config.yaml"
    seen = []

    def model_provider() -> nn.Module:
        model = MeasuredAndSharded({}) if own_strategy else Measured({})
        model.out.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
        return model

    sys.argv = ["pretrain.py", *FLAGS.split(), *ADDED.format(config).split(), "--bf16", "--log-interval", "1"]
    sys.argv += ["--save", str(Path(folder) / f"run{ignored}")]
    pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step)
    dist.barrier()  # the first rank has written
    assert set(seen) == {torch.bfloat16}
    return list(losses(Path(folder) / f"run{ignored}").values())


def run_both(folder: str, own_strategy: bool) -> tuple[list[float], list[float]]:
    config = Path(folder) / "fsdp2_config.yaml"
    found = []
    for ignored in ("", "out"):
        if dist.get_rank() == 0:
            text = FSDP2_CONFIG.replace('"fp32"\t\nreduce', '"bf16"\t\nreduce')
            config.write_text(text + (f'ignored_modules:\t\n  - "{ignored}"\t\n' if ignored else ""))
        dist.barrier()
        found.append(run_in_bf16(folder, own_strategy, ignored))
        dist.barrier()
    return found[0], found[1]


@pytest.mark.parametrize(
    ("ranks", "own_strategy"),
    [
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_ignored_modules_compute_in_bf16_as_all_others(tmp_path: Path, ranks: int, own_strategy: bool) -> None:
    """The guide's `ignored_modules` with --bf16: numbers are those of the run that shards everything."""
    for sharded, with_ignored in run_ranks(ranks, run_both, str(tmp_path), own_strategy):
        assert len(sharded) == 3 and sharded[2] < sharded[0]
        assert with_ignored == sharded


@pytest.mark.parametrize("own_strategy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_train_as_one(tmp_path: Path, own_strategy: bool) -> None:
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        (tmp_path / str(ranks) / "fsdp2_config.yaml").write_text(FSDP2_CONFIG)
    (expected,) = run_ranks(1, run, str(tmp_path / "1"), own_strategy)
    measured = run_ranks(2, run, str(tmp_path / "2"), own_strategy)
    assert len(expected) == 3 and expected[2] < expected[0]
    for found in measured:
        assert found == pytest.approx(expected, rel=1e-9)
