"""Captions that a text encoder reads together with pictures: one that holds a mark of media stops no run without its
row being named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.families.test_generators import make_run
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_families import smaller_pictures

CASES = [("qwen_image_edit", "<|image_pad|>"), pytest.param("hunyuan_video_i2v", "<image>", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "mark"), CASES)
def test_a_mark_of_media_in_a_caption_is_told_with_its_row(name: str, mark: str, tmp_path: Path) -> None:
    """The processor looks for a second picture, or the model counts the marks."""
    yaml, rows = make_run(name, tmp_path), tmp_path / "rows.jsonl"
    first, second, *others = map(json.loads, rows.read_text().splitlines())
    second["cap"] = f"a {mark} b"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (first, second, *others)))
    with smaller_pictures():
        for place, command in (("rows.jsonl:2  prompt", ("extract", "--out", tmp_path / "features")), ("", ("train",))):
            verb, *words = command
            said = mm(verb, yaml, f"training.save={tmp_path / 'run'}", *words)
            told = f"{place}  the caption 'a {mark} b' cannot be read beside its media"
            assert said.code == 4 and told in said.err
