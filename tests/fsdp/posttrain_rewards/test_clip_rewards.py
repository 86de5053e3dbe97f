"""Rewards by CLIP models: what transformers computes for a picture and a prompt alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.posttrain_rewards.pictures import frames_of
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, build_reward
from tests.helpers.tiny_clip import SIDE, make_tiny_clip, write_open_clip

PROMPTS = ["a red box", "two blue lines", "grain, large and round"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_clip(tmp_path_factory.mktemp("clip") / "model")


def pictures(width: int = 40, height: int = 40) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in PROMPTS]


def judged(name: str, completions: list[Any], **options: Any) -> list[float]:
    return build_reward(name, 1.0, options)(Judged(PROMPTS, completions, [{}] * len(PROMPTS)))


def logits(folder: Path, shown: list[Image.Image]) -> list[float]:
    """Similarities by transformers, one pair at a time."""
    from transformers import AutoProcessor, CLIPModel

    model, processor = CLIPModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder, use_fast=False)
    found = []
    with torch.no_grad():
        for prompt, picture in zip(PROMPTS, shown, strict=True):
            inputs = processor(text=[prompt], images=[picture], return_tensors="pt")
            found.append(float(model(**inputs).logits_per_image))
    return found


def test_scores_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import CLIPModel

    shown = pictures(52, 40)
    expected = logits(folder, shown)
    assert judged("pickscore", shown, path=str(folder), batch_size=2) == pytest.approx(expected, abs=1e-4)
    model = CLIPModel.from_pretrained(folder)
    cosines = [value / model.logit_scale.exp().item() for value in expected]
    assert max(cosines) < -0.1
    assert judged("clip_score", shown, path=str(folder)) == [0, 0, 0]
    model.text_projection.weight.data.neg_()
    shutil.copytree(folder, tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    found = judged("clip_score", shown, path=str(tmp_path / "other"))
    assert found == pytest.approx([-2.5 * each for each in cosines], abs=1e-5)
    clips = [[picture] * 3 for picture in shown]
    assert judged("pickscore", clips, path=str(folder)) == pytest.approx(expected, abs=1e-4)


def test_hps_v2_reads_its_file(folder: Path, tmp_path: Path) -> None:
    """As HPSv2 shows pictures: the longer side becomes the model's, black around; what transformers computes for such
    pictures is the score, of the file and of the same model as transformers has it."""
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folder)
    (tmp_path / "hps").mkdir()
    write_open_clip(model, tmp_path / "hps" / "HPS_v2.1_compressed.pt")
    wide = pictures(2 * SIDE, SIDE)
    squares = []
    for picture in wide:
        square = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
        square[SIDE // 4 : 3 * SIDE // 4] = np.asarray(picture.resize((SIDE, SIDE // 2), Image.Resampling.BICUBIC))
        squares.append(Image.fromarray(square))
    expected = [each / model.logit_scale.exp().item() for each in logits(folder, squares)]
    found = judged("hps_v2", wide, path=str(tmp_path / "hps"), tokenizer=str(folder))
    assert found == pytest.approx(expected, abs=1e-5)
    assert judged("hps_v2", wide, path=str(folder)) == pytest.approx(expected, abs=1e-5)
    assert found != pytest.approx([each / 100 for each in logits(folder, wide)], abs=1e-3)  # cut to a square


def test_what_is_no_model_is_told(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(MMError, match="there is no such folder"):
        build_reward("clip_score", 1.0, {"path": str(tmp_path / "none")})
    with pytest.raises(MMError, match="comes without a tokenizer"):
        build_reward("hps_v2", 1.0, {"path": str(path)})
    with pytest.raises(MMError, match=r"open_clip's layout"):
        judged("hps_v2", pictures(), path=str(path), tokenizer=str(folder))


def test_frames_are_spread_over_a_clip() -> None:
    assert frames_of("a", 4) == ["a"]
    assert frames_of(list(range(8)), 2) == [2, 6]
    assert frames_of([0, 1, 2], 4) == frames_of((0, 1, 2)) == [0, 1, 2]
