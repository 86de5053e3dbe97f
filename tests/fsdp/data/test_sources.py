"""Entries of `dataset:` → files, formats and numbered rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part, RowTable, display_names, find_part, open_rows
from mindspeed_mm.fsdp.data.data_utils.rows.sources import find_sources
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.fsdp.data.conftest import conversation, write_jsonl


def rows_of(folder: Path, dataset: Any, attr: dict[str, Any] | None = None, **basic: Any) -> RowTable:
    param = DatasetParam.model_validate(
        {"attr": attr or {}, "basic_parameters": {"dataset": dataset, "dataset_dir": str(folder), **basic}}
    )
    return open_rows(param.basic_parameters, param.attr)


def answers(table: RowTable) -> list[str]:
    """The model's last word of each row."""
    samples = (convert_row(table.row(i), table.row_format(i), table.place(i)) for i in range(len(table)))
    return [sample.messages[-1]["content"] for sample in samples]


def write(path: Path, *said: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_jsonl(path, [conversation("?", answer) for answer in said])


def write_alpaca(path: Path, *said: str) -> Path:
    path.write_text(json.dumps([{"instruction": "?", "output": answer} for answer in said]))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows in a folder of three files, two in a file, three of Alpaca's in another."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "shards" / "b.jsonl", "3")
    write(tmp_path / "shards" / "a.jsonl", "1", "2")
    write(tmp_path / "shards" / "deep" / "c.jsonl", "4")
    write(tmp_path / "own.jsonl", "5", "6")
    write_alpaca(tmp_path / "alpaca.json", "7", "8", "9")
    return tmp_path


@pytest.mark.parametrize(
    ("dataset", "said", "parts"),
    [
        ("own.jsonl", "56", [("own.jsonl", 0, 2)]),
        ("shards", "1234", [("shards", 0, 4)]),
        ("shards/*.jsonl", "123", [("shards/*.jsonl", 0, 3)]),
        ("shards , own.jsonl", "123456", [("shards", 0, 4), ("own.jsonl", 4, 6)]),
        (["own.jsonl", "shards"], "561234", [("own.jsonl", 0, 2), ("shards", 2, 6)]),
        (
            [{"path": "alpaca.json", "name": "seven", "attr": {"formatting": "alpaca"}, "max_samples": 2}, "own.jsonl"],
            "7856",
            [("seven", 0, 2), ("own.jsonl", 2, 4)],
        ),
        (
            [{"path": "shards", "max_samples": 2}, {"path": "own.jsonl"}, {"path": "own.jsonl", "name": "again"}],
            "125656",
            [("shards", 0, 2), ("own.jsonl", 2, 4), ("again", 4, 6)],
        ),
    ],
)
@pytest.mark.parametrize("start", ["working directory", "dataset_dir"])
def test_entries_name_files(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dataset: Any,
    said: str,
    parts: list[tuple[str, int, int]],
    start: str,
) -> None:
    if start == "dataset_dir":
        monkeypatch.chdir("/")
    table = rows_of(folder if start == "dataset_dir" else Path("/none"), dataset)
    assert "".join(answers(table)) == said
    assert table.parts == [Part(*part) for part in parts]
    assert len(table) == len(said)


def test_a_comma_may_be_part_of_a_name(folder: Path) -> None:
    write(folder / "a, b.jsonl", "1")
    assert answers(rows_of(folder, "a, b.jsonl")) == ["1"]


def test_at_most_so_many_rows_are_taken_from_each_entry(folder: Path) -> None:
    table = rows_of(folder, "shards,own.jsonl", max_samples=3)
    assert "".join(answers(table)) == "12356"
    assert table.parts == [("shards", 0, 3), ("own.jsonl", 3, 5)]
    assert [fact["name"] for fact in table.facts()] == ["a.jsonl", "b.jsonl", "own.jsonl"]


def test_rows_of_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("x/train.jsonl", "y/train.jsonl", "other.jsonl"):
        write(tmp_path / name, name)
    table = rows_of(tmp_path, ["x", "y", "other.jsonl"])
    assert [str(table.place(i)) for i in range(3)] == ["x/train.jsonl:1", "y/train.jsonl:1", "other.jsonl:1"]
    a, b = Path("/data/x/1/t.jsonl"), Path("/data/y/1/t.jsonl")
    assert [fact["name"] for fact in table.facts()] == ["x/train.jsonl", "y/train.jsonl", "other.jsonl"]
    assert display_names([a, b, a]) == {a: "x/1/t.jsonl", b: "y/1/t.jsonl"}


def test_a_row_that_is_not_there_is_an_index_error(folder: Path) -> None:
    table = rows_of(folder, "own.jsonl")
    for index in (-1, 2):
        with pytest.raises(IndexError):
            table.row(index)


def test_parts_are_found_by_name_or_by_the_end_of_their_path() -> None:
    parts = [Part("conf/a.jsonl", 0, 1), Part("b.jsonl", 1, 2), Part("conf/b.jsonl", 2, 3), Part("x/b.jsonl", 3, 4)]
    assert [find_part(parts, name) for name in ("a.jsonl", "conf/a.jsonl", "b.jsonl")] == [0, 0, 1]
    for name in ("c.jsonl", ".jsonl"):
        with pytest.raises(KeyError):
            find_part(parts, name)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "no data set is named"),
        (" , ", "no data set is named"),
        ("shard", "'shard' does not exist. Did you mean 'shards'"),
        ("nothing/*.jsonl", "'nothing/*.jsonl' does not exist"),
        ("empty", "the folder holds no .jsonl, .json, .parquet, .csv file"),
        ("hub", "the folder holds the splits test, train. Name one, for example"),
        ("own.jsonl,own.jsonl", "'own.jsonl' is named twice. Give entries a `name` each"),
    ],
)
def test_an_entry_that_names_nothing(folder: Path, dataset: Any, message: str) -> None:
    (folder / "empty").mkdir()
    for split in ("train", "test"):
        write(folder / "hub" / f"{split}-00000-of-00001.jsonl", split)
    with pytest.raises((ConfigError, DataError)) as caught:
        rows_of(folder, dataset)
    assert message in str(caught.value)


