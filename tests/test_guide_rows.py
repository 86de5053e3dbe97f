"""Every row of the two documents that coding agents work by has its counterpart in the guides, or a reason why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.provider.parse import parse as parse_flags
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.models import routes
from tests.test_docs import anchor_of_heading
from tests.test_readme import parse

ROOT = Path(__file__).parents[1]
GROUPS: dict[str, dict[str, Any]] = YAML(typ="safe").load(ROOT / "tests" / "guide_rows.yaml")
FLAGS = ROOT / "skills/mindspeed-mm-pipeline/references/common-args.md"


class Row(NamedTuple):
    """A row of a document, with what answers it."""

    words: str
    at: str
    says: str = ""
    run: str = ""
    route: str = ""
    page: str = ""
    why_not: str = ""


def rows_of(group: dict[str, Any]) -> list[Row]:
    """The rows of a group, with its section where a row names none."""
    return [
        Row(words=row["row"], **({"at": group["at"]} | {k: row[k] for k in row if k != "row"})) for row in group["rows"]
    ]


def plain(text: str) -> str:
    """A text whose lines and blanks make no difference."""
    return " ".join(text.split())


def section_at(place: str) -> str:
    """What stands below a heading of a guide, up to the next heading of its level or above.

    Raises:
        ValueError: No such file, or no such heading in it.
    """
    file, _, anchor = place.partition("#")
    if not (ROOT / file).is_file():
        raise ValueError(f"no file {file}")
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found, level, fenced = [], 0, False
    for line in lines:
        fenced ^= line.startswith("```")
        heading = re.match(r"(#{1,6}) (.*)$", line) if not fenced else None
        if heading and level and len(heading[1]) <= level:
            break
        if heading and not level and anchor_of_heading(heading[2]) == anchor:
            level = len(heading[1])
        if level:
            found.append(line)
    if not found:
        raise ValueError(f"no heading #{anchor} in {file}")
    return "\n".join(found)


def faults_of(row: Row) -> list[str]:
    """What is wrong with the answer to a row."""
    if not (row.says or row.run or row.route or row.why_not):
        return ["no answer and no reason"]
    if row.why_not:
        return [] if len(row.why_not.split()) > 5 else ["no reason in words"]
    try:
        text = section_at(row.at)
    except ValueError as error:
        return [str(error)]
    faults = [f"'{words}' is not there" for words in (row.says, row.run) if plain(words) not in plain(text)]
    if row.run:
        parse(re.sub(r"\b[A-Z/]{4,}\b", "word", row.run))
    if row.route and routes.find(row.route).page != row.page:
        faults.append(f"mm route leads to {routes.find(row.route).page}")
    return faults


@pytest.mark.parametrize("name", GROUPS)
def test_every_row_of_a_section_has_its_place(name: str) -> None:
    rows = rows_of(GROUPS[name])
    assert len(rows) == GROUPS[name]["count"]
    assert {row.words: faults for row in rows if (faults := faults_of(row))} == {}


def test_a_row_without_its_place_is_found() -> None:
    guide = "docs/agent-task-workflow.md#3-checkpoints"
    assert faults_of(Row("a", guide, says="Hugging Face ↔ DCP")) == []
    assert faults_of(Row("a", guide, says="an elephant")) == ["'an elephant' is not there"]
    assert faults_of(Row("a", guide, says="bottleneck")) == ["'bottleneck' is not there"]  # of the next section
    assert faults_of(Row("a", "docs/agent-task-workflow.md#none")) == ["no answer and no reason"]
    assert faults_of(Row("a", "docs/agent-task-workflow.md#none", says="DCP"))[0].startswith("no heading")
    assert faults_of(Row("a", "docs/none.md#none", says="DCP")) == ["no file docs/none.md"]
    assert faults_of(Row("a", guide, route="DCP", page="README.md")) == ["mm route leads to docs/conversion.md"]
    assert faults_of(Row("a", guide, why_not="no")) == ["no reason in words"]


GIVEN = {
    "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2", "context-parallel-size": "2",
    "expert-model-parallel-size": "2", "micro-batch-size": "1", "global-batch-size": "4", "seq-length": "128",
    "recompute-granularity": "selective", "recompute-method": "uniform", "train-iters": "10", "lr": "1e-5",
    "min-lr": "0", "lr-decay-style": "cosine", "weight-decay": "0.1", "num-workers": "0",
}  # fmt: skip
"""Values for the flags of the guide; the others are switches."""


def test_the_flags_of_the_guide_set_the_keys_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "fsdp2_config.yaml").write_text("sharding_size: auto\nparam_dtype: bf16\n")
    needed = ["--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-5"]
    companions = {
        "recompute-method": ["--recompute-granularity", "full", "--recompute-num-layers", "1"],
        "sequence-parallel": ["--tensor-model-parallel-size", "2"],
    }
    lines = re.findall(r"^\| (`--.*?) \| .* \| (.*) \|$", FLAGS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(lines) == 18
    for column, keys in lines:
        words = list(needed)
        for flag in re.findall(r"`--([\w-]+)`", column):
            value = str(tmp_path / "fsdp2_config.yaml") if flag == "fsdp2-config-path" else GIVEN.get(flag)
            words += [f"--{flag}", *([value] if value is not None else []), *companions.get(flag, [])]
        translated = translate(parse_flags(words, {"WORLD_SIZE": "4"}))
        if keys.startswith("none"):
            assert any("has no effect" in note for note in translated.notes)
            continue
        set_by = [*(word for word in words[len(needed) :] if word.startswith("--")), "fsdp2_config.yaml"]
        origins = translated.config.origins.items()
        set_keys = [key for key, origin in origins if any(flag in str(origin) for flag in set_by)]
        for named in keys.split(", "):
            ways = tuple(re.findall(r"`([\w.]+)`", named))
            assert any(key.startswith(ways) for key in set_keys), (column, named, set_keys)
