"""Tiny models with dropout, a loss of each, and what a step of one gives and keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.tiny_models import PATCH_SIZE, VOCAB_SIZE

Step = Callable[[nn.Module], torch.Tensor]
KINDS = ("qwen3_vl", "flux", "wan")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole, whoever holds it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def build(kind: str, folder: Path) -> tuple[nn.Module, Step]:
    model, step = {"qwen3_vl": partial(qwen3_vl, folder), "flux": flux, "wan": wan}[kind]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return model.train(), step


def qwen3_vl(folder: Path) -> tuple[nn.Module, Step]:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    generator = torch.Generator().manual_seed(1)
    picture = torch.full((2, 4), model.config.image_token_id)
    tokens = torch.randint(10, VOCAB_SIZE // 2, (2, 9), generator=generator)
    batch = {
        "input_ids": torch.cat([picture, tokens], 1),
        "pixel_values": torch.randn(2 * 16, 3 * 2 * PATCH_SIZE**2, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": torch.cat([torch.ones_like(picture), torch.zeros_like(tokens)], 1),
        "use_cache": False,
    }
    return model, lambda model: model(**batch).logits.square().mean()


def flux() -> tuple[nn.Module, Step]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    )
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    batch = {
        "hidden_states": noise(2, 16, 4),
        "encoder_hidden_states": noise(2, 5, 12),
        "pooled_projections": noise(2, 6),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, lambda model: model(**batch, return_dict=False)[0].square().mean()


def wan() -> tuple[nn.Module, Step]:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=3,
        rope_max_seq_len=16,
    )
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    batch = {
        "hidden_states": noise(2, 4, 3, 8, 8),
        "encoder_hidden_states": noise(2, 5, 8),
        "timestep": torch.tensor([300.0, 700.0]),
    }
    return model, lambda model: model(**batch, return_dict=False)[0].square().mean()


def loss_and_gradients(model: nn.Module, step: Step) -> dict[str, torch.Tensor | None]:
    """Dropout is drawn from the generator; its state afterwards counts as well."""
    torch.manual_seed(7)
    loss = step(model)
    loss.backward()
    gradients = {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}
    return {"loss": full(loss), "generator": torch.get_rng_state(), **gradients}


def differing(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not same(tensor, other[name])]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def kept_bytes(model: nn.Module, step: Step) -> int:
    """Of all that autograd holds between forward and backward, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model)
    return sum(sizes.values())
