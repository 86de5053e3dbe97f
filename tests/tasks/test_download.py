"""`mm download` runs a hub's client, and nothing else downloads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import mm

CLIENT = f"""#!{sys.executable}
import json, os, pathlib, sys
if os.environ.get("CLIENT_FAILS"):
    sys.exit(3)
folder = pathlib.Path(sys.argv[-1])
folder.mkdir(parents=True, exist_ok=True)
offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in os.environ]
(folder / "asked.json").write_text(json.dumps([sys.argv[1:], offline]))
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and programs of two hubs that note how they were called."""
    (tmp_path / "bin").mkdir()
    for name in ("hf", "modelscope"):
        program = tmp_path / "bin" / name
        program.write_text(CLIENT)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "folder", "asked"),
    [
        ([], "models/Qwen3-0.6B", ["download", "Qwen/Qwen3-0.6B", "--local-dir", "models/Qwen3-0.6B"]),
        (["--out", "here"], "here", ["download", "Qwen/Qwen3-0.6B", "--local-dir", "here"]),
        (["--hub", "modelscope", "--out", "here"], "here",
         ["download", "--model", "Qwen/Qwen3-0.6B", "--local_dir", "here"]),
    ],
)  # fmt: skip
def test_the_client_is_run_online_and_the_folder_told(
    work: Path, words: list[str], folder: str, asked: list[str]
) -> None:
    said = mm("download", "Qwen/Qwen3-0.6B", *words, "--json")
    assert said.code == 0 and json.loads(said.out) == {"name": "Qwen/Qwen3-0.6B", "folder": folder}
    assert json.loads((work / folder / "asked.json").read_text()) == [asked, []]
    assert f"mm chat {folder}" in mm("download", "Qwen/Qwen3-0.6B", *words).out


@pytest.mark.parametrize("name", ["qwen3", "a/b/c", "https://host/a/b", "../x", ""])
def test_a_name_is_owner_and_model(work: Path, name: str) -> None:
    said = mm("download", name)
    assert said.code == 2 and "is not OWNER/MODEL" in said.err and not (work / "models").exists()


def test_a_client_that_fails_or_is_not_there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_FAILS", "1")
    said = mm("download", "a/b")
    assert said.code == 3 and "ended with exit code 3" in said.err
    (work / "file").write_text("")
    assert "is a file" in mm("download", "a/b", "--out", "file").err
    monkeypatch.setenv("PATH", str(work))
    said = mm("download", "a/b")
    assert said.code == 3 and "hf is not installed. Install it: pip install huggingface_hub." in said.err
