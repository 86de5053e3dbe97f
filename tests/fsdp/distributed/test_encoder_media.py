"""Which ranks share media, which towers can, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_plan import ModelLayout, ParallelPlan, resolve_parallel_plan
from mindspeed_mm.fsdp.distributed.tensor.plan import resolve_tensor_plan
from mindspeed_mm.fsdp.distributed.towers.groups import check_tower_sums, sharing_ranks
from mindspeed_mm.fsdp.distributed.towers.media import check_towers, widths_of
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments, TpPlan
from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes, resolve_encoder_sizes
from mindspeed_mm.fsdp.params.sizes.parallel import least_ranks, resolve_parallel_sizes
from tests.helpers.tiny_models import make_tiny_qwen3_vl


def parallel(**keys: Any) -> ParallelArguments:
    return ParallelArguments.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"encoder_plan": {"balance": True}}, EncoderSizes(streams=4)),
        ({"tensor_parallel_size": 2, "encoder_plan": {"tensor_parallel_size": 2}}, None),
        ({"tensor_parallel_size": 2, "encoder_plan": {"tensor_parallel_size": 1}}, EncoderSizes(copies=2)),
        ({"ring_attention_size": 2, "encoder_plan": {"balance": True}}, EncoderSizes(streams=4)),
        ({"ring_attention_size": 2, "encoder_plan": {"ring_attention_size": 1}}, EncoderSizes(parts=2)),
        (
            {"ring_attention_size": 2, "encoder_plan": {"ring_attention_size": 1, "ulysses_parallel_size": 2}},
            EncoderSizes(parts=2, ulysses=2),
        ),
        (
            {"encoder_plan": {"balance": True, "ring_attention_size": 2, "ulysses_parallel_size": 2}},
            EncoderSizes(streams=4, ring=2, ulysses=2),
        ),
    ],
)
def test_sizes(keys: dict[str, Any], expected: EncoderSizes | None) -> None:
    assert resolve_encoder_sizes(parallel(**keys), data_ranks=4) == expected


def test_one_data_rank_has_nobody_to_share_with() -> None:
    assert resolve_encoder_sizes(parallel(encoder_plan={"balance": True}), data_ranks=1) is None


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"tensor_parallel_size": 4, "encoder_plan": {"tensor_parallel_size": 2}}, "tensor", ("2", "decoder, 4", "1")),
        ({"encoder_plan": {"tensor_parallel_size": 2}}, "tensor", ("decoder, 1",)),
        ({"encoder_plan": {"ulysses_parallel_size": 2}}, "ulysses", ("2 ranks", "can be 1", "balance=true 2")),
        ({"encoder_plan": {"balance": True, "ring_attention_size": 3}}, "ring", ("3 ranks", "data 8", "1, 2, 4, 8")),
    ],
)
def test_layouts_that_cannot_be_had_name_those_that_can(keys: dict[str, Any], key: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_parallel_sizes(parallel(**keys), 8 * keys.get("tensor_parallel_size", 1))
    (problem,) = caught.value.problems
    assert key in problem.key and all(word in str(problem) for word in words), problem


def test_ranks_that_share_media() -> None:
    sizes = resolve_parallel_sizes(parallel(tensor_parallel_size=2, ring_attention_size=2), 8)
    assert sharing_ranks(sizes, EncoderSizes(streams=2)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sharing_ranks(sizes, EncoderSizes(copies=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sharing_ranks(sizes, EncoderSizes(streams=2, copies=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert sharing_ranks(sizes, EncoderSizes(2, 2, 2)) == [list(range(8))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    config = Qwen3VLConfig.from_pretrained(make_tiny_qwen3_vl(tmp_path_factory.mktemp("tower") / "model"))
    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration(config)


def arguments(**keys: Any) -> Arguments:
    return Arguments.model_validate({"parallel": keys})


def resolved(model: nn.Module, arguments: Arguments) -> ParallelPlan:
    """For the fewest ranks that the sizes fit, and at least two."""
    parallel = arguments.parallel
    sizes = resolve_parallel_sizes(parallel, max(2, least_ranks(parallel)))
    spec = resolve_spec(model)
    layout = ModelLayout(spec.shard_modules, spec.tie_groups, {tower.module for tower in spec.towers})
    return resolve_parallel_plan(model, parallel, sizes, layout)


def test_the_plan_of_towers_is_judged(model: nn.Module) -> None:
    resolved(model, arguments(encoder_plan={"balance": True, "ulysses_parallel_size": 2}))
    with pytest.raises(ConfigError, match="neither 1 nor that of the decoder"):
        resolved(model, arguments(encoder_plan={"tensor_parallel_size": 3}))
    with pytest.raises(ConfigError, match="there is no tower"):
        resolved(nn.Linear(2, 2), arguments(encoder_plan={"balance": True}))


def test_a_whole_tower_need_not_be_divisible(model: nn.Module) -> None:
    heads = model.config.vision_config.num_heads  # type: ignore[union-attr]
    size = 2 * heads
    with pytest.raises(ConfigError, match="visual"):
        resolved(model, arguments(tensor_parallel_size=size))
    with pytest.raises(ConfigError) as caught:  # of the decoder alone
        resolved(model, arguments(tensor_parallel_size=size, encoder_plan={"tensor_parallel_size": 1}))
    assert all("visual" not in str(problem) for problem in caught.value.problems)
    plan = resolve_tensor_plan(model, TpPlan()).without(["model.visual"])
    assert plan.rules and not any(name.startswith("model.visual") for name in plan.rules)
    assert "model.visual" in plan.describe()


def test_towers_that_take_no_grids_are_refused() -> None:
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "vocab_size": 16}  # fmt: skip
    config = LlavaConfig(vision_config={"model_type": "clip_vision_model", **vision},
                         text_config={"model_type": "llama", **text})  # fmt: skip
    with torch.device("meta"):
        llava = LlavaForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="takes no patches of many media"):
        check_towers(llava, ["model.vision_tower"], in_teams=False)


def test_a_trained_tower_left_out_of_sharding_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="nothing would sum"):
        check_tower_sums(model, ["model.visual"], ["model.visual.blocks.0"])


def test_widths_of_towers() -> None:
    assert widths_of(SimpleNamespace(hidden_size=8, intermediate_size=20)).mlp == 20
    older = widths_of(SimpleNamespace(embed_dim=16, hidden_size=99, mlp_ratio=4))
    assert (older.hidden, older.mlp) == (16, 64)
