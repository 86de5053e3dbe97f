"""LoRA adapters of Qwen2.5-VL in Megatron's layout, against pieces cut here with plain torch."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mm.checkpoint.keymap import check_used_once
from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor
from mindspeed_mm.checkpoint.megatron.adapters import adapter_model
from mindspeed_mm.checkpoint.megatron.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout, MegatronRank
from mindspeed_mm.checkpoint.megatron.sharding import divide, join

R, H, INNER = 2, 8, 12
LAYERS = {"text": ((1, 2),), "vision": ((2, 0),)}
MODULES = {  # of the adapted modules: columns, rows
    "model.language_model.layers.{}.self_attn.q_proj": (H, H),
    "model.language_model.layers.{}.self_attn.o_proj": (H, H),
    "model.language_model.layers.{}.mlp.up_proj": (H, INNER),
    "model.language_model.layers.{}.mlp.down_proj": (INNER, H),
    "model.visual.blocks.{}.attn.qkv": (H, 3 * H),
    "model.visual.blocks.{}.attn.proj": (H, H),
}


@pytest.fixture
def adapter() -> dict[str, torch.Tensor]:
    """As PEFT names it."""
    torch.manual_seed(0)
    found = {}
    for module, (columns, rows) in MODULES.items():
        for number in range(2 if "visual" in module else 3):
            name = f"base_model.model.{module.format(number)}"
            found[f"{name}.lora_A.weight"] = torch.randn(R, columns)
            found[f"{name}.lora_B.weight"] = torch.randn(rows, R)
    return found


def test_adapters_are_cut_where_their_projections_are(adapter: dict[str, torch.Tensor]) -> None:
    model = adapter_model(QWEN2_5_VL, {"text": 3, "vision": 2})
    layout = MegatronLayout(LAYERS, tp=2, canonical=True)
    steps = model.key_map.steps({key: HeldTensor(tensor) for key, tensor in adapter.items()})
    whole = {key: tensor for step in steps for key, tensor in step.targets.items()}
    check_used_once(steps, adapter, whole)
    shards = divide(whole, model, layout)
    peft, text = "base_model.model.model.language_model.layers.", "text_decoder.decoder.layers."
    for tp in (0, 1):
        last = shards[MegatronRank(tp, 1, 0)]["model"]  # layers 1 and 2 of text, as 0 and 1
        expected = {
            f"{text}1.self_attention.q_proj.lora_A.default.weight": adapter[f"{peft}2.self_attn.q_proj.lora_A.weight"],
            f"{text}1.self_attention.q_proj.lora_B.default.weight": adapter[
                f"{peft}2.self_attn.q_proj.lora_B.weight"
            ].chunk(2, 0)[tp],
            f"{text}1.mlp.up_proj.lora_B.default.weight": adapter[f"{peft}2.mlp.up_proj.lora_B.weight"].chunk(2, 0)[tp],
            f"{text}1.mlp.linear_fc2.lora_A.default.weight": adapter[f"{peft}2.mlp.down_proj.lora_A.weight"].chunk(
                2, 1
            )[tp],
            f"{text}1.mlp.linear_fc2.lora_B.default.weight": adapter[f"{peft}2.mlp.down_proj.lora_B.weight"],
            f"{text}1.self_attention.linear_proj.lora_A.default.weight": adapter[
                f"{peft}2.self_attn.o_proj.lora_A.weight"
            ].chunk(2, 1)[tp],
        }
        for key, tensor in expected.items():
            assert torch.equal(last[key].read(), tensor), key
        name = "image_encoder.encoder.blocks.layers.1.self_attention.linear_qkv.lora_B.default.weight"
        of_qkv = adapter["base_model.model.model.visual.blocks.1.attn.qkv.lora_B.weight"]
        assert torch.equal(shards[MegatronRank(tp, 0, 0)]["model"][name].read(), of_qkv.chunk(2, 0)[tp])


@pytest.mark.parametrize("family", [QWEN2_VL, QWEN2_5_VL])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_adapters_come_back_to_the_bit(family: MegatronFamily, tp: int, adapter: dict[str, torch.Tensor]) -> None:
    model = adapter_model(family, {"text": 3, "vision": 2})
    layout = MegatronLayout(LAYERS, tp=tp, canonical=True)
    steps = model.key_map.steps({key: HeldTensor(tensor) for key, tensor in adapter.items()})
    whole = {key: tensor for step in steps for key, tensor in step.targets.items()}
    back = model.key_map.inverse.steps(join(divide(whole, model, layout), model, layout))
    found = {key: tensor for step in back for key, tensor in step.targets.items()}
    assert found.keys() == adapter.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor.read(), adapter[key]), key


def test_an_adapter_under_the_hubs_own_names_has_no_prefix(adapter: dict[str, torch.Tensor]) -> None:
    model = adapter_model(QWEN2_5_VL, {"text": 3, "vision": 2}, prefix="", module_names={})
    old = {
        key.removeprefix("base_model.model.").replace("model.language_model.", "model.").replace("model.vis", "vis")
        for key in adapter
    }
    steps = model.key_map.steps({key: HeldTensor(torch.zeros(2, 2)) for key in old})
    check_used_once(steps, old, {key for step in steps for key in step.targets})
