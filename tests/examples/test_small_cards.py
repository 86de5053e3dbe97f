"""The examples for cards of some size: a step of the released model, on meta, fits the card that the file names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from tests.helpers.released_examples import Example, first_comment, full_batch

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARE = 0.92
"""Of a card, what is left beside the driver, the kernels' own memory and what the allocator loses."""
FLUX = {
    "_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 64, "num_layers": 19,
    "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096,
    "pooled_projection_dim": 768, "axes_dims_rope": [16, 56, 56], "guidance_embeds": True,
}  # fmt: skip
WAN = {
    "_class_name": "WanTransformer3DModel", "attention_head_dim": 128, "cross_attn_norm": True, "freq_dim": 256,
    "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads", "text_dim": 4096, "ffn_dim": 13824,
    "num_attention_heads": 40, "num_layers": 40, "in_channels": 16, "out_channels": 16,
}  # fmt: skip
SMALL_WAN = WAN | {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}
VACE = SMALL_WAN | {
    "_class_name": "WanVACETransformer3DModel", "vace_layers": list(range(0, 30, 2)), "vace_in_channels": 96,
}  # fmt: skip
WAN_VAE = {"z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4}
RELEASED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "flux1_dev": ("FluxPipeline", FLUX, {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]}),
    "wan2.1_14B": ("WanPipeline", WAN, WAN_VAE),
    "wan2.1_1.3B": ("WanPipeline", SMALL_WAN, WAN_VAE),
    "vace_1.3B": ("WanVACEPipeline", VACE, WAN_VAE),
}
"""What a file's name begins with → pipeline, and configurations of transformer and VAE, as released."""
_CLIP = (21, 60, 104)
LATENTS = {"flux1_dev": (16, 128, 128)} | dict.fromkeys(("wan2.1_14B", "wan2.1_1.3B", "vace_1.3B"), (16, *_CLIP))
CARDS = sorted(EXAMPLES.glob("*/*_*GB_config.yaml"))
READERS = [path for path in CARDS if path.parent.name in ("qwen2.5vl", "qwen3vl", "internvl3")]
"""Models that look at pictures; the others make some."""
FILES = [path for path in CARDS if path not in READERS]
_NAMED = re.compile(r"`(\S+?_config\.yaml)` \| (\d+) GB \| ([\d.]+) GiB")
"""A line of a page about a file for a card: its name, the card and the forecast."""


def release_of(path: Path) -> str:
    """The key of `RELEASED`."""
    (name,) = (name for name in RELEASED if path.name.startswith(f"{name}_"))
    return name


def write_parts(folder: Path, pipeline: str, transformer: dict[str, Any], vae: dict[str, Any]) -> None:
    """The configurations of a pipeline's folder."""
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    index = {
        "_class_name": pipeline,
        "transformer": ["diffusers", transformer["_class_name"]],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", scheduler["_class_name"]],
    }
    parts = {"transformer/config": transformer, "vae/config": vae, "scheduler/scheduler_config": scheduler}
    for path, content in {**parts, "model_index": index}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{path}.json").write_text(json.dumps(content))


def predicted_gb(path: Path, folder: Path, *words: str) -> float:
    """GiB of a step."""
    name = release_of(path)
    write_parts(folder, *RELEASED[name])
    arguments = load_with_plugins(path, [f"model.model_name_or_path={folder}", *words]).arguments
    rows = arguments.training.micro_batch_size
    batch = {
        "sample_ids": ["a"] * rows, "epochs": [0] * rows, "fps": [16.0] * rows,
        "latents": torch.zeros(rows, *LATENTS[name]), "prompt_embeds": torch.zeros(rows, 512, 4096),
        "pooled_prompt_embeds": torch.zeros(rows, 768),
    }  # fmt: skip
    if name.startswith("vace"):
        batch["control_latents"] = torch.zeros(rows, VACE["vace_in_channels"], *_CLIP)
    return forecast(arguments, batch, device_type="cuda").peak / 2**30


def test_each_names_its_card() -> None:
    assert {release_of(path) for path in FILES} == RELEASED.keys()
    for path in CARDS:
        (said,) = re.findall(r"a card of (\d+) GB\.", first_comment(path))
        assert f"_{said}GB_" in path.name and f"_{said}GB" in path.read_text().partition("save: ")[2]


