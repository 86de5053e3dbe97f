"""`mm evaluate --harness`: lmms-eval and VLMEvalKit ask a folder or a server; their figures are read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.tasks.evaluate.harness.evaluate import FILES, RESULTS, run
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.helpers.judging import JudgingServer, judging
from tests.helpers.runs import Said, mm
from tests.helpers.stub_harnesses import install_stubs
from tests.helpers.tiny_models import make_tiny_qwen3


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_stubs(tmp_path_factory.mktemp("harnesses"))


@pytest.fixture
def server() -> Iterator[JudgingServer]:
    with judging({"what?": "a cat"}) as serving:
        yield serving


def asked(server: JudgingServer, python: Path, out: Path, harness: str, tasks: str, *words: object) -> Said:
    address = f"http://127.0.0.1:{server.server_port}/v1"
    given = ["--harness", harness, "--tasks", tasks, "--harness-python", python, "--name", "large", "--out", out]
    return mm("evaluate", address, *given, *words)


def test_lmms_eval_asks_a_server(server: JudgingServer, python: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.txt"
    key.write_text("a-long-secret\n")
    words = ["--key-file", key, "--max-new-tokens", 7, "--harness-option=--limit", "--harness-option=8"]
    for _ in range(2):  # over its own results
        said = asked(server, python, tmp_path / "out", "lmms-eval", "ai2d,mmmu_val", *words)
        assert said.code == 0, said.err
    # The interval is that of the clustered error, 0.75 ± 1.96 · 0.125.
    line = "lmms-eval unknown, ai2d, exact_match: 0.75 (95 % interval 0.505 to 0.995), n=8"
    assert said.out.splitlines()[0] == line
    assert "lmms-eval unknown, mmmu_val, exact_match (flexible-extract): 0.8, n=8" in said.out.splitlines()
    found = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert found["tasks"]["ai2d"]["figures"].keys() == {"exact_match", "exact_match (flexible-extract)"}
    assert found["options"] == ["--limit", "8"] and found["model"].startswith("large at http://127")
    path, request = server.asked[-1]
    assert (path, request["model"]) == ("/v1/chat/completions Bearer a-long-secret", "large")
    written = next((tmp_path / "out" / FILES).rglob("*_results.json"))
    assert json.loads(written.read_text())["gen_kwargs"] == "max_new_tokens=7"


def test_vlmevalkit_asks_a_server(server: JudgingServer, python: Path, tmp_path: Path) -> None:
    said = asked(server, python, tmp_path / "out", "vlmevalkit", "AI2D_TEST,MathVista_MINI")
    assert said.code == 0, said.err
    assert said.out.splitlines() == [
        "VLMEvalKit unknown, AI2D_TEST, Overall: 0.5",
        "VLMEvalKit unknown, MathVista_MINI: no figures: a judge is needed",
    ]
    figures = json.loads((tmp_path / "out" / RESULTS).read_text())["tasks"]["AI2D_TEST"]["figures"]
    assert figures["split=none|c"]["value"] == pytest.approx(0.2) and len(figures) == 9
    written = json.loads(next((tmp_path / "out" / FILES).rglob("T*/status.json")).read_text())
    assert (written["judge"], written["said"]) == ("exact_matching", "a cat")


@pytest.mark.slow
def test_a_folder_is_served_for_it(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server with a key of its own, which has ended when the command has."""
    monkeypatch.chdir(tmp_path)
    model = make_tiny_qwen3(tmp_path / "mine")
    words = ["--harness", "lmms-eval", "--tasks", "ai2d", "--harness-python", python, "--json"]
    said = mm("evaluate", model, *words)
    assert said.code == 0, said.err
    assert json.loads(said.out)["model"] == str(model)
    (written,) = (tmp_path / "eval/mine/lmms-eval" / FILES).rglob("*_results.json")
    assert isinstance(json.loads(written.read_text())["said"], str)
    assert json.loads(said.out) == json.loads((tmp_path / "eval/mine/lmms-eval" / RESULTS).read_text())


def test_what_cannot_be_is_told(server: JudgingServer, python: Path, tmp_path: Path) -> None:
    said = asked(server, python, tmp_path / "none", "lmms-eval", "unknown")
    assert said.code == 3 and "lmms-eval ended with exit code 0 and has written no figures" in said.err
    said = asked(server, python, tmp_path / "none", "vlmevalkit", "MathVista_MINI")
    assert said.code == 3 and "(MathVista_MINI: a judge is needed)" in said.err
    assert not (tmp_path / "none" / RESULTS).exists()
    said = asked(server, tmp_path / "nowhere", tmp_path / "none", "lmms-eval", "ai2d")
    assert said.code == 3 and "is not a Python that can be run" in said.err
    (tmp_path / "none" / RESULTS).write_text('{"harness": 1}')
    said = asked(server, python, tmp_path / "none", "lmms-eval", "ai2d")
    assert said.code == 2 and "did not write" in said.err
    script = python.parents[1] / "site" / "run.py"
    newer = script.read_text()
    script.write_text(newer.replace("base-url", "base"))
    said = asked(server, python, tmp_path / "old", "vlmevalkit", "AI2D_TEST")
    script.write_text(newer)
    assert said.code == 3 and "no run.py beside it that takes --base-url" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:1/v1", "--data", "x"], "whose model only a harness asks"),
        (["models/x", "--data", "x", "--tasks", "ai2d"], "Name one: --harness lmms-eval or vlmevalkit"),
        (["models/x", "--harness", "lmms-eval"], "no tasks are given"),
        (["models/x", "--harness", "lmms-eval", "--tasks", "a", "--name", "b"], "is for the address of a server"),
        (["models/x", "--harness", "lmms-eval", "--tasks", "a", "--metric", "wer"], "does not go with --harness"),
        (["http://127.0.0.1:1/v1", "--harness", "lmms-eval", "--tasks", "a", "--lora", "b"], "loaded its own"),
        (["http://127.0.0.1:1/v1", "--harness", "lmms-eval", "--tasks", "a"], "the server cannot be reached"),
    ],
)
def test_options_that_do_not_fit(words: list[str], message: str) -> None:
    said = mm("evaluate", *words)
    assert said.code in (2, 3) and message in said.err, said


def test_a_generator_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "flux"
    model.mkdir()
    (model / "model_index.json").write_text("{}")
    with pytest.raises(UsageError, match="is a generator, and harnesses ask models that answer"):
        run(EvaluateRequest(str(model), harness="lmms-eval", tasks="ai2d", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_harness_that_is_not_installed(server: JudgingServer, tmp_path: Path) -> None:
    import sys

    said = asked(server, Path(sys.executable), tmp_path / "out", "vlmevalkit", "AI2D_TEST")
    assert said.code == 3 and "VLMEvalKit is not installed" in said.err and "with --harness-python" in said.err
