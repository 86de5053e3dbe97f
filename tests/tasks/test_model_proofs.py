"""Each row of the documents' model tables, and of their table of post-training, has tests that prove it and a planted
fault that one of these tests sees; all of them exist, run, and assert."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from mindspeed_mm.fsdp.params.cards import ModelCard
from mindspeed_mm.tasks.models import catalogue
from mindspeed_mm.tasks.models.routes import bare
from tests.families.test_generators import FAULTS as OF_GENERATORS
from tests.helpers.released_rows import ROWS as RELEASED

ROOT = Path(__file__).parents[2]
PLANTED = "tests/families/test_planted_faults.py"
OF_TRAINING = f"{PLANTED}::test_a_part_in_disorder_is_seen_by_the_proof_of_training"
OF_PIPELINES = "tests/families/test_generators.py::test_a_fault_is_seen"
CASES = {OF_TRAINING: [*RELEASED], OF_PIPELINES: [fault.strip() for fault in OF_GENERATORS]}
"""Test that has a fault for each of several families → the cases that it has."""

SPARSE = "tests/families/test_opensoraplan"
DRAWN = f"{PLANTED}::test_a_part_in_disorder_is_seen_by_the_proof_of_a_family_that_draws"
ROWS = {
    "Qwen2VL": {"qwen2vl": OF_TRAINING}, "Qwen2.5VL": {"qwen2_5vl": OF_TRAINING},
    "Qwen3VL": {"qwen3vl": OF_TRAINING, "qwen3_vl_moe": OF_TRAINING},
    "InternVL2.5": {"internvl": OF_TRAINING, "internvl_chat": OF_TRAINING},
    "InternVL3": {"internvl": OF_TRAINING, "internvl_chat": OF_TRAINING}, "InternVL3.5": {"internvl": OF_TRAINING},
    "GLM4.1V": {"glm4v": OF_TRAINING}, "GLM4.5V": {"glm4v_moe": OF_TRAINING},
    "DeepSeekVL2": {"deepseek_vl2": OF_TRAINING}, "DeepSeekOCR": {"deepseek_ocr": OF_TRAINING},
    "DeepSeekOCR2": {"deepseek_ocr2": OF_TRAINING}, "JanusPro": {"janus_pro": DRAWN}, "Ming": {"ming": OF_TRAINING},
    "Bagel": {"bagel": f"{PLANTED}::test_a_part_of_bagel_in_disorder_is_seen_by_its_proof"},
    "Wan2.1": {"wan": OF_PIPELINES}, "Wan2.2": {"wan": OF_PIPELINES}, "HunyuanVideo": {"hunyuan_video": OF_PIPELINES},
    "HunyuanVideo 1.5": {"hunyuan_video_1_5": OF_PIPELINES}, "CogVideoX": {"cogvideox": OF_PIPELINES},
    "FLUX": {"flux": OF_PIPELINES},
    "OpenSoraPlan 1.3": {"opensoraplan": f"{SPARSE}.py::test_what_is_dealt_out_wrongly_is_seen"},
    "OpenSoraPlan 1.5": {"opensoraplan": f"{SPARSE}_1_5.py::test_sets_that_begin_one_token_late_are_seen"},
    "StepVideo": {"stepvideo": "tests/families/test_stepvideo.py::test_a_fault_of_the_transformer_is_seen"},
    "LTX2": {"ltx2": "tests/families/test_ltx2.py::test_a_fault_is_seen"}, "Lumina-mGPT": {"lumina_mgpt": DRAWN},
    "Qwen2.5Omni": {"qwen2_5omni": OF_TRAINING}, "Qwen3Omni": {"qwen3omni": OF_TRAINING},
    "Whisper": {"whisper": OF_TRAINING}, "CosyVoice3": {"cosyvoice3": OF_TRAINING},
    "Qwen3TTS": {"qwen3tts": OF_TRAINING}, "FunASR": {"funasr": OF_TRAINING},
}  # fmt: skip
"""Name in the model tables of document 001 → card → test whose planted fault the family's proof sees."""

SIZES = {
    "Qwen2VL": "2B/7B/72B", "Qwen2.5VL": "3B/7B/32B/72B", "Qwen3VL": "8B/30B/235B", "InternVL2.5": "4B/78B",
    "InternVL3": "8B/78B", "InternVL3.5": "30B", "GLM4.1V": "9B",
}  # fmt: skip
SUBTASKS = {"Wan2.1": "t2v/i2v/v2v/flf2v", "Wan2.2": "t2v/i2v", "FLUX": "t2i"} | dict.fromkeys(
    ("HunyuanVideo", "HunyuanVideo 1.5", "CogVideoX", "OpenSoraPlan 1.3", "OpenSoraPlan 1.5", "StepVideo", "LTX2"),
    "t2v",
)
"""Name in the model tables → what their columns Specs and Subtask say, where they say anything."""


