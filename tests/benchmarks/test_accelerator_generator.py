"""The accelerator's Wan-shaped step on the CPU, at a size for tests: it runs, and its figures are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator import Session, clip_figures, has_failed
from benchmarks.accelerator_sizes import CLIPS, TINY_CLIP, Clip
from benchmarks.processes import Finished, ProcessFailed


@pytest.mark.parametrize(("who", "recompute"), [("ours", True), ("bare", False)])
def test_a_tiny_step_runs_on_the_cpu(tmp_path: Path, who: str, recompute: bool) -> None:
    from benchmarks.accelerator_generator import measure

    found = measure(who, replace(TINY_CLIP, recompute=recompute), tmp_path, peak=1.0)
    # A model that knows nothing is off by the variance of ε − x: 2 for clips of noise, and what it guesses itself.
    assert 1.7 < found["first_loss"] < 3.5
    assert found["tokens_a_step"] == 3 * 4 * 4
    assert found["mfu"] == pytest.approx(found["model_tflops"])
    assert found["tokens_per_s"] == pytest.approx(48 / found["step_s"])


def test_the_flops_of_a_long_clip_are_six_a_weight_and_full_attention(tmp_path: Path) -> None:
    from benchmarks.accelerator_generator import model_flops, write_model_folder

    clip = CLIPS["recompute"][0]
    write_model_folder(clip, tmp_path)
    tokens, width = 21 * 30 * 52, clip.heads * clip.head_width
    attention = 3 * 4 * clip.layers * width * tokens * (tokens + clip.text_tokens)
    each_token = clip.layers * (6 * width**2 + 2 * width * clip.feed_forward)
    each_text_token = clip.layers * 2 * width**2
    counted = model_flops(clip, tmp_path)
    # What stands before and after the blocks is a thousandth.
    products = 6 * (each_token * tokens + each_text_token * clip.text_tokens)
    assert counted - attention == pytest.approx(products, rel=2e-3)


class Recorded(Session):
    """A session whose modules answer from a table instead of running."""

    answers: dict[tuple[str, str, bool], Any]

    def _module(self, module: str, *words: str, limit_s: float) -> Finished:
        clip = Clip.from_json(words[1])
        answer = self.answers.get((words[0], clip.name, clip.recompute))
        if answer is None:
            raise ProcessFailed(f"{clip.name} ran out of memory")
        return Finished(((0.0, 0.0),), 0.0, None, json.dumps(answer))


def test_the_longest_clip_that_fits_is_taken_and_the_bare_loop_runs_on_it(tmp_path: Path) -> None:
    session = Recorded(tmp_path, {"type": "cuda", "memory_gib": 140.0}, parts=("generator",))
    session.answers = {
        ("ours", "1.3B-21x60x104", True): {"model": "long", "step_s": 2.1, "mfu": 0.4},
        ("bare", "1.3B-21x60x104", True): {"step_s": 2.0},
        ("ours", "1.3B-13x60x104", False): {"model": "short", "step_s": 1.0, "mfu": 0.5},
    }
    found = session.run()["generator"]
    assert [each["attempt"] for each in found["no recompute"]["attempts_before"]] == ["1.3B-21x60x104"]
    assert "error" in found["no recompute"]["bare_diffusers_loop"]
    assert has_failed(found)
    assert not has_failed(found["recompute"])
    shown = {figure.name: figure.value for figure in clip_figures(found)}
    assert shown["Wan-shaped step long, recompute, over a bare diffusers loop"] == pytest.approx(1.05)
    assert shown["Wan-shaped step short, no recompute, over a bare diffusers loop"] is None
    assert shown["Wan-shaped step short, no recompute, MFU (non-causal)"] == pytest.approx(50)


def test_a_clip_that_asks_for_more_memory_than_there_is_is_not_tried(tmp_path: Path) -> None:
    session = Recorded(tmp_path, {"type": "cuda", "memory_gib": 24.0}, parts=("generator",))
    session.answers = {("ours", "1.3B-9x60x104", True): {"step_s": 2.1}}
    found = session.run()["generator"]
    assert found["recompute"]["attempts_before"] == []
    assert [each["attempt"] for each in found["no recompute"]["attempts_before"]] == ["1.3B-1x60x104"]


def test_without_diffusers_nothing_is_tried(tmp_path: Path) -> None:
    session = Recorded(tmp_path, {"type": "cuda", "memory_gib": 140.0, "has_diffusers": False}, parts=("generator",))
    session.answers = {}
    found = session.run()["generator"]
    assert "diffusers is not installed" in found["error"]
    assert has_failed(found)
    assert all(figure.value is None for figure in clip_figures(found))
