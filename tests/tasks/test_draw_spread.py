"""`mm infer --plan` of a generator: ranks that share its weights, or a clip's tokens, draw what one process draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.errors import MMError, UsageError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.pixels import media_pixels, probe_media
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from mindspeed_mm.fsdp.ops.context_attention import layer
from mindspeed_mm.tasks.draw import generate
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import lines
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan

FSDP = "fsdp_plan: {param_dtype: fp32, reduce_dtype: fp32}"
PLANS = {
    "ring": f"ring_attention_size: 2, {FSDP}",
    "ulysses": f"ulysses_parallel_size: 2, {FSDP}",
    "sharded": f"fully_shard_parallel_size: auto, {FSDP}",
}
FAMILIES = {"flux": (make_tiny_flux, {}), "wan": (make_tiny_wan, {"num_frames": 5})}
PROMPTS = ("a red box", "rain", "a dog")


def request(family: str, plan: Path | None) -> generate.GenerateRequest:
    settings = {"height": 32, "width": 32, "num_inference_steps": 2, "batch_size": 2, **FAMILIES[family][1]}
    return generate.GenerateRequest(PROMPTS, settings=settings, plan=plan)


def draw_as_rank(family: str, model: str, out: str, plan: str) -> tuple[str, set[int]]:
    """What was refused, and how many tokens this rank had where a sample's were spread."""
    tokens: set[int] = set()
    check = layer.check_lengths

    def noted(x_BTHD: torch.Tensor, *layout: Any) -> None:
        tokens.add(x_BTHD.shape[1])
        check(x_BTHD, *layout)

    layer.check_lengths = noted
    try:
        generate.run(Path(model), Path(out), request(family, Path(plan)))
    except MMError as error:
        return str(error), tokens
    return "", tokens


def make_plan(folder: Path, words: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(f"model: {{model_name_or_path: {folder / 'model'}}}\nparallel: {{{words}}}\n")
    return path


def frames_of(folder: Path) -> dict[str, np.ndarray]:
    """File → (3, T, H, W)."""
    found, media = {}, MediaLoader(folder)
    for entry in lines(folder / "manifest.jsonl"):
        row = GenerationRow(RowLocation("manifest.jsonl", 1), entry["file"], ())
        size = MediaSize(probe_media(row, media).frames, 32, 32)
        found[entry["file"]] = media_pixels(row, size, media).numpy().astype(int)
    return found


def check_same(family: str, plan: str, folder: Path) -> list[tuple[str, set[int]]]:
    make, _ = FAMILIES[family]
    make(folder / "model")
    words = str(folder / "model"), str(folder / "two"), str(make_plan(folder, PLANS[plan]))
    said = run_ranks(2, draw_as_rank, family, *words)
    assert [refused for refused, _ in said] == ["", ""]
    generate.run(folder / "model", folder / "one", request(family, None))
    one, two = frames_of(folder / "one"), frames_of(folder / "two")
    assert one.keys() == two.keys() and len(one) == len(PROMPTS)
    for name, frames in one.items():
        assert np.abs(frames - two[name]).mean() < 1, name
    first, second, *_ = one.values()
    assert np.abs(first - second).mean() > 2
    return said


def test_the_tokens_of_a_clip_are_spread(tmp_path: Path) -> None:
    """Eight tokens, of which each rank has half."""
    assert [tokens for _, tokens in check_same("wan", "ring", tmp_path)] == [{4}, {4}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"), [("wan", "ulysses"), ("wan", "sharded"), ("flux", "ring"), ("flux", "sharded")]
)
def test_every_plan(family: str, plan: str, tmp_path: Path) -> None:
    check_same(family, plan, tmp_path)


def test_what_is_not_spread(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "model")
    plan = make_plan(tmp_path, PLANS["ring"])
    with pytest.raises(UsageError, match="one process holds the whole model"):
        generate.run(tmp_path / "model", tmp_path / "out", request("flux", plan))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*.png"))
    layers = make_plan(tmp_path, "pipeline_parallel_size: 2, pp_plan: {schedule: gpipe}")
    (refused, _), _ = run_ranks(2, draw_as_rank, "flux", str(tmp_path / "model"), str(tmp_path / "out"), str(layers))
    assert "layers that are spread over ranks can only be trained" in refused
