"""Errors at the border to Python: options become arguments, and nothing is named that a caller cannot pass."""

from __future__ import annotations

import importlib
import inspect

import click
import pytest

import mindspeed_mm as mm
from mindspeed_mm.core.errors import DataError, Problem, UsageError
from mindspeed_mm.core.python_words import ARGUMENTS, FLAGS, VERBS, problem_for_python, word_for_python

pytestmark = pytest.mark.edge("U2")


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("Choose another file, or say --overwrite.", "Choose another file, or say overwrite=True."),
        ("Restore it, or add --accept-data-change.", "Restore it, or add accept_data_change=True."),
        ("Say --resume auto to continue it.", "Say resume=True to continue it."),
        ("Name the folder: --model FOLDER.", "Name the folder: model_folder=FOLDER."),
        ("Give mm infer and mm evaluate --max-new-tokens.", "Give mm.infer and mm.evaluate max_new_tokens."),
        ("Run mm extract again, or say --allow-fresh.", "Run mm extract again, or say allow_fresh=True."),
        ("Run mm extract with --overwrite.", "Run mm extract with --overwrite."),
        ("Use fewer: --workers 1.", "Use fewer: --workers 1."),
        ("'runs/a--merge' does not exist", "'runs/a--merge' does not exist"),
        ("Set training.save.", "Set training.save."),
    ],
)  # fmt: skip
def test_a_sentence(said: str, heard: str) -> None:
    assert problem_for_python(Problem(said, way_out=said)) == Problem(heard, way_out=heard)


def test_places_and_keys() -> None:
    assert problem_for_python(Problem("x", "--prompt:1", "--max-new-tokens")) == Problem(
        "x", "prompt", "max_new_tokens"
    )
    row = problem_for_python(Problem("x", "questions-0123456789ab.jsonl:3", "--overwrite"))
    assert (row.where, row.key) == ("question rows, row 2", "overwrite")
    stored = problem_for_python(Problem("x", "/tmp/mm-run-a/rows/train-0123456789ab.jsonl:1"))
    assert stored.where == "train rows, row 0"


def test_an_error_is_changed_as_a_whole_and_stays_what_it_is() -> None:
    error = DataError("Say --weights-only.", problems=[Problem("a", way_out="Say --overwrite."), Problem("b")])
    word_for_python(error)
    assert str(error).splitlines() == ["Say weights_only=True.", "  a. Say overwrite=True.", "  b"]
    assert error.args == (str(error),) and error.exit_code == 4


def test_what_is_named_can_be_passed() -> None:
    flags, arguments = set(), set()
    for verb in VERBS:
        program: click.Command = importlib.import_module(f"mindspeed_mm.cli.{verb}").command
        flags |= {one.opts[0].lstrip("-") for one in program.params if isinstance(one, click.Option) and one.is_flag}
        arguments |= set(inspect.signature(getattr(mm, verb)).parameters)
    arguments |= {"height", "width"}  # of infer's sampling
    assert set(FLAGS) <= flags
    assert {part for name in ARGUMENTS.values() for part in name.split(", ")} <= arguments


def test_functions_speak_of_their_arguments() -> None:
    with pytest.raises(UsageError) as refused:
        mm.train({"training": {"lr": 1e-3}, "model": {"model_name_or_path": "a\0b"}}, model="a\0b")
    assert refused.value.problems[0].key == "model" and "NUL" in str(refused.value)
