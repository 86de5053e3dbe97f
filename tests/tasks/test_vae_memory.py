"""Tiling and slicing of a generator's VAE: in extraction, on raw media and in sampling, what diffusers does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run

SIDE = 48
"""Larger than a tile, which is 32 pixels wide here."""
TILED, SLICED = "model.vae_tiling=true", "model.vae_slicing=true"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_generator_run(tmp_path_factory.mktemp("tiles"), "flux", SIDE, training={"train_iters": 1})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the VAE worked tile by tile, and on how many samples at a time."""
    from diffusers import AutoencoderKL

    found: Counter[str] = Counter()

    def counted(name: str) -> None:
        real = getattr(AutoencoderKL, name)

        def method(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found[f"{name} of {len(sample)}"] += 1
            return real(self, sample, *args, **kwargs)

        monkeypatch.setattr(AutoencoderKL, name, method)

    for name in ("_tiled_encode", "tiled_decode", "_encode", "_decode"):
        counted(name)
    return found


def test_extraction_by_tiles_is_diffusers_own(yaml: Path, tmp_path: Path, calls: Counter[str]) -> None:
    said = mm("extract", yaml, TILED, "--out", tmp_path / "features")
    assert said.code == 0, said.err
    assert any(name.startswith("_tiled_encode") for name in calls)
    adapter = find_adapter(yaml.parent / "model")
    store, pipeline = open_features(tmp_path / "features", adapter), load_encoders(adapter, torch.device("cpu"))
    row = lines(yaml.parent / "rows.jsonl")[0]
    pixels = torch.from_numpy(np.asarray(Image.open(yaml.parent / row["path"])).copy()).permute(2, 0, 1)[None, :, None]
    whole = adapter.encode_media(pipeline, pixels)[0]
    pipeline.vae.enable_tiling()
    found = store.read(0, 0)["latents"]
    torch.testing.assert_close(found, adapter.encode_media(pipeline, pixels)[0], rtol=1e-5, atol=1e-5)
    assert (found - whole).abs().max() > 1e-4


def test_extraction_one_by_one(yaml: Path, tmp_path: Path, calls: Counter[str]) -> None:
    assert mm("extract", yaml, "--out", tmp_path / "whole", "--batch-size", 4).code == 0
    assert calls == {"_encode of 4": 4}
    calls.clear()
    assert mm("extract", yaml, SLICED, "--out", tmp_path / "sliced", "--batch-size", 4).code == 0
    assert calls == {"_encode of 1": 16}


def test_raw_media_by_tiles(yaml: Path, tmp_path: Path, calls: Counter[str]) -> None:
    train(yaml, tmp_path / "tiled", TILED)
    assert any(name.startswith("_tiled_encode") for name in calls)


def test_samples_by_tiles_one_by_one(yaml: Path, tmp_path: Path, calls: Counter[str]) -> None:
    words = ("--prompt", "a", "--prompt", "b", "--size", f"{SIDE}x{SIDE}", "--steps", 1, "--batch-size", 2)
    options = ("--vae-tiling", "--vae-slicing")
    assert mm("infer", yaml.parent / "model", *words, *options, "--out", tmp_path / "out").code == 0
    assert calls["tiled_decode of 1"] == 2


def test_a_vae_that_cannot_is_refused(yaml: Path) -> None:
    class Plain:
        pass

    adapter = find_adapter(yaml.parent / "model")
    from mindspeed_mm.fsdp.models.diffusion.components import _enable

    with pytest.raises(ConfigError, match=r"model\.vae_tiling  Plain has no tiling"):
        _enable(Plain(), "tiling")
    assert adapter.vae_options == ()
