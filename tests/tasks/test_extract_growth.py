"""A feature set that grows: what is new is encoded, what is there is kept by its content, and a kill loses nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.runs import lines, mm
from tests.tasks.extraction_run import files, make_run, run
from tests.tasks.test_extract_kill import extract_and_die

BUCKETS = "data.dataset_param.preprocess_parameters.buckets"


class Encoded:
    """What the family encoded: pictures, and captions."""

    def __init__(self) -> None:
        self.pictures, self.captions = 0, list[str]()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Encoded:
    found = Encoded()
    media, text = DiffusionAdapter.encode_media, DiffusionAdapter.encode_text

    def counted_media(self: DiffusionAdapter, pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
        found.pictures += len(pixels)
        return media(self, pipeline, pixels)

    def counted_text(self: DiffusionAdapter, pipeline: Any, captions: Any) -> Any:
        found.captions += captions
        return text(self, pipeline, captions)

    monkeypatch.setattr(DiffusionAdapter, "encode_media", counted_media)
    monkeypatch.setattr(DiffusionAdapter, "encode_text", counted_text)
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growth")
    run(make_run(folder))
    return folder


@pytest.fixture
def work(prepared: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    copy = shutil.copytree(prepared, tmp_path / "work")
    (copy / "run.yaml").write_text((copy / "run.yaml").read_text().replace(str(prepared), str(copy)))
    return copy


def rows_of(work: Path) -> list[dict[str, Any]]:
    return lines(work / "rows.jsonl")


def write_rows(work: Path, rows: list[dict[str, Any]]) -> None:
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def new_picture(work: Path, name: str, seed: int = 99) -> str:
    noise = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(work / "pictures" / name)
    return f"pictures/{name}"


def check_equal_to_fresh(work: Path, *overrides: str) -> None:
    """Every row has what an extraction from nothing gives it."""
    fresh = work / "fresh"
    run(work / "run.yaml", *overrides, out=fresh)
    adapter = find_adapter(work / "model")
    grown, made = open_features(work / "features", adapter), open_features(fresh, adapter)
    assert len(grown) == len(made)
    for index, (left, right) in enumerate(zip(grown.records, made.records, strict=True)):
        assert (left.key, left.place, left.captions, left.size) == (right.key, right.place, right.captions, right.size)
        assert left.tensors.keys() == right.tensors.keys()
        for caption in range(len(left.captions)):
            ours, theirs = grown.read(index, caption), made.read(index, caption)
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=2e-6)


def test_new_rows_are_encoded_alone(work: Path, encoded: Encoded) -> None:
    rows = rows_of(work)
    rows.insert(3, {"path": new_picture(work, "new.png"), "cap": ["brand new", rows[0]["cap"][0]]})
    write_rows(work, rows)
    assert mm("check", work / "run.yaml").code == 4
    outcome = run(work / "run.yaml")
    assert (outcome.samples, outcome.kept) == (13, 12)
    assert encoded.pictures == 1
    assert encoded.captions == ["brand new"]
    assert mm("check", work / "run.yaml").code == 0
    check_equal_to_fresh(work)


def test_changed_captions_are_encoded_alone(work: Path, encoded: Encoded) -> None:
    rows = rows_of(work)
    rows[4]["cap"] = "something else"
    write_rows(work, rows)
    assert run(work / "run.yaml").kept == 11
    assert (encoded.pictures, encoded.captions) == (0, ["something else"])
    check_equal_to_fresh(work)
    rows[4]["cap"] = rows[5]["cap"]  # and one that another row has
    write_rows(work, rows)
    encoded.captions.clear()
    shutil.rmtree(work / "fresh")
    assert run(work / "run.yaml").kept == 12
    assert encoded.captions == []


def test_rows_that_go_or_move_cost_nothing(work: Path, encoded: Encoded) -> None:
    write_rows(work, rows_of(work)[:1:-1])
    assert (run(work / "run.yaml").samples, encoded.pictures, encoded.captions) == (10, 0, [])
    check_equal_to_fresh(work)


def test_further_sizes_are_encoded_alone(work: Path, encoded: Encoded) -> None:
    """Half of the pictures are 16×16, and stay so."""
    other = f"{BUCKETS}=[16x16,16x20]"
    assert run(work / "run.yaml", other).kept == 6
    assert (encoded.pictures, encoded.captions) == (6, [])
    check_equal_to_fresh(work, other)


def test_a_file_that_changed_is_encoded_again(work: Path, encoded: Encoded) -> None:
    path = work / "pictures" / "2.png"
    os.utime(path, (1, 1))  # touched alone
    assert (run(work / "run.yaml").kept, encoded.pictures) == (12, 0)
    new_picture(work, "2.png")
    assert (run(work / "run.yaml").kept, encoded.pictures, encoded.captions) == (11, 1, [])
    check_equal_to_fresh(work)


def test_a_damaged_shard_of_earlier_work_is_made_again(work: Path, encoded: Encoded) -> None:
    write_rows(work, [*rows_of(work), {"path": new_picture(work, "new.png"), "cap": "new"}])
    run(work / "run.yaml")
    shard = sorted((work / "features").glob("shard-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    encoded.pictures = 0
    outcome = run(work / "run.yaml")
    assert len(outcome.damaged) == 1
    assert 0 < encoded.pictures < 13
    check_equal_to_fresh(work)


def test_growing_again_and_again(work: Path, encoded: Encoded) -> None:
    for number in range(3):
        write_rows(work, [*rows_of(work), {"path": new_picture(work, f"{number}-new.png", number), "cap": str(number)}])
        assert run(work / "run.yaml").samples == 13 + number
    assert encoded.pictures == 3
    check_equal_to_fresh(work)


def grown(work: Path) -> None:
    rows = rows_of(work)
    rows += [{"path": new_picture(work, f"new{n}.png", n), "cap": f"new {n}"} for n in range(5)]
    rows[2]["cap"] = "another"
    write_rows(work, rows)


def test_a_kill_while_it_grows_loses_nothing(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: Encoded
) -> None:
    grown(work)
    unbroken = shutil.copytree(work / "features", tmp_path / "unbroken")
    run(work / "run.yaml", out=unbroken)
    assert encoded.pictures == 5
    kills = 0
    for change in range(0, 30, 3):
        out = shutil.copytree(work / "features", tmp_path / f"killed{change}")
        if not extract_and_die(work, out, change):
            break
        kills += 1
        run(work / "run.yaml", out=out)
        assert files(out) == files(unbroken), change
    assert kills > 3