def test_a_pattern_chooses_a_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "hub" / f"{split}-00000-of-00001.jsonl", split)
    assert answers(rows_of(tmp_path, str(tmp_path / "hub" / "train-*"))) == ["train"]


# --- dataset_info.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [".", "*.jsonl", "**/*.jsonl"])
def test_hidden_files_are_no_rows(tmp_path: Path, dataset: str) -> None:
    """Notebooks keep copies, and macOS facts of a file system, beside the files that they are of."""
    write(tmp_path / "set" / "a.jsonl", "a")
    for name in ("._a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl"):
        write(tmp_path / "set" / name, "copy")
    assert answers(rows_of(tmp_path, f"set/{dataset}")) == ["a"]
    assert answers(rows_of(tmp_path, "set/._*.jsonl")) == ["copy"]


def test_a_link_to_a_folder_of_rows_is_told(tmp_path: Path) -> None:
    write(tmp_path / "set" / "a.jsonl", "a")
    write(tmp_path / "more" / "inner" / "b.jsonl", "b")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "more")
    (tmp_path / "set" / "round").symlink_to(tmp_path / "no rows")
    with pytest.warns(UserWarning, match=r"linked' is a link to a folder: its rows are not read") as told:
        assert answers(rows_of(tmp_path, "set")) == ["a"]
    assert len(told) == 1
    assert answers(rows_of(tmp_path, ["set/a.jsonl", "set/linked"])) == ["a", "b"]


def describe(folder: Path, **entries: Any) -> None:
    (folder / "dataset_info.json").write_text(json.dumps(entries))


