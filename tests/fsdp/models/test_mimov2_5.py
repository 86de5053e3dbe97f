"""MiMo-V2.5 against its published formulas in plain torch, in fp64, on weights under the released names; what its
processor writes; and what its folders may be."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import mimov2_5_by_hand as by_hand
from tests.helpers.decoder_logits import Weights
from tests.helpers.tiny_mimov2_5 import CODEBOOKS, GROUP, MARKS, make_tiny_mimov2_5
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MiMoV2FlashConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)
SIZES = [(24, 16), (8, 8), (40, 24)]
PICTURE = MARKS["vision_start"] + MARKS["image"] + MARKS["vision_end"]
CLIP = MARKS["vision_start"] + MARKS["video"] + MARKS["vision_end"]
SOUND = MARKS["audio_start"] + MARKS["audio"] + MARKS["audio_end"]


@cache
def released(root: str) -> tuple[Path, Weights]:
    folder = Path(root) / "model"
    return folder, {name: tensor.double() for name, tensor in make_tiny_mimov2_5(folder).items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("mimov2_5"))


def sound_of(seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(size=int(24000 * seconds)).astype(np.float32) * 0.1


def asked(folder: Path) -> dict[str, Any]:
    """Pictures, a clip and a sound among words, as the processor has them."""
    processor: Any = load_processor(folder)
    clip = np.random.default_rng(2).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
    metadata = transformers.video_utils.VideoMetadata(total_num_frames=150, fps=1.0, frames_indices=[0, 1, 59, 60, 125])
    made = processor(
        images=random_pictures(SIZES), videos=[clip], audio=[sound_of(0.3)],
        text=[f"one {PICTURE} two {PICTURE} {CLIP} and {SOUND} or {PICTURE}?"], return_tensors="pt",
        videos_kwargs={"do_sample_frames": False, "video_metadata": [metadata]},
    )  # fmt: skip
    return {name: value for name, value in made.items() if name not in ("num_audio_tokens", "attention_mask")}


def media_by_hand(w: Weights, inputs: dict[str, Any], config: Any) -> list[tuple[int, torch.Tensor]]:
    seen = []
    for pixels, grids in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        rows = inputs[pixels].double().split(inputs[grids].prod(1).tolist())
        parts = [by_hand.seen(w, own, tuple(grid)) for own, grid in zip(rows, inputs[grids].tolist(), strict=True)]
        seen.append(torch.cat(parts))
    tokens = (config.image_token_id, config.video_token_id, config.audio_token_id)
    return list(zip(tokens, [*seen, by_hand.heard(w, inputs["audio_codes"])], strict=True))


@pytest.mark.parametrize("attention", ["ours", "eager"])
def test_equals_the_formulas(attention: str, root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    if attention == "eager":
        model.set_attn_implementation("eager")
    ids = inputs["input_ids"][0]
    embeddings = by_hand.embedded(w, ids, media_by_hand(w, inputs, model.config))
    with torch.no_grad(), keeping_double():
        expected = by_hand.text_hidden(w, embeddings) @ w["lm_head.weight"].T
        found = model(**inputs, labels=inputs["input_ids"])
    assert (found.logits[0] - expected).abs().max() < 1e-9
    # transformers' own loss comes in fp32
    assert found.loss.item() == pytest.approx(F.cross_entropy(expected[:-1], ids[1:]).item(), rel=1e-6)


def _transposed_squares(model: Any) -> None:
    weight = model.visual.merger.mlp[0].weight
    weight.data = weight.data.unflatten(1, (4, -1))[:, [0, 2, 1, 3]].flatten(1)


def _without_sinks(model: Any) -> None:
    for layer in model.model.layers:
        if layer.self_attn.sinks is not None:
            layer.self_attn.sinks = None


def _without_tower_sinks(model: Any) -> None:
    for block in model.visual.blocks:
        block.attn.sinks = None


def _text_window(model: Any) -> None:
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window += 1


def _tower_window(model: Any) -> None:
    for block in model.visual.blocks:
        if block.attn.window is not None:
            block.attn.window += 1


def _rows_for_columns(model: Any) -> None:
    model.config.vision_config.vit_window_attn_types = [0] * model.config.vision_config.depth


@pytest.mark.parametrize(
    "fault",
    [_transposed_squares, _without_sinks, _without_tower_sinks, _text_window, _tower_window, _rows_for_columns],
)
def test_a_planted_fault_is_seen(fault: Any, root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    embeddings = by_hand.embedded(w, inputs["input_ids"][0], media_by_hand(w, inputs, model.config))
    fault(model)
    with torch.no_grad(), keeping_double():
        expected = by_hand.text_hidden(w, embeddings) @ w["lm_head.weight"].T
        assert (model(**inputs).logits[0] - expected).abs().max() > 1e-6
