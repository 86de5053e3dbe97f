"""A model made small keeps every kind of layer, stays divisible by the plan, and is one that its class can run."""

from __future__ import annotations

import importlib
import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.params.cards import transformer_ids
from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.verify.model import smaller_ones, with_rates
from mindspeed_mm.tasks.verify.run import uncompared
from mindspeed_mm.tasks.verify.shrink import Room, shrink, without_dropout

QWEN3_VL = {
    "text_config": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip


def test_a_vision_language_model() -> None:
    small = shrink(QWEN3_VL, Room()).config
    assert small["text_config"] == {
        "vocab_size": 151936, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "rope_scaling": {"mrope_section": [6, 5, 5], "rope_type": "default"},
    }  # fmt: skip
    assert small["vision_config"] == {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128,
        "deepstack_visual_indexes": [1],
    }  # fmt: skip


def test_layers_with_a_window_narrow_as_the_others_do() -> None:
    """MiMo-V2.5: twice as many key heads, and all else the same; lists of layers are as long as there are layers."""
    path = Path(__file__).parents[1] / "released/mimo-v2-5.json"
    small = shrink(json.loads(path.read_text(encoding="utf-8"))["config"], Room()).config
    assert small["swa_num_key_value_heads"] == 2 * small["num_key_value_heads"] == 4
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        assert small[f"swa_{key}"] == small[key]
    assert small["num_attention_heads"] == 4
    assert len(small["hybrid_layer_pattern"]) == len(small["moe_layer_freq"]) == small["num_hidden_layers"] == 3
    assert len(small["vision_config"]["vit_window_attn_types"]) == small["vision_config"]["depth"]


def test_lists_of_layers_that_count_from_one() -> None:
    """Kimi-K3: of a state without experts and with them, and of latent attention."""
    path = Path(__file__).parents[1] / "released/kimi-k3.json"
    small = shrink(json.loads(path.read_text(encoding="utf-8"))["config"], Room()).config
    text, mixing = small["text_config"], small["text_config"]["linear_attn_config"]
    assert (text["num_hidden_layers"], text["first_k_dense_replace"]) == (3, 1)
    assert (mixing["kda_layers"], mixing["full_attn_layers"]) == ([1, 2], [3])
    assert (text["num_experts"], text["num_experts_per_token"]) == (4, 2)
    assert small["vision_config"]["vt_num_hidden_layers"] == 2


def test_what_the_plan_divides() -> None:
    small = shrink(QWEN3_VL, Room(stages=3, tensor=4)).config
    text = small["text_config"]
    assert text["num_hidden_layers"] == 3
    assert text["num_key_value_heads"] == 4 and text["num_attention_heads"] == 8
    assert small["vision_config"]["num_heads"] == 4 and small["vision_config"]["depth"] == 2


def test_layers_alone() -> None:
    small = shrink(QWEN3_VL, Room(), heads=None)
    assert {key.rpartition(".")[2] for key in small.changes} == {
        "num_hidden_layers", "depth", "deepstack_visual_indexes",
    }  # fmt: skip


GRANITE: dict[str, Any] = {
    "deepstack_layer_map": [[-19, 9], [-1, 0]], "spatial_target_layers": [12, 15, 18, 21],
    "text_config": {"hidden_size": 2560, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8},
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
    "qformer_config": {"hidden_size": 1152, "num_hidden_layers": 1, "num_attention_heads": 18},
}  # fmt: skip


@pytest.mark.parametrize(
    "lists", [{"spatial_target_layers": [12]}, {"deepstack_layer_map": [[-1, 9]]}, {"vision_feature_layer": [-7, -1]}]
)
def test_layers_that_another_section_numbers_stay(lists: dict[str, Any]) -> None:
    """Granite 4 Vision: what each layer of the tower feeds is a layer of the text."""
    sections = {key: GRANITE[key] for key in ("text_config", "vision_config")}
    assert shrink(sections, Room()).config["text_config"]["num_hidden_layers"] == 2
    small = shrink(sections | lists, Room()).config
    assert (small["text_config"]["num_hidden_layers"], small["vision_config"]["num_hidden_layers"]) == (40, 27)
    assert small["text_config"]["hidden_size"] == 64
    short = {key: [[-3, 0]] for key in lists}
    assert shrink(sections | short, Room()).config["text_config"]["num_hidden_layers"] == 2


def test_lists_of_a_section_that_is_not_cut() -> None:
    tower = {"layers": 12, "width": 768, "global_attn_indexes": [2, 5, 8, 11]}
    small = shrink({"num_hidden_layers": 8, "vision_config": {"width": {"sam": tower}}}, Room()).config
    assert small["num_hidden_layers"] == 2


def test_heads_that_a_class_derives_from_a_width() -> None:
    """Granite 4 Vision's Q-Former has as many heads as its tower has times 64 features; no layer of it goes."""
    prepare_for_transformers()
    import transformers

    text = {"vocab_size": 64, "intermediate_size": 512, "pad_token_id": 0}
    vision = {"model_type": "siglip_vision_model", "intermediate_size": 512, "image_size": 64, "patch_size": 16}
    former = {"model_type": "blip_2_qformer", "intermediate_size": 64}
    own = {"text_config": text, "vision_config": vision, "qformer_config": former}
    config: dict[str, Any] = {"model_type": "granite4_vision", "downsample_rate": "2/4"}
    for key, value in GRANITE.items():
        config[key] = value | own[key] if isinstance(value, dict) else value
    built = []
    for way in smaller_ones(config, Room()):
        with suppress(ArithmeticError), torch.device("meta"):
            made = transformers.AutoConfig.for_model(**way.config)
            built.append(transformers.Granite4VisionForConditionalGeneration(made))
    assert len(built[0].model.language_model.layers) == 40
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in built]
    assert counts[0] < 50_000_000 < 1_000_000_000 < counts[-1] and len(built) == 2