class Method(NamedTuple):
    """A row of the table of post-training: of which cards, the test that proves it, and the fault that one sees."""

    cards: tuple[str, ...]
    proof: str
    fault: str


PREFERENCES, FLOWS = "tests/fsdp/loss/test_preference.py", "tests/fsdp/loss/test_flow_pair_objective.py"
ROLLOUTS, VERL = "tests/fsdp/train/test_flow_rollouts.py", "tests/verl/test_engine.py"
METHODS = {
    "DPO of Qwen2VL": Method(
        ("qwen2vl",),
        f"{PREFERENCES}::test_losses_and_gradients_are_those_of_trl",
        f"{PREFERENCES}::test_denominators_of_a_micro_batch_are_seen",
    ),
    "DPO of Wan and its like": Method(
        ("wan", "hunyuan_video", "flux"),
        f"{FLOWS}::test_the_loss_is_the_paper_s",
        f"{FLOWS}::test_other_noise_for_the_rejected_side_is_seen",
    ),
    "GRPO of FLUX": Method(
        ("flux",),
        f"{ROLLOUTS}::test_what_is_trained_is_what_was_drawn",
        f"{ROLLOUTS}::test_states_in_bf16_are_found",
    ),
    "GRPO by verl": Method(
        ("qwen2_5vl",),
        f"{VERL}::test_probabilities_and_entropies_are_the_models",
        f"{VERL}::test_a_temperature_that_is_passed_over_is_seen",
    ),
}


@cache
def parsed(file: str) -> ast.Module:
    """A file of tests. A collection of garbage in the midst of it, by what other tests left, makes CPython 3.11 say
    "AST constructor recursion depth mismatch"."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse((ROOT / file).read_text(encoding="utf-8"))
    finally:
        if was_on:
            gc.enable()


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """Name → function at the top of a file of tests."""
    return {each.name: each for each in parsed(file).body if isinstance(each, ast.FunctionDef)}


@cache
def imported(file: str) -> dict[str, tuple[str, str]]:
    """Name that a file of tests has from another one → that file, and the name there; "" of the file as a whole."""
    found = {}
    for each in ast.walk(parsed(file)):
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("tests"):
            folder = (each.module or "").replace(".", "/")
            for name in each.names:
                is_file = (ROOT / folder / f"{name.name}.py").is_file()
                source = f"{folder}/{name.name}.py" if is_file else f"{folder}.py"
                found[name.asname or name.name] = (source, "" if is_file else name.name)
    return found


@cache
def failures(file: str) -> set[str]:
    """Errors that a file of tests has for what is not proven."""
    classes = [each for each in parsed(file).body if isinstance(each, ast.ClassDef)]
    return {"AssertionError"} | {each.name for each in classes if "AssertionError" in map(ast.unparse, each.bases)}


def asserts(file: str, function: ast.FunctionDef, seen: set[tuple[str, str]] | None = None) -> bool:
    """Whether a test can fail: by an assertion of its own, or of a function of the tests that it calls."""
    seen = seen if seen is not None else set()
    if (file, function.name) in seen:
        return False
    seen.add((file, function.name))
    for each in ast.walk(function):
        if isinstance(each, ast.Assert) or (isinstance(each, ast.Call) and _is_proof(file, each.func, seen)):
            return True
        raised = each.exc if isinstance(each, ast.Raise) else None
        if isinstance(raised, ast.Call) and ast.unparse(raised.func) in failures(file):
            return True
    return False


def _is_proof(file: str, called: ast.expr, seen: set[tuple[str, str]]) -> bool:
    """Whether what is called is an assertion of pytest, torch or numpy, or a function of the tests that asserts."""
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if isinstance(called, ast.Attribute):
        owner = getattr(called.value, "id", "")
        if (owner, name) == ("pytest", "raises") or name.startswith("assert_"):
            return True
        source, inside = imported(file).get(owner, ("", ""))[0], name
    elif name in functions(file):
        source, inside = file, name
    else:
        source, inside = imported(file).get(name, ("", ""))
    found = functions(source).get(inside) if source and (ROOT / source).is_file() else None
    return found is not None and asserts(source, found, seen)


def skips(file: str, function: ast.FunctionDef) -> bool:
    """Whether a test never runs: marked so, by its own mark or its file's, or by its first statement."""
    marks = [ast.unparse(each) for each in function.decorator_list]
    for each in parsed(file).body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark":
            marks.append(ast.unparse(each.value))
    is_marked = any("mark.skip" in mark and "skipif" not in mark for mark in marks)
    first = next(
        each for each in function.body if not isinstance(each, ast.Expr) or not isinstance(each.value, ast.Constant)
    )
    return is_marked or ast.unparse(first).startswith("pytest.skip(")


