"""Which layers stand on which stage and rank, by cost and by split points, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.pipeline.cut import PlaceholderExit, cut_to_rank, stage_of
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan, check_units, even_borders, layer_names, plan_stages
from mindspeed_mm.fsdp.models.structure.stages import CutPoints, PlaceholderModule, find_cut_points
from mindspeed_mm.fsdp.params.parallel_args import PpPlan
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

POINTS = CutPoints({"model.layers": ("hidden_states",)}, ("model.norm", "lm_head"), embedding="model.embed_tokens")
SIX = tuple(f"model.layers.{number}" for number in range(6))


def decoder(layers: int = 6, tie: bool = False) -> Qwen3ForCausalLM:
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, num_hidden_layers=layers, tie_word_embeddings=tie))


def plan_of(model: nn.Module, ranks: int, **plan: object) -> StagePlan:
    return plan_stages(model, find_cut_points(model), ranks, PpPlan.model_validate(plan))


def ranges(plan: StagePlan) -> list[tuple[int, int]]:
    return [(plan.layers_of(stage).start, plan.layers_of(stage).stop) for stage in range(plan.stages)]


@pytest.mark.parametrize(
    ("costs", "front", "back", "stages", "borders"),
    [
        ([1] * 8, 0, 0, 4, (2, 4, 6)),
        ([1] * 8, 0, 4, 2, (6,)),
        ([1] * 8, 3, 3, 4, (1, 4, 7)),
        ([5, 1, 1, 1], 0, 0, 2, (1,)),
        ([1, 1], 0, 100, 2, (1,)),
    ],
)
def test_stages_of_equal_cost(costs: list[int], front: int, back: int, stages: int, borders: tuple[int, ...]) -> None:
    assert even_borders(costs, front, back, stages) == borders


def test_placement() -> None:
    loop, v = (StagePlan(POINTS, tuple(range(1, 6)), SIX, 3, is_v=is_v) for is_v in (False, True))
    assert [loop.rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [v.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert (loop.stages_of(1), v.stages_of(0)) == ([1, 4], [0, 5])


def test_split_points_may_leave_the_ends_without_layers() -> None:
    model = decoder()
    assert ranges(plan_of(model, 2, split_points=["model.layers.4"])) == [(0, 4), (4, 6)]
    assert ranges(plan_of(model, 3, split_points=["model.layers.0", "model.norm"])) == [(0, 0), (0, 6), (6, 6)]


@pytest.mark.parametrize(
    ("ranks", "plan", "words"),
    [
        (8, {}, r"8 ranks are more stages than the 6 layers .*pipeline_parallel_size to at most 6\."),
        (4, {"schedule": "zbv"}, r"4 ranks × 2 chunks .*size to at most 3, or parallel\.pp_plan\.schedule to 1f1b\."),
        (
            2,
            {"schedule": "interleaved1f1b", "virtual_stages": 4},
            r"2 ranks × 4 chunks .* Set parallel\.pp_plan\.virtual_stages to at most 3, or",
        ),
        (
            2,
            {"split_points": ["model.layers.9"]},
            r"'model.layers.9' is not a module .* model.layers.0 to model.layers.5",
        ),
        (2, {"split_points": ["model.layers.2", "model.layers.4"]}, r"2 split points make 3 stages, .* has 2"),
        (3, {"split_points": ["model.layers.4", "model.layers.2"]}, r"not one behind the other"),
        (3, {"split_points": ["model.layers.4", "model.layers.4"]}, r"would have no parameters"),
    ],
)
def test_what_cannot_be_is_refused(ranks: int, plan: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(decoder(), ranks, **plan)


def test_one_weight_in_three_places_is_refused_before_anything_is_cut() -> None:
    model = decoder(tie=True)
    aside = nn.Linear(8, 50, bias=False, device="meta")
    model.model.layers[5].aside = aside
    aside.weight = model.lm_head.weight
    with pytest.raises(ConfigError, match=r"are one weight on several stages: two ends can be tied"):
        plan_of(model, 2)


def test_a_model_without_cut_points_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be cut into stages"):
        find_cut_points(nn.Linear(2, 2))
    model = decoder()
    model.model.extra = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="holds extra, and it is not known which stage"):
        find_cut_points(model)


def test_stages_of_several_lists() -> None:
    model = nn.Module()
    model.both = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.single = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    model.end = nn.Linear(2, 2)
    points = CutPoints({"both": ("text", "image"), "single": ("image",)}, ("end",))
    plan = plan_stages(model, points, 2, PpPlan.model_validate({"split_points": ["single.1"]}))
    assert plan.describe() == "2 stages of both, single: 0-1 + 0 on rank 0, 1-3 on rank 1"
    assert [plan.owner(name) for name in ("both.1.weight", "single.0.weight", "single.1.weight", "end.bias")] == [
        0,
        0,
        1,
        1,
    ]
    assert (plan.streams_into(1), plan.layers[plan.layers_of(1).start]) == (("image",), "single.1")
    # What is behind may need all that the layers return: only one stream is handed to a stage without layers.
    with pytest.raises(ConfigError, match=r"'end' is not a module .* Take both\.0 to single\.3\.$"):
        plan_stages(model, points, 2, PpPlan.model_validate({"split_points": ["end"]}))


def test_a_unit_must_not_hold_the_layers() -> None:
    plan = plan_of(decoder(), 2)
    check_units(["model.layers.0", "model.layers.1.mlp", "lm_head"], plan, "key")
    with pytest.raises(ConfigError, match="'model' holds the layers"):
        check_units(["model.layers.0", "model"], plan, "key")


def test_owners_of_a_vision_language_model(tmp_path: Path) -> None:
    folder = make_tiny_qwen3_vl(tmp_path, num_hidden_layers=4)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    points = find_cut_points(model)
    plan = StagePlan(points, (2,), layer_names(model, points), 2)
    assert points.behind == ("model.language_model.norm", "lm_head")
    assert plan.owner("model.visual.blocks.0.attn.qkv.weight") == 0
    assert plan.owner("model.language_model.embed_tokens.weight") == 0
    assert plan.owner("model.language_model.layers.2.mlp.up_proj.weight") == 1
    assert plan.owner("lm_head.weight") == 1


def test_parts_have_the_names_of_the_whole_and_each_parameter_once() -> None:
    whole = [name for name, _ in decoder().named_parameters()]
    plan = plan_of(decoder(), 2, schedule="interleaved1f1b", virtual_stages=2)
    held: list[str] = []
    for rank in range(2):
        part = decoder()
        assert cut_to_rank(part, plan, rank, torch.float32) == {}
        own = [name for name, _ in part.named_parameters()]
        held += own
        of_stages = [
            n for s in plan.stages_of(rank) for n, _ in stage_of(part, plan, s, torch.float32).named_parameters()
        ]
        assert sorted(of_stages) == sorted(own)
    assert sorted(held) == sorted(whole)


def test_tied_ends_become_a_weight_and_a_copy() -> None:
    plan = plan_of(decoder(tie=True), 2)
    first, last = decoder(tie=True), decoder(tie=True)
    assert cut_to_rank(first, plan, 0, torch.float32) == {}
    assert cut_to_rank(last, plan, 1, torch.float32) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in dict(first.named_parameters())
    v = decoder(tie=True)
    copies = cut_to_rank(v, plan_of(v, 2, schedule="zbv"), 0, torch.float32)
    assert copies == {"lm_head.weight": "model.embed_tokens.weight"}
    assert v.lm_head.weight is not v.model.embed_tokens.weight


def test_placeholders_keep_numbers_and_end_the_stage() -> None:
    model = decoder()
    plan = plan_of(model, 2, split_points=["model.layers.3"])
    cut_to_rank(model, plan, 0, torch.float32)
    stage = stage_of(model, plan, 0, torch.float32)
    kinds = [type(layer).__name__ for layer in stage.get_submodule("model.layers").children()]
    assert kinds == ["Qwen3DecoderLayer"] * 3 + ["PlaceholderExit"] + ["PlaceholderLayer"] * 2
    assert isinstance(stage.get_submodule("model.layers.3"), PlaceholderExit)
    assert isinstance(model.get_submodule("model.layers.3"), PlaceholderModule)
    assert not isinstance(model.get_submodule("model.layers.3"), PlaceholderExit)


def test_mm_check_judges_the_stages(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    words = ("parallel.pipeline_parallel_size=4", "training.gradient_accumulation_steps=4")
    said = mm("check", yaml, *words)
    assert said.code == 2
    assert "4 ranks are more stages than the 2 layers of model.language_model.layers" in said.out + said.err
