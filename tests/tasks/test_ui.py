"""`mm ui` over HTTP: who may look, what may be named, configurations that are made, checked and written, and jobs."""

from __future__ import annotations

import http.client
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from mindspeed_mm.cli.main import run as mm
from mindspeed_mm.cli.ui import command
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from mindspeed_mm.tasks.requests.serve import Access, UiRequest, check_ui_request
from mindspeed_mm.tasks.ui import form, jobs
from tests.helpers.many_runs import make_run
from tests.helpers.served import served_board

KEY = "a-long-enough-key"
GOOD = "# mine\ntraining:\n  lr: 2.0e-5  # the rate\n  save: runs/first\n"
Answer = tuple[int, dict[str, Any]]


def ask(address: str, path: str, body: object = None, **headers: str) -> Answer:
    """Status and JSON of an answer: of a GET where there is no body."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    with closing(connection):
        if body is None:
            connection.request("GET", f"/api/{path}", headers=headers)
        else:
            words = {"Content-Type": "application/json", **headers}
            connection.request("POST", f"/api/{path}", body if isinstance(body, str) else json.dumps(body), words)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def message(answer: Answer) -> str:
    """What an error says."""
    status, content = answer
    assert 400 <= status < 500, answer
    return str(content["error"]["message"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside") / "board"
    for name in ("one", "two"):
        make_run(folder / "runs" / name, lr=1e-3 if name == "one" else 2e-3)
    (folder / "mine.yaml").write_text(GOOD)
    (folder.parent / "secret.yaml").write_text("training: {lr: 0.777}\n")
    (folder / "link.yaml").symlink_to(folder.parent / "secret.yaml")
    (folder / "up").symlink_to(folder.parent)
    return folder


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with served_board(root) as address:
        yield address


def ids(address: str) -> dict[str, str]:
    return {run["name"]: run["id"] for run in ask(address, "runs")[1]["runs"]}


# --- looking ---------------------------------------------------------------------------------------------------------


def test_runs_are_listed_shown_and_compared(address: str) -> None:
    status, found = ask(address, "runs")
    assert status == 200 and found["configs"] == ["mine.yaml"]
    assert [run["name"] for run in found["runs"]] == ["runs/two", "runs/one"]
    runs = ids(address)
    _, shown = ask(address, "show", {"runs": [runs["runs/one"]], "stamp": ""})
    assert "<svg" in shown["html"] and "training loss" in shown["html"]
    assert ask(address, "show", {"runs": [runs["runs/one"]], "stamp": shown["stamp"]})[1]["html"] is None
    _, both = ask(address, "show", {"runs": [runs["runs/one"], runs["runs/two"]], "stamp": ""})
    assert "training.lr" in both["html"] and "runs/two" in both["html"]


def test_the_page_runs_its_own_scripts_alone(address: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    with closing(connection):
        connection.request("GET", "/")
        answer = connection.getresponse()
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert "script-src 'sha256-" in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0] and "unsafe-eval" not in policy
    assert "http://" not in page and "https://" not in page and page.count("<script>") == 1 and " onclick=" not in page


@pytest.mark.parametrize("run", ["../../etc", "/etc/passwd", "", "0" * 20, "runs/one"])
def test_runs_are_named_by_what_was_listed(address: str, run: str) -> None:
    status, content = ask(address, "show", {"runs": [run], "stamp": ""})
    assert status == 404 and content["error"]["code"] == "run_not_found"


def test_a_run_that_becomes_a_link_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "board" / "run")
    with served_board(tmp_path / "board") as address:
        (one,) = ids(address).values()
        run.rename(tmp_path / "elsewhere")
        run.symlink_to(tmp_path / "elsewhere")
        assert ask(address, "show", {"runs": [one], "stamp": ""})[0] == 404
        assert ids(address) == {}


# --- who may look ----------------------------------------------------------------------------------------------------


def test_a_key_is_asked_of_everything_but_the_page(root: Path) -> None:
    with served_board(root, Access(key=KEY)) as address:
        assert ask(address, "runs")[0] == 401
        assert ask(address, "runs", Authorization="Bearer wrong")[0] == 401
        assert ask(address, "configs/read", {"name": "mine.yaml"})[0] == 401
        assert ask(address, "runs", Authorization=f"Bearer {KEY}")[0] == 200


def test_foreign_pages_and_names_are_refused(address: str) -> None:
    assert ask(address, "runs", Host="evil.example")[0] == 403
    body = {"name": "new.yaml", "text": GOOD, "replace": False}
    assert ask(address, "configs/save", body, Origin="https://evil.example")[0] == 403
    assert ask(address, "configs/save", body, **{"Content-Type": "text/plain"})[0] == 415
    assert ask(address, "runs?all=1")[0] == 400
    assert ask(address, "configs/save", "{")[0] == 400
    assert ask(address, "configs/save", {**body, "more": 1})[0] == 400
    assert ask(address, "configs/save", {**body, "replace": "yes"})[0] == 400
    assert ask(address, "nothing")[0] == 404


def test_other_machines_need_a_key(root: Path) -> None:
    with pytest.raises(UsageError, match="there is no key"):
        check_ui_request(UiRequest(root, host="0.0.0.0"))
    with pytest.raises(UsageError, match="no such folder"):
        check_ui_request(UiRequest(root / "missing"))


def test_who_may_only_look_makes_and_starts_nothing(root: Path) -> None:
    with served_board(root, read_only=True) as address:
        assert ask(address, "runs")[1]["read_only"] is True
        made = (
            "configs/read",
            "configs/save",
            "configs/check-whole",
            "preview",
            "jobs/train",
            "jobs/serve",
            "jobs/stop",
        )
        assert {ask(address, path, {})[0] for path in made} == {404} and ask(address, "fields")[0] == 404


def test_a_missing_extra_and_a_taken_port_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert mm(["ui", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 3
    assert "cannot be listened at" in capsys.readouterr().err
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "starlette" else found(name))
    assert mm(["ui", str(tmp_path)]) == 3
    assert "pip install 'mindspeed-mm[ui]'" in capsys.readouterr().err


def test_help_names_what_it_does() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0 and "--read-only" in result.output and "mm ui experiments" in result.output


# --- configurations --------------------------------------------------------------------------------------------------


def test_the_form_has_every_key_that_holds_a_value(address: str) -> None:
    _, found = ask(address, "fields")
    keys = [field["key"] for field in found["fields"]]
    leaves = {key for key, _ in walk_fields()}
    leaves -= {key.rpartition(".")[0] for key in leaves}
    assert len(keys) == len(set(keys)) > 400 and tuple(keys[: found["first"]]) == form.FIRST
    in_lists = {key for key in leaves if key.rpartition(".")[0] in keys}
    assert {key for key in leaves - in_lists if key.startswith(("training.", "model.", "features."))} <= set(keys)
    fields = {field["key"]: field for field in found["fields"]}
    assert fields["training.lr"] | {"help": ""} == {
        "key": "training.lr", "help": "", "kind": "number", "default": "5e-05", "whole": False, "least": 0,
    }  # fmt: skip
    assert fields["training.lr_decay_style"]["choices"] == ["constant", "linear", "cosine", "wsd"]
    assert fields["training.lora.enable"]["choices"] == ["true", "false"]
    assert all(field["help"] for field in found["fields"])


def test_fields_go_into_the_yaml_and_comments_stay(address: str, tmp_path: Path) -> None:
    values = {
        "training.lr": "1e-4",
        "model.freeze": "[model.visual]",
        "training.save": "",
        "training.lora.enable": "true",
    }
    _, made = ask(address, "configs/compose", {"text": GOOD, "values": values})
    assert made["text"] == (
        "# mine\ntraining:\n  lr: 1e-4    # the rate\n  lora:\n    enable: true\nmodel:\n  freeze: [model.visual]\n"
    )
    (tmp_path / "made.yaml").write_text(made["text"])
    assert load_config(tmp_path / "made.yaml").arguments.training.lr == 1e-4
    assert ask(address, "configs/compose", {"text": "", "values": {}})[1]["text"] == ""
    for text, wrong in (
        ("training: 3", {"training.lr": "1"}),
        ("a: [", {}),
        ("- 1", {}),
        ("", {"a": "[1"}),
        ("", {"a": "!!python/x 1"}),
    ):
        assert ask(address, "configs/compose", {"text": text, "values": wrong})[0] == 400, text


def test_a_text_is_checked_as_mm_check_does(address: str) -> None:
    text = "training: {learning_rate: 1, micro_batch_size: -1}\n"
    _, found = ask(address, "configs/check", {"text": text, "name": "mine.yaml"})
    assert [each["key"] for each in found["findings"]] == ["training.learning_rate", "training.micro_batch_size"]
    assert found["findings"][0]["where"] == "mine.yaml:1:12" and "'lr'" in found["findings"][0]["way_out"]
    assert ask(address, "configs/check", {"text": "a: [", "name": ""})[1]["findings"]


def test_a_configuration_is_written_whole_and_replaced_when_asked(address: str, root: Path) -> None:
    body = {"name": "made.yaml", "text": GOOD, "replace": False}
    assert ask(address, "configs/save", body) == (200, {"name": "made.yaml"})
    assert (root / "made.yaml").read_text() == GOOD
    assert "exists already" in message(ask(address, "configs/save", {**body, "text": "model: {}\n"}))
    assert (root / "made.yaml").read_text() == GOOD
    assert ask(address, "configs/save", {**body, "text": "model: {}", "replace": True})[0] == 200
    assert (root / "made.yaml").read_text() == "model: {}\n"
    assert "made.yaml" in ask(address, "runs")[1]["configs"]
    (root / "made.yaml").unlink()


@pytest.mark.parametrize(
    "name",
    [
        "../evil.yaml", "/tmp/evil.yaml", "a/../../evil.yaml", "up/evil.yaml", "link.yaml", "none/evil.yaml", "evil.py",
        "evil", ".evil.yaml", "", "a\x00.yaml", "a\nb.yaml", "e" * 300 + ".yaml", "e" * 2000, "runs/one/evil.yaml",
        "runs/one/config.yaml", "mine.yaml/evil.yaml",
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(address: str, root: Path, name: str) -> None:
    before = sorted(str(path) for path in root.parent.rglob("*"))
    assert ask(address, "configs/save", {"name": name, "text": GOOD, "replace": True})[0] == 400
    assert sorted(str(path) for path in root.parent.rglob("*")) == before
    assert "0.777" in (root.parent / "secret.yaml").read_text()
    for path, more in (
        ("configs/read", {}),
        ("configs/check-whole", {}),
        ("preview", {"count": 1}),
        ("jobs/train", {"nproc": 1}),
    ):
        status, content = ask(address, path, {"name": name, **more})
        assert status == 400 and "0.777" not in json.dumps(content), path


def test_secrets_are_hidden_and_do_not_get_lost(address: str, root: Path) -> None:
    text = "posttrain: {rewards: [{api_key: topsecret1}]}\n"
    (root / "secret.yaml").write_text(text)
    _, found = ask(address, "configs/read", {"name": "secret.yaml"})
    assert "topsecret" not in found["text"] and "•••" in found["text"]
    told = message(ask(address, "configs/save", {"name": "secret.yaml", "text": found["text"], "replace": True}))
    assert "api_key_env" in told and (root / "secret.yaml").read_text() == text
    (root / "secret.yaml").unlink()


def test_a_run_gives_its_configuration(address: str) -> None:
    _, found = ask(address, "configs/of-run", {"run": ids(address)["runs/one"]})
    assert "lr: 0.001" in found["text"]


def test_what_is_no_configuration_is_not_written(address: str, root: Path) -> None:
    for text in ("just words", "- 1\n", "a: [", "a: 1\n" * 300_000):
        assert ask(address, "configs/save", {"name": "no.yaml", "text": text, "replace": False})[0] == 400
    assert not (root / "no.yaml").exists()


# --- jobs ------------------------------------------------------------------------------------------------------------

STAND_IN = """
import json, signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print(json.dumps(sys.argv[1:]), flush=True)
print("token=topsecret9 \\x1b[2J", flush=True)
time.sleep(60)
"""
"""In the place of `mm`: says what it was given, and stops as training does."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "own_python", lambda words: [sys.executable, "-c", STAND_IN, *words])


