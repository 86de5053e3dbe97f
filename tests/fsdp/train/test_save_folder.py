"""`training.save` over what is not the run's: refused before anything is written, by `mm check` and `mm train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_mm.core.folder_kinds import is_run
from mindspeed_mm.core.run_ownership import check_run_folder, mark_run_folder
from tests.helpers.kills import everything
from tests.helpers.runs import mm, train
from tests.helpers.tiny_run import make_tiny_run

pytestmark = pytest.mark.edge("S7")

SECRET = "# api_key: hunter2-hunter2\n"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("save"), training={"train_iters": 1})


def own_file(name: str) -> Callable[[Path, Path], Path]:
    def prepare(root: Path, yaml: Path) -> Path:
        (root / "mine").mkdir()
        (root / "mine" / name).write_text(SECRET)
        return root / "mine"

    return prepare


def dangling(root: Path, yaml: Path) -> Path:
    (root / "link").symlink_to(root / "gone")
    return root / "link"


CASES: dict[str, tuple[Callable[[Path, Path], Path | str], str]] = {
    "a config.yaml": (own_file("config.yaml"), r"is no run folder and holds config\.yaml"),
    "a run.json": (own_file("run.json"), r"is no run folder and holds run\.json"),
    "a log": (own_file("log"), "holds log"),
    "an iter_": (own_file("iter_0000001"), "holds iter_0000001"),
    "the model": (lambda root, yaml: yaml.parent / "model", "is a model folder"),
    "in the model": (lambda root, yaml: yaml.parent / "model" / "run", "lies in a model folder"),
    "a file": (lambda root, yaml: yaml, "is a file"),
    "a dangling link": (dangling, "leads nowhere"),
    "300 characters": (lambda root, yaml: root / ("x" * 300), "File name too long"),
    "NUL": (lambda root, yaml: f'"{root}/a\\0b"', "cannot be a path: embedded null"),
}


@pytest.mark.edge("S13")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_what_is_not_the_runs_stays(verb: str, case: str, yaml: Path, tmp_path: Path) -> None:
    prepare, said = CASES[case]
    save = prepare(tmp_path, yaml)
    before = everything(tmp_path) | everything(yaml.parent)
    ended = mm(verb, yaml, f"training.save={save}")
    assert ended.code == 2, ended
    assert said.replace("\\", "") in ended.out + ended.err
    assert "this is a bug" not in ended.err
    assert everything(tmp_path) | everything(yaml.parent) == before


def test_a_users_yaml_in_the_save_folder_is_never_rewritten(yaml: Path, tmp_path: Path) -> None:
    save = tmp_path / "mine"
    save.mkdir()
    own = save / "config.yaml"
    own.write_text(SECRET + yaml.read_text())
    (save / "notes.txt").write_text("mine")
    before = everything(save)
    train(own, save)
    train(own, save, "training.train_iters=2")
    after = everything(save)
    assert {name: after[name] for name in before} == before
    assert b"hunter2" not in after["resolved.yaml"]
    ended = mm("train", save / "resolved.yaml", f"training.save={save}")
    assert (ended.code, "Copy it to another name first" in ended.err) == (2, True)


def test_a_folder_that_a_killed_start_left_is_taken_up_again(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        check_run_folder(folder)
        mark_run_folder(folder)
        (folder / "log").mkdir()  # the first thing that a start writes
        assert is_run(folder)
        check_run_folder(folder)
        mark_run_folder(folder)


def test_checkpoints_copied_from_elsewhere_are_a_run(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "MANIFEST.json").write_text('{"format": "mindspeed-mm-checkpoint"}')
    (tmp_path / "metrics.jsonl").touch()
    check_run_folder(tmp_path)
