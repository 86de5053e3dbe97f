"""`mm data check`, `preview` and `stats` of captioned pictures and clips, before and after features are made."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.loader import load_config
from tests.fsdp.data.test_media_folders import captioned
from tests.helpers.runs import lines, mm
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generator_run import generator_config, make_clips
from tests.helpers.tiny_generators import TEXT_TOKENS, make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_media_pairs import PAIRS, make_tiny_media_pairs
from tests.tasks.extraction_run import write_yaml

pytestmark = pytest.mark.edge("G5", "G8", "G9")

BASIC = "data.dataset_param.basic_parameters"
SIZES = "data.dataset_param.preprocess_parameters"
SKIP = (f"{BASIC}.on_bad_sample=skip", f"{BASIC}.max_bad_fraction=0.9")


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of two buckets, bad rows of five kinds among them; features are configured and not made."""
    folder = tmp_path_factory.mktemp("pictures")
    make_tiny_flux(folder / "model")
    sides = {"a": (16, 16), "b": (16, 32), "c": (32, 64), "d": (4, 4), "e": (16, 64), "f": (16, 16)}
    for name, (height, width) in sides.items():
        noise = np.random.default_rng(ord(name)).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes(b"<html>")
    rows: list[dict[str, Any]] = [
        {"path": "a.png", "cap": ["one", "two"]},
        {"path": "b.png", "cap": "word " * TEXT_TOKENS},
        {"path": "gone.png", "cap": "x"},
        {"path": "c.png", "cap": ""},
        {"path": "broken.png", "cap": "x"},
        {"path": "d.png", "cap": "small"},
        {"path": "a.png", "cap": None},
        {"path": "e.png", "cap": "wide"},
        {"path": "f.png", "cap": "false", "resolution": {"height": 17, "width": 16}},
        {"path": "a.png", "cap": "false", "resolution": {"height": 16, "width": 32}},
        {"cap": "no medium"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = generator_config(folder, {"buckets": ["16x16", "16x32"]})
    config["data"]["dataset_param"]["basic_parameters"]["features_dir"] = str(folder / "features")
    return write_yaml(folder / "run.yaml", config)


def test_check_reads_every_row_and_names_every_fault(yaml: Path, tmp_path: Path) -> None:
    said = mm("data", "check", yaml, "--json", "--bad-rows", tmp_path / "bad.jsonl")
    assert said.code == 4
    found = json.loads(said.out)
    assert (found["rows"], found["read"], found["usable"], found["bad"]) == (11, 11, 6, 5)
    kinds = {finding["kind"]: finding for finding in found["findings"]}
    assert {kind for kind, finding in kinds.items() if finding["severity"] == "error"} == {
        "missing media", "broken media", "fields", "false declarations",
    }  # fmt: skip
    bad = {row["row"]: row["what"] for row in lines(tmp_path / "bad.jsonl")}
    assert bad.keys() == {3, 5, 7, 10, 11}
    assert "cap  is null" in bad[7]
    assert "the row declares width 32, the file has 16: it is a sample of 16×16, not of 16×32" in bad[10]
    warned = {kind: finding["examples"] for kind, finding in kinds.items() if finding["severity"] == "warning"}
    assert warned["declarations"] == ["rows.jsonl:9  the row declares height 17, the file has 16"]
    assert warned["cut captions"][0].startswith("rows.jsonl:2  ")
    assert warned["cut captions"][0].endswith(f" tokens, {TEXT_TOKENS} are read")
    assert warned["empty captions"] == ["rows.jsonl:4  its only caption"]
    assert warned["enlarged"] == ["rows.jsonl:6  4 times, to 16×16"]
    assert warned["cut away"] == ["rows.jsonl:8  50%, to 16×32"]


def test_stats_tell_buckets_captions_and_scaling(yaml: Path, tmp_path: Path) -> None:
    said = mm("data", "stats", yaml, "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)["denoised"]
    assert found["buckets"] == {"16×16": 3, "16×32": 3}
    assert found["captions_of_a_row"] == {"1": 5, "2": 1}
    assert (found["captions_cut"], found["captions_empty"]) == (1, 1)
    assert found["caption_tokens"]["max"] > TEXT_TOKENS
    assert found["cut_share"] == {"mean": 0.083, "p50": 0.0, "p95": 0.5, "max": 0.5}
    assert (found["enlarged"]["p50"], found["enlarged"]["max"]) == (1.0, 4.0)
    text = mm("data", "stats", yaml, "--html", tmp_path / "stats.html").out
    for told in ("samples by size", "16×32", "share of a medium that is cut away", "captions cut: 1, empty: 1"):
        assert told in text
    assert "share of a medium that is cut away" in (tmp_path / "stats.html").read_text()


def test_preview_shows_captions_picture_and_bucket(yaml: Path, tmp_path: Path) -> None:
    words = ("data", "preview", yaml, "--row-id", "rows.jsonl:1", "--row-id", "rows.jsonl:8")
    said = mm(*words, *SKIP, "--html", tmp_path / "preview.html")
    assert said.code == 0, said.err
    assert "size 16×32 (height × width), of a medium of 16×64: scaled 1 times, 50.0% cut away" in said.out
    assert said.out.count("drawn in the first epoch") == 1
    for caption in ("'one'", "'two'", "'wide'"):
        assert f": {caption}" in said.out
    assert "image 1: a.png  16 × 16" in said.out
    page = (tmp_path / "preview.html").read_text()
    assert page.count("data:image/") == 2
    assert "50.0% cut away" in page
    shown = json.loads(mm(*words, *SKIP, "--json").out)["shown"]
    assert len(shown[0]["notes"]) == 3


def test_preview_shows_both_sides_of_a_pair(tmp_path: Path) -> None:
    yaml = make_tiny_media_pairs(tmp_path)
    said = mm("data", "preview", yaml, *PAIRS, "--rows", "1", "--json")
    assert said.code == 0, said.err
    (row,) = json.loads(said.out)["shown"]
    assert [medium["name"] for medium in row["media"]] == ["pictures/1.png", "pictures/2.png"]
    assert "rejected: image 2" in row["notes"] and row["fault"] is None


def test_stats_tell_of_all_media_of_a_row(tmp_path: Path) -> None:
    """A Kontext folder: pictures before an edit in a folder of their own, one of them of another shape."""
    make_tiny_flux(tmp_path / "model", pipeline="FluxKontextPipeline")
    for name, sides in (("a", (16, 16)), ("b", (16, 32)), ("c", (16, 16))):
        captioned(tmp_path / "after" / f"{name}.png", f"make it {name}")
        captioned(tmp_path / "before" / f"{name}.jpg", None, seed=1, height=sides[0], width=sides[1])
    run = write_yaml(tmp_path / "run.yaml", generator_config(tmp_path, {"height": 16, "width": 16}))
    entries = f"{BASIC}.dataset=[{{path: {tmp_path}/after, companions: {{source: {tmp_path}/before}}}}]"
    said = mm("data", "stats", run, entries, "model.task=edit", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    source = found["denoised"]["roles"]["source"]
    assert source["kinds"] == {"image": 3}
    assert source["sizes"] == {"16 × 16": 2, "32 × 16": 1}
    assert source["cut_share"]["max"] == 0.5
    assert [(each["kind"], each["items"], each["rows"]) for each in found["media"]] == [("image", 6, 3)]
    text = mm("data", "stats", run, entries, "model.task=edit").out
    assert "source: 3 × image" in text and "share that is cut away: mean 0.167" in text
    (tmp_path / "before" / "b.jpg").write_bytes(b"<html>")
    said = mm("data", "check", run, entries, "model.task=edit", "--json")
    assert said.code == 4
    assert "broken media" in {finding["kind"] for finding in json.loads(said.out)["findings"]}


def test_clips_have_frames_and_rates(tmp_path: Path) -> None:
    make_tiny_wan(tmp_path / "model")
    make_clips(tmp_path, count=4, frames=9)
    run = write_yaml(tmp_path / "run.yaml", generator_config(tmp_path, {"height": 16, "width": 16, "num_frames": 5}))
    found = json.loads(mm("data", "stats", run, "--json").out)["denoised"]
    assert found["buckets"] == {"5×16×16": 4}
    assert found["fps"] == {"8.33": 4}
    assert found["frames"]["mean"] == 9
    assert "9 frames at 8.33" in mm("data", "preview", run).out
    told = "4 of 4 clips are read with 8.333 frames a second, and the model makes 16"
    with pytest.warns(UserWarning, match=told):
        mm("data", "check", run)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the model makes")
        assert mm("data", "check", run, f"{SIZES}.fps=16", f"{SIZES}.frame_interval=null").code == 0


def test_stats_of_stored_clips_tell_what_those_of_raw_ones_do(tmp_path: Path) -> None:
    """VACE: frames, rates and cuts of clips, and of the controls beside them."""
    make_tiny_conditioned(tmp_path / "model", "vace")
    for name, fps, width in (("a", 16, 32), ("b", 8, 64)):
        write_video(tmp_path / f"{name}.mp4", range(0, 250, 25), fps=fps, width=width)
    rows = [
        {"path": "a.mp4", "cap": "one", "control": "b.mp4"},
        {"path": "b.mp4", "cap": ["two", "another"], "control": "a.mp4"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = write_yaml(tmp_path / "run.yaml", generator_config(tmp_path, {"height": 16, "width": 16, "num_frames": 5}))
    features = f"{BASIC}.features_dir={tmp_path / 'features'}"
    assert mm("extract", run, features).code == 0
    raw, stored = (json.loads(mm("data", "stats", run, *words, "--json").out) for words in ((), (features,)))
    assert raw["denoised"]["fps"] == {"16": 1, "8": 1} and raw["denoised"]["cut_share"]["max"] > 0
    assert raw["denoised"]["roles"]["control"]["kinds"] == {"video": 2}
    assert stored["denoised"] == raw["denoised"] and stored["media"] == raw["media"]


def test_clips_of_another_rate_are_resampled_with_a_note(tmp_path: Path) -> None:
    """Wan makes 16 frames a second; features of every frame are not taken for those."""
    make_tiny_wan(tmp_path / "model")
    clips = tmp_path / "clips"
    clips.mkdir()
    for name, fps in (("own", 16), ("near", 15), ("other", 32)):
        write_video(clips / f"{name}.mp4", range(0, 250, 25), fps=fps)
        (clips / f"{name}.txt").write_text("a clip")
    run = write_yaml(tmp_path / "run.yaml", generator_config(tmp_path, {"height": 16, "width": 16, "num_frames": 5}))
    resampled = (f"{BASIC}.dataset={clips}", f"{SIZES}.frame_interval=null")
    with pytest.warns(UserWarning, match=r"1 of 3 clips has 32 frames a second, resampled to the 16"):
        dataset = build_mm_dataset(load_config(run, resampled).arguments.data.dataset_param)[0]
    grays = [np.array(dataset[index]["pixels"][0, :, -1, 0], dtype=int) for index in range(3)]
    steps = [np.diff(each).mean() for each in grays]
    assert steps == pytest.approx([25, 50, 25], abs=3)  # near, other, own

    features = f"{BASIC}.features_dir={tmp_path / 'features'}"
    every_frame = (resampled[0], f"{SIZES}.frame_interval=1")
    assert mm("extract", run, features, *every_frame).code == 0
    said = mm("check", run, features, *resampled)
    assert said.code == 4
    assert "fps  was each clip's own, is 16 of clips of another rate. Set frame_interval: 1" in said.out
    made = json.loads(mm("extract", run, features, *resampled, "--json").out)
    assert (made["samples"], made["kept"]) == (3, 2)
    assert mm("check", run, features, *resampled).code == 0


def test_features_that_are_there_are_looked_at(yaml: Path, tmp_path: Path) -> None:
    features = f"{BASIC}.features_dir={tmp_path / 'features'}"
    assert mm("extract", yaml, features, *SKIP).code == 0
    assert mm("data", "check", yaml, features).code == 0
    assert json.loads(mm("data", "stats", yaml, features, "--json").out)["denoised"]["buckets"]["16×16"] == 3
    assert "size 16×16" in mm("data", "preview", yaml, features).out
    rows = lines(yaml.parent / "rows.jsonl")
    rows[0]["cap"] = "other"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = mm("data", "check", yaml, features, f"{BASIC}.dataset={tmp_path / 'rows.jsonl'}")
    assert said.code == 4
    assert "changed rows" in said.out
