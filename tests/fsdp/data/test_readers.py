from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core import kept_hashes
from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader, open_stream, stream_facts
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import open_rows
from mindspeed_mm.fsdp.data.datasets.generation.row_files import open_row_files
from mindspeed_mm.fsdp.params.data_args import DatasetParam

ROWS = [{"a": 1, "t": "é中😀"}, {"a": 2, "t": 'x"]},{'}, {"a": 3, "t": "\\n"}]


def lines(rows: list[dict], end: str = "\n") -> bytes:
    return end.join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.jsonl", lines(ROWS)),
        ("r.jsonl", lines(ROWS) + b"\n"),
        ("r.jsonl", b"\xef\xbb\xbf" + lines(ROWS, "\r\n")),
        ("r.json", lines(ROWS)),
        ("r.json", json.dumps(ROWS, ensure_ascii=False).encode()),
        ("r.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode()),
        ("r.jsonl", json.dumps(ROWS).encode()),
    ],
    ids=["lines", "last newline", "BOM and CRLF", "json of lines", "list", "indented list", "list called jsonl"],
)
def test_json_rows_are_read_by_number(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    reader = open_reader(tmp_path / name)
    assert [reader.read(i) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert str(reader.place(1)) == f"{name}:2"


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b"\n" + lines(ROWS[:1]) + b"\n  \r\n\n" + lines(ROWS[1:2]))
    reader = open_reader(tmp_path / "r.jsonl")
    assert len(reader) == 2
    assert str(reader.place(1)) == "r.jsonl:5"
    assert reader.read(1) == ROWS[1]


def test_the_file_is_not_held_in_memory(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(lines([{"t": "x" * 10_000}] * 100))
    reader = open_reader(tmp_path / "r.jsonl")
    assert len(pickle.dumps(reader)) <= 100 * 24 + 2000


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"a": [1, 2', "broken JSON"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "broken JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        ('{"a": "\u00e9"}'.encode("latin-1"), "byte 7 of the row is not UTF-8 (0xe9)"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b"[1, 2]", "not an object"),
        (b'{"a": 1} {"a": 2}', "broken JSON"),
    ],
    ids=["cut", "twice", "digits", "deep", "latin-1", "surrogate", "list", "two"],
)
@pytest.mark.parametrize("name", ["r.jsonl", "r.json"])
def test_a_broken_row_is_named_and_the_others_are_read(tmp_path: Path, name: str, row: bytes, message: str) -> None:
    before, after = lines(ROWS[:1]), lines(ROWS[2:])
    if name == "r.json":
        row = row.replace(b"[1, 2", b"[1, 2x]}") if row.endswith(b"2") else row  # unclosed, it would hide what follows
        (tmp_path / name).write_bytes(b"[" + before + b",\n" + row + b" , " + after + b"]")
    else:
        (tmp_path / name).write_bytes(before + b"\n" + row + b"\n" + after)
    reader = open_reader(tmp_path / name)
    with pytest.raises(DataError) as caught:
        reader.read(1)
    assert f"{name}:2" in str(caught.value)
    assert message in str(caught.value)
    assert reader.read(2) == ROWS[2]


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", range(3))
def test_elements_of_any_list_are_found_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, seed: int
) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.rows.json_reader._BLOCK_BYTES", block)
    draw = random.Random(seed)
    words = ['"', "\\", '\\"', "]", "[", "},{", ",", "é😀", "\n", ""]

    def value(depth: int) -> Any:
        kind = draw.choice(["text", "list", "object", "number"] if depth else ["text", "number"])
        if kind == "text":
            return "".join(draw.choices(words, k=draw.randrange(6)))
        if kind == "number":
            return draw.choice([-1.5e-7, 0, None, True])
        items = [value(depth - 1) for _ in range(draw.randrange(3))]
        return items if kind == "list" else {f"{i}\\": item for i, item in enumerate(items)}

    rows = [{"row": value(3)} for _ in range(draw.randrange(1, 9))]
    for name, content in (
        ("r.json", json.dumps(rows, indent=draw.choice([None, 2]), ensure_ascii=draw.random() < 0.5)),
        ("r.jsonl", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)),
    ):
        (tmp_path / name).write_text(content)
        reader = open_reader(tmp_path / name)
        assert [reader.read(i) for i in range(len(reader))] == rows


def test_a_stream_reads_no_more_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.rows.json_reader._BLOCK_BYTES", 100)
    rows = [{"row": number, "text": "x" * (number % 40)} for number in range(50)]
    (tmp_path / "r.jsonl").write_bytes(b"\xef\xbb\xbf\n" + lines(rows, "\r\n"))
    stream = open_stream(tmp_path / "r.jsonl")
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: read.append(at + size) or pread(file, size, at))
    assert stream.has(3)
    assert stream.read(3) == rows[3]
    assert str(stream.place(3)) == "r.jsonl:5"
    assert max(read) < 500
    assert stream_facts(stream).keys() == {"name", "bytes", "changed_ns"}
    stream = pickle.loads(pickle.dumps(stream))
    assert stream.has(49)
    assert not stream.has(50)
    assert [stream.read(i) for i in range(50)] == rows