def test_dataset_info_of_llama_factory(tmp_path: Path) -> None:
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "U",
        "assistant_tag": "M",
        "system_tag": "S",
        "observation_tag": "R",
        "function_tag": "C",
    }
    said = [
        {"role": "S", "content": "Be brief."},
        {"role": "U", "content": "<image>1 + 2?"},
        {"role": "C", "content": '{"name": "add", "arguments": {}}'},
        {"role": "R", "content": "3"},
        {"role": "M", "content": "three"},
    ]
    (tmp_path / "talk.json").write_text(json.dumps([{"chat": said, "pics": ["a.png"], "can": '[{"name": "add"}]'}] * 3))
    (tmp_path / "past.json").write_text(
        json.dumps([{"q": "?", "input": "unused", "a": "!", "past": [["1", "2"]], "history": [["3", "4"]]}])
    )
    (tmp_path / "pairs.json").write_text(json.dumps([{"instruction": "?", "chosen": "good", "rejected": "bad"}]))
    write(tmp_path / "hub" / "part" / "train-00000-of-00001.jsonl", "in the split")
    write(tmp_path / "hub" / "part" / "test-00000-of-00001.jsonl", "of another")
    columns = {"messages": "chat", "images": "pics", "tools": "can"}
    sharegpt = {"formatting": "sharegpt"}
    describe(
        tmp_path,
        talk={"file_name": "talk.json", **sharegpt, "columns": columns, "tags": tags, "num_samples": 2},
        past={"file_name": "past.json", "columns": {"prompt": "q", "response": "a", "history": "past"}},
        pairs={"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}},
        hub={"file_name": "hub", "subset": "part", "split": "train", **sharegpt},
    )
    table = rows_of(tmp_path, "talk,past,pairs,hub")
    assert table.parts == [("talk", 0, 2), ("past", 2, 3), ("pairs", 3, 4), ("hub", 4, 5)]
    samples = [convert_row(table.row(i), table.row_format(i), table.place(i)) for i in range(5)]
    roles = [message["role"] for message in samples[1].messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert samples[1].media == [("image", "a.png")]
    assert samples[1].tools == [{"type": "function", "function": {"name": "add"}}]
    assert [message["content"] for message in samples[2].messages] == ["1", "2", "?", "!"]
    assert samples[3].rejected is not None
    assert [pair.messages[-1]["content"] for pair in (samples[3], samples[3].rejected)] == ["good", "bad"]
    assert samples[4].messages[-1]["content"] == "in the split"


def test_an_entry_of_dataset_info_without_columns_has_the_usual_ones(tmp_path: Path) -> None:
    write_alpaca(tmp_path / "a.json", "1")
    describe(tmp_path, a={"file_name": "a.json"})
    assert answers(rows_of(tmp_path, "a")) == ["1"]
    own = {"path": "a", "name": "b", "attr": {"formatting": "alpaca", "response": "instruction"}}
    assert answers(rows_of(tmp_path, ["a", own])) == ["1", "?"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"hf_hub_url": "x/y"}, "hf_hub_url is not followed: only local files are read"),
        ({"script_url": "x.py"}, "script_url is not followed"),
        ({"formatting": "alpaca"}, "has no file_name"),
        ("a.json", "is 'a.json', not an object"),
        ({"file_name": "b.json"}, "b.json' does not exist"),
        ({"file_name": "a.json", "formatting": "sharegtp"}, "'sharegtp' is not known here. Did you mean 'sharegpt'?"),
        ({"file_name": "a.json", "columns": {"promt": "q"}}, "'promt' is not known here. Did you mean 'prompt'?"),
        ({"file_name": "a.json", "columns": {"kto_tag": "label"}}, "'kto_tag' is not known here"),
        ({"file_name": "a.json", "tags": {"usr_tag": "U"}}, "'usr_tag' is not known here. Did you mean 'user_tag'?"),
        ({"file_name": "a.json", "num_samples": "all"}, "'all' is not a number of samples"),
        ({"file_name": "hub", "split": "valid"}, "no split 'valid', only train"),
    ],
)
def test_a_wrong_entry_of_dataset_info(tmp_path: Path, entry: Any, message: str) -> None:
    write_alpaca(tmp_path / "a.json", "1")
    write(tmp_path / "hub" / "train-00000-of-00001.jsonl", "1")
    describe(tmp_path, mine=entry)
    with pytest.raises((ConfigError, DataError)) as caught:
        rows_of(tmp_path, "mine")
    assert message in str(caught.value)
    assert "mine" in str(caught.value) or "hub" in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_dataset_info(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_info.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset_info\.json"):
        find_sources("a", tmp_path, RowFormat())


# --- tables ----------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]], schema: Any = None) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def test_tables_of_one_entry_have_the_same_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "p" / "1.parquet", [{"instruction": "a", "output": "b"}])
    wide = pa.schema([("output", pa.large_string()), ("instruction", pa.string())])
    write_parquet(tmp_path / "p" / "2.parquet", [{"instruction": "a", "output": "b"}], wide)
    cache = str(tmp_path / "cache")
    table = rows_of(tmp_path, "p", {"formatting": "alpaca"}, cache_dir=cache)
    assert answers(table) == ["b", "b"]
    write_parquet(tmp_path / "p" / "3.parquet", [{"instruction": 1, "input": "b"}])
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path, "p", {"formatting": "alpaca"}, cache_dir=cache)
    for word in ("3.parquet", "1.parquet", "instruction (int64)", "input (string)", "output (string)"):
        assert word in str(caught.value)
    for name, header in (("1.csv", "instruction,output"), ("2.csv", "instruction,answer")):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / name).write_text(f"{header}\na,b\n")
    with pytest.raises(DataError, match=r"2.csv.*answer \(text\), but 1.csv has output \(text\)"):
        rows_of(tmp_path, "c")


@pytest.mark.parametrize(
    ("row", "attr", "column"),
    [
        ({"conversations": None, "id": "x"}, {}, "conversations"),
        ({"instruction": "x", "output": None}, {"formatting": "alpaca"}, "output"),
        ({"prompt": "x", "chosen": "y", "worse": None}, {"ranking": True, "rejected": "worse"}, "worse"),
    ],
)
def test_a_column_that_is_null_all_over(tmp_path: Path, row: dict[str, Any], attr: dict[str, Any], column: str) -> None:
    write_parquet(tmp_path / "n.parquet", [row] * 3)
    with pytest.raises(DataError, match=rf"n\.parquet  {column}  the column is null in every row"):
        rows_of(tmp_path, "n.parquet", attr, cache_dir=str(tmp_path / "cache"))
