"""Section C of the catalogue of bad input: files of rows that are missing, broken, wrong or hostile.

One row each: a real file with one bad row among good ones, and what the message must say. Every row is run as training
runs it, under both policies: to stop, and to leave out and count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import CheckpointError, DataError, MMError
from mindspeed_mm.fsdp.checkpoint.resume import check_resumable
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam
from mindspeed_mm.tasks.data import check
from mindspeed_mm.tasks.requests.data import DataCheckRequest
from tests.fsdp.data.conftest import conversation, picture, write_jsonl
from tests.tasks.data_rows import add_rows, make_run

GOOD_ROWS, BAD_AT = 11, 5
"""The bad row is the sixth of twelve."""

Build = Callable[[Path], "str | bytes | dict[str, Any]"]


@dataclass(frozen=True)
class Case:
    """A file, and what is said of it."""

    id: str
    """Its number in the catalogue, and what is special about it."""
    make: Callable[[Path], Any]
    """Writes the data into a folder. A row case gives the bad row; others write the file and give what to name."""
    words: tuple[str, ...] = ()
    """All of them stand in the message."""
    key: str = ""
    """Field or key that the message names; empty: the fault is of the row as a whole."""
    attr: dict[str, Any] = field(default_factory=dict)
    basic: dict[str, Any] = field(default_factory=dict)
    model: str = "text"

    def __str__(self) -> str:
        return self.id


def good(number: int) -> dict[str, Any]:
    return {"id": f"r{number}", **conversation(f"What comes after {number}?", f"I say {number + 1}.")}


def row(value: Any) -> Callable[[Path], Any]:
    return lambda folder: value


def talk(*contents: Any, **more: Any) -> Callable[[Path], Any]:
    roles = ("user", "assistant")
    return row({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **more})


def with_image(source: Any) -> Callable[[Path], Any]:
    """A row whose picture is at `source`; good ones lie in the data root, one outside it."""

    def make(folder: Path) -> Any:
        path = source(folder) if callable(source) else source
        return conversation("<image>Which?", "seven", images=[path])

    return make


def link_outside(folder: Path) -> str:
    (folder / "data" / "link.png").symlink_to(folder / "secret.png")
    return "link.png"


def folder_called_png(folder: Path) -> str:
    (folder / "data" / "dir.png").mkdir()
    return "dir.png"


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "data" / "pipe.png")
    return "pipe.png"


def device(folder: Path) -> str:
    try:
        os.mknod(folder / "data" / "null.png", 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this user makes no device files")
    return "null.png"


def empty(folder: Path) -> str:
    (folder / "data" / "empty.png").touch()
    return "empty.png"


def pair(**answers: Any) -> Callable[[Path], Any]:
    return row({"messages": [{"role": "user", "content": "?"}], **answers})


PAIRS = {"attr": {"ranking": True}, "basic": {"stage": "rm"}}

BAD_ROWS = [
    Case("32 cut line", row(b'{"messages": [{"role": "us'), ("broken JSON", "Unterminated string")),
    Case("34 NaN", row(b'{"messages": NaN, "score": NaN}'), ("messages", "nan is not a list of messages")),
    Case("34 duplicate keys", row(b'{"messages": [], "messages": []}'), ("duplicate key 'messages'",)),
    Case("34 5,000 digits", row(b'{"messages": ' + b"9" * 5000 + b"}"), ("broken JSON", "a number of 5000 digits")),
    Case("34 deep", row(b'{"messages": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), ("nested too deeply",)),
    Case("35 latin-1", row('{"messages": "\u00e9"}'.encode("latin-1")), ("byte 14 of the row is not UTF-8 (0xe9)",)),
    Case("35 lone surrogate", row(b'{"messages": "\\ud83d\\ude00\\ud83d"}'), ("byte 26", "lone surrogate")),
    Case("35 second half alone", row(b'{"messages": "\\ud83d\\ude00\\ude00"}'), ("byte 26", "lone surrogate")),
    Case(
        "36 missing",
        row({"speech": "x", "id": 3}),
        ("no row format fits: the row has ['id', 'speech']",),
        "attr",
    ),
    Case("37 string", row({"messages": "hi"}), ("'hi' is not a list of messages",), "messages"),
    Case("37 number", talk("hi", 5), ("5 is not text",), "message 1.content"),
    Case("37 null", talk("hi", None), ("None is not text",), "message 1.content"),
    Case("37 row is a list", row([1, 2]), ("the row is a list, not an object",)),
    Case("38 empty", talk(), ("no trainable token",), "messages"),
    Case("38 no answer", talk("hi"), ("no trainable token",), "messages"),
    Case(
        "38 all masked",
        row({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False}]}),
        ("no trainable token",),
        "labels",
    ),
    Case("39 role", row({"messages": [{"role": "narrator", "content": "x"}]}), ("role 'narrator'",), "message 0"),
    Case(
        "39 result of no call",
        row({"messages": [{"role": "tool", "content": "a"}, *good(1)["messages"]]}),
        ("a result of a tool follows nothing",),
        "message 0",
    ),
    Case("40 one too few", talk("<image><image>", "x", images=["a.png"]), ("2 <image>", "but 1 images"), "images"),
    Case("40 one too many", talk("<image>", "x", images=["a.png"] * 2), ("1 <image>", "but 2 images"), "images"),
    Case("40 video", talk([{"type": "video"}], "x"), ("1 <video>", "but 0 videos"), "videos"),
    Case("40 audio", talk("<audio>", "x", audios=["1.wav", "2.wav"]), ("1 <audio>", "but 2 audios"), "audios"),
    Case("41 absolute", with_image(lambda f: str(f / "secret.png")), ("outside the media roots",), "media_roots"),
    Case("41 dots", with_image("../secret.png"), ("outside the media roots",), "media_roots"),
    Case("41 symlink", with_image(link_outside), ("outside the media roots",), "media_roots"),
    Case("42 URL", with_image("https://localhost:1/a.png"), ("https://localhost:1/a.png", "allow_remote_media")),
    Case("42 file://", with_image(lambda f: f"file://{f}/data/a.png"), ("file://",)),
    Case("42 data:", with_image("data:image/png;base64,iVBO"), ("data:image/png",)),
    Case(
        "42 URL in a part",
        talk([{"type": "image_url", "image_url": {"url": "http://localhost:1/a.png"}}], "x"),
        ("http://localhost:1/a.png", "allow_remote_media"),
    ),
    Case("43 missing", with_image("none.png"), ("'none.png' not found", "dataset_dir")),
    Case("43 directory", with_image(folder_called_png), ("'dir.png' is not a regular file",)),
    Case("43 pipe", with_image(pipe), ("'pipe.png' is not a regular file",)),
    Case("43 device", with_image(device), ("'null.png' is not a regular file",)),
    Case("43 empty", with_image(empty), ("'empty.png' is empty (0 bytes)",)),
    Case("45 large", talk("a", "x" * 10_000), ("bytes, more than 5000", "Keep media in files")),
    Case("47 equal", pair(chosen="a", rejected="a"), ("chosen and rejected are the same",), "rejected", **PAIRS),
    Case("47 no rejected", pair(chosen="a"), ("the field is missing",), "rejected", **PAIRS),
    Case("47 empty chosen", pair(chosen="", rejected="a"), ("'' is not an answer",), "chosen", **PAIRS),
]


class Run:
    """A data set as training reads it.

    Args:
        folder: Where the case writes; its `data` is `dataset_dir`.
        models: Kind → folder of a model.
    """

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.folder, self._models = folder, models
        self.data = folder / "data"
        self.data.mkdir()
        picture().save(self.data / "a.png")
        picture().save(folder / "secret.png")

    def dataset(self, case: Case, dataset: Any, **basic: Any) -> Any:
        """The training data set."""
        param = DatasetParam.model_validate(
            {
                "attr": case.attr,
                "basic_parameters": {
                    "dataset": dataset,
                    "dataset_dir": str(self.data),
                    "cache_dir": str(self.folder / "cache"),
                    "max_bad_fraction": 0.5,
                    **case.basic,
                    **basic,
                },
                "preprocess_parameters": {"model_name_or_path": str(self._models[case.model])},
            }
        )
        return build_mm_dataset(param)[0]

    def write(self, bad: Any, name: str = "rows.jsonl", **answers: Any) -> Path:
        """Good rows with a bad one in the middle."""
        lines = [json.dumps({**good(i), **answers}).encode() for i in range(GOOD_ROWS)]
        if answers:
            lines = [json.dumps(conversation_without_answer(i) | answers).encode() for i in range(GOOD_ROWS)]
        lines.insert(BAD_AT, bad if isinstance(bad, bytes) else json.dumps(bad).encode())
        path = self.data / name
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path


def conversation_without_answer(number: int) -> dict[str, Any]:
    return {"messages": good(number)["messages"][:1]}


def loader(dataset: Any, rank: int = 0, ranks: int = 1, position: DataPosition | None = None) -> MMDataLoader:
    return build_mm_dataloader(
        dataset,
        DataloaderParam(num_workers=0),
        micro_batch_size=4 // ranks,
        gradient_accumulation_steps=1,
        dp_rank=rank,
        dp_size=ranks,
        seed=3,
        position=position,
    )


STEPS = (GOOD_ROWS + 1) // 4


def steps_of(data: MMDataLoader, steps: int = STEPS) -> list[list[str]]:
    """Samples of each step."""
    return [[name for batch in step for name in batch["sample_ids"]] for step in islice(data, steps)]


@pytest.fixture
def run(tmp_path: Path, text_folder: Path, vlm_folder: Path) -> Run:
    return Run(tmp_path, {"text": text_folder, "vlm": vlm_folder})


def check_message(error: MMError, case: Case, where: str | None) -> None:
    """Place, field, what is wrong and the way out."""
    said = str(error)
    problem = error.problems[0]
    for word in case.words:
        assert word in said, said
    if where is not None:
        assert problem.where == where, said
    assert (problem.key or "").endswith(case.key), said
    assert problem.way_out, said
    assert error.exit_code


@pytest.mark.parametrize("case", BAD_ROWS, ids=str)
def test_a_bad_row_stops_the_run_or_is_left_out_and_counted(
    case: Case, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mindspeed_mm.fsdp.data.data_utils.rows.json_reader.MAX_ROW_BYTES", 5000 if "45" in case.id else 10**7
    )
    if case.id[:2] in ("41", "42", "43") or case.id == "40 one too few":
        case = replace(case, model="vlm")
    answers = {"chosen": "good", "rejected": "bad"} if case.attr.get("ranking") else {}
    path = run.write(case.make(run.folder), **answers)
    where = f"rows.jsonl:{BAD_AT + 1}"
    opened = spy_on_open(monkeypatch)

    with pytest.raises(DataError) as caught:
        steps_of(loader(run.dataset(case, str(path))))
    check_message(caught.value, case, where)

    data = loader(run.dataset(case, str(path), on_bad_sample="skip"))
    found = steps_of(data)
    assert list(data.counts.bad) == [where]
    for word in case.words:
        assert word in data.counts.bad[where]
    assert {name for step in found for name in step} == {f"rows.jsonl:{i + 1}" for i in range(12) if i != BAD_AT}
    assert sum(map(len, found)) == 12  # another row stands in for it

    # every rank decides the same, and so does a run that goes on
    ranks = [loader(run.dataset(case, str(path), on_bad_sample="skip"), rank, 2) for rank in range(2)]
    assert [a + b for a, b in zip(*map(steps_of, ranks), strict=True)] == found
    assert sorted(name for rank in ranks for name in rank.counts.bad) == [where]
    first = loader(run.dataset(case, str(path), on_bad_sample="skip"))
    steps_of(first, 1)
    position = DataPosition.from_dict(first.position.to_dict())
    assert (
        steps_of(loader(run.dataset(case, str(path), on_bad_sample="skip"), position=position), STEPS - 1) == found[1:]
    )

    assert str(run.folder / "secret.png") not in opened


def spy_on_open(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args, **kw: opened.append(os.path.realpath(path)) or real(path, *args, **kw)
    )
    return opened


# --- files that are off as a whole -----------------------------------------------------------------------------------


def content(data: bytes, name: str = "rows.jsonl") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return name

    return make


def parquet(*tables: list[dict[str, Any]], cut: bool = False) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        (folder / "shards").mkdir()
        for number, rows in enumerate(tables):
            path = folder / "shards" / f"{number}.parquet"
            pq.write_table(pa.Table.from_pylist(rows, schema=None if rows else pa.schema([("id", pa.string())])), path)
            if cut:
                path.write_bytes(path.read_bytes()[:-20])
        return "shards"

    return make


def all_of(bad: dict[str, Any]) -> Callable[[Path], str]:
    return lambda folder: write_jsonl(folder / "rows.jsonl", [bad] * 150).name


TALK = good(1)
BAD_FILES = [
    Case("31 missing", row("none.jsonl"), ("'none.jsonl' does not exist",), "dataset"),
    Case("31 nearest name", lambda f: write_jsonl(f / "train.jsonl", [TALK]) and "trian.jsonl", ("'train.jsonl'?",)),
    Case("31 empty file", content(b""), ("the file is empty",)),
    Case("31 empty list", content(b"[]", "rows.json"), ("the file holds no rows",)),
    Case("31 blank lines", content(b"\n \n"), ("the file holds no rows",)),
    Case("31 no header's rows", content(b"instruction,output\n", "rows.csv"), ("the file holds no rows",)),
    Case("32 cut list", content(json.dumps([TALK] * 3).encode()[:-40], "rows.json"), ("rows.json:3", "breaks off")),
    Case(
        "33 an object over many lines", content(json.dumps(TALK, indent=1).encode(), "rows.json"), ("neither a list",)
    ),
    Case("36 all rows", all_of({"speech": "x"}), ("none of the first 100 rows can be used", "['speech']"), "attr"),
    Case("46 cut parquet", parquet([TALK], cut=True), ("0.parquet", "cannot be read as parquet")),
    Case(
        "46 schema",
        parquet([TALK], [{"id": 3, "messages": TALK["messages"]}]),
        ("1.parquet", "id (int64)", "id (string)"),
    ),
    Case(
        "46 null column",
        parquet([{"conversations": None, "id": "x"}]),
        ("0.parquet", "the column is null in every row"),
        "conversations",
    ),
    Case("46 no rows", parquet([]), ("0.parquet", "the file holds no rows")),
]


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("case", BAD_FILES, ids=str)
def test_a_bad_file_is_an_error_before_training_whatever_the_policy(case: Case, policy: str, run: Run) -> None:
    dataset = case.make(run.data)
    if policy == "error" and case.id == "36 all rows":
        case = replace(case, words=("rows.jsonl:1", "['speech']"), key="attr")
    with pytest.raises(MMError) as caught:
        run.dataset(case, dataset, on_bad_sample=policy)
    check_message(caught.value, case, None)


@pytest.mark.parametrize(
    "case",
    [
        Case("33 a list in a .jsonl", content(json.dumps([TALK] * 4).encode())),
        Case("33 lines in a .json", content(b"\n".join([json.dumps(TALK).encode()] * 4), "rows.json")),
        Case("35 BOM", content(b"\xef\xbb\xbf" + b"\n".join([json.dumps(TALK).encode()] * 4))),
        Case("35 CRLF", content(b"\r\n".join([json.dumps(TALK).encode()] * 4) + b"\r\n")),
        Case("35 BOM and a list", content(b"\xef\xbb\xbf" + json.dumps([TALK] * 4).encode(), "rows.json")),
        Case("46 a null column that is not needed", parquet([{**TALK, "images": None}] * 4)),
    ],
    ids=str,
)
def test_what_looks_odd_and_is_fine(case: Case, run: Run) -> None:
    dataset = run.dataset(case, case.make(run.data))
    (step,) = steps_of(loader(dataset), 1)
    assert len(step) == 4


# --- the rest --------------------------------------------------------------------------------------------------------

LONG = {
    "messages": [
        {"role": "user", "content": "<image>Which " + "digit " * 40},
        {"role": "assistant", "content": "seven"},
        {"role": "user", "content": "<image>And this?"},
        {"role": "assistant", "content": "one"},
    ],
    "images": ["a.png", "a.png"],
}


def test_44_a_sample_that_is_too_long(run: Run) -> None:
    case = Case("44", row(LONG), model="vlm")
    path = str(run.write(LONG))
    whole = run.dataset(case, path)[BAD_AT]
    first = len(run.dataset(case, str(write_jsonl(run.data / "first.jsonl", [
        {"messages": LONG["messages"][:2], "images": ["a.png"]}
    ])))[0]["input_ids"])  # fmt: skip
    for cutoff in (len(whole["input_ids"]) - 1, first):
        with pytest.raises(DataError) as caught:
            steps_of(loader(run.dataset(case, path, cutoff_len=cutoff, truncation="error", on_bad_sample="skip")))
        assert "rows.jsonl:6 " in str(caught.value)
        assert f"{len(whole['input_ids'])} tokens, more than cutoff_len {cutoff}" in str(caught.value)

        dropped = loader(run.dataset(case, path, cutoff_len=cutoff, truncation="drop"))
        assert "rows.jsonl:6" not in {name for step in steps_of(dropped) for name in step}
        assert (dropped.counts.too_long, dropped.counts.bad) == (1, {})

        shrinking = run.dataset(case, path, cutoff_len=cutoff, truncation="shrink")
        shrunk = loader(shrinking)
        assert "rows.jsonl:6" in {name for step in steps_of(shrunk) for name in step}
        assert (shrunk.counts.shrunk, shrunk.counts.too_long) == (1, 0)
        ids = shrinking[BAD_AT]["input_ids"]
        image = shrinking.processor.image_token_id
        assert (ids == image).sum() == (whole["input_ids"] == image).sum() // 2  # one of two, whole
    with pytest.raises(DataError, match="more than cutoff_len"):  # not even one turn fits
        run.dataset(case, path, cutoff_len=first - 1, truncation="shrink")[BAD_AT]


def test_48_fewer_rows_than_a_global_batch(run: Run) -> None:
    path = str(write_jsonl(run.data / "three.jsonl", [good(i) for i in range(3)]))
    with pytest.raises(DataError) as caught:
        loader(run.dataset(Case("48", row(None)), path))
    check_message(caught.value, Case("48", row(None), ("3 samples", "4")), None)


def test_48_the_last_short_batch_is_dropped_or_taken_short_on_all_ranks(run: Run) -> None:
    path = str(write_jsonl(run.data / "six.jsonl", [good(i) for i in range(6)]))
    dataset = run.dataset(Case("48", row(None)), path)
    for rank in range(2):
        validation = [[len(batch["sample_ids"]) for batch in step] for step in loader(dataset, rank, 2).one_pass()]
        assert validation == [[2], [2 - rank]]
        assert loader(dataset, rank, 2).steps_per_epoch == 1


def test_45_a_large_row_of_a_parquet_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.rows.json_reader.MAX_ROW_BYTES", 5000)
    rows = [good(i) if i != BAD_AT else talk("a", "x" * 10_000, id="r")(run.folder) for i in range(12)]
    case = Case("45", parquet(rows), ("bytes, more than 5000",))
    data = loader(run.dataset(case, case.make(run.data), on_bad_sample="skip"))
    steps_of(data)
    assert list(data.counts.bad) == ["0.parquet:6"]
    with pytest.raises(DataError) as caught:
        steps_of(loader(run.dataset(case, "shards")))
    check_message(caught.value, case, "0.parquet:6")


def test_49_duplicate_ids_are_a_warning_with_their_count(tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    add_rows(tmp_path, [{**good(i), "id": f"row{i}"} for i in range(3)])
    result = check.run(DataCheckRequest(yaml))
    (finding,) = (each for each in result.findings if each.kind == "duplicate ids")
    assert (finding.severity, finding.rows) == ("warning", 3)
    assert "rows.jsonl:25  as rows.jsonl:1" in finding.examples
    assert result.exit_code == 0


def test_50_rows_that_changed_since_the_checkpoint(run: Run) -> None:
    path = run.data / "rows.jsonl"
    contexts = []
    for text in ("seven", "eight"):
        write_jsonl(path, [conversation("Which?", text)] * 4)
        os.utime(path, ns=(1, len(contexts)))
        contexts.append({"config": {}, "dataset": run.dataset(Case("50", row(None)), str(path)).fingerprint()})
    with pytest.raises(CheckpointError) as caught:
        check_resumable(contexts[0], contexts[1])
    assert "rows.jsonl  its content has changed" in str(caught.value)
    assert "--accept-data-change" in str(caught.value)
    assert check_resumable(contexts[0], contexts[0]) == []


def test_more_bad_rows_than_allowed(run: Run) -> None:
    rows = [good(i) if i % 4 else {"messages": "hi"} for i in range(12)]
    path = str(write_jsonl(run.data / "rows.jsonl", rows))
    case = Case("max_bad_fraction", row(None))
    data = loader(run.dataset(case, path, on_bad_sample="skip", max_bad_fraction=0.25))
    steps_of(data)
    assert len(data.counts.bad) == 3
    with pytest.raises(DataError, match=r"3 of 12 samples are bad, more than 10.000%: rows.jsonl"):
        steps_of(loader(run.dataset(case, path, on_bad_sample="skip", max_bad_fraction=0.1)))