def wait_for(address: str, text: str) -> dict[str, Any]:
    """The newest job, once it has said this."""
    for _ in range(400):
        job: dict[str, Any] = ask(address, "runs")[1]["jobs"][0]
        if text in job["said"] and (text != "saved" or job["exit_code"] is not None):
            return job
        time.sleep(0.05)
    raise AssertionError(job)


@pytest.mark.usefixtures("started")
def test_a_run_is_started_from_a_list_of_words_and_stopped(root: Path) -> None:
    name = "-o $(touch x); 'y'.yaml"
    (root / name).write_text(GOOD)
    with served_board(root) as address:
        assert ask(address, "jobs/train", {"name": name, "nproc": 2})[0] == 200
        job = wait_for(address, "token")
        assert json.loads(job["said"].splitlines()[0]) == ["-m", "mindspeed_mm", "train", str(root / name), "--nproc=2"]
        assert "topsecret9" not in job["said"] and "\x1b" not in job["said"]
        assert "being trained already" in message(ask(address, "jobs/train", {"name": name, "nproc": 1}))
        assert ask(address, "jobs/train", {"name": name, "nproc": 0})[0] == 400
        assert ask(address, "jobs/stop", {"job": job["job"]})[0] == 200
        assert wait_for(address, "saved")["exit_code"] == 75
        assert "does not run" in message(ask(address, "jobs/stop", {"job": job["job"]}))
        assert "does not run" in message(ask(address, "jobs/stop", {"job": 99}))
    (root / name).unlink()


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("training: {lr: 1e-3}\n", "training.save"),
        ("training: {save: ../elsewhere}\n", "training.save"),
        ("training: {save: /tmp/elsewhere}\n", "training.save"),
        ("training: {save: up/elsewhere}\n", "training.save"),
        ("training: {save: runs/new}\ndata: {dataset_param: {basic_parameters: {cache_dir: ../cache}}}\n", "cache_dir"),
    ],
)
def test_runs_write_below_the_folder_alone(address: str, root: Path, text: str, key: str) -> None:
    (root / "away.yaml").write_text(text)
    status, content = ask(address, "jobs/train", {"name": "away.yaml", "nproc": 1})
    assert status == 400 and content["error"]["param"].endswith(key)
    assert ask(address, "runs")[1]["jobs"] == []
    (root / "away.yaml").unlink()


