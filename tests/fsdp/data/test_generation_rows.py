"""Rows of pictures and clips in every format, and what is said of those that cannot be used."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.row_files import open_row_files
from mindspeed_mm.fsdp.data.datasets.generation.rows import (
    GenerationRows,
    build_media_loader,
    content_key,
    media_digest,
    read_rows,
)
from mindspeed_mm.fsdp.models.diffusion.media_roles import SOURCE_PICTURE
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from tests.fsdp.data.conftest import write_jsonl

DECLARED = {"num_frames": 81, "fps": 16.0, "resolution": {"height": 480, "width": 832}}


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., GenerationRows]:
    def read(dataset: Path | str, **basic: Any) -> GenerationRows:
        return read_rows(BasicParameters(dataset=str(dataset), dataset_dir=str(tmp_path), **basic))

    return read


def as_file(folder: Path, kind: str, table: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(table))
    elif kind == "jsonl":
        write_jsonl(path, table)
    elif kind == "csv":
        cells = [[value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in table]
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells]
        path.write_text("\n".join([",".join(table[0]), *quoted]) + "\n")
    elif kind == "txt":
        path.write_text("".join(f"{row['file']}\t{row['captions']}\n" for row in table))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    return path


class TestFormats:
    @pytest.mark.parametrize("kind", ["json", "jsonl"])
    def test_declared_rows(self, kind: str, tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
        table = [
            {"path": "a/1.mp4", "cap": ["one", "uno"], **DECLARED, "aesthetic": 5.5},
            {"path": "b/1.mp4", "cap": "two"},
        ]
        first, second = rows(as_file(tmp_path, kind, table))
        assert (first.media, first.captions) == ("a/1.mp4", ("one", "uno"))
        assert (first.num_frames, first.fps, first.height, first.width) == (81, 16.0, 480, 832)
        assert first.extras == {"aesthetic": 5.5}
        assert (second.captions, second.num_frames, second.height) == (("two",), None, None)

    @pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "txt", "parquet"])
    def test_standard_tables_are_joined_to_the_data_folder(
        self, kind: str, tmp_path: Path, rows: Callable[..., GenerationRows]
    ) -> None:
        (tmp_path / "media").mkdir()
        (tmp_path / "media" / "1.png").write_bytes(b"x")
        path = as_file(tmp_path, kind, [{"file": f"{n}.png", "captions": f"a, {n}"} for n in (1, 2, 3)])
        for folder in ("media", str(tmp_path / "media")):
            found = rows(path, data_storage_mode="standard", data_folder=folder, cache_dir=str(tmp_path / "cache"))
            assert [(row.media, row.captions) for row in found] == [(f"{n}.png", (f"a, {n}",)) for n in (1, 2, 3)]
            basic = BasicParameters(dataset_dir=str(tmp_path), data_folder=folder)
            assert build_media_loader(basic).read("1.png") == (b"x", "1.png")

    def test_captions_in_a_file_beside_the_paths(self, tmp_path: Path) -> None:
        """As CogVideoX's scripts have them: line by line, commas in captions or not."""
        (tmp_path / "videos.txt").write_text("clips/a.mp4\n\nclips/b.mp4\n")
        (tmp_path / "prompts.txt").write_text("a dog, running\ntwo cats\n")
        basic = BasicParameters(dataset=str(tmp_path / "videos.txt"))
        found = read_rows(basic)
        assert [(each.media, each.captions) for each in map(found.__getitem__, range(2))] == [
            (f"{tmp_path}/clips/a.mp4", ("a dog, running",)),
            (f"{tmp_path}/clips/b.mp4", ("two cats",)),
        ]
        (tmp_path / "prompts.txt").write_text("a dog\n")
        with pytest.raises(DataError, match=r"prompts.txt +1 captions, and 2 paths in videos.txt"):
            read_rows(basic)

    def test_a_table_holds_lists_of_captions_and_numbers_as_text(
        self, tmp_path: Path, rows: Callable[..., GenerationRows]
    ) -> None:
        table = [
            {"file": "1.mp4", "captions": ["a", "b"], "num_frames": 17, "height": "480", "width": 832.0},
            {"file": "2.mp4", "captions": "[sic] a", "num_frames": 9, "height": "", "width": ""},
        ]
        first, second = rows(as_file(tmp_path, "csv", table))
        assert first.captions == ("a", "b")
        assert (first.num_frames, first.height, first.width) == (17, 480, 832)
        assert second.captions == ("[sic] a",)
        assert second.height is None

    @pytest.mark.parametrize("mode", ["combine", None])
    def test_combined_annotations(self, mode: str | None, tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
        """Two folders with clips of the same names."""
        for name in ("a", "b"):
            as_file(tmp_path, "json", [{"path": f"{n}.mp4", "cap": f"{name} {n}"} for n in range(2)])
            (tmp_path / "rows.json").rename(tmp_path / f"{name}.json")
        listed = tmp_path / "train.txt"
        listed.write_text(f"clips/a,a.json\r\n\n{tmp_path}/clips/b, {tmp_path}/b.json\n")
        found = rows(listed, data_storage_mode=mode)
        media = ["clips/a/0.mp4", "clips/a/1.mp4", f"{tmp_path}/clips/b/0.mp4", f"{tmp_path}/clips/b/1.mp4"]
        assert [row.media for row in found] == media
        assert [row.captions for row in found] == [("a 0",), ("a 1",), ("b 0",), ("b 1",)]
        assert str(found.place(3)) == "b.json:2"

    def test_folders_of_a_list_are_media_roots(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`folder,annotation` as MindSpeed-MM joins it, from the working directory, with nothing else named."""
        monkeypatch.chdir(tmp_path)
        for name in ("here", "there"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "1.png").write_bytes(name.encode())
            write_jsonl(tmp_path / f"{name}.jsonl", [{"path": "1.png", "cap": name}])
        (tmp_path / "data.txt").write_text(f"here,here.jsonl\n{tmp_path}/there,{tmp_path}/there.jsonl\n")
        for named in (None, "data", "here"):
            basic = BasicParameters(dataset="data.txt", dataset_dir=named, data_storage_mode="combine")
            files = open_row_files(basic)
            media = build_media_loader(basic, files)
            found = [media.read(row.media)[0] for row in read_rows(basic, files=files)]
            assert found == [b"here", b"there"]
        (tmp_path / "data.txt").write_text("/nowhere,here.jsonl\n")
        basic = BasicParameters(dataset="data.txt", data_storage_mode="combine")
        with pytest.raises(DataError, match=r"dataset +'/nowhere' is not a folder"):
            build_media_loader(basic, open_row_files(basic))

    @pytest.mark.parametrize("media", ["image", "video", "file_name", "path", "media"])
    @pytest.mark.parametrize("caption", ["caption", "prompt", "text", "cap"])
    def test_plain_spellings(
        self, media: str, caption: str, tmp_path: Path, rows: Callable[..., GenerationRows]
    ) -> None:
        (row,) = rows(write_jsonl(tmp_path / "rows.jsonl", [{media: "1.png", caption: "one", "source": "x"}]))
        assert (row.media, row.captions, row.extras) == ("1.png", ("one",), {"source": "x"})

    def test_columns_by_name_and_media_inside_the_row(
        self, tmp_path: Path, rows: Callable[..., GenerationRows]
    ) -> None:
        table = [{"path": "an id", "clip": {"bytes": b"\x89PNG", "path": "x.png"}, "zh": "一", "caption": "one"}]
        path = as_file(tmp_path, "parquet", table)
        (row,) = rows(path, media_column="clip", caption_column="zh", cache_dir=str(tmp_path / "cache"))
        assert (row.media, row.captions) == (b"\x89PNG", ("一",))
        assert row.extras == {"path": "an id", "caption": "one"}
        assert row.name == "bytes of rows.parquet:1"

    def test_most_samples_and_slices(self, tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", [{"path": f"{n}.png", "cap": "a"} for n in range(9)])
        found = rows(path, max_samples=4)
        assert len(found) == 4
        assert [row.media for row in found[1:3]] == ["1.png", "2.png"]
        assert found[-1].place == RowLocation("rows.jsonl", 4)


GOOD = {"path": "good.png", "cap": "a"}
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no caption": ({"path": "1.png"}, "rows.jsonl:2  the row has no caption: none of cap, .* among no columns"),
    "no medium": ({"cap": "a"}, "the row has no medium: none of path, .* among cap"),
    "caption null": ({"path": "1.png", "cap": None}, 'rows.jsonl:2  cap  is null. Give text; "" for a sample'),
    "medium null": ({"path": None, "cap": "a"}, "rows.jsonl:2  path  is null. Give the path of a file"),
    "caption a number": ({"path": "1.png", "cap": 3}, "rows.jsonl:2  cap  '3' is neither a caption nor a list"),
    "empty list": ({"path": "1.png", "cap": []}, "is neither a caption nor a list"),
    "list of numbers": ({"path": "1.png", "cap": ["a", 1]}, "is neither a caption nor a list"),
    "path a number": ({"path": 7, "cap": "a"}, "rows.jsonl:2  path  '7' is not a path"),
    "path empty": ({"path": " ", "cap": "a"}, "is not a path"),
    "two paths": ({"path": ["1.png", "2.png"], "cap": "a"}, "is not a path"),
    "url": (
        {"path": "https://x.org/1.png", "cap": "a"},
        r"rows.jsonl:2  .https://x.org/1.png. is a URL: only local files",
    ),
    "frames 0": ({**GOOD, "num_frames": 0}, "rows.jsonl:2  num_frames  0 is not a whole number above 0"),
    "frames half": ({**GOOD, "num_frames": 1.5}, "1.5 is not a whole number"),
    "fps 0": ({**GOOD, "fps": 0}, "rows.jsonl:2  fps  0 is not a number above 0"),
    "fps a word": ({**GOOD, "fps": "fast"}, "fast is not a number"),
    "fps NaN": ('{"path": "1.png", "cap": "a", "fps": NaN}', "fps  nan is not a number above 0"),
    "fps nan as text": ({**GOOD, "fps": "nan"}, "nan is not a number above 0"),
    "resolution a word": ({**GOOD, "resolution": "480p"}, "'480p' is not a resolution"),
    "height negative": ({**GOOD, "resolution": {"height": -1, "width": 8}}, "rows.jsonl:2  height  -1 is not"),
    "cut line": ('{"path": "1.png", "ca', "rows.jsonl:2  broken JSON"),
    "twice the same key": ('{"path": "1.png", "path": "2.png", "cap": "a"}', "duplicate key 'path'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_stop_or_are_left_out(case: str, tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
    content, reason = BAD_ROWS[case]
    bad = content if isinstance(content, str) else json.dumps(content)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), bad, json.dumps({**GOOD, "path": "last.png"})]))
    with pytest.raises(DataError, match="1 of 3 rows cannot be used") as caught:
        rows(path)
    line = re.sub(r"\s{2,}", "  ", str(caught.value))
    assert re.search(reason, line), line
    found = rows(path, on_bad_sample="skip")
    assert [row.media for row in found] == ["good.png", "last.png"]
    assert list(found.left_out) == ["rows.jsonl:2"]
    assert str(found.place(1)) == "rows.jsonl:3"


def test_many_bad_rows_are_one_error(tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD] + [{"path": "1.png"}] * 30)
    with pytest.raises(DataError) as caught:
        rows(path)
    assert len(caught.value.problems) == 10
    assert "30 of 31 rows cannot be used" in str(caught.value)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_no_row_fits_is_one_error_about_the_columns(
    policy: str, tmp_path: Path, rows: Callable[..., GenerationRows]
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"location": f"{n}.png", "words": "a"} for n in range(200)])
    with pytest.raises(DataError, match=r"media_column  none of the first 100 rows .* among location, words") as caught:
        rows(path, on_bad_sample=policy)
    assert len(caught.value.problems) == 1
    with pytest.raises(DataError, match=r"no caption: none of 'nope' among words"):
        rows(path, media_column="location", caption_column="nope")
    assert len(rows(path, media_column="location", caption_column="words")) == 200


class TestFiles:
    def test_what_is_wrong_with_files(self, tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
        listed = tmp_path / "train.txt"
        for text, reason in {
            "clips,missing.json\n": r"train.txt:1  the annotation file 'missing.json' is missing",
            "clips,a.json\nno comma\n": r"train.txt:2  'no comma' is not 'folder,annotation file'",
            "\n \n": "the file is empty",
        }.items():
            write_jsonl(tmp_path / "a.json", [GOOD])
            listed.write_text(text)
            with pytest.raises(DataError, match=reason):
                rows(listed, data_storage_mode="combine")
        listed.write_bytes(b"a.png\tna\xefve\n")
        with pytest.raises(DataError, match="byte 8 is not UTF-8"):
            rows(listed)
        listed.write_text("a.png\tone\nb.png two\n")
        with pytest.raises(DataError, match=r"train.txt:2 +'b.png two' is not a file and a caption"):
            rows(listed)
        with pytest.raises(ConfigError, match=r"combine, but a\.json is no \.txt file"):
            rows(tmp_path / "a.json", data_storage_mode="combine")
        with pytest.raises(ConfigError, match="'sora' is not one of standard, combine"):
            rows(tmp_path / "a.json", data_storage_mode="sora")
        with pytest.raises(DataError, match=r"'a.jsonx' does not exist. Did you mean 'a.json'"):
            rows("a.jsonx")
        with pytest.raises(ConfigError, match="no data set is named"):
            rows(" , ")

    def test_media_outside_the_roots_are_never_opened(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "secret.png").write_bytes(b"x")
        media = build_media_loader(BasicParameters(dataset_dir=str(tmp_path / "data")))
        (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
        for path in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
            with pytest.raises(DataError, match="outside the media roots"), media.open(path):
                pass
        roomy = build_media_loader(BasicParameters(dataset_dir=str(tmp_path / "data"), media_roots=[str(tmp_path)]))
        with roomy.open(str(tmp_path / "secret.png")) as file:
            assert file.read() == b"x"


class TestDuplicatesAndKeys:
    def test_duplicates_are_counted_and_told_once(self, tmp_path: Path, rows: Callable[..., GenerationRows]) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, GOOD, {**GOOD, "cap": "b"}, GOOD, {**GOOD, "id": 1}])
        with pytest.warns(UserWarning, match="2 of 5 rows repeat another") as told:
            assert rows(path).duplicates == 2
        assert len(told) == 1
        write_jsonl(path, [GOOD, {**GOOD, "cap": "b"}, {**GOOD, "path": "other.png"}])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert rows(path).duplicates == 0

    def test_rows_with_other_sources_are_no_repeats(self, tmp_path: Path) -> None:
        """Their noise is of all media of a row, so that of these is not the same."""
        table = [{**GOOD, "source": "one.png"}, {**GOOD, "source": "two.png"}]
        path = write_jsonl(tmp_path / "rows.jsonl", table)
        basic = BasicParameters(dataset=str(path), dataset_dir=str(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_rows(basic, roles=[SOURCE_PICTURE]).duplicates == 0
        write_jsonl(path, [*table, table[0]])
        with pytest.warns(UserWarning, match="1 of 3 rows repeats another: the same media"):
            assert read_rows(basic, roles=[SOURCE_PICTURE]).duplicates == 1

    def test_the_key_is_of_content_captions_and_extras(self, tmp_path: Path) -> None:
        key = content_key(media_digest(b"pixels"), ("a",), {"id": 1})
        assert key == "5fb22ed78d7086860b0fc8c28931a70d"  # stored in features and checkpoints: it stays as it is
        (tmp_path / "x").write_bytes(b"pixels")
        with (tmp_path / "x").open("rb") as file:
            assert content_key(media_digest(file), ("a",), {"id": 1}) == key
        others = [
            content_key(media_digest(b"pixel"), ("a",), {"id": 1}),
            content_key(media_digest(b"pixels"), ("b",), {"id": 1}),
            content_key(media_digest(b"pixels"), ("a", "a"), {"id": 1}),
            content_key(media_digest(b"pixels"), ("a",), {"id": 2}),
        ]
        assert len({key, *others}) == 5
        empty = media_digest(b"")
        assert content_key(empty, ("a",), {"y": 1, "x": 2}) == content_key(empty, ("a",), {"x": 2, "y": 1})
