"""`mm data check`: everything that is planted is found, named and counted, and the advice does what it says."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.data.data_utils.encode import build_tokens
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.tasks.data import check
from mindspeed_mm.tasks.data.check import DataCheck
from mindspeed_mm.tasks.data.facts import RowFacts
from mindspeed_mm.tasks.data.faults import kind_of
from mindspeed_mm.tasks.data.findings import DataFinding, lengths_that_save, unread_fields
from mindspeed_mm.tasks.data.page import check_page
from mindspeed_mm.tasks.data.scan import scan
from mindspeed_mm.tasks.data.tally import RowStatistics
from mindspeed_mm.tasks.data.tokens import special_texts
from mindspeed_mm.tasks.data.words import Paint, check_lines
from mindspeed_mm.tasks.requests.data import DataCheckRequest
from tests.helpers.tiny_processors import byte_tokenizer
from tests.tasks.data_rows import GOOD_ROWS, add_rows, bad_rows, basics, conversation, make_run
from tests.tasks.test_report import Page


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("bad"), bad=True)


@pytest.fixture(scope="module")
def found(bad: Path) -> DataCheck:
    return check.run(DataCheckRequest(bad, basics(cutoff_len=400)))


def of_kind(result: DataCheck, kind: str) -> DataFinding:
    [finding] = [finding for finding in result.findings if finding.kind == kind]
    return finding


def test_good_rows_pass(good: Path) -> None:
    result = check.run(DataCheckRequest(good))
    assert (result.rows, result.read, result.usable, result.findings, result.exit_code) == (24, 24, 24, [], 0)
    assert sum(each.rows for each in result.tokens) == 24
    assert sum(each.rows for each in result.patches) == 16  # every third row has no image
    lines = check_lines(result, Paint(colour=False))
    assert lines[0] == f"{good}: ok" and "(media by their headers, " in lines[1]


def test_every_planted_fault_is_found_with_its_kind_and_place(found: DataCheck, bad: Path) -> None:
    planted = [kind for kind, rows in bad_rows(bad.parent).items() for _ in rows]
    expected = {f"rows.jsonl:{GOOD_ROWS + number}": kind for number, kind in enumerate(planted, 1)}
    assert {row.place: row.fault.kind for row in found.bad} == expected
    assert (found.read, found.usable, found.exit_code) == (GOOD_ROWS + len(planted), GOOD_ROWS, 4)
    counts = {finding.kind: finding.rows for finding in found.findings}
    assert counts == {kind: planted.count(kind) for kind in planted}
    assert all(finding.is_error for finding in found.findings if finding.kind != "too long")


def test_errors_come_first_and_the_most_rows_before_fewer(found: DataCheck) -> None:
    keys = [(not finding.is_error, -finding.rows) for finding in found.findings]
    assert keys == sorted(keys)
    assert found.findings[0].kind == "roles"


@pytest.mark.parametrize(("fields", "told"), [(12, []), (15, ["    … and 3 more"])])
def test_fields_that_are_not_listed_are_counted_and_no_rows(fields: int, told: list[str]) -> None:
    """Each is in a hundred rows, and none of them is a row."""
    names = [f"column '{number}'" for number in range(fields)]
    tally = RowStatistics(unread={key: ["a.jsonl:1"] for key in names}, unread_rows=Counter(dict.fromkeys(names, 100)))
    (finding,) = unread_fields(tally)
    assert len(finding.examples) == 12
    lines = check_lines(DataCheck(Path("run.yaml"), findings=[finding]), Paint(colour=False))
    assert lines[0] == "run.yaml: 1 warning"
    assert [line for line in lines if " more" in line] == told


def test_lines_say_kind_example_and_way_out(found: DataCheck) -> None:
    text = "\n".join(check_lines(found, Paint(colour=False)))
    assert "error  missing media: 1 row cannot be used" in text
    assert re.search(r"rows.jsonl:25 .*'images/none.png' not found", text)
    assert text.count("→ or train without the bad rows") == 1
    assert "\x1b" not in text
    assert "\x1b[" in "\n".join(check_lines(found, Paint(colour=True)))


def test_bad_rows_are_listed(found: DataCheck, tmp_path: Path) -> None:
    path = tmp_path / "lists" / "bad.jsonl"
    check.write_bad_rows(path, found.bad)
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["file"], each["row"], each["kind"]) for each in listed] == [
        ("rows.jsonl", row.index + 1, row.fault.kind) for row in found.bad
    ]
    assert all(each["what"] for each in listed)


def test_only_decoding_finds_half_a_picture(good: Path, tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    bad_rows(tmp_path)
    add_rows(tmp_path, [conversation("<image>?", images=["images/half.png"])])
    assert check.run(DataCheckRequest(yaml)).exit_code == 0
    result = check.run(DataCheckRequest(yaml, decode=True))
    assert [(row.place, row.fault.kind) for row in result.bad] == [("rows.jsonl:25", "broken media")]
    assert "(media decoded, " in check_lines(result, Paint(colour=False))[1]


def test_skipping_makes_faults_warnings_until_they_are_too_many(bad: Path) -> None:
    few = check.run(DataCheckRequest(bad, basics(cutoff_len=400, on_bad_sample="skip", max_bad_fraction=0.5)))
    assert few.exit_code == 0
    assert {finding.severity for finding in few.findings} == {"warning"}
    many = check.run(DataCheckRequest(bad, basics(cutoff_len=400, on_bad_sample="skip", max_bad_fraction=0.01)))
    assert many.exit_code == 4
    advised = next(fix.what for fix in many.findings[0].fixes if "max_bad_fraction=" in fix.what)
    words = advised.partition(": ")[2].split()
    assert (
        check.run(DataCheckRequest(bad, [*basics(cutoff_len=400), *words])).exit_code == 0
    )  # the advice does what it says


class TestTooLong:
    def test_the_lengths_advised_save_what_they_say(self, tmp_path: Path) -> None:
        yaml = make_run(tmp_path)
        result = check.run(DataCheckRequest(yaml, basics(cutoff_len=45)))
        finding = of_kind(result, "too long")
        assert (finding.severity, finding.rows) == ("warning", len(result.bad))
        assert finding.rows > 3
        for fix in finding.fixes:
            again = check.run(DataCheckRequest(yaml, [*basics(cutoff_len=45), fix.what]))
            assert again.usable == result.usable + fix.saves_rows

    def test_truncation_error_is_an_error_and_shrinking_is_counted(self, tmp_path: Path) -> None:
        yaml = make_run(tmp_path)
        turns = [*conversation("one")["messages"], *conversation("two " * 30, "three " * 30)["messages"]]
        add_rows(tmp_path, [{"messages": turns}])
        strict = check.run(DataCheckRequest(yaml, basics(cutoff_len=100, truncation="error")))
        assert (of_kind(strict, "too long").severity, strict.exit_code) == ("error", 4)
        shrunk = check.run(DataCheckRequest(yaml, basics(cutoff_len=100, truncation="shrink")))
        assert (of_kind(shrunk, "shortened").rows, shrunk.shrunk, shrunk.usable, shrunk.exit_code) == (1, 1, 25, 0)

    def test_lengths_that_save(self) -> None:
        import numpy as np

        assert lengths_that_save(np.array([65, 66, 100, 129])) == [(128, 3), (192, 4)]
        assert lengths_that_save(np.array([])) == []


class TestDuplicates:
    def test_rows_and_ids(self, tmp_path: Path) -> None:
        yaml = make_run(tmp_path)
        first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
        add_rows(tmp_path, [first | {"id": "other"}, conversation("else", id="row3"), conversation("new", id="new")])
        result = check.run(DataCheckRequest(yaml))
        rows, ids = of_kind(result, "duplicate rows"), of_kind(result, "duplicate ids")
        assert (rows.rows, rows.examples) == (1, ("rows.jsonl:25  as rows.jsonl:1",))
        assert (ids.rows, ids.examples) == (1, ("rows.jsonl:26  as rows.jsonl:4",))
        assert result.exit_code == 0

    def test_other_media_make_another_row(self, tmp_path: Path) -> None:
        yaml = make_run(tmp_path)
        first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
        add_rows(tmp_path, [first | {"id": "other", "images": ["images/2_0.png"]}])
        assert check.run(DataCheckRequest(yaml)).findings == []


def test_missing_media_are_looked_for_beside_the_rows(good: Path, tmp_path: Path) -> None:
    result = check.run(DataCheckRequest(good, basics(dataset_dir=str(tmp_path))))
    fix = of_kind(result, "missing media").fixes[0]
    assert (fix.what, fix.saves_rows) == (f"data.dataset_param.basic_parameters.dataset_dir={good.parent}", 16)
    assert check.run(DataCheckRequest(good, [fix.what])).exit_code == 0


def test_special_tokens_in_a_text(tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    add_rows(tmp_path, [conversation("what does <|im_end|> mean?")])
    found = of_kind(check.run(DataCheckRequest(yaml)), "special tokens in the text")
    assert found.examples == ("rows.jsonl:25  '<|im_end|>'",)
    assert found.what.endswith("it is read as plain text")
    (fix,) = found.fixes
    key, _, value = fix.what.split()[0].partition("=")
    found = of_kind(check.run(DataCheckRequest(yaml, [f"{key}={value}"])), "special tokens in the text")
    assert (value, found.what.endswith("the model reads a control token, not words")) == ("false", True)


@pytest.mark.edge("BR9")
def test_rows_that_were_read_by_a_rule_are_reported(tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    add_rows(tmp_path, [conversation("hm", images=["images/0_0.png"]), conversation("what is <video>?")])
    result = check.run(DataCheckRequest(yaml))
    assert result.exit_code == 0
    assert {finding.examples: finding.what for finding in result.findings} == {
        ("rows.jsonl:25",): "1 row: media without a placeholder in the text are shown before the first question",
        ("rows.jsonl:26",): "1 row: <video> in the text of rows without videos is plain text",
    }


def test_empty_answers(tmp_path: Path) -> None:
    """Calls of tools and turns that are not trained may be empty."""
    yaml = make_run(tmp_path)
    called, untrained = conversation("when?", ""), conversation("hm", "")
    called["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "clock", "arguments": {}}}]
    untrained["messages"] += [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]
    untrained["messages"][1]["train"] = False
    add_rows(tmp_path, [conversation("hi", ""), conversation("ho", " \n"), untrained, called])
    result = check.run(DataCheckRequest(yaml))
    found = of_kind(result, "empty answers")
    assert (found.severity, found.rows, found.examples) == ("warning", 2, ("rows.jsonl:25", "rows.jsonl:26"))
    assert result.usable >= 26


class TestTemplate:
    def source(self, tmp_path: Path, mark: str) -> list[str]:
        path = tmp_path / "template.jinja"
        path.write_text(
            "{% for m in messages %}" + mark + "{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
            "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}" + mark + "assistant\n{% endif %}"
        )
        return basics(chat_template=str(path))

    def test_marks_that_are_no_tokens(self, good: Path, tmp_path: Path) -> None:
        result = check.run(DataCheckRequest(good, self.source(tmp_path, "<|turn|>")))
        first, second = [finding for finding in result.findings if finding.kind == "template mismatch"]
        assert {"<|turn|>" in first.what, "<|turn|>" in second.what} == {True, False}
        assert result.exit_code == 0

    def test_the_same_format_written_otherwise_is_none(self, good: Path, tmp_path: Path) -> None:
        assert check.run(DataCheckRequest(good, self.source(tmp_path, "<|im_start|>"))).findings == []


class TestBatches:
    def test_fewer_rows_than_a_global_batch(self, good: Path) -> None:
        result = check.run(DataCheckRequest(good, ["training.gradient_accumulation_steps=4"], nproc=4))
        assert (of_kind(result, "too few rows").severity, result.exit_code) == ("error", 4)
        assert "24 rows can be used, fewer than one global batch of 32" in result.findings[0].what
        assert check.run(DataCheckRequest(good, ["training.gradient_accumulation_steps=4"], nproc=2)).exit_code == 0
        kept = check.run(
            DataCheckRequest(
                good, ["training.gradient_accumulation_steps=4", "data.dataloader_param.drop_last=false"], nproc=4
            )
        )
        assert kept.exit_code == 0

    def test_rows_above_a_budget(self, good: Path) -> None:
        words = ["data.dataloader_param.max_tokens_per_batch=400", "data.dataloader_param.max_patches_per_batch=20"]
        result = check.run(DataCheckRequest(good, words))
        [finding] = result.findings
        assert (finding.severity, finding.kind, finding.rows) == ("warning", "above max_patches_per_batch", 8)
        assert finding.fixes[0].what == "data.dataloader_param.max_patches_per_batch=32"
        assert check.run(DataCheckRequest(good, [*words, finding.fixes[0].what])).findings == []
        assert check.run(DataCheckRequest(good, [*words, *basics(truncation="error")])).exit_code == 4

    def test_a_budget_that_no_row_fits_stops_the_run(self, good: Path) -> None:
        result = check.run(DataCheckRequest(good, ["data.dataloader_param.max_tokens_per_batch=2"]))
        assert [finding.severity for finding in result.findings] == ["error"]
        assert result.exit_code == 4

    def test_a_part_of_the_rows_says_nothing_about_that(self, good: Path) -> None:
        result = check.run(DataCheckRequest(good, ["training.gradient_accumulation_steps=4"], nproc=4, limit=5))
        assert (result.read, result.rows, result.exit_code) == (5, 24, 0)


def test_shares_of_a_mixture(tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(conversation(f"q {i}")) + "\n" for i in range(8)))
    entries = [str(tmp_path / "rows.jsonl"), str(tmp_path / "more.jsonl")]
    mix = {"weights": {entries[0]: 1, entries[1]: 3}}
    result = check.run(DataCheckRequest(yaml, basics(dataset=entries, mix=mix)))
    assert [(each.rows, each.of_rows, each.weight) for each in result.shares] == [(24, 0.75, 0.25), (8, 0.25, 0.75)]
    assert sum(each.of_tokens for each in result.shares) == pytest.approx(1)


def test_workers_find_the_same_in_the_same_order(bad: Path, found: DataCheck) -> None:
    spread = check.run(DataCheckRequest(bad, basics(cutoff_len=400), workers=2))
    assert {**spread.to_dict(), "seconds": 0} == {**found.to_dict(), "seconds": 0}
    assert [row.to_dict() for row in spread.bad] == [row.to_dict() for row in found.bad]


def test_a_worker_that_dies_is_told() -> None:
    def look(index: int) -> RowFacts:
        if index == 40:
            os._exit(3)
        return RowFacts(index, str(index))

    with pytest.raises(MachineError, match="a process that reads rows ended"):
        list(scan(range(100), look, workers=1))
    assert [facts.index for facts in scan([5, 3], look)] == [5, 3]


def test_files_that_do_not_open_are_a_finding(good: Path) -> None:
    result = check.run(DataCheckRequest(good, basics(dataset="none.jsonl")))
    assert (result.exit_code, result.findings[0].kind) == (4, "the data set does not open")
    with pytest.raises(ConfigError):
        check.run(DataCheckRequest(good, ["data.nonsense=1"]))


def test_rows_of_which_none_fits_blame_the_mapping(good: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"q": "x"}) + "\n")
    result = check.run(DataCheckRequest(good, basics(dataset=str(tmp_path / "other.jsonl"))))
    assert (result.exit_code, "attr" in result.findings[0].what) == (4, True)


def test_a_plugins_data_set_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows_for_check.py").write_text(
        "from mindspeed_mm.core.errors import DataError\n"
        "from mindspeed_mm.fsdp.utils.register import data_register\n\n"
        "class Rows:\n"
        "    def __len__(self):\n        return 10\n"
        "    def __getitem__(self, index):\n"
        "        if index == 3:\n            raise DataError('is broken: row 3')\n"
        "        if index == 4:\n            raise KeyError('nothing there')\n"
        "        return {'input_ids': [1] * (index + 2), 'labels': [-100] + [1] * (index + 1)}\n\n"
        "@data_register.register('my_rows_for_check')\n"
        "def build(basic_param, preprocess_param, dataset_param):\n    return Rows()\n"
    )
    monkeypatch.chdir(tmp_path)
    yaml = make_run(tmp_path)
    result = check.run(
        DataCheckRequest(
            yaml, ["training.plugin=[my_rows_for_check]", "data.dataset_param.dataset_type=my_rows_for_check"]
        )
    )
    assert [(row.place, row.fault.kind) for row in result.bad] == [("3", "broken media"), ("4", "the data set failed")]
    assert (result.usable, sum(each.rows for each in result.tokens)) == (8, 8)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("'a.png' not found", "missing media"),
        ("no trainable token in: 'the picture is broken'", "nothing is trained"),
        ("'a.mp4' is not a video but a JPEG picture", "broken media"),
        ("'a' is 9000 × 9000 = 81 megapixels, more than 67", "media beyond the limits"),
        ("'a.wav' is at least 3700 s long, more than 3600 s", "media beyond the limits"),
        ("2 <image> placeholders in the text, but 1 images", "placeholders and media differ"),
        (
            "a size of 600 × 2 pixels is refused: absolute aspect ratio must be smaller than 200",
            "media beyond the limits",
        ),
        ("'a.wav' is 45.0 s long; the model takes 30.0 s", "media beyond the limits"),
        ("'a.png' is empty (0 bytes)", "broken media"),
        ("'a.tar' holds no 'b.png'", "missing media"),
        ("something new", "other"),
    ],
)
def test_kinds(what: str, kind: str) -> None:
    assert kind_of(what) == kind


def test_huge_pictures_are_beyond_the_limits(tmp_path: Path) -> None:
    yaml = make_run(tmp_path)
    Image.new("1", (9000, 9000)).save(tmp_path / "images" / "huge.png")
    add_rows(tmp_path, [conversation("<image>?", images=["images/huge.png"])])
    result = check.run(DataCheckRequest(yaml))
    assert [row.fault.kind for row in result.bad] == ["media beyond the limits"]


def test_the_page_is_whole_and_safe(found: DataCheck) -> None:
    html = check_page(found)
    page = Page(html)
    assert page.references == []
    assert all(finding.what in page for finding in found.findings)
    assert "<html>not found" not in html.partition("<body>")[2]  # what a row's file began with is text


def test_json_is_json(found: DataCheck) -> None:
    told: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    assert (told["bad"], told["exit_code"], len(told["findings"])) == (len(found.bad), 4, len(found.findings))


def test_tokens_that_a_processor_writes_for_pictures_are_found_in_texts_and_stay_words(tmp_path: Path) -> None:
    """Aya Vision's tiles have tokens that its tokenizer need not call special."""
    marks = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", "TILE_1")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = byte_tokenizer(special, None)
    tokenizer.add_tokens([*marks, "unrelated"])
    images = transformers.GotOcr2ImageProcessor(size={"height": 28, "width": 28})
    processor = transformers.AyaVisionProcessor(images, tokenizer, patch_size=7, img_size=28, downsample_factor=2)
    assert set(marks) < set(special_texts(processor)) and "unrelated" not in special_texts(processor)
    plugin = build_mm_plugin(processor, PreprocessParameters())
    tokens = build_tokens(processor, None, plugin, PreprocessParameters(split_special_tokens=False))
    for mark in marks:
        ids, _ = tokens.encode(tokens.protect(f"Say {mark}!"), [])
        assert tokenizer.convert_tokens_to_ids(mark) not in ids and tokenizer.decode(ids) == f"Say {mark}!"
