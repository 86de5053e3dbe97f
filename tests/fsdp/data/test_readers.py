from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.readers import open_reader

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
    held = sum(getattr(value, "nbytes", 0) for value in vars(reader).values())
    assert held <= 100 * 24


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"a": [1, 2', "broken JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "broken JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        ('{"a": "\u00e9"}'.encode("latin-1"), "byte 7 of the row is not UTF-8 (0xe9)"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b"[1, 2]", "not an object"),
    ],
    ids=["cut", "nan", "twice", "digits", "deep", "latin-1", "surrogate", "list"],
)
def test_a_broken_row_is_named_and_the_others_are_read(tmp_path: Path, row: bytes, message: str) -> None:
    (tmp_path / "r.jsonl").write_bytes(lines(ROWS[:1]) + b"\n" + row + b"\n" + lines(ROWS[2:]))
    reader = open_reader(tmp_path / "r.jsonl")
    with pytest.raises(DataError) as caught:
        reader.read(1)
    assert "r.jsonl:2" in str(caught.value)
    assert message in str(caught.value)
    assert reader.read(2) == ROWS[2]


def test_a_row_above_the_cap_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.readers.MAX_ROW_BYTES", 50)
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
        ("r.json", b'[{"a": 1} {"a": 2}]', "expected ',' or ']'"),
        ("r.json", b'{\n "data": []\n}', "neither a list"),
        ("r.json", b'["\xe9"]', "byte 2 is not UTF-8"),
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
