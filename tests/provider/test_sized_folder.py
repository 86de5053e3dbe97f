"""A model that no folder is named for is that of the released folder, where the sizes are those of the release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.provider.sized_folder import files_of_sizes

RELEASED = Path(__file__).parents[1] / "released"
ROPE = {"rope_theta": 1000000.0, "mrope_section": [16, 24, 24], "layernorm_epsilon": 1e-06}
MARKS = {"img_context_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
TOWER = {
    "num_layers": 32, "hidden_size": 1280, "num_attention_heads": 16,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-3b": {
        "model_id": "qwen2_5vl",
        **MARKS,
        "image_encoder": {
            "vision_encoder": TOWER
            | {"ffn_hidden_size": 3420, "window_attn_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
        },
        "text_decoder": {
            "num_layers": 36, "hidden_size": 2048, "ffn_hidden_size": 11008, "num_attention_heads": 16,
            "num_query_groups": 2, "vocab_size": 151936, "max_position_embeddings": 128000,
            "untie_embeddings_and_output_weights": False, **ROPE,
        },
    },
    "qwen2-vl-7b": {
        "model_id": "qwen2vl",
        **MARKS,
        "image_encoder": {"vision_encoder": TOWER | {"ffn_hidden_size": 5120}},
        "text_decoder": {
            "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28,
            "num_query_groups": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
            "untie_embeddings_and_output_weights": True, **ROPE,
        },
    },
}  # fmt: skip
"""Name of a release → its sizes, as model.json says them."""
WAN = {
    "model_id": "wandit", "model_type": "t2v", "num_layers": 40, "num_heads": 40, "hidden_size": 5120, "in_dim": 16,
    "out_dim": 16, "ffn_dim": 13824, "freq_dim": 256, "text_dim": 4096, "img_dim": 1280, "max_seq_len": 1024,
    "patch_size": [1, 2, 2], "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_release(name: str) -> None:
    record = json.loads((RELEASED / f"{name}.json").read_text(encoding="utf-8"))["config"]
    config = files_of_sizes(MODELS[name], "model.json")["config.json"]
    tower = config.pop("vision_config")
    assert config == {key: record[key] for key in config} and len(config) > 14
    assert tower == {key: record["vision_config"][key] for key in tower} and len(tower) > 6


def test_wan_is_diffusers_own_default() -> None:
    """Which is the 14 B model."""
    from diffusers import WanTransformer3DModel

    files = files_of_sizes({"predictor": WAN, "diffusion": {"shift": 5}}, "model.json")
    defaults = WanTransformer3DModel.__init__.__wrapped__.__kwdefaults__ or _defaults(WanTransformer3DModel)
    config = {key: value for key, value in files["transformer/config.json"].items() if key != "_class_name"}
    assert {key: defaults[key] for key in config} | {"patch_size": [1, 2, 2]} == config
    assert files["scheduler/scheduler_config.json"]["flow_shift"] == 5
    assert files["model_index.json"]["_class_name"] == "WanPipeline"


def _defaults(model_class: Any) -> dict[str, Any]:
    import inspect

    return {name: each.default for name, each in inspect.signature(model_class.__init__).parameters.items()}


def test_wan_of_pictures() -> None:
    files = files_of_sizes({"predictor": WAN | {"model_type": "i2v", "in_dim": 36}}, "model.json")
    config = files["transformer/config.json"]
    assert (config["image_dim"], config["added_kv_proj_dim"], config["in_channels"]) == (1280, 5120, 36)
    assert files["model_index.json"]["_class_name"] == "WanImageToVideoPipeline"


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"model_id": "qwen2_5vl", "text_decoder": {"num_layers": 2}},
         "model.json  text_decoder  hidden_size, ffn_hidden_size, num_attention_heads, vocab_size: not given"),
        ({"predictor": {"model_id": "wandit", "num_layers": 2}}, "model.json  predictor  num_heads, hidden_size"),
        ({"model_id": "qwen3_vl", "text_decoder": {}}, "sizes alone are enough for Qwen2-VL, Qwen2.5-VL and Wan"),
        ({}, "model.json  names no model folder"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_enough(model: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        files_of_sizes(model, "model.json")
    assert line in str(raised.value)
