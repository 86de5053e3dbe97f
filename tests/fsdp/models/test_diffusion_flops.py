"""FLOPs by the adapters' formulas against torch's counter, on the meta device: released widths can be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.released import FLUX_1_DEV, WAN_2_1_I2V_14B, WAN_2_1_T2V_1_3B, Folder, write_folder


def counted(adapter: Any, latent_shape: tuple[int, ...], batch: dict[str, torch.Tensor]) -> int:
    with torch.device("meta"), torch.no_grad():
        model = diffusers_class(adapter.transformer_class).from_config(adapter.transformer_config)
        inputs = adapter.inputs(torch.empty(1, *latent_shape), torch.empty(1), batch, 3.5)
        with FlopCounterMode(display=False) as counter:
            model(**inputs, return_dict=False)
    return counter.get_total_flops()


def features(adapter: Any, latent_shape: tuple[int, ...], image_tokens: int) -> dict[str, torch.Tensor]:
    config = adapter.transformer_config
    with torch.device("meta"):
        if adapter.task == "t2i":
            text = torch.empty(1, adapter.text_tokens, config["joint_attention_dim"])
            return {"prompt_embeds": text, "pooled_prompt_embeds": torch.empty(1, config["pooled_projection_dim"])}
        batch = {"prompt_embeds": torch.empty(1, adapter.text_tokens, config["text_dim"])}
        if adapter.task == "i2v":
            batch["condition_latents"] = torch.empty(1, *latent_shape)
            batch["image_embeds"] = torch.empty(1, image_tokens, config["image_dim"])
        return batch


@pytest.mark.parametrize(
    ("content", "changes", "size", "image_tokens"),
    [
        (FLUX_1_DEV, {"num_layers": 2, "num_single_layers": 3}, MediaSize(1, 1024, 768), 0),
        (WAN_2_1_T2V_1_3B, {"num_layers": 2}, MediaSize(17, 480, 832), 0),
        (WAN_2_1_I2V_14B, {"num_layers": 2}, MediaSize(17, 480, 832), 257),
    ],
    ids=["FLUX.1-dev", "Wan2.1 t2v 1.3B", "Wan2.1 i2v 14B"],
)
def test_formula_of_released_widths(
    tmp_path: Path, content: Folder, changes: dict[str, int], size: MediaSize, image_tokens: int
) -> None:
    adapter = find_adapter(write_folder(tmp_path, content), transformer=changes)
    shape = adapter.geometry.latent_shape(size)
    expected = counted(adapter, shape, features(adapter, shape, image_tokens))
    assert adapter.forward_flops(shape, adapter.text_tokens) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "image_tokens"), [("flux", 0), ("flux_guidance", 0), ("t2v", 0), ("i2v", 5)])
def test_formula_of_tiny_models(generators: dict[str, Path], kind: str, image_tokens: int) -> None:
    adapter = find_adapter(generators[kind])
    shape = adapter.geometry.latent_shape(MediaSize(5 if adapter.geometry.is_video else 1, 32, 48))
    expected = counted(adapter, shape, features(adapter, shape, image_tokens))
    assert adapter.forward_flops(shape, adapter.text_tokens) == pytest.approx(expected, rel=1e-6)
