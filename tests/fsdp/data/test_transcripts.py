"""Preference pairs of two whole texts: transcripts with marked speakers, and texts with a common beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.transcripts import SPLIT_NOTE, split_pair, turns_of_transcript
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation, Sample
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.fsdp.data.conftest import write_jsonl

Param = Callable[..., DatasetParam]
HEAD = "\n\nHuman: Name a prime.\n\nAssistant: Seven.\n\nHuman: Another one?\n\nAssistant:"


def pair(chosen: str, rejected: str, **more: Any) -> Sample:
    row = {"chosen": chosen, "rejected": rejected, **more}
    return convert_row(row, RowFormat(ranking=True), RowLocation("rows.jsonl", 3))


def said(sample: Sample) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in sample.messages]


def test_a_transcript_is_read_in_turns_and_only_what_differs_is_trained() -> None:
    sample = pair(f"{HEAD} Eleven.\n\nIt is odd.", f"{HEAD} Nine.")
    start = [("user", "Name a prime."), ("assistant", "Seven."), ("user", "Another one?")]
    assert said(sample) == [*start, ("assistant", "Eleven.\n\nIt is odd.")]
    assert sample.rejected is not None
    assert said(sample.rejected) == [*start, ("assistant", "Nine.")]
    for side in (sample, sample.rejected):
        assert side.weights == [None, 0.0, None, 1.0]
    assert not sample.notes


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: a\n\nHum: b\n\nAssistant: c", ["user a", "user b", "assistant c"]),
        ("Human: a\n\nAssistant: Human: is a word here\n\nAssistant:", ["user a", "assistant Human: is a word here",
                                                                        "assistant "]),
        ("Tell me.\n\nHuman: a\n\nAssistant: b", None),
        ("no marks", None),
    ],
)  # fmt: skip
def test_marks_of_speakers(text: str, turns: list[str] | None) -> None:
    found = turns_of_transcript(text)
    assert (found and [f"{turn['role']} {turn['content']}" for turn in found]) == turns


@pytest.mark.parametrize(
    ("chosen", "rejected", "parts"),
    [
        ("The sky is blue.", "The sky is green.", ("The sky is", "blue.", "green.")),
        ("The sky is blue.", "The sky is black.", ("The sky is", "blue.", "black.")),  # not within a word
        ("Two and two? 4.", "Two and two? 5.", ("Two and two?", "4.", "5.")),
        ("天空是蓝色的", "天空是绿色的", ("天空是", "蓝色的", "绿色的")),
        ("Hi you", "Hi you too", ("Hi you", "", "too")),
        ("Yes.", "No.", ("", "Yes.", "No.")),
    ],
)
def test_texts_are_split_where_they_begin_to_differ(chosen: str, rejected: str, parts: tuple[str, str, str]) -> None:
    assert split_pair(chosen, rejected) == parts


def test_texts_without_marks_make_one_question_and_say_so() -> None:
    sample = pair("The sky is blue.", "The sky is green.", id=7, source="trl")
    assert sample.rejected is not None
    assert said(sample) == [("user", "The sky is"), ("assistant", "blue.")]
    assert said(sample.rejected) == [("user", "The sky is"), ("assistant", "green.")]
    assert sample.notes == [SPLIT_NOTE]


@pytest.mark.parametrize(
    ("chosen", "rejected", "more", "told"),
    [
        (f"{HEAD} Five.", f"{HEAD} Five.", {}, "chosen and rejected are the same"),
        ("Same.", " Same.", {}, "chosen and rejected are the same"),
        (f"{HEAD} Five.", f"{HEAD}", {}, "the answer is empty"),
        (f"{HEAD} Five.", HEAD.removesuffix("\n\nAssistant:"), {}, "one is the beginning of the other"),
        (f"{HEAD} Five.\n\nHuman: Bye.", f"{HEAD} Nine.", {}, "the last turn is the user's"),
        ("Two is even", "Two is even and prime", {}, "and one ends there"),
        ("Yes.", "No.", {}, "begin differently"),
        (f"{HEAD} Five.", "Name a prime. Nine.", {}, "a transcript with marked speakers and a text without"),
        ("The sky is blue.", "The sky is green.", {"ask": "Sky?"}, "nothing comes before the answers"),
    ],
)
def test_what_makes_no_pair_is_refused_with_its_row(chosen: str, rejected: str, more: Any, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        pair(chosen, rejected, **more)
    problem = caught.value.problems[0]
    assert problem.where == "rows.jsonl:3" and problem.way_out


def test_a_pair_of_texts_encodes_as_the_pair_of_conversations_that_it_is(
    tmp_path: Path, param: Param, text_folder: Path
) -> None:
    write_jsonl(tmp_path / "hh.jsonl", [{"chosen": f"{HEAD} Eleven.", "rejected": f"{HEAD} Nine."}])
    start = [
        {"role": "user", "content": "Name a prime."},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "Another one?"},
    ]
    ends = ({"role": "assistant", "content": text} for text in ("Eleven.", "Nine."))
    chosen, rejected = ([*start, end] for end in ends)
    write_jsonl(tmp_path / "trl.jsonl", [{"chosen": chosen, "rejected": rejected}])
    sets = [build_mm_dataset(param(f"{name}.jsonl", model=text_folder, stage="rm"))[0] for name in ("hh", "trl")]
    ours, theirs = (dataset[0] for dataset in sets)
    for side in ("chosen", "rejected"):
        for key in ("input_ids", "labels"):
            assert ours[side][key].tolist() == theirs[side][key].tolist()
