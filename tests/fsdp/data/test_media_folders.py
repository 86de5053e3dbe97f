"""Captioned media as people have them: folders with text files, image folders, archives; what is made of captions."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.datasets.generation.captions import CaptionRules
from mindspeed_mm.fsdp.data.datasets.generation.generation_dataset import samples_of
from mindspeed_mm.fsdp.data.datasets.generation.media_marks import doubled_note, rates_note
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.datasets.generation.sizes import SizeSettings
from mindspeed_mm.fsdp.models.diffusion.media_roles import SOURCE_PICTURE
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataEntry, PreprocessParameters

GEOMETRY = MediaGeometry(spatial_ratio=2, temporal_ratio=1, patch=(1, 2, 2), latent_channels=4, is_video=False)
SIDES = {"height": 16, "width": 16}


def picture(path: Path, height: int = 16, width: int = 16, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def captioned(path: Path, caption: str | None, seed: int = 0, **size: int) -> None:
    picture(path, seed=seed, **size)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def source(dataset: Any, sizes: dict[str, Any] | None = None, **basic: Any) -> RawSource:
    preprocess = PreprocessParameters(**(SIDES if sizes is None else sizes))
    return RawSource(BasicParameters(dataset=dataset, **basic), preprocess, GEOMETRY)


def said(found: RawSource) -> list[tuple[str, tuple[str, ...], int]]:
    return [(str(row.place), row.captions, repeats) for row, repeats in zip(found.rows, found.repeats, strict=True)]


def test_a_folder_of_kohya_is_read_by_itself(tmp_path: Path) -> None:
    """Neither `dataset_dir` nor anything else says where media are."""
    folder = tmp_path / "set"
    captioned(folder / "10_my dog" / "b.png", None)
    captioned(folder / "10_my dog" / "a.jpg", "a dog, outside\n")
    captioned(folder / "1_cats" / "sub" / "c.png", "one line\n\nanother line\n")
    captioned(folder / ".hidden" / "d.png", "never seen")
    found = source(str(folder))
    assert said(found) == [
        ("set/10_my dog/a.jpg", ("a dog, outside",), 10),
        ("set/10_my dog/b.png", ("my dog",), 10),
        ("set/1_cats/sub/c.png", ("one line", "another line"), 1),
    ]
    assert found.item(2, 0)["pixels"].shape == (3, 1, 16, 16)


def test_repeats_are_samples_of_their_own(tmp_path: Path) -> None:
    captioned(tmp_path / "3_x" / "a.png", "one\ntwo\nthree\nfour")
    captioned(tmp_path / "1_y" / "b.png", "y", seed=1)
    found = source(str(tmp_path))
    assert samples_of(found.repeats) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    items = [found.item(row, 0, repeat) for row, repeat in samples_of(found.repeats)]
    assert len({item["sample_id"] for item in items}) == 4
    drawn = {found.item(1, epoch, repeat)["caption"] for epoch in range(4) for repeat in range(3)}
    assert drawn == {"one", "two", "three", "four"}


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_paths_of_an_image_folder_start_at_its_table(tmp_path: Path, kind: str) -> None:
    picture(tmp_path / "train" / "in" / "1.png")
    line = '{"file_name": "in/1.png", "text": "one"}' if kind == "jsonl" else "file_name,text\nin/1.png,one"
    (tmp_path / "train" / f"metadata.{kind}").write_text(line + "\n")
    found = source(str(tmp_path / "train"), dataset_dir=str(tmp_path))
    assert [row.captions for row in found.rows] == [("one",)]
    assert torch.equal(found.item(0, 0)["pixels"], source_pixels(tmp_path / "train" / "in" / "1.png"))


def source_pixels(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1)[:, None]


def test_media_lie_beside_a_table_where_nobody_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "far" / "1.png")
    (tmp_path / "far" / "rows.jsonl").write_text('{"path": "1.png", "cap": "one"}\n')
    monkeypatch.chdir(tmp_path)
    assert torch.equal(source("far/rows.jsonl").item(0, 0)["pixels"], source_pixels(tmp_path / "far" / "1.png"))


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return path


def test_archives_of_webdataset(tmp_path: Path) -> None:
    first, second = (picture(tmp_path / f"{seed}.png", seed=seed).read_bytes() for seed in (1, 2))
    columns = b'{"score": 3, "caption": "no"}'
    archive(tmp_path / "a-000.tar", {"x/01.png": first, "x/01.txt": b"one", "x/01.json": columns})
    archive(tmp_path / "a-001.tar", {"02.json": b'{"caption": "two"}', "02.png": second, "02.cls": b"7"})
    for dataset in (str(tmp_path / "a-*.tar"), [str(tmp_path / "a-000.tar"), str(tmp_path / "a-001.tar")]):
        found = source(dataset)
        assert said(found) == [("a-000.tar/x/01", ("one",), 1), ("a-001.tar/02", ("two",), 1)]
        assert found.rows[0].extras == {"score": 3, "caption": "no"}
        assert torch.equal(found.item(0, 0)["pixels"], source_pixels(tmp_path / "1.png"))
        assert torch.equal(found.item(1, 0)["pixels"], source_pixels(tmp_path / "2.png"))
    data = (tmp_path / "a-000.tar").read_bytes()
    (tmp_path / "a-000.tar").write_bytes(data[:700])
    with pytest.raises(DataError, match=r"a-000.tar .*(ends before|that can be read)"):
        source(str(tmp_path / "a-000.tar"))


def test_entries_have_repeats_and_sizes_of_their_own(tmp_path: Path) -> None:
    captioned(tmp_path / "small" / "a.png", "a")
    captioned(tmp_path / "large" / "b.png", "b", height=32, width=24)
    entries = [
        DataEntry(path=str(tmp_path / "small"), repeats=2),
        DataEntry(path=str(tmp_path / "large"), sizes={"buckets": ["32x24"]}),
    ]
    found = source(tuple(entries))
    assert found.sizes == [MediaSize(1, 16, 16), MediaSize(1, 32, 24)]
    assert found.repeats == [2, 1]
    wrong = (DataEntry(path=str(tmp_path / "small"), name="s", sizes={"heights": 16}),)
    with pytest.raises(ConfigError, match=r"dataset\.s\.sizes\.heights .*Did you mean 'height'"):
        source(wrong)
    with pytest.raises(ConfigError, match=r"dataset\.s\.sizes\.height .*multiples of 4"):
        source((DataEntry(path=str(tmp_path / "small"), name="s", sizes={"height": 15, "width": 16}),))


def test_entries_are_cut_at_their_own_number_of_rows(tmp_path: Path) -> None:
    """Counted over all files of an entry, as the folders of kohya are."""
    for name in ("3_x/a", "3_x/b", "1_y/c", "1_y/d", "other/e", "other/f"):
        captioned(tmp_path / Path(name).parent.name / f"{Path(name).name}.png", name)
    for folder in ("3_x", "1_y"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / folder).rename(tmp_path / "set" / folder)
    entries = (DataEntry(path=str(tmp_path / "set"), max_samples=3), DataEntry(path=str(tmp_path / "other")))
    assert [row.captions[0] for row in source(entries).rows] == ["1_y/c", "1_y/d", "3_x/a", "other/e", "other/f"]
    assert len(source(entries, max_samples=1)) == 3  # of each file


@pytest.mark.parametrize(
    ("rates", "is_resampled", "told"),
    [
        ([16.0, 15.0, 17.5], True, ""),
        ([30.0, 16.0, 24.0], True, "2 of 3 clips have 24 to 30 frames a second, resampled to the 16 that"),
        ([30.0, 16.0, 24.0], False, "2 of 3 clips are read with 24 to 30 frames a second, and the model makes 16"),
        ([8.0, 8.001], False, "2 of 2 clips are read with 8 frames a second"),
    ],
)
def test_other_rates_than_the_model_makes_are_told(rates: list[float], is_resampled: bool, told: str) -> None:
    found = rates_note(rates, 16.0, is_resampled=is_resampled)
    assert found.startswith(told) and bool(found) == bool(told)


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ([(16.0, 16.0), (15.0, 16.0), (30.0, 16.0), (8.0, 8.0)], ""),
        ([(8.0, 16.0), (30.0, 16.0)], "1 of 2 clips has 8 frames a second, and 16 are taken: frames are repeated"),
        ([(8.0, 24.0), (12.0, 24.0)], "2 of 2 clips have 8 to 12 frames a second, and 24 are taken"),
    ],
)
def test_frames_that_are_repeated_are_told(rates: list[tuple[float, float]], told: str) -> None:
    found = doubled_note(rates)
    assert found.startswith(told) and bool(found) == bool(told)


class TestCompanions:
    """Masks, controls and pictures before an edit, in folders of their own."""

    @staticmethod
    def edits(folder: Path, **companions: str) -> RawSource:
        entries = (DataEntry(path=str(folder / "after"), companions=companions or {"source": "before"}),)
        basic = BasicParameters(dataset=entries, on_bad_sample="error")
        return RawSource(basic, PreprocessParameters(**SIDES), GEOMETRY, roles=(SOURCE_PICTURE,))

    @staticmethod
    def make(folder: Path) -> None:
        captioned(folder / "after" / "2_dog" / "a.png", "a", seed=1)
        captioned(folder / "after" / "b.png", "b", seed=2)
        picture(folder / "before" / "2_dog" / "a.webp", seed=3)
        picture(folder / "before" / "a.png", seed=4)
        picture(folder / "before" / "in" / "b.png", seed=5)
        picture(folder / "before" / "b.bmp", seed=6)

    def test_the_longest_end_of_the_path_counts(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        found = self.edits(tmp_path)
        sources = {row.captions[0]: row.roles["source"] for row in found.rows}
        before = tmp_path / "before"
        assert sources == {"a": f"{before}/2_dog/a.webp", "b": f"{before}/b.bmp"}
        items = {item["caption"]: item for item in (found.item(index, 0) for index in range(2))}
        assert torch.equal(items["b"]["pixels_source"], source_pixels(before / "b.bmp"))
        assert torch.equal(items["b"]["pixels"], source_pixels(tmp_path / "after" / "b.png"))

    def test_another_file_is_another_sample_and_another_folder_is_not(self, tmp_path: Path) -> None:
        self.make(tmp_path / "one")
        found = self.edits(tmp_path / "one")
        told, key, mark = found.rows[0].digest, found.key(0), found.fingerprint()["hash"]
        (tmp_path / "one").rename(tmp_path / "two")
        moved = self.edits(tmp_path / "two")
        assert (moved.rows[0].digest, moved.key(0)) == (told, key)
        picture(tmp_path / "two" / "before" / "b.bmp", seed=7)
        changed = self.edits(tmp_path / "two")
        assert changed.key(0) != key and changed.fingerprint()["hash"] != mark

    def test_a_folder_inside_is_no_data_of_its_own(self, tmp_path: Path) -> None:
        captioned(tmp_path / "after" / "a.png", "a")
        picture(tmp_path / "after" / "before" / "a.png", seed=1)
        assert [row.captions for row in self.edits(tmp_path).rows] == [("a",)]

    def test_what_a_row_names_itself_comes_first(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        line = {"file_name": "b.png", "text": "b", "source": "../before/a.png"}
        (tmp_path / "after" / "metadata.jsonl").write_text(json.dumps(line) + "\n")
        assert self.edits(tmp_path).rows[0].roles["source"] == str(tmp_path / "after" / "../before/a.png")

    def test_what_is_wrong_is_named(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        with pytest.raises(ConfigError, match=r"companions\.mask .*takes source, source_image"):
            self.edits(tmp_path, mask="before")
        with pytest.raises(DataError, match=r"companions\.source .*'nowhere' is not a folder"):
            self.edits(tmp_path, source="nowhere")
        (tmp_path / "before" / "b.bmp").unlink()
        with pytest.raises(DataError, match=r"after/b\.png .*source .*there is no 'b' in 'before'"):
            self.edits(tmp_path)
        picture(tmp_path / "before" / "a.jpg")
        with pytest.raises(DataError, match=r"'a\.jpg' and 'a\.png' have one name"):
            self.edits(tmp_path)


def test_samples_of_an_entry_stand_together() -> None:
    repeats, entries = [2, 1, 3, 1], ["a", "b", "a", "b"]
    assert samples_of(repeats, entries) == [(0, 0), (2, 0), (0, 1), (2, 1), (2, 2), (1, 0), (3, 0)]
    assert sorted(samples_of(repeats)) == sorted(samples_of(repeats, entries))


class TestWhatIsWrong:
    def test_a_medium_without_a_caption(self, tmp_path: Path) -> None:
        captioned(tmp_path / "set" / "a.png", "a")
        captioned(tmp_path / "set" / "b.png", None)
        with pytest.raises(DataError, match=r"set/b\.png .*there is no b\.txt beside it.* Write one"):
            source(str(tmp_path / "set"))
        assert len(source(str(tmp_path / "set"), on_bad_sample="skip", max_bad_fraction=0.5)) == 1

    def test_a_table_and_captions(self, tmp_path: Path) -> None:
        captioned(tmp_path / "a.png", "a")
        (tmp_path / "rows.jsonl").write_text("{}\n")
        with pytest.raises(DataError, match=r"text files, and the table rows.jsonl.*Name the table"):
            source(str(tmp_path))

    def test_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "notes.md").write_text("x")
        with pytest.raises(DataError, match=r"neither media nor tables.*\.txt of the same name"):
            source(str(tmp_path))

    def test_text_that_is_no_text(self, tmp_path: Path) -> None:
        captioned(tmp_path / "a.png", None)
        (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(DataError, match=r"a\.txt .*byte 0 is not UTF-8"):
            source(str(tmp_path))

    def test_an_archive_without_media(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="holds no pictures or clips"):
            source(str(archive(tmp_path / "a.tar", {"a.txt": b"x"})))


class TestCaptions:
    def test_what_is_not_asked_for_is_not_done(self) -> None:
        captions = ("b, a", "")
        assert CaptionRules()(captions) is captions

    def test_shuffled_tags_keep_the_first(self) -> None:
        made = CaptionRules(shuffle_tags=True, keep_tags=1, caption_variants=30)(("sks, a, b, c",))
        assert all(caption.startswith("sks, ") for caption in made)
        assert {tuple(sorted(caption.split(", "))) for caption in made} == {("a", "b", "c", "sks")}
        assert len(made) == 6  # every order of three, each once
        assert made == CaptionRules(shuffle_tags=True, keep_tags=1, caption_variants=30)(("sks, a, b, c",))

    def test_dropped_tags(self) -> None:
        made = CaptionRules(tag_dropout=0.5, keep_tags=1, caption_variants=200)(("x, a, b",))
        counts = Counter(tag for caption in made for tag in caption.split(", "))
        assert set(made) == {"x", "x, a", "x, b", "x, a, b"}
        assert counts["x"] == 4

    @pytest.mark.parametrize(
        ("caption", "made"),
        [("a dog", "sks, a dog"), ("a [trigger] dog", "a sks dog"), ("a sks dog", "a sks dog"), ("", "sks")],
    )
    def test_trigger_word(self, caption: str, made: str) -> None:
        assert CaptionRules(trigger_word="sks")((caption,)) == (made,)

    def test_wrong_values_are_told_at_once(self) -> None:
        basic = BasicParameters(keep_tags=-1, tag_dropout=1.0, shuffle_tags="yes")
        with pytest.raises(ConfigError) as told:
            CaptionRules.read(basic)
        assert [problem.key.rpartition(".")[2] for problem in told.value.problems] == [
            "shuffle_tags", "keep_tags", "tag_dropout",
        ]  # fmt: skip


class TestViews:
    def test_flips_and_cuts(self, tmp_path: Path) -> None:
        captioned(tmp_path / "a.png", "a", height=16, width=32)
        plain = source(str(tmp_path)).pixels(0)["target"]
        assert plain.shape == (1, 3, 1, 16, 16)
        flipped = source(str(tmp_path), {**SIDES, "flip": True}).pixels(0)["target"]
        assert torch.equal(flipped[0], plain[0])
        assert torch.equal(flipped[1], plain[0].flip(-1))
        cuts = source(str(tmp_path), {**SIDES, "crop": "random", "variants": 6}).pixels(0)["target"]
        assert len({cut.numpy().tobytes() for cut in cuts}) == 6

    def test_an_epoch_draws_one(self, tmp_path: Path) -> None:
        captioned(tmp_path / "a.png", "a", height=16, width=32)
        found = source(str(tmp_path), {**SIDES, "crop": "random", "flip": True})
        views = [view.numpy().tobytes() for view in found.pixels(0)["target"]]
        drawn = [views.index(found.item(0, epoch)["pixels"].numpy().tobytes()) for epoch in range(40)]
        assert set(drawn) == {0, 1, 2, 3}

    def test_variants_of_nothing(self) -> None:
        with pytest.raises(ConfigError, match="nothing tells variants from one another"):
            SizeSettings.read({"height": 16, "width": 16, "variants": 3})

    def test_nothing_is_enlarged(self, tmp_path: Path) -> None:
        captioned(tmp_path / "a.png", "small", height=18, width=13)
        captioned(tmp_path / "b.png", "large", height=64, width=64)
        sizes = {"height": 32, "width": 32, "enlarge": False}
        assert source(str(tmp_path), sizes).sizes == [MediaSize(1, 16, 12), MediaSize(1, 32, 32)]
        assert source(str(tmp_path), {**sizes, "enlarge": True}).sizes == [MediaSize(1, 32, 32)] * 2


def test_json_beside_pictures_is_no_table(tmp_path: Path) -> None:
    captioned(tmp_path / "a.png", "a")
    (tmp_path / "a.json").write_text(json.dumps({"score": 1}))
    assert len(source(str(tmp_path))) == 1


@pytest.mark.edge("BR13")
@pytest.mark.parametrize("table", ["rows.jsonl", "metadata.jsonl", "rows.csv"])
def test_a_captioned_table_means_the_picture_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """A folder that happens to be called `data` has a picture of the same name."""
    picture(tmp_path / "set" / "a.png", width=32)
    picture(tmp_path / "data" / "a.png", width=64)
    line = '{"file_name": "a.png", "text": "noise"}\n' if table.endswith("jsonl") else "file_name,text\na.png,noise\n"
    (tmp_path / "set" / table).write_text(line)
    monkeypatch.chdir(tmp_path)
    name = str(tmp_path / "set" / table)
    for found in (source(name), source(table, dataset_dir="set")):
        assert found.describe(0).header.width == 32
    named = source(name, dataset_dir="data").describe(0).header.width
    assert named == (32 if table.startswith("metadata") else 64)
    (tmp_path / "set" / "a.png").unlink()
    with pytest.raises(DataError, match="not found"):
        source(name)
