"""Plans of tensor parallelism as data: what each model's is, what is refused, what is communicated."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state
from mindspeed_mm.fsdp.distributed.pipeline.cut import PlaceholderFront
from mindspeed_mm.fsdp.distributed.tensor.apply import apply_tensor_parallel
from mindspeed_mm.fsdp.distributed.tensor.collectives import (
    SplitVocabulary,
    TensorRanks,
    split_vocabulary,
    whole_logits,
)
from mindspeed_mm.fsdp.distributed.tensor.plan import SplitRule, Style, own_plan, resolve_tensor_plan
from mindspeed_mm.fsdp.distributed.tensor.sequence import sequence_regions
from mindspeed_mm.fsdp.distributed.tensor.sizes import check_split_sizes, resolve_tensor_parallel
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.parallel_args import TpPlan
from tests.fsdp.distributed.tensor_parallel_step import NORMS, SEQUENCE, Case, build, label_loss, samples_of
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        "text": make_tiny_qwen3(root / "text"),
        "vlm": make_tiny_qwen3_vl(root / "vlm"),
        "flux": make_tiny_flux(root / "flux"),
        "wan": make_tiny_wan(root / "wan", task="i2v"),
    }
    return {kind: ModelHub.build(ModelArguments(model_name_or_path=str(folder))) for kind, folder in folders.items()}


def plan_of(model: nn.Module, **tp_plan: list[str]) -> dict[str, SplitRule]:
    return resolve_tensor_plan(model, TpPlan.model_validate(tp_plan)).rules


def test_text_decoder(models):
    rules = plan_of(models["text"])
    splits_embedding = "model.embed_tokens" in own_plan(models["text"])  # not in transformers 5.17
    assert rules.get("model.embed_tokens") == (SplitRule(Style.EMBEDDING) if splits_embedding else None)
    assert rules["lm_head"] == SplitRule(Style.HEAD)
    assert rules["model.layers.1.self_attn.k_proj"] == SplitRule(Style.COLUMN)
    assert rules["model.layers.1.self_attn.k_norm"] == SplitRule(Style.OWN_PART)
    assert rules["model.layers.1.mlp.down_proj"] == SplitRule(Style.ROW)
    assert len(rules) == 1 + splits_embedding + 2 * 9


def test_layers_with_a_state_stay_whole() -> None:
    """Kimi Linear calls parts of them as attention does, and convolutions and gates go over all their channels."""
    import transformers

    if not hasattr(transformers, "KimiLinearConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Kimi Linear")
    config = transformers.KimiLinearConfig(
        hidden_size=16, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2, linear_num_heads=2,
        linear_head_dim=8, vocab_size=32, pad_token_id=0, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.KimiLinearForCausalLM(config)
    rules = plan_of(model)
    assert "model.layers.0.mlp.down_proj" in rules and "lm_head" in rules
    with_state = [f"model.layers.{n}." for n, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    assert [name for name in rules if name.startswith(tuple(f"{layer}self_attn" for layer in with_state))] == []


def test_both_halves_of_a_vision_language_model(models):
    rules = plan_of(models["vlm"])
    assert rules["model.visual.blocks.0.attn.qkv"] == SplitRule(Style.COLUMN, (1, 1, 1))
    assert rules["model.visual.blocks.0.attn.proj"] == SplitRule(Style.ROW)
    assert rules["model.visual.blocks.1.mlp.linear_fc1"] == SplitRule(Style.COLUMN)
    assert rules["model.visual.merger.linear_fc2"] == SplitRule(Style.ROW)
    assert rules["model.visual.deepstack_merger_list.0.linear_fc1"] == SplitRule(Style.COLUMN)
    assert rules["model.language_model.layers.0.self_attn.q_norm"] == SplitRule(Style.OWN_PART)
    # Tied to the head, which the class's plan names alone; in transformers 5.17 it names nothing.
    if "lm_head" in own_plan(models["vlm"]):
        assert rules["model.language_model.embed_tokens"] == SplitRule(Style.EMBEDDING)


def test_generators(models):
    flux, wan = plan_of(models["flux"]), plan_of(models["wan"])
    width = models["flux"].config.num_attention_heads * models["flux"].config.attention_head_dim
    assert flux["single_transformer_blocks.0.proj_out"] == SplitRule(Style.ROW, (width, 4 * width))
    assert flux["transformer_blocks.0.attn.norm_added_k"] == SplitRule(Style.OWN_PART)
    assert "single_transformer_blocks.0.norm.linear" not in flux
    assert wan["blocks.0.attn2.to_out.0"] == wan["blocks.0.ffn.net.2"] == SplitRule(Style.ROW)
    assert wan["blocks.1.attn1.norm_k"] == wan["blocks.1.attn2.norm_added_k"] == SplitRule(Style.WIDE_NORM)


def test_layers_named_in_the_configuration_are_all(models):
    rules = plan_of(models["text"], colwise_parallel=["*.up_proj", "*.gate_proj"], rowwise_parallel=["*.down_proj"])
    assert {name.rpartition(".")[2] for name in rules} == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("tp_plan", "message"),
    [
        ({"colwise_parallel": ["*.wq"]}, "matches no module"),
        ({"colwise_parallel": ["model.norm"], "rowwise_parallel": ["*.o_proj"]}, "not a linear layer"),
        ({"colwise_parallel": ["*.q_proj"]}, "no layer near it by input features"),
        ({"rowwise_parallel": ["*.o_proj"]}, "no layer near it by output features"),
        ({"colwise_parallel": ["*.o_proj"], "rowwise_parallel": ["*.o_proj"]}, "in colwise_parallel and in rowwise"),
        ({"sequence_parallel": ["*.o_proj"]}, "is split as rowwise"),
    ],
)
def test_plans_that_do_not_fit_are_refused(tp_plan, message, models):
    with pytest.raises(ConfigError, match=message):
        plan_of(models["text"], **tp_plan)


def test_model_without_a_plan_is_refused():
    with pytest.raises(ConfigError, match="knows no plan"):
        plan_of(nn.Sequential(nn.Linear(4, 4)))


def test_norm_over_several_heads_is_refused(models):
    decoder = copy.deepcopy(models["text"])
    decoder.model.layers[0].self_attn.q_norm.weight = nn.Parameter(torch.ones(64))
    with pytest.raises(ConfigError, match="norms 64 features, which is not one head"):
        plan_of(decoder)


def test_numbers_of_heads_are_cut_with_the_heads(models):
    decoder = copy.deepcopy(models["text"])
    attention = decoder.model.layers[0].self_attn
    attention.sinks = nn.Parameter(torch.zeros(4))
    assert plan_of(decoder)["model.layers.0.self_attn"] == SplitRule(Style.HEAD_NUMBERS)
    attention.scales = nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(ConfigError, match=r"parameters of its own, scales \(4, 2\), that are not one number a head"):
        plan_of(decoder)


def test_stretches_of_the_sequence(models):
    text = resolve_tensor_plan(models["text"], TpPlan.model_validate({"sequence_parallel": [*NORMS, "model.norm"]}))
    assert [s.modules for s in sequence_regions(models["text"], text)] == [
        ("model.layers.0", "model.layers.1", "model.norm")
    ]
    # Features of the vision tower are added between the decoder's blocks.
    vlm = resolve_tensor_plan(models["vlm"], TpPlan.model_validate(SEQUENCE["tp_plan"]))
    assert [s.modules for s in sequence_regions(models["vlm"], vlm)] == [
        ("model.language_model.layers.0",),
        ("model.language_model.layers.1",),
    ]


def test_two_streams_are_refused(models):
    plan = resolve_tensor_plan(models["flux"], TpPlan.model_validate({"sequence_parallel": ["*.norm1"]}))
    with pytest.raises(ConfigError, match="text and image go through the blocks of FluxTransformer2DModel"):
        sequence_regions(models["flux"], plan)


def test_norm_left_out_of_the_sequence_is_refused(models):
    plan = resolve_tensor_plan(models["text"], TpPlan.model_validate({"sequence_parallel": NORMS[:1]}))
    with pytest.raises(ConfigError, match=r"layers\.0\.post_attention_layernorm.*runs on a slice of the sequence too"):
        sequence_regions(models["text"], plan)


def test_sizes_of_both_halves_once_they_are_built(models):
    plan = resolve_tensor_plan(models["vlm"], TpPlan())
    check_split_sizes(models["vlm"], plan, 2)
    with pytest.raises(ConfigError) as caught:
        check_split_sizes(models["vlm"], plan, 4)
    (problem,) = caught.value.problems  # one size is wrong; not told of every layer
    attention = "model.language_model.layers.0.self_attn"
    assert problem.what == (
        f"4 does not divide the 2 heads of {attention}.k_proj and {attention}.v_proj and the 2 num_heads of "
        "model.visual.blocks.0.attn"
    )
    assert problem.way_out == "Sizes that fit the whole model: 1, 2."


def test_what_alone_stands_in_the_way_of_a_size_is_named(tmp_path):
    """A prime vocabulary, tied or not, allows no size; what would fit without it is told, and is true."""
    folder = make_tiny_qwen3(tmp_path / "model", vocab_size=317)
    model = ModelHub.build(ModelArguments(model_name_or_path=str(folder)))
    with pytest.raises(ConfigError) as caught:
        check_split_sizes(model, resolve_tensor_plan(model, TpPlan()), 2)
    (problem,) = caught.value.problems
    assert problem.what.startswith("2 does not divide the 317 features of ")
    assert "Sizes that fit the whole model: 1. With lm_head " in problem.way_out
    assert "1, 2: name the other layers in parallel.tp_plan" in problem.way_out
    named = {"colwise_parallel": ["*.q_proj", "*.k_proj", "*.v_proj"], "rowwise_parallel": ["*.o_proj"]}
    check_split_sizes(model, resolve_tensor_plan(model, TpPlan.model_validate(named)), 2)


class Counted:
    """Counts collectives and their elements, by the shapes of what is reduced."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self._reduce = dist.all_reduce

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(tensor.numel())
        return self._reduce(tensor, *args, **kwargs)