def test_every_kind_of_layer_stays() -> None:
    kinds = (["sliding"] * 5 + ["full"]) * 5
    small = shrink({"num_hidden_layers": 30, "layer_types": kinds, "mlp_only_layers": [0, 1, 2]}, Room()).config
    assert small["layer_types"] == ["sliding", "sliding", "full"]
    assert small["mlp_only_layers"] == [0]


def test_layers_that_come_in_periods_stay_in_place() -> None:
    assert shrink({"num_hidden_layers": 48, "full_attention_interval": 4}, Room()).config["num_hidden_layers"] == 4


def test_dense_layers_in_front_of_experts() -> None:
    config = {
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512,
    }  # fmt: skip
    small = shrink(config, Room(experts=2)).config
    assert (small["num_hidden_layers"], small["first_k_dense_replace"]) == (2, 1)
    assert (small["n_routed_experts"], small["num_experts_per_tok"]) == (4, 2)
    assert (small["n_group"], small["topk_group"]) == (2, 2)


def test_a_plan_that_does_not_fit_still_does_not() -> None:
    small = shrink({"num_hidden_layers": 4, "num_attention_heads": 6, "hidden_size": 96}, Room(tensor=4)).config
    assert small["num_attention_heads"] == 6


def test_transformers_of_generators() -> None:
    flux = {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56], "joint_attention_dim": 4096, "in_channels": 64}  # fmt: skip
    assert shrink(flux, Room()).config == flux | {
        "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32,
        "axes_dims_rope": [4, 14, 14],
    }  # fmt: skip
    wan = {"num_layers": 30, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096}
    assert shrink(wan, Room(tensor=4)).config == wan | {
        "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 128,
    }  # fmt: skip


