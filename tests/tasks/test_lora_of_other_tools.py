"""Adapters of generators by the names of ComfyUI and of kohya's scripts sample as the weights with them merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.lora.files import AdapterFile, check_adapters
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.model_source import ModelSource
from tests.helpers.adapters import adapted_model
from tests.helpers.pipeline_probe import plain_pipeline
from tests.helpers.runs import mm
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan

RANK, ALPHA = 2, 1.0
CPU = torch.device("cpu")


def written(path: Path, name: str, ends: tuple[str, str], shape: tuple[int, int]) -> torch.Tensor:
    """A file with one adapter; returns what it adds to the weight."""
    draw = torch.Generator().manual_seed(1)
    down, up = torch.randn(RANK, shape[1], generator=draw), torch.randn(shape[0], RANK, generator=draw)
    save_file({name + ends[0]: down, name + ends[1]: up, f"{name}.alpha": torch.tensor(ALPHA)}, path)
    return ALPHA / RANK * up @ down


CASES: dict[str, tuple[Callable[..., Path], str, tuple[str, str], str, int]] = {
    "Wan, ComfyUI": (make_tiny_wan, "diffusion_model.blocks.0.self_attn.q", (".lora_A.weight", ".lora_B.weight"),
                     "blocks.0.attn1.to_{}", 1),
    "FLUX, kohya": (make_tiny_flux, "lora_unet_double_blocks_0_img_attn_qkv", (".lora_down.weight", ".lora_up.weight"),
                    "transformer_blocks.0.attn.to_{}", 3),
    "Wan, kohya": (make_tiny_wan, "lora_unet_blocks_0_self_attn_q", (".lora_down.weight", ".lora_up.weight"),
                   "blocks.0.attn1.to_{}", 1),
    "VACE, kohya": (lambda folder: make_tiny_conditioned(folder, "vace"), "lora_unet_vace_blocks_0_self_attn_q",
                    (".lora_down.weight", ".lora_up.weight"), "vace_blocks.0.attn1.to_{}", 1),
}  # fmt: skip
"""Case → its model, the layer's name in the file, the ends of its halves, the layers in diffusers, how many are one."""


@pytest.mark.edge("BN12")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_they_sample_as_merged_weights(name: str, tmp_path: Path) -> None:
    make, layer, ends, own, fused = CASES[name]
    folder, file = make(tmp_path / "model"), tmp_path / "other.safetensors"
    adapter = find_adapter(folder)
    plain = load_sampler(adapter, ModelSource(folder), CPU).pipeline.transformer
    targets = [plain.get_submodule(own.format(letter)) for letter in "qkv"[:fused]]
    width, taken = targets[0].weight.shape
    delta = written(file, layer, ends, (fused * width, taken))
    given = load_sampler(adapter, ModelSource(folder, lora=file), CPU).pipeline.transformer
    for target, part in zip(targets, delta.chunk(fused), strict=True):
        beside = given.get_submodule(next(n for n, m in plain.named_modules() if m is target))
        tokens = torch.randn(3, taken)
        expected = tokens @ (target.weight + part).T + target.bias
        torch.testing.assert_close(beside(tokens), expected, rtol=1e-4, atol=1e-5)
        assert (beside(tokens) - target(tokens)).abs().max() > 1e-3


def changes_by(pipeline: Any, plain: Any, layer: str) -> torch.Tensor:
    """What a layer with an adapter adds for one token for each of its inputs."""
    adapted, base = (each.transformer.get_submodule(layer) for each in (pipeline, plain))
    tokens = torch.eye(base.in_features)
    return (adapted(tokens) - base(tokens)).T


@pytest.mark.edge("BN12")
@pytest.mark.parametrize("alpha", [0.1, 12])
@torch.no_grad()
def test_adapters_of_flux_hold_alpha_for_every_reader(alpha: float, tmp_path: Path) -> None:
    """Beside the layers, where ComfyUI looks it up, and not in the header: diffusers takes one of the two."""
    folder, own = make_tiny_flux(tmp_path / "model"), tmp_path / "own"
    model = adapted_model(folder, alpha=alpha)
    save_adapters(model, own, folder, dtype=torch.bfloat16)
    file = own / "pytorch_lora_weights.safetensors"
    held = load_file(file)
    layers = {key.partition(".lora_")[0] for key in held if ".lora_" in key}
    assert layers and all(held[f"{layer}.alpha"] == torch.tensor(alpha) for layer in layers)  # not rounded to bf16
    plain, adapted = plain_pipeline(folder), plain_pipeline(folder)
    adapted.load_lora_weights(own)
    assert layers == {f"transformer.{n}" for n, m in adapted.transformer.named_modules() if hasattr(m, "lora_A")}
    for layer in layers:
        down, up = held[f"{layer}.lora_A.weight"].float(), held[f"{layer}.lora_B.weight"].float()
        expected = held[f"{layer}.alpha"] / len(down) * up @ down
        found = changes_by(adapted, plain, layer.removeprefix("transformer."))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
        assert expected.abs().max() > 1e-5

    settings = AdapterFile.find(own).settings
    assert (settings["r"], settings["lora_alpha"], settings["alpha_pattern"]) == (4, alpha, {})
    check_adapters(model, own)
    with pytest.raises(ModelFolderError, match=f"has alpha {alpha:g}, this run 7"):
        check_adapters(adapted_model(folder, alpha=7), own)

    with safe_open(file, "pt") as reader:
        header = reader.metadata()
    assert "lora_adapter_metadata" not in header
    settings_too = {**header, "lora_adapter_metadata": f'{{"transformer.r": 4, "transformer.lora_alpha": {alpha}}}'}
    save_file(held, tmp_path / "both.safetensors", metadata=settings_too)
    with pytest.raises(ValueError, match="Both `network_alphas` and `metadata`"):
        plain.load_lora_weights(tmp_path, weight_name="both.safetensors")


