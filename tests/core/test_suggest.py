"""Suggestions for mistyped words."""

from pathlib import Path

import pytest

from mindspeed_mm.core.suggest import did_you_mean, near_path, nearest, where_else


def test_nearest_word_is_suggested() -> None:
    assert did_you_mean("traim", ["train", "check"]) == "Did you mean 'train'? "


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["train"]) == ""


def test_likeness_can_be_asked_for() -> None:
    assert nearest("holderr", ["holder"], likeness=0.8) == ["holder"]
    assert nearest("holderr", ["mode"], likeness=0.8) == []


@pytest.mark.edge("U5")
@pytest.mark.parametrize(
    ("missing", "offered"),
    [
        ("runs.yaml", "run.yaml"),
        ("run.yml", "run.yaml"),
        ("RUN.yaml", "run.yaml"),
        ("rows.yaml", None),
        ("a.yaml", None),
    ],
)
def test_only_near_files_are_offered(missing: str, offered: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    assert near_path(tmp_path / missing) == (tmp_path / offered if offered else None)
    assert near_path(tmp_path / missing, Path.is_dir) is None
    assert near_path(tmp_path / "gone" / missing) is None


@pytest.mark.edge("BU7")
def test_a_name_on_a_hub_leads_to_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hf download Qwen/Qwen3-VL-2B --local-dir Qwen3-VL-2B" in where_else(Path("Qwen/Qwen3-VL-2B"))
    assert "hf download" not in where_else(Path("models/gemma.gguf"))
    assert where_else(Path("models/a/b")) == f"Relative paths start at '{tmp_path}'."
    (tmp_path / "runs").mkdir()
    assert "hf download" not in where_else(Path("runs/nothing"))
