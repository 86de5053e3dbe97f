"""The older layout of features: read as it is, refused with a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.feature_store import FeatureStore, check_provenance, open_features

VIDEO = MediaGeometry(spatial_ratio=8, temporal_ratio=4, patch=(1, 2, 2), latent_channels=16, is_video=True)
IMAGE = MediaGeometry(spatial_ratio=8, temporal_ratio=1, patch=(1, 2, 2), latent_channels=16, is_video=False)
TEXT_TOKENS, TEXT_WIDTH = 12, 6


def sample(seed: int, words: int, **more: Any) -> dict[str, Any]:
    """As the older tool saved it: latents without a batch axis, text with an axis of one."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.zeros(1, TEXT_TOKENS, dtype=torch.int64)
    mask[:, :words] = 1
    return {
        "video": torch.randn(16, 3, 4, 6, generator=draw).bfloat16(),
        "prompt_ids": torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=draw),
        "prompt_mask": mask,
        **more,
    }


def write(folder: Path, samples: dict[str, Any], lines: list[dict[str, Any]] | None = None) -> Path:
    (folder / "features").mkdir(parents=True, exist_ok=True)
    for name, content in samples.items():
        torch.save(content, folder / "features" / name)
    rows = [{"path": name, "cap": f"of {name}", "file": f"features/{name}"} for name in samples]
    text = "".join(json.dumps(line) + "\n" for line in (rows if lines is None else lines))
    (folder / "data.jsonl").write_text(text)
    return folder


def opened(folder: Path, geometry: MediaGeometry = VIDEO) -> FeatureStore:
    return open_features(folder, SimpleNamespace(geometry=geometry, require=lambda name: None))  # type: ignore[arg-type]


def test_rows_are_read(tmp_path: Path) -> None:
    samples = {"a_mp4.pt": sample(0, words=5), "b_mp4.pt": sample(1, words=12)}
    store = opened(write(tmp_path, samples))
    assert [record.path for record in store.records] == ["features/a_mp4.pt", "features/b_mp4.pt"]
    assert store.records[0].size == MediaSize(frames=9, height=32, width=48)
    assert store.records[0].captions == ("of a_mp4.pt",)
    assert len({record.key for record in store.records}) == len(store) == 2
    found, expected = store.read(0, 0), samples["a_mp4.pt"]
    assert found.keys() == {"latents", "prompt_embeds"}
    assert torch.equal(found["latents"], expected["video"])
    assert torch.equal(found["prompt_embeds"], expected["prompt_ids"][0, :5])
    assert store.null_text is None and store.provenance is None


def test_ids_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    samples = {"a.pt": sample(0, words=5)}
    here, there = (opened(write(tmp_path / name, samples)) for name in ("here", "there"))
    assert here.records[0].key == there.records[0].key
    assert len(here.records[0].key) == 32


def test_several_text_encoders(tmp_path: Path) -> None:
    content = sample(0, words=4)
    pooled = torch.randn(8)
    content["prompt_ids"] = [content["prompt_ids"], pooled]
    content["prompt_mask"] = [content["prompt_mask"], None]
    content["video"] = content["video"][:, 0]
    store = opened(write(tmp_path, {"a.pt": content}), IMAGE)
    found = store.read(0, 0)
    assert store.records[0].size == MediaSize(1, 32, 48)
    assert torch.equal(found["pooled_prompt_embeds"], pooled)
    assert torch.equal(found["prompt_embeds"], content["prompt_ids"][0][0, :4])


def test_image_to_video_conditions(tmp_path: Path) -> None:
    condition, image = torch.randn(20, 3, 4, 6), torch.randn(5, 9)
    content = sample(0, words=4, i2v_vae_feature=condition, i2v_clip_feature=image)
    found = opened(write(tmp_path, {"a.pt": content})).read(0, 0)
    assert torch.equal(found["condition_latents"], condition[4:])  # the mask is the first four channels
    assert torch.equal(found["image_embeds"], image)


def test_nobody_knows_who_made_them(tmp_path: Path) -> None:
    store = opened(write(tmp_path, {"a.pt": sample(0, words=4)}))
    with pytest.warns(UserWarning, match="do not say which weights made them"):
        check_provenance(store, SimpleNamespace())  # type: ignore[arg-type]


class Payload:
    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.proof,)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    store = opened(write(tmp_path, {"a.pt": {**sample(0, words=4), "extra": Payload(tmp_path / "proof")}}))
    with pytest.raises(DataError, match=r"a\.pt  is refused: it asks for posix\.mkdir"):
        store.read(0, 0)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{"path": "a.mp4"}], r"data\.jsonl:1  is not a JSON object with 'file'"),
        ([["features/a.pt"]], r"data\.jsonl:1  is not a JSON object with 'file'"),
        ([{"file": 3}], r"data\.jsonl:1  is not a JSON object with 'file'"),
        ([{"file": "features/none.pt"}], r"data\.jsonl:1  'features/none\.pt' is missing"),
        ([{"file": "../outside.pt"}], r"data\.jsonl:1  '\.\./outside\.pt' lies outside"),
        ([{"file": "/etc/passwd"}], r"lies outside"),
        ([{"file": "features/a.pt"}] * 2, r"rows 1 and 2 share the features in 'features/a\.pt'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[Any], told: str) -> None:
    torch.save(sample(0, words=4), tmp_path / "outside.pt")
    write(tmp_path / "set", {"a.pt": sample(0, words=4)}, lines)
    with pytest.raises(DataError, match=told):
        opened(tmp_path / "set")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([1, 2], "holds a list, no table"),
        ({"prompt_ids": torch.ones(1, 2, 3)}, "holds no features under 'video'"),
        ({"video": sample(0, words=4)["video"]}, "holds no features under 'prompt_ids'"),
        ({**sample(0, words=4), "prompt_ids": torch.ones(1, 12, dtype=torch.int64)}, "under 'prompt_ids'"),
        ({**sample(0, words=4), "video": torch.ones(4, 3, 4, 6)}, r"shape \(4, 3, 4, 6\), the model takes 4 axes, 16"),
        ({**sample(0, words=4), "video": torch.ones(1, 16, 3, 4, 6)}, "the model takes 4 axes"),
    ],
)
def test_files_of_something_else_are_named(tmp_path: Path, content: Any, told: str) -> None:
    store = opened(write(tmp_path, {"a.pt": content}))
    with pytest.raises(DataError, match=told) as caught:
        _ = store.records
    assert "a.pt" in str(caught.value)
