"""Sizes of the parallel groups from the configuration and the number of ranks."""

from typing import Any

import pytest
from pydantic import ValidationError

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, resolve_parallel_sizes


def sizes(world: int, **keys: Any) -> ParallelSizes:
    return resolve_parallel_sizes(ParallelArguments(**keys), world)


@pytest.mark.parametrize(
    ("keys", "dp_replicate", "dp_shard", "dp", "fsdp"),
    [
        ({}, 1, 8, 8, 8),
        ({"fully_shard_parallel_size": 8}, 1, 8, 8, 8),
        ({"fully_shard_parallel_size": 2}, 4, 2, 8, 2),
        ({"fully_shard_parallel_size": 1}, 8, 1, 8, 1),
        ({"tensor_parallel_size": 2}, 1, 4, 4, 4),
        ({"ulysses_parallel_size": 2}, 1, 4, 4, 8),
        ({"ring_attention_size": 2, "ulysses_parallel_size": 2}, 1, 2, 2, 8),
        ({"ulysses_parallel_size": 2, "fully_shard_parallel_size": 4}, 2, 2, 4, 4),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, 1, 2, 2, 2),
    ],
)
def test_axes(keys: dict[str, Any], dp_replicate: int, dp_shard: int, dp: int, fsdp: int) -> None:
    found = sizes(8, **keys)
    assert (found.dp_replicate, found.dp_shard, found.dp, found.fsdp) == (dp_replicate, dp_shard, dp, fsdp)
    assert found.pp * found.dp_replicate * found.dp_shard * found.ring * found.ulysses * found.tp == 8
    assert found.edp * found.efsdp * found.ep == 8 // (found.pp * found.tp)


def test_expert_groups_follow_the_sharding_group() -> None:
    found = sizes(16, fully_shard_parallel_size=8, expert_parallel_size=4)
    assert (found.edp, found.efsdp, found.ep) == (2, 2, 4)
    assert sizes(16, expert_parallel_size=4, expert_fully_shard_parallel_size=1).edp == 4


@pytest.mark.parametrize(
    ("keys", "key", "numbers"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", ("3", "8")),
        ({"fully_shard_parallel_size": 3}, "fully_shard_parallel_size", ("3", "8")),
        ({"ring_attention_size": 5}, "ring_attention_size", ("5", "8")),
        ({"ulysses_parallel_size": 4, "fully_shard_parallel_size": 2}, "ulysses_parallel_size", ("4", "2")),
        ({"expert_parallel_size": 3}, "expert_parallel_size", ("3", "8")),
        ({"data_parallel_size": 4}, "data_parallel_size", ("4", "8")),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, "pipeline_parallel_size", ("6", "8")),
        ({"tensor_parallel_size": 2, "ring_attention_size": 3}, "ring_attention_size", ("3", "4")),
        ({"tensor_parallel_size": 4, "ring_attention_size": 2, "ulysses_parallel_size": 2}, "ulysses", ("4", "2")),
        (
            {"expert_parallel_size": 2, "expert_fully_shard_parallel_size": 3},
            "expert_fully_shard_parallel_size",
            ("6", "8"),
        ),
    ],
)
def test_sizes_that_do_not_fit_name_both_numbers(keys: dict[str, Any], key: str, numbers: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        sizes(8, **keys)
    problem = caught.value.problems[0]
    assert key in problem.key
    assert all(number in problem.what for number in numbers)


def test_the_nearest_sizes_that_fit_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        sizes(24, tensor_parallel_size=5)
    assert caught.value.problems[0].way_out == "Nearest sizes that do: 3, 4, 6."


@pytest.mark.parametrize("value", [0, -2, 1.5, "two", True, None])
@pytest.mark.parametrize(
    "key",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "ring_attention_size",
        "ulysses_parallel_size",
        "expert_parallel_size",
        "fully_shard_parallel_size",
    ],
)
def test_a_size_is_a_whole_number_from_1(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=key):
        ParallelArguments.model_validate({key: value})