def on_two_ranks(folder: str) -> dict[str, Any]:
    return {
        "reductions": counted_step(folder),
        "tokens": tokens_in_norms(folder),
        "loss": loss_of_parts(),
        "uneven": refused_at_three_heads(folder),
        "behind a stage": shape_behind_a_stage(folder),
        "generated": generated_on_ranks(folder),
    }


def counted_step(folder: str) -> dict[str, Any]:
    built = build(Case("text"), folder)
    samples, batched = samples_of("text", built.model, ())
    batch = batched(samples)
    counted = Counted()
    with mock.patch.object(dist, "all_reduce", counted):
        loss = label_loss(built)(built.model, batch)
        forward = len(counted.calls)
        loss.backward()
    destroy_parallel_state()
    size = batch["input_ids"].numel() * 32
    return {"forward": counted.calls[:forward].count(size), "backward": counted.calls[forward:].count(size)}


def tokens_in_norms(folder: str) -> list[int]:
    built = build(Case("text", SEQUENCE), folder)
    seen: list[int] = []
    norm = built.model.get_submodule("model.layers.1.input_layernorm")
    norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].shape[1]))
    samples, batched = samples_of("text", built.model, ())
    batch = batched(samples)
    label_loss(built)(built.model, batch)
    destroy_parallel_state()
    return [batch["input_ids"].shape[1], *seen]