@pytest.mark.edge("BN12")
def test_alphas_and_ranks_of_single_layers_are_read(tmp_path: Path) -> None:
    ranks, alphas = {"a": 2, "b": 2, "c": 4}, {"a": 3.0, "b": 1.0, "c": 3.0}
    held = {f"transformer.{layer}.lora_A.weight": torch.zeros(rank, 8) for layer, rank in ranks.items()}
    held |= {f"transformer.{layer}.lora_B.weight": torch.zeros(8, rank) for layer, rank in ranks.items()}
    held |= {f"transformer.{layer}.alpha": torch.tensor(alpha) for layer, alpha in alphas.items()}
    save_file(held, tmp_path / "x.safetensors")
    stored = AdapterFile.find(tmp_path / "x.safetensors").adapter()
    assert stored.layers.keys() == ranks.keys() and not stored.whole
    assert {layer: stored.scale(layer) for layer in ranks} == {"a": 1.5, "b": 0.5, "c": 0.75}
    save_file(held | {"transformer.a.alpha": torch.tensor(float("nan"))}, tmp_path / "x.safetensors")
    with pytest.raises(ModelFolderError, match="is not one finite number"):
        AdapterFile.find(tmp_path / "x.safetensors")


@pytest.mark.edge("BN12")
def test_other_loaders_of_diffusers_reject_alphas(tmp_path: Path) -> None:
    """Which is why files of all other families have alpha in the header alone."""
    folder, own = make_tiny_wan(tmp_path / "model"), tmp_path / "own"
    save_adapters(adapted_model(folder), own, folder)
    file = own / "pytorch_lora_weights.safetensors"
    held, pipeline = load_file(file), plain_pipeline(folder)
    assert not any(key.endswith(".alpha") for key in held)
    pipeline.load_lora_weights(own)
    assert {s for m in pipeline.transformer.modules() for s in getattr(m, "scaling", {}).values()} == {12 / 4}
    layers = {key.partition(".lora_")[0] for key in held}
    save_file(held | {f"{layer}.alpha": torch.tensor(12.0) for layer in layers}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
        plain_pipeline(folder).load_lora_weights(tmp_path, weight_name="x.safetensors")


def test_a_file_of_them_is_sampled_with(tmp_path: Path) -> None:
    folder, file = make_tiny_flux(tmp_path / "model"), tmp_path / "other.safetensors"
    _, layer, ends, _, _ = CASES["FLUX, kohya"]
    width = find_adapter(folder).transformer_config
    size = width["num_attention_heads"] * width["attention_head_dim"]
    written(file, layer, ends, (3 * size, size))
    words = ("infer", folder, "--prompt", "a", "--size", "16x16", "--steps", 1)
    for option, out in ((), "without"), (("--lora", file), "with"):
        said = mm(*words, *option, "--out", tmp_path / out)
        assert said.code == 0, said.err
    pictures = [next((tmp_path / out).glob("*.png")).read_bytes() for out in ("without", "with")]
    assert pictures[0] != pictures[1]


def test_a_file_for_another_model_is_refused(tmp_path: Path) -> None:
    folder, file = make_tiny_flux(tmp_path / "model"), tmp_path / "other.safetensors"
    written(file, "diffusion_model.nobody.q", (".lora_A.weight", ".lora_B.weight"), (8, 8))
    with pytest.raises(ModelFolderError, match=r"no adapter of a layer|does not read adapters by these names"):
        load_sampler(find_adapter(folder), ModelSource(folder, lora=file), CPU)


MISSHAPEN = {
    "FLUX, ComfyUI": (make_tiny_flux, "diffusion_model.single_blocks.0.linear1"),
    "VACE, ComfyUI": (
        lambda folder: make_tiny_conditioned(folder, "vace"),
        "diffusion_model.vace_blocks.0.cross_attn.q",
    ),
    "VACE, kohya": (lambda folder: make_tiny_conditioned(folder, "vace"), "lora_unet_vace_blocks_0_cross_attn_q"),
}
"""Case → its model, and a layer of it."""


@pytest.mark.parametrize("name", MISSHAPEN)
def test_adapters_of_another_size_are_told(name: str, tmp_path: Path) -> None:
    make, layer = MISSHAPEN[name]
    folder, file = make(tmp_path / "model"), tmp_path / "other.safetensors"
    written(file, layer, (".lora_down.weight", ".lora_up.weight"), (9, 9))
    with pytest.raises(ModelFolderError, match="do not belong to this model") as caught:
        load_sampler(find_adapter(folder), ModelSource(folder, lora=file), CPU)
    assert str(file) in str(caught.value)
    assert caught.value.exit_code == 4
