"""Every command answers in JSON where it is asked to: on a small real input, and where it fails."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from mindspeed_mm.cli.main import cli
from mindspeed_mm.core.errors import ExitCode
from tests.cli.test_profile import small_trace
from tests.helpers.runs import Said, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_pairs import make_tiny_pairs
from tests.helpers.tiny_rollout_run import make_tiny_rollout_run
from tests.helpers.tiny_run import make_tiny_run
from tests.tasks.test_download import CLIENT

MINUTES = {"quickstart", "verify"}
"""Commands that take minutes."""
COMMANDS = {
    "quickstart": "first",
    "route": "'fine-tune a speech recogniser'",
    "models": "qwen3vl",
    "init": "--model vlm/model --data vlm/rows.jsonl --gpu 24 --out first.yaml",
    "train": "vlm/run.yaml --steps 1 training.save=once",
    "posttrain dpo": "pairs/run.yaml --steps 1",
    "posttrain grpo": "rollouts/run.yaml --dry-run",
    "posttrain nft": "rollouts/run.yaml --dry-run",
    "posttrain dmd": "rollouts/run.yaml --dry-run training.micro_batch_size=1 posttrain.dmd.dfake_gen_update_ratio=1",
    "posttrain reference": "pairs/run.yaml posttrain.reference.path=reference.safetensors",
    "posttrain rollouts": "rollouts/run",
    "posttrain score": "rewards.yaml pictures.jsonl --out scores.jsonl",
    "check": "vlm/run.yaml --config-only",
    "data check": "vlm/run.yaml --workers 0",
    "data preview": "vlm/run.yaml --count 1",
    "data stats": "vlm/run.yaml --workers 0",
    "config": "vlm/run.yaml",
    "schema": "training.lr",
    "verify": "pairs/run.yaml --nproc 1",
    "extract": "flux/run.yaml --out features",
    "export": "vlm/run exported",
    "convert": "text converted --to dcp --verify false",
    "merge": "vlm/model vlm/adapters --out merged",
    "infer": "vlm/run --prompt 'What is it?' --max-new-tokens 2",
    "chat": "vlm/run --max-new-tokens 2",
    "serve": "vlm/run",
    "evaluate": "vlm/run --data vlm/rows.jsonl --max-new-tokens 2 --out scores",
    "profile": "trace.json",
    "report": "vlm/run",
    "flops": "vlm/model --seq 16",
    "doctor": "",
    "download": "owner/model",
    "completion": "bash",
}
"""Command → words of a small real case."""


def commands(group: click.Group, context: click.Context, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, click.Context(found, parent=context), f"{before}{name} ")
        else:
            yield before + name, found


ALL = dict(commands(cli, click.Context(cli)))


def documents(text: str) -> list[Any]:
    """The JSON values that follow one another in a text."""
    found, rest = [], text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models and runs, and a client of a hub."""
    work = tmp_path_factory.mktemp("work")
    make_tiny_run(work / "vlm", training={"train_iters": 1})
    make_tiny_qwen3(work / "text")
    make_tiny_pairs(work / "pairs")
    make_tiny_rollout_run(work / "rollouts")
    make_tiny_generator_run(work / "flux")
    train(work / "vlm/run.yaml", work / "vlm/run")
    train(work / "vlm/run.yaml", work / "vlm/lora", "training.lora.enable=true")
    assert mm("export", work / "vlm/lora", work / "vlm/adapters").code == 0
    train(work / "rollouts/run.yaml", work / "rollouts/run", "--steps", "1", "training.gradient_accumulation_steps=1")
    small_trace(work / "trace.json")
    (work / "rewards.yaml").write_text("posttrain: {rewards: [{name: jpeg_size}]}\n")
    row = {"prompt": "a box", "file": "flux/pictures/0.png"}
    (work / "pictures.jsonl").write_text(json.dumps(row) + "\n")
    (work / "bin").mkdir()
    (work / "bin/hf").write_text(CLIENT)
    (work / "bin/hf").chmod(0o755)
    return work


