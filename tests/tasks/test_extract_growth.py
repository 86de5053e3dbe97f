"""A feature set that grows: what is new is encoded, what is there is kept by its content, and a kill loses nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.fsdp.data.datasets.generation import media_marks
from mindspeed_mm.fsdp.data.datasets.generation import rows as generation_rows
from mindspeed_mm.fsdp.data.feature_store import folder as feature_folder
from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.runs import lines, mm
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generator_run import generator_config
from tests.helpers.tiny_media_pairs import PAIRS
from tests.tasks.extraction_run import files, make_run, run, write_yaml
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


def new_picture(work: Path, name: str, seed: int = 99, **options: Any) -> str:
    noise = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(work / "pictures" / name, **options)
    return f"pictures/{name}"


def check_equal_to_fresh(work: Path, *overrides: str) -> None:
    """Every row has what an extraction from nothing gives it."""
    fresh = work / "fresh"
    run(work / "run.yaml", *overrides, out=fresh)
    adapter = find_adapter(work / "model")
    grown, made = open_features(work / "features", adapter), open_features(fresh, adapter)
    assert len(grown) == len(made)
    lies: dict[str, Any] = {"shard": "", "tensors": {}, "places": {}, "stem": "", "media_stem": "", "caption_stems": ()}
    for index, (left, right) in enumerate(zip(grown.records, made.records, strict=True)):
        assert replace(left, **lies) == replace(right, **lies)
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


def test_what_a_start_asks_of_each_row_does_not_grow(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large set is taken up again in the time that its rows take: each is parsed four times, to look through all, for
    its header, for what is there now and for the plan, and its file is asked twice; a shard is parsed once. A new row
    is parsed once more to be encoded, and its file has no header yet that could be out of date."""
    asked: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            asked[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    write_rows(work, [*rows_of(work), {"path": new_picture(work, "new.png"), "cap": "new"}])
    counted(generation_rows, "parse_row")
    counted(media_marks, "_of_file")
    counted(feature_folder, "read_facts")
    run(work / "run.yaml")
    shards = len(FeatureFolder(work / "features").shards())
    assert asked["parse_row"] == 4 * 13 + 1
    assert asked["_of_file"] == 2 * 12 + 1
    assert asked["read_facts"] == shards
    asked.clear()
    run(work / "run.yaml")
    assert (asked["parse_row"], asked["_of_file"], asked["read_facts"]) == (4 * 13, 2 * 13, shards)


def test_rows_that_share_a_picture_keep_what_else_they_have(tmp_path: Path) -> None:
    """Two rows edit one picture into the same, from sources that differ in their pixels alone."""
    make_tiny_conditioned(tmp_path / "model", "kontext")
    (tmp_path / "pictures").mkdir()
    given = []
    for seed, name in enumerate(("target", "one", "other", "new")):
        path = tmp_path / new_picture(tmp_path, f"{name}.png", seed, compress_level=0)
        os.utime(path, (1, 1))
        if name != "target":
            given.append({"path": "pictures/target.png", "source": f"pictures/{name}.png", "cap": "the same"})
    write_rows(tmp_path, given[:2])
    config = generator_config(tmp_path, {"height": 16, "width": 16})
    config["data"]["dataset_param"]["basic_parameters"]["features_dir"] = str(tmp_path / "features")
    yaml = write_yaml(tmp_path / "run.yaml", config)
    run(yaml)
    write_rows(tmp_path, given)
    assert run(yaml).kept == 2
    check_equal_to_fresh(tmp_path)
    store = open_features(tmp_path / "features", find_adapter(tmp_path / "model"))
    assert len({store.read(row, 0)["source_latents"].numpy().tobytes() for row in range(3)}) == 3


def test_pairs_keep_their_scores_and_rows_what_was_counted_in_them(work: Path) -> None:
    """Of rows that are kept, the index says what it said: scores of both sides, sizes of media, cut captions."""
    rows = rows_of(work)
    for at, row in enumerate(rows):
        other = rows[(at + 2) % len(rows)]["path"]
        row |= {"file_rejected": other, "score": 0.8, "score_rejected": 0.1 * (at % 4)}
        if at % 5 == 0:
            row["cap"] = "so many words that no tokenizer of a test reads them to their end " * 9
    write_rows(work, rows[:-1])
    # These three, and two second captions, which are a word longer than the first.
    assert run(work / "run.yaml", *PAIRS, overwrite=True).cut_captions == 5
    write_rows(work, rows)
    outcome = run(work / "run.yaml", *PAIRS)
    assert (outcome.kept, outcome.cut_captions) == (11, 5)
    check_equal_to_fresh(work, *PAIRS)
    assert all(record.scores for record in open_features(work / "features", find_adapter(work / "model")).records)


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
