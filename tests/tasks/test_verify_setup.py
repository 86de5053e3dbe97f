"""Which processes a verification starts, and what of a configuration it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.tasks.verify.setup import Case, arguments_of, set_up, smallest_plan

TP, PP, RING, ULYSSES = (f"{name}_size" for name in
                         ("tensor_parallel", "pipeline_parallel", "ring_attention", "ulysses_parallel"))  # fmt: skip
FSDP, DATA, EP = "fully_shard_parallel_size", "data_parallel_size", "expert_parallel_size"
AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({}, {"dp_shard": 2}),
        ({DATA: 64}, {"dp_shard": 2}),
        ({DATA: 1}, {}),
        ({FSDP: 1}, {"dp_replicate": 2}),
        ({FSDP: 8}, {"dp_replicate": 2, "dp_shard": 2}),
        ({FSDP: 8, DATA: 8}, {"dp_shard": 2}),
        ({TP: 2}, {"dp_shard": 2, "tp": 2}),
        ({TP: 4}, {"dp_shard": 2, "tp": 4}),
        ({TP: 8}, {"dp_shard": 2, "tp": 2}),
        ({TP: 8, DATA: 1}, {"tp": 8}),
        ({RING: 2, ULYSSES: 2}, {"dp_shard": 2, "ring": 2, "ulysses": 2}),
        ({RING: 4, ULYSSES: 4, FSDP: 16}, {"dp_replicate": 2, "ring": 2, "ulysses": 2}),
        ({RING: 2, FSDP: 2}, {"dp_replicate": 2, "ring": 2}),
        ({PP: 4, TP: 8}, {"pp": 2, "dp_shard": 2, "tp": 2}),
        ({EP: 8}, {"dp_shard": 2}),
        ({EP: 8, "expert_fully_shard_parallel_size": 4}, {"dp_shard": 4}),
    ],
)
def test_the_smallest_plan(plan: dict[str, Any], expected: dict[str, int]) -> None:
    _, sizes = smallest_plan(ParallelArguments(**plan), None)
    assert {axis: size for axis in AXES if (size := getattr(sizes, axis)) > 1} == expected
    assert sizes.ep == min(plan.get(EP, 1), 2)


def test_a_number_of_processes_takes_the_plan_as_it_stands() -> None:
    _, sizes = smallest_plan(ParallelArguments(**{TP: 4}), 16)
    assert (sizes.tp, sizes.dp_shard) == (4, 4)
    with pytest.raises(ConfigError, match="4 does not divide the 6 ranks"):
        smallest_plan(ParallelArguments(**{TP: 4}), 6)


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        smallest_plan(ParallelArguments(**{RING: 2, FSDP: 3}), None)


def test_batches_of_all_runs_hold_the_same_rows() -> None:
    for plan in ({}, {DATA: 1}, {PP: 2}, {FSDP: 8}, {TP: 2, PP: 2}):
        setup = set_up(Arguments(parallel=ParallelArguments(**plan)), None, Path("cache"), full=False)
        for case in (Case(alone=True), Case(micro_batches=setup.accumulation),
                     Case(micro_batches=2 * setup.accumulation)):  # fmt: skip
            training = arguments_of(setup, case).training
            ranks = 1 if case.alone else setup.sizes.dp
            assert training.micro_batch_size * training.gradient_accumulation_steps * ranks == setup.rows >= 4


def test_nothing_is_written_and_nothing_left_to_chance() -> None:
    training = {"save": "runs/mine", "load": "runs/other", "lora": {"enable": True, "dropout": 0.1}, "adam_eps": 1e-15}
    data = {"dataset_param": {"basic_parameters": {"dataset": "rows.jsonl", "val_dataset": "other.jsonl"}}}
    arguments = Arguments(training=training, data=data, model={"attn_implementation": "flash_attention_2"})
    setup = set_up(arguments, None, Path("cache"), full=False)
    now = arguments_of(setup, Case())
    assert now.training.save is None and now.training.load is None and now.training.lora.dropout == 0
    assert now.training.adam_eps == 1e-8 and now.parallel.fsdp_plan.param_dtype == "fp64"
    assert now.data.dataset_param.basic_parameters.cache_dir == "cache"
    assert now.data.dataset_param.basic_parameters.val_dataset is None
    assert now.model.attn_implementation is None
    told = " ".join(setup.changes)
    for words in ("adam_eps: 1e-15 → 1e-08", "lora.dropout: 0.1 → 0.0", "flash_attention_2 → null", "→ fp64"):
        assert words in told


@pytest.mark.parametrize("loader", [
    {"sampler_type": "LengthGroupedSampler", "max_patches_per_batch": 64},
    {"sampler_type": "TokenBudgetSampler", "max_tokens_per_batch": 128},
    {"dataloader_mode": "variable"},
])  # fmt: skip
def test_lengths_do_not_choose_the_samples_of_a_step(loader: dict[str, Any]) -> None:
    setup = set_up(Arguments(data={"dataloader_param": loader}), None, Path("cache"), full=False)
    now = arguments_of(setup, Case()).data.dataloader_param
    assert (now.sampler_type, now.dataloader_mode) == ("BaseRandomBatchSampler", "sampler")
    assert now.max_patches_per_batch is None and now.max_tokens_per_batch is None
    told = " ".join(setup.changes)
    assert all(f"data.dataloader_param.{key}" in told for key in loader)


def test_the_order_of_rows_is_kept_and_an_unknown_sampler_is_not_passed_over() -> None:
    for name in ("SequentialSampler", "NoSuchSampler"):
        arguments = Arguments(data={"dataloader_param": {"sampler_type": name}})
        setup = set_up(arguments, None, Path("cache"), full=False)
        assert arguments_of(setup, Case()).data.dataloader_param.sampler_type == name