@pytest.fixture(autouse=True)
def here(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/system Be short.\nWhat is it?\n/image nowhere.png\n"))


def test_every_command_has_a_case_and_the_option() -> None:
    # `mm ui` opens a page, and ends when it is closed; it has a test of its own.
    assert ALL.keys() - {"ui"} == COMMANDS.keys()
    lacking = [name for name, command in ALL.items() if not any("--json" in each.opts for each in command.params)]
    assert lacking == []


def answered(name: str) -> Said:
    """The command on its case, with --json; a server is not started, only announced."""
    words = [*name.split(), *shlex.split(COMMANDS[name]), "--json"]
    announced = mock.patch(
        "mindspeed_mm.tasks.serve.serve.run", lambda _request, _access, announce: announce("http://127.0.0.1:1")
    )
    with announced:
        return mm(*words)


_NUMBERS = re.compile(
    r"[(\[]?[-+]?\d[\d.,]*(e[-+]?\d+)?(\s*[×x,]\s*[\d.,]+)*[)\]]?\s?(%|s|ms|[KMGT]?i?B|tokens|rows|bytes|u?int\d+|b?float\d+)?"
)
"""A number, several of them, or one with its unit."""
WORDS_OF_NUMBERS = {"text", "answer", "content", "default", "name", "id", "version", "found", "prompt", "what"}
"""Keys of what users, models or files say, and of names and versions (`found` of `mm doctor`)."""


def texts_of_numbers(value: Any, key: str = "") -> list[str]:
    """Texts in a JSON value that mean numbers, with their keys."""
    if isinstance(value, dict):
        return [each for name, inner in value.items() for each in texts_of_numbers(inner, name)]
    if isinstance(value, list):
        return [each for inner in value for each in texts_of_numbers(inner, key)]
    is_text = isinstance(value, str) and key not in WORDS_OF_NUMBERS and _NUMBERS.fullmatch(value)
    return [f"{key}: {value}"] if is_text else []


def test_texts_of_numbers_are_found() -> None:
    said = {"shape": "(2, 40) int64", "size": ["16 × 32"], "peak": "1.5 GiB", "share": "12%", "n": 3, "text": "4"}
    assert texts_of_numbers(said) == ["shape: (2, 40) int64", "size: 16 × 32", "peak: 1.5 GiB", "share: 12%"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in MINUTES else name for name in COMMANDS]
)
def test_stdout_of_a_command_is_json(name: str) -> None:
    said = answered(name)
    found = documents(said.out)
    assert found and all(isinstance(each, (dict, list)) for each in found), said
    assert texts_of_numbers(found) == []
    failed = [each for each in found if "error" in each]
    if name == "chat":  # its last line names a file that is not there; the model has answered before
        assert said.code == ExitCode.DATA and len(failed) == 1 and "text" in found[0]
    else:
        assert failed == [], said
        assert said.code == 0 or name == "doctor", said.err  # what doctor finds is the machine's


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        ("train nowhere.yaml --json", 2, "no such file"),
        ("train vlm/run.yaml training.learning_rate=1 --json", 2, "unknown key"),
        ("posttrain dpo nowhere.yaml --json", 2, "no such file"),
        ("route xyzzy --json", 2, "no word of 'xyzzy' is known"),
        ("export nowhere out --json", 4, "nowhere"),
        ("infer nowhere --prompt a --json", 4, "nowhere"),
        ("trian --json", 2, "unknown command 'trian'"),
        ("flops vlm/model --seq none --json", 2, "none"),
    ],
)
def test_an_error_is_json_on_stdout_and_prose_on_stderr(words: str, code: int, what: str) -> None:
    said = mm(*shlex.split(words))
    (found,) = documents(said.out)
    error = found["error"]
    assert (said.code, error["exit_code"]) == (code, code)
    assert what in said.err and error["message"] in said.err
    told = [f"{each['where']} {each['what']}" for each in error["problems"]] or [error["message"]]
    assert any(what in each for each in told)
    assert mm(*(word for word in shlex.split(words) if word != "--json")).out == ""


def test_secrets_of_an_error_are_hidden_in_json() -> None:
    said = mm("evaluate", "http://user:hunter22hunter22@127.0.0.1:9/v1", "--data", "vlm/rows.jsonl", "--json")
    assert said.code == ExitCode.USAGE and "127.0.0.1:9" in said.out and "hunter22" not in said.out + said.err


@pytest.mark.slow
def test_ranks_that_fail_leave_one_json_error(capfd: pytest.CaptureFixture[str]) -> None:
    said = mm("train", "vlm/run.yaml", "--nproc", "2", "parallel.expert_parallel_size=2", "training.save=two", "--json")
    found = documents(said.out + capfd.readouterr().out)
    assert said.code != 0 and [set(each) for each in found] == [{"error"}], said