def test_widths_that_generators_repeat() -> None:
    """Positions have a setting of another name in each family; captions are brought to the width of the layers."""
    hunyuan = {"num_layers": 20, "num_attention_heads": 24, "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56]}
    assert shrink(hunyuan, Room()).config == {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "rope_axes_dim": [4, 14, 14],
    }  # fmt: skip
    sd3 = {"num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536,
           "joint_attention_dim": 4096}  # fmt: skip
    assert shrink(sd3, Room(tensor=2)).config == {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "caption_projection_dim": 32,
        "joint_attention_dim": 4096,
    }  # fmt: skip
    z_image = {"dim": 3840, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48]}
    assert shrink(z_image, Room()).config == {
        "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [4, 6, 6],
    }  # fmt: skip
    ltx2 = {
        "num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096,
        "audio_num_attention_heads": 32, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048,
    }  # fmt: skip
    assert shrink(ltx2, Room()).config == {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32,
        "audio_num_attention_heads": 2, "audio_attention_head_dim": 16, "audio_cross_attention_dim": 32,
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(transformer_ids()))
def test_every_generator_becomes_small(name: str) -> None:
    """Of the sizes that a constructor has, which are those of a release in most families."""
    prepare_for_transformers()
    import diffusers

    own_classes = model_register.get(transformer_ids()[name]).own_classes
    kind = getattr(importlib.import_module(own_classes[name]) if name in own_classes else diffusers, name)
    config = {}
    for setting, parameter in inspect.signature(kind.__init__).parameters.items():
        if parameter.default is not parameter.empty:
            is_tuple = isinstance(parameter.default, tuple)
            config[setting] = list(parameter.default) if is_tuple else parameter.default
    if name.startswith("OpenSora") and name.endswith("v1_3"):
        config["attention_head_dim"] = 96  # the constructor's, 88, cannot be divided into three axes, and is refused
    with torch.device("meta"):
        model = kind(**shrink(config, Room(tensor=2, stages=2)).config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 30_000_000


def test_nothing_is_dropped_any_more() -> None:
    config = {"attention_dropout": 0.1, "vision_config": {"drop_path_rate": 0.2}, "hidden_size": 8, "use_dropout": True}
    still = without_dropout(config)
    assert still.config["attention_dropout"] == 0 and still.config["vision_config"]["drop_path_rate"] == 0
    assert still.config["use_dropout"] is True
    assert set(still.changes) == {"attention_dropout", "vision_config.drop_path_rate"}
    assert config["attention_dropout"] == 0.1


def test_what_a_class_drops_by_default_is_told() -> None:
    """transformers stores no setting that has the value of its class, a section of defaults neither."""
    whole = {"dropout": 0.1, "depth": 2, "former": {"attention_dropout": 0.2, "width": 8}, "text": {"drop": 1, "n": 3}}
    whole |= {"eye": {"hidden_dropout_prob": 0.1, "width": 4}, "id2label": {0: "cat"}}
    stored = {"depth": 2, "former": {"width": 8}}
    assert with_rates(stored, whole) == {
        "depth": 2, "former": {"width": 8, "attention_dropout": 0.2}, "dropout": 0.1, "eye": whole["eye"],
    }  # fmt: skip
    assert with_rates({"dropout": 0.0}, {"dropout": 0.1}) == {"dropout": 0.0}


def test_parameters_that_no_gradient_reaches_are_told() -> None:
    """They are equal in every plan: no gradient, or one of zeros in each step. Frozen ones are not meant."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in ("a", "b", "c", "d")})
    model["d"].requires_grad_(False)
    nothing, some = torch.zeros(1, 2), torch.ones(1, 2)
    first = {"gradients": {"a.weight": nothing, "b.weight": nothing, "c.weight": None, "d.weight": None}}
    second = {"gradients": {**first["gradients"], "a.weight": some}}
    (line,) = uncompared(model, [first, second])
    assert "2 of 3 parameters: b.weight, c.weight" in line
    every = {"gradients": {f"{name}.weight": some for name in ("a", "b", "c")}}
    assert uncompared(model, [every]) == ()


TEXT = ("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Gemma2", "Gemma3Text", "DeepseekV3", "Mixtral", "Phi3")


@pytest.mark.parametrize("name", TEXT)
def test_classes_run_what_comes_of_their_defaults(name: str) -> None:
    prepare_for_transformers()
    import transformers

    config_class = getattr(transformers, f"{name}Config")
    before: dict[str, Any] = config_class(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2).to_dict()
    small = shrink(before, Room(tensor=2, experts=2))
    config = config_class.from_dict(small.config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    logits = model(input_ids=torch.arange(8)[None]).logits
    assert logits.shape == (1, 8, 64)
    logits.sum().backward()
