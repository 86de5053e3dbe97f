"""Linear layers in few bits: the numbers of other libraries, the layer against its dequantised twin, bytes kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import (
    QuantizedForward,
    QuantizedLayout,
    packings_of,
    quantize_linears,
)
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao
from tests.helpers.adapters import adapted_model, logits

WEIGHT = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
KINDS = {"nf4": QuantizedLayout("nf4", 128, 64), "int8": QuantizedLayout("int8", 128, 128)}


def test_nf4_is_torchaos() -> None:
    """Its scales are quantised once more before codes are chosen: nearly all of these are the same, and numbers agree
    as far as scales do."""
    nf4 = load_torchao("quantization.quantize_.workflows.nf4.nf4_tensor", key="")
    theirs = nf4.to_nf4(WEIGHT, block_size=64, scaler_block_size=256)
    packed = KINDS["nf4"].pack(WEIGHT)
    assert float((packed[:, :64].flatten() == theirs.quantized_data).float().mean()) > 0.98
    difference = KINDS["nf4"].unpack(packed, torch.float32) - theirs.get_original_weight()
    assert float(difference.abs().mean()) < 0.01


def test_nf4_by_its_definition() -> None:
    """QLoRA, appendix E: the nearest of sixteen quantiles, times the largest number of the block."""
    from mindspeed_mm.fsdp.models.behaviour.quantized_linear import _NF4

    table, blocks = torch.tensor(_NF4), WEIGHT.view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / largest)[..., None] - table).abs().argmin(-1)
    found = KINDS["nf4"].unpack(KINDS["nf4"].pack(WEIGHT), torch.float32)
    assert torch.equal(found, (table[nearest] * largest).view(256, 128))


def test_int8_by_its_definition() -> None:
    scale = WEIGHT.abs().amax(1, keepdim=True) / 127
    found = KINDS["int8"].unpack(KINDS["int8"].pack(WEIGHT), torch.float32)
    torch.testing.assert_close(found, (WEIGHT / scale).round() * scale, rtol=1e-6, atol=1e-7)
    assert float((found - WEIGHT).abs().max()) <= float(scale.max()) / 2 * 1.001


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.5625), ("int8", 1.03125)])
def test_bytes_of_a_number(kind: str, most: float) -> None:
    packed = KINDS[kind].pack(WEIGHT)
    assert packed.dtype == torch.uint8 and packed.numel() / WEIGHT.numel() == most
    zeros = KINDS[kind].pack(torch.zeros(2, 128))
    assert not KINDS[kind].unpack(zeros, torch.float32).any()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layer_equals_its_dequantised_twin(kind: str, dtype: torch.dtype) -> None:
    """Outputs and gradients; what is kept for the backward pass is bytes."""
    packing = KINDS[kind]
    layer = nn.Linear(128, 256).requires_grad_(False).to(dtype)
    layer._parameters["weight"] = nn.Parameter(packing.pack(WEIGHT), requires_grad=False)
    layer.forward = QuantizedForward(layer, packing)  # type: ignore[method-assign, assignment]
    twin = nn.Linear(128, 256).to(dtype)
    with torch.no_grad():
        twin.weight.copy_(packing.unpack(layer.weight, dtype))
        twin.bias.copy_(layer.bias)
    found = []
    kept: list[torch.Tensor] = []
    for module in (layer, twin):
        inputs = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = module(inputs)
        output.square().sum().backward()
        assert inputs.grad is not None
        found.append((output.detach(), inputs.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert layer.weight.grad is None and any(t.dtype == torch.uint8 for t in kept)


def test_which_layers(folders: dict[str, Path]) -> None:
    model = adapted_model(folders["vision"], dtype=torch.bfloat16, quantize="nf4", modules_to_save=["visual.merger"])
    names = set(packings_of(model))
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in names  # under an adapter
    assert (
        "model.language_model.layers.1.mlp.down_proj.weight" in names
        and "model.visual.blocks.0.mlp.linear_fc1.weight" in names
    )
    assert not any("merger" in name or "embed" in name or "lm_head" in name for name in names)
    kept = {n: p for n, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(kept) == len(names) and not any(p.requires_grad for p in kept.values())


@pytest.mark.parametrize("kind", list(KINDS))
def test_model_equals_the_model_of_rounded_weights(kind: str, folders: dict[str, Path]) -> None:
    model = adapted_model(folders["text"], dtype=torch.float64, quantize=kind)
    plain = adapted_model(folders["text"], dtype=torch.float64)
    before = logits(plain)
    for name, packing in packings_of(model).items():
        inner = name if name in dict(plain.named_parameters()) else name.replace(".weight", ".base_layer.weight")
        with torch.no_grad():
            plain.get_parameter(inner).copy_(packing.unpack(model.get_parameter(inner), torch.float64))
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-12)
    assert not torch.allclose(before, logits(plain), atol=1e-5)  # rounding is no small thing


def test_loftq_makes_up_for_the_rounding(folders: dict[str, Path]) -> None:
    """W − Q(W) − scale · B·A is what remains of the residual without its largest directions."""
    from peft.utils.loftq_utils import _low_rank_decomposition
    from safetensors.torch import load_file

    model: Any = adapted_model(folders["text"], random=False, quantize="nf4", init_lora_weights="loftq")
    stored = load_file(folders["text"] / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    layer = model.model.layers[0].self_attn.q_proj
    kept = layer.base_layer.forward.packing.unpack(layer.base_layer.weight, torch.float32)
    theirs = _low_rank_decomposition(stored - kept, reduced_rank=4)
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(delta, theirs["L"] @ theirs["R"], rtol=0, atol=1e-6)
    assert float((stored - kept - delta).norm()) < float((stored - kept).norm())


def test_a_model_without_frozen_layers(folders: dict[str, Path]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="no frozen linear layer"):
        quantize_linears(model, "nf4")