def wrong_with(test: str) -> str:
    """What keeps a test, told as file::function [cases], from proving anything; empty: nothing does."""
    file, _, function = test.partition(" [")[0].partition("::")
    found = functions(file).get(function)
    if found is None or not function.startswith("test_"):
        return "is not there"
    if skips(file, found):
        return "is always skipped"
    return "" if asserts(file, found) else "asserts nothing"


def proofs(card: ModelCard) -> Iterator[str]:
    """The tests that a card names, in full."""
    for proof, case in card.proven.items():
        if "::" in case:
            yield case
            continue
        name, _, function = catalogue.PROOFS[proof].test.partition("::")
        stem, _, choices = name.partition("{")
        inside, _, end = choices.partition("}")
        yield from (f"{stem}{choice}{end}::{function} [{case}]" for choice in inside.split(","))
    yield from (case for case in card.tasks.values() if "::" in case)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_tables_has_its_proofs_and_a_fault_that_they_see(row: str) -> None:
    found = {card.name: card for card in catalogue.find(row)}
    for name, fault in ROWS[row].items():
        card = found.get(name) or catalogue.find(name)[0]
        assert {"train", "lora"} <= card.proven.keys(), name
        assert fault not in CASES or name in CASES[fault], (name, fault)
        assert [(test, wrong) for test in (*proofs(card), fault) if (wrong := wrong_with(test))] == []
    assert found.keys() & ROWS[row].keys()


def test_sizes_and_subtasks_of_the_tables_are_those_of_cards() -> None:
    cards = {card.name: card for card in catalogue.families()}
    for row, sizes in SIZES.items():
        released = [bare(hub.partition("/")[2]) for name in ROWS[row] for hub in cards[name].released]
        for size in sizes.lower().split("/"):
            assert [hub for hub in released if hub.startswith(f"{bare(row)}{size}")], (row, size)
    for row, tasks in SUBTASKS.items():
        assert set(tasks.split("/")) <= {task for name in ROWS[row] for task in cards[name].tasks}, row


@pytest.mark.parametrize("row", METHODS)
def test_a_row_of_post_training_has_its_proof_and_a_fault_that_it_sees(row: str) -> None:
    method = METHODS[row]
    assert [name for name in method.cards if catalogue.find(name)[0].name != name] == []
    assert [(test, wrong) for test in (method.proof, method.fault) if (wrong := wrong_with(test))] == []


def test_every_card_names_tests_that_can_fail() -> None:
    for card in catalogue.families():
        assert [(test, wrong) for test in proofs(card) if (wrong := wrong_with(test))] == [], card.name


def words_in(given: object) -> Iterator[str]:
    """All texts in lists and tuples; what pytest.param makes is a tuple."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from words_in(each)


def cases_of(test: str) -> set[str]:
    """Words that a test, told as file::function, is parametrized with."""
    file, _, function = test.partition("::")
    module = import_module(file.removesuffix(".py").replace("/", "."))
    marks = [mark for mark in getattr(getattr(module, function), "pytestmark", ()) if mark.name == "parametrize"]
    return {word for mark in marks for word in words_in([*mark.args[1], mark.kwargs.get("ids")])}


def test_the_cases_that_a_card_names_are_those_of_its_test() -> None:
    for card in catalogue.families():
        for told in (*card.proven.values(), *card.tasks.values()):
            test, _, named = told.partition(" [")
            if named:
                assert set(named.removesuffix("]").split(", ")) - cases_of(test) == set(), (card.name, told)


SPOILT = '''
import pytest
from tests.helpers.parity import compare_steps

def helper(value):
    return value

def test_nothing():
    helper(1)

@pytest.mark.skip
def test_marked():
    assert helper(1)

def test_begun():
    """Prove."""
    pytest.skip("later")
    assert helper(1)

def test_by_another():
    compare_steps([], [], 0)
'''


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("test_gone", "is not there"), ("helper", "is not there"), ("test_nothing", "asserts nothing"),
        ("test_marked", "is always skipped"), ("test_begun", "is always skipped"), ("test_by_another", ""),
    ],
)  # fmt: skip
def test_a_proof_that_proves_nothing_is_found(name: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "test_spoilt.py").write_text(SPOILT)
    assert wrong_with(f"{tmp_path / 'test_spoilt.py'}::{name} [a, b]") == wrong