def test_rows_are_shown_from_below_the_folder_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[list[str]] = []

    def look(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        pages.append(words)
        Path(words[-1].partition("=")[2]).write_text("<!doctype html>rows")
        return subprocess.CompletedProcess(words, 0, b"", b"")

    monkeypatch.setattr(jobs.subprocess, "run", look)
    (root / "rows.yaml").write_text(
        f"data: {{dataset_param: {{basic_parameters: {{dataset: [{tmp_path}/rows.jsonl]}}}}}}\n"
    )
    body = {"name": "rows.yaml", "count": 500}
    with served_board(root) as address:
        told = message(ask(address, "preview", body))
    assert "is outside of" in told and "--also" in told and not pages
    with served_board(root, also=(tmp_path,)) as address:
        assert ask(address, "preview", body) == (200, {"html": "<!doctype html>rows"})
    (words,) = pages
    assert words[2:7] == ["-m", "mindspeed_mm", "data", "preview", str(root / "rows.yaml")] and "--count=50" in words
    (root / "rows.yaml").unlink()


@pytest.mark.usefixtures("started")
def test_a_server_is_started_for_a_run_and_ends_with_the_board(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = STAND_IN.replace("json.dumps(sys.argv[1:])", "json.dumps({'address': 'http://127.0.0.1:9/v1'})")
    monkeypatch.setattr(jobs, "own_python", lambda words: [sys.executable, "-c", serving, *words])
    with served_board(root) as address:
        assert ask(address, "jobs/serve", {"run": ids(address)["runs/one"]})[0] == 200
        assert wait_for(address, "token")["address"] == "http://127.0.0.1:9"
    # Nothing is left: `served_board` ends jobs as the command does.


def test_jobs_that_end_with_the_board(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "own_python", lambda words: [sys.executable, "-c", STAND_IN, *words])
    held = jobs.Jobs(root)
    training, serving = held.train(root / "mine.yaml", "mine.yaml", 1), held.serve(root / "runs" / "one", "runs/one")
    while "token" not in serving.said() or "token" not in training.said():
        time.sleep(0.02)
    held.end()
    assert serving.process.poll() == 75 and training.process.poll() is None
    training.process.send_signal(signal.SIGTERM)
    assert training.process.wait(10) == 75
    monkeypatch.setattr(jobs, "MOST_JOBS", 0)
    with pytest.raises(UsageError, match="run already"):
        held.serve(root / "runs" / "one", "runs/one")
