"""Samples on the report's page: pictures and clips by step, inside the page, and no more than it can hold."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.sampling.answers.scoring import score
from mindspeed_mm.fsdp.utils.media_files import write_media
from mindspeed_mm.tasks.report import report
from mindspeed_mm.tasks.report import samples as report_samples
from mindspeed_mm.tasks.report.samples import MOST_FRAMES, Round, load, read_rounds, sample_grid, show, spread
from tests.tasks.test_report import Page, external


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def write_round(run: Path, step: int, prompts: list[str], frames: np.ndarray, samples: int = 1) -> None:
    folder = run / "samples" / f"iter_{step:07}"
    folder.mkdir(parents=True)
    entries = []
    for number, prompt in enumerate(prompts):
        for sample in range(samples):
            path = write_media(folder / f"{number:03}_{sample:02}", frames, fps=8)
            entries.append({"number": number, "sample": sample, "prompt": prompt, "file": path.name, "step": step})
    (folder / "samples.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"status": "running"}')
    return folder


def image_of(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


def test_a_grid_of_pictures_by_step(run: Path) -> None:
    for step in (2, 10):
        write_round(run, step, ["a red box", "<script>alert(1)</script>", ""], noise(1, 8, 8), samples=2)
    (run / "samples" / "iter_0000010" / "000_01.png").unlink()
    html = report.run([run]).read_text()
    page = Page(html)
    assert "script" not in page.tags
    for words in ("Samples while training", "2 of 2 rounds, 3 of 3 prompts", "a red box", "alert(1)", "(no caption)"):
        assert words in page
    assert re.findall(r'<span class="soft">(\d+)</span>', html) == ["2", "10"] * 3
    assert html.count('class="small"') == 11
    assert "'000_01.png' not found" in page
    assert external(page, html) == []
    sources = [reference for reference in page.references if reference.startswith("data:image/png")]
    assert np.array_equal(np.asarray(image_of(sources[0])), noise(1, 8, 8)[0])  # small ones lose nothing
    assert re.search(r"\.pictures img\.small \{[^}]*image-rendering: pixelated", html)


def test_clips_move(run: Path) -> None:
    write_round(run, 5, ["a seven moving left"], noise(5, 16, 16))
    html = report.run([run]).read_text()
    (source,) = [reference for reference in Page(html).references if reference.startswith("data:image/webp")]
    clip = image_of(source)
    assert (clip.format, clip.n_frames, clip.size, clip.info["loop"]) == ("WEBP", 5, (16, 16), 0)
    clip.load()
    assert clip.info["duration"] == 125
    assert external(Page(html), html) == []


def test_long_and_large_ones_are_made_smaller(tmp_path: Path) -> None:
    smooth = np.zeros((61, 240, 416, 3), dtype=np.uint8) + np.arange(61, dtype=np.uint8)[:, None, None, None]
    write_media(tmp_path / "clip", smooth, fps=20)
    write_media(tmp_path / "picture", noise(1, 300, 600), fps=1)
    media = MediaLoader(tmp_path)
    clip = image_of(load("clip.mp4", media)["source"])
    assert clip.n_frames <= MOST_FRAMES
    assert max(clip.size) == 160
    total_ms = 0
    for frame in range(clip.n_frames):
        clip.seek(frame)
        clip.load()
        total_ms += clip.info["duration"]
    assert total_ms == pytest.approx(61 / 20 * 1000, rel=0.05)
    shown = load("picture.png", media)
    assert max(image_of(shown["source"]).size) == 256
    assert not shown["small"]
    with pytest.raises(DataError):
        load("../picture.png", MediaLoader(tmp_path / "clip.mp4"))
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes()[:300])
    assert "cut.mp4" in show("cut.mp4", media)["trouble"]


def test_what_is_too_much_for_a_page_is_left_out(run: Path) -> None:
    for step in range(1, 31):
        write_round(run, step, [f"prompt {number}" for number in range(24 if step == 30 else 1)], noise(1, 4, 4), 5)
    rounds = read_rounds(run)
    grid = sample_grid(rounds)
    assert grid is not None
    assert grid["steps"] == [1, 7, 13, 18, 24, 30]
    assert (grid["rounds"], grid["prompts"], len(grid["rows"])) == (30, 24, 20)
    assert [len(pictures) for _, pictures in grid["rows"][0]["rounds"]] == [4] * 6
    assert [step for step, _ in grid["rows"][1]["rounds"]] == [30]
    newest = [picture for row in grid["rows"] for picture in row["rounds"][-1][1]]
    one_round = sum(len(picture["source"]) for picture in newest)
    with mock.patch.object(report_samples, "MOST_BYTES", one_round + 1000):
        small = sample_grid(rounds)
    assert small is not None
    assert 1 <= len(small["steps"]) < 6
    assert small["steps"][-1] == 30  # the newest is always there
    assert sample_grid([]) is None


def test_rounds_are_spread_over_the_run() -> None:
    rounds = [Round(step, Path(), []) for step in range(10)]
    assert [each.step for each in spread(rounds, 4)] == [0, 3, 6, 9]
    assert [each.step for each in spread(rounds, 1)] == [9]
    assert spread(rounds[:2], 4) == rounds[:2]


def test_a_round_that_is_still_written_does_not_count(run: Path) -> None:
    write_round(run, 1, ["a"], noise(1, 4, 4))
    (run / "samples" / "iter_0000002").mkdir()
    (run / "samples" / "iter_0000003").mkdir()
    (run / "samples" / "iter_0000003" / "samples.jsonl").write_text('{"number": 0}\n{"fil')
    assert [each.step for each in read_rounds(run)] == [1]


def test_judges_and_their_findings(run: Path) -> None:
    write_round(run, 1, ["a"], noise(1, 4, 4))
    (run / "eval").mkdir()
    results = {
        "tasks": {"SVC": score([True] * 49 + [False]).to_dict(), "eye": {"accuracy": 0.5}},
        "overall": {"accuracy": 0.98},
        "notes": ["judges have learned from other scans"],
        "distance_to_nearest_training_scan": {"generated": 2.31234, "real held-out": 2.15},
        "media_dir": str(run),
        "seconds": 3.0,
    }  # fmt: skip
    (run / "eval" / "results.json").write_text(json.dumps(results))
    page = Page(report.run([run]).read_text())
    for words in (
        "Accuracy on generated samples",
        "98.0 %",
        "50.0 %",
        "judges have learned from other scans",
        "distance to nearest training scan: 2.312 generated, 2.15 real held-out",
    ):
        assert words in page


def test_the_report_needs_no_torch() -> None:
    program = "import sys, mindspeed_mm.tasks.report.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=600).returncode == 0