def test_models_that_look_have_cards_of_three_sizes_and_pages_name_them() -> None:
    assert {int(re.findall(r"_(\d+)GB_", path.name)[0]) for path in READERS} == {24, 48, 80}
    recipes = (EXAMPLES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    for path in READERS:
        arguments = load_config(path).arguments
        assert arguments.training.lora.enable == ("lora" in path.name)
        assert (arguments.training.lora.quantize == "nf4") == ("qlora" in path.name)
        page = (path.parent / "README.md").read_text(encoding="utf-8")
        assert path.name in [name for name, *_ in _NAMED.findall(page)]
        assert path.name in recipes


@pytest.mark.slow
@pytest.mark.parametrize("path", READERS, ids=lambda path: path.stem)
def test_a_packed_row_fits_the_card(path: Path, tmp_path: Path) -> None:
    """A micro-batch as long as the file lets it become, half of its tokens pictures, takes what the page says."""
    arguments = Example(path).arguments(tmp_path / "model", "model.train_from_scratch=false")
    batch = full_batch(build_outline(arguments).model, arguments)
    needed = forecast(arguments, batch, device_type="cuda").peak / 2**30
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    (told,) = [(card, size) for name, card, size in _NAMED.findall(page) if name == path.name]
    print(f"{path.stem}: {needed:.1f} GiB")
    assert needed < SHARE * int(told[0]) and abs(needed - float(told[1])) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_step_fits_the_card(path: Path, tmp_path: Path) -> None:
    (card,) = re.findall(r"_(\d+)GB_", path.name)
    needed = predicted_gb(path, tmp_path)
    print(f"{path.stem}: {needed:.1f} GiB")
    assert needed < SHARE * int(card)


@pytest.mark.slow
@pytest.mark.parametrize("card", ["flux/flux1_dev", "wan2.1/wan2.1_14B"])
def test_weights_on_the_host_are_what_makes_it_fit(card: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{card}_lora_16GB_config.yaml"
    assert predicted_gb(path, tmp_path, "features.enable_weight_offload=false") > 16


@pytest.mark.slow
def test_without_its_measures_a_step_does_not_fit(tmp_path: Path) -> None:
    path = EXAMPLES / "wan2.1/wan2.1_14B_lora_24GB_config.yaml"
    whole = ("training.lora.quantize=null", "features.enable_activation_offload=false")
    assert predicted_gb(path, tmp_path, *whole) > 24


LTX2 = {
    "_class_name": "LTX2VideoTransformer3DModel", "num_attention_heads": 32, "attention_head_dim": 128,
    "num_layers": 48, "in_channels": 128, "out_channels": 128, "cross_attention_dim": 4096, "audio_in_channels": 128,
    "audio_out_channels": 128, "audio_num_attention_heads": 32, "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048, "caption_channels": 3840, "rope_type": "split",
}  # fmt: skip
"""As released."""


@pytest.mark.slow
def test_a_step_of_ltx2_fits_eight_cards_of_80_gb(tmp_path: Path) -> None:
    """Pictures and sound of a clip, all weights trained, on as many devices as the first line of the file names."""
    write_parts(tmp_path, "LTX2Pipeline", LTX2, {"latent_channels": 128})
    path = EXAMPLES / "ltx2/ltx2_19B_config.yaml"
    assert ": 8 devices" in first_comment(path)
    arguments = load_with_plugins(path, [f"model.model_name_or_path={tmp_path}"]).arguments
    text = torch.zeros(1, 1024, 3840)
    batch = {
        "sample_ids": ["a"], "epochs": [0], "fps": [24.0], "latents": torch.zeros(1, 128, 16, 16, 24),
        "audio_latents": torch.zeros(1, 8, 126, 16), "prompt_embeds": text, "audio_prompt_embeds": text,
        "prompt_mask": torch.ones(1, 1024),
    }  # fmt: skip
    needed = forecast(arguments, batch, world_size=8, device_type="cuda").peak / 2**30
    print(f"{path.stem}: {needed:.1f} GiB")
    assert 0.3 * 80 < needed < SHARE * 80