@pytest.mark.parametrize("name", ["r.json", "r.jsonl", "r.csv"])
def test_what_cannot_be_streamed_is_opened_as_a_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a\n1\n2\n" if name == "r.csv" else '[{"a": "1"}, {"a": "2"}]')
    stream = open_stream(tmp_path / name, name="mine")
    assert [stream.has(i) for i in range(3)] == [True, True, False]
    assert stream.read(1) == {"a": "2"}
    assert str(stream.place(1)) == "mine:2"


@pytest.mark.parametrize("of_generator", [False, True])
def test_content_is_hashed_once_until_it_changes(
    of_generator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all starts together, of any of which `fingerprint` asks for the facts."""
    rows = tmp_path / "r.jsonl"
    rows.write_bytes(lines(ROWS))
    hashed: list[Path] = []
    monkeypatch.setattr(kept_hashes, "sha256_file", lambda path: hashed.append(path) or sha256_file(path))
    monkeypatch.setattr(kept_hashes, "_RACY_NS", -(10**12))  # no file counts as fresh
    param = DatasetParam.model_validate({"basic_parameters": {"dataset": str(rows), "cache_dir": str(tmp_path / "c")}})
    basic = param.basic_parameters

    def facts() -> dict[str, Any]:
        kept_hashes._here.clear()
        if of_generator:
            return open_row_files(basic)[0].facts(basic.cache_dir)
        return open_rows(basic, param.attr).facts()[0]

    first = facts()
    assert first["sha256"] == hashlib.sha256(lines(ROWS)).hexdigest()
    assert facts() == first
    assert hashed == [rows]
    rows.write_bytes(lines(ROWS).replace(b'"a": 1', b'"a": 7'))
    os.utime(rows, ns=(1, 1))
    assert facts()["sha256"] != first["sha256"]


def test_rows_of_a_csv_have_the_headers_cells(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("a,b\n1,2\n3\n4,5,6\n7,8\n")
    reader = open_reader(tmp_path / "r.csv")
    assert reader.read(3) == {"a": "7", "b": "8"}
    for index in (1, 2):
        with pytest.raises(DataError, match=rf"r.csv:{index + 1} .*does not have the header's 2 cells"):
            reader.read(index)


def test_a_row_above_the_cap_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.rows.json_reader.MAX_ROW_BYTES", 50)
    (tmp_path / "r.jsonl").write_bytes(lines([{"t": "x" * 60}]))
    with pytest.raises(DataError, match="more than 50"):
        open_reader(tmp_path / "r.jsonl").read(0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", None, "missing"),
        ("r.jsonl", b"", "empty"),
        ("r.json", b"[]", "no rows"),
        ("r.jsonl", b"\n\n", "no rows"),
        ("r.json", b'[{"a": 1}, {"a": 2', "r.json:2"),
        ("r.json", b'[{"a": "}]', "r.json:1"),
        ("r.json", b'[{"a": 1}] [{"a": 2}]', "comes after its ']'"),
        ("r.jsonl", b"[1, 2]\n[3, 4]\n", "comes after its ']'"),
        ("r.json", b'{\n "data": []\n}', "neither a list"),
        ("r.txt", b"hello", "'.txt' files are not read"),
        ("r.csv", b"a,b\n", "no rows"),
        ("r.parquet", b"PAR1 cut off", "cannot be read as parquet"),
    ],
)
def test_a_broken_file_is_an_error_at_once(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_reader(tmp_path / name)
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_csv_and_parquet_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.csv").write_bytes('\ufeffa,t\r\n1,"x, ""y""\nz"\r\n2,\r\n'.encode())
    reader = open_reader(tmp_path / "r.csv")
    assert [reader.read(i) for i in range(2)] == [{"a": "1", "t": 'x, "y"\nz'}, {"a": "2"}]

    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"messages": [{"role": "user", "content": "?"}], "images": [{"bytes": b"\x89PNG", "path": None}]}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    parquet = open_reader(tmp_path / "r.parquet", cache_dir=str(tmp_path / "cache"))
    assert len(parquet) == 3
    assert parquet.read(2) == rows[2]
    assert capfd.readouterr() == ("", "")  # no progress bar of the library


def test_a_parquet_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    """`rsync -t`, `tar` and images of reproducible builds give another file the same name and time of change, and these
    are all that `datasets` finds its copy by."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path, cache = tmp_path / "r.parquet", str(tmp_path / "cache")
    for word in ("old", "new", "old"):
        pq.write_table(pa.table({"text": [word] * 3}), path)
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert open_reader(path, cache_dir=cache).read(1) == {"text": word}


def test_a_parquet_file_of_a_type_that_is_not_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    maps = pa.array([[("role", "user")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"messages": maps}), tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"r\.parquet .*cannot be read as parquet: .*map<string, string"):
        open_reader(tmp_path / "r.parquet", cache_dir=str(tmp_path / "cache"))