def loss_of_parts() -> dict[str, torch.Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ranks = TensorRanks(mesh)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 10, generator=generator, dtype=torch.float64) * 30
    targets = torch.randint(0, 10, (7,), generator=generator)
    weights = torch.rand(7, generator=generator, dtype=torch.float64)
    own = logits.chunk(2, dim=1)[ranks.rank].clone().requires_grad_()
    vocabulary = SplitVocabulary(ranks)
    losses, _ = vocabulary.token_losses(own, targets)
    (losses * weights).sum().backward()
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="none")
    (expected * weights).sum().backward()
    empty, _ = vocabulary.token_losses(own[:0], targets[:0])
    assert own.grad is not None and whole.grad is not None
    return {
        "loss": (losses - expected).abs().max(),
        "gradient": (own.grad - whole.grad.chunk(2, dim=1)[ranks.rank]).abs().max(),
        "empty": empty.sum(),
    }


def refused_at_three_heads(folder: str) -> str:
    model = ModelHub.build(ModelArguments(model_name_or_path=folder), overrides={"num_key_value_heads": 1})
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        apply_tensor_parallel(model, resolve_tensor_parallel(model, TpPlan(), mesh.size()), mesh)
    except ConfigError as error:
        return str(error) + str(split_vocabulary(model))
    return "split"


def shape_behind_a_stage(folder: str) -> list[int]:
    """What a later stage of a rank takes for the output of the embedding, which is split."""
    model = ModelHub.build(ModelArguments(model_name_or_path=folder))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, resolve_tensor_parallel(model, TpPlan(), mesh.size()), mesh)
    front = PlaceholderFront(model.get_input_embeddings(), torch.float64)
    return list(front(torch.tensor([[3, 4, 5]])).shape)


def generated_on_ranks(folder: str) -> dict[str, Any]:
    """Tokens are generated one at a time, while the plan cuts sequences too."""
    model: Any = build(Case("text", SEQUENCE), folder).model.eval()
    with torch.no_grad(), whole_logits(model):
        generated = continue_prompts(model)
    with torch.no_grad():
        own = model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape[-1]
    destroy_parallel_state()
    return generated | {"own": own}


def continue_prompts(model: Any) -> dict[str, Any]:
    """Six tokens behind two prompts, the shorter one padded on the left."""
    ids = torch.tensor([[0, 0, 0, 7, 8], [9, 10, 11, 12, 13]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    found = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return {"tokens": found.sequences.tolist(), "logits": torch.stack(found.logits)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = make_tiny_qwen3(tmp_path_factory.mktemp("models") / "text")
    return run_ranks(2, on_two_ranks, str(folder))[0] | {"folder": folder}


def test_one_reduction_a_layer_half_and_direction(two_ranks, models):
    """Queries, keys and values share one, as gate and up do. The embedding has one forward, where it is split; the
    head's is smaller."""
    splits_embedding = "model.embed_tokens" in own_plan(models["text"])
    assert two_ranks["reductions"] == {"forward": 2 * 2 + splits_embedding, "backward": 2 * 2}


def test_norms_see_half_of_an_odd_row(two_ranks):
    tokens, seen = two_ranks["tokens"]
    assert (tokens % 2, seen) == (1, tokens // 2 + 1)


def test_loss_of_parts_of_the_vocabulary(two_ranks):
    assert two_ranks["loss"]["loss"] < 1e-13
    assert two_ranks["loss"]["gradient"] < 1e-13
    assert two_ranks["loss"]["empty"] == 0


def test_a_later_stage_of_a_rank_knows_the_shape_of_a_split_embedding(two_ranks):
    width = AutoModelForCausalLM.from_pretrained(two_ranks["folder"]).config.hidden_size
    assert two_ranks["behind a stage"] == [1, 3, width]


def test_heads_are_checked_before_anything_is_split(two_ranks):
    assert "2 does not divide the 1 heads of model.layers.0.self_attn.k_proj" in two_ranks["uneven"]
    assert two_ranks["uneven"].endswith("None")


def test_tokens_are_chosen_by_the_whole_vocabulary(two_ranks):
    reference: Any = AutoModelForCausalLM.from_pretrained(two_ranks["folder"], dtype=torch.float64)
    expected, found = continue_prompts(reference.eval()), two_ranks["generated"]
    assert found["tokens"] == expected["tokens"]
    assert (found["logits"] - expected["logits"]).abs().max() < 1e-13
    assert found["own"] == reference.config.vocab_size // 2  # behind it, the loss has a part again
    later = expected["logits"].argmax(dim=-1)
    assert (later >= found["own"]).any()  # tokens that the first rank alone would never say
