"""`training.save` over what is not the run's: refused before anything is written, by `mm check` and `mm train`."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_mm import api
from mindspeed_mm.checkpoint import layout
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.folder_kinds import MARKER, is_run
from mindspeed_mm.core.run_ownership import check_run_folder, clear_unbegun_run, mark_run_folder
from mindspeed_mm.fsdp.train.run import introduction
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


MEGATRON = {
    "latest_checkpointed_iteration.txt": "100\n",
    "iter_0000100/mp_rank_00/model_optim_rng.pt": "mine",
    "iter_0000001/model_optim_rng.pt": "mine",
    "config.yaml": SECRET,
    "run.json": '{"status": "mine"}',
    "metrics.jsonl": '{"loss": 1.0}\n',
}
"""What another trainer left, and a user's own records beside it."""


def megatron(pattern: str) -> Callable[[Path, Path], Path]:
    """That folder, with only the files whose names fit."""

    def prepare(root: Path, yaml: Path) -> Path:
        for name in fnmatch.filter(MEGATRON, pattern):
            (root / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "mine" / name).write_text(MEGATRON[name])
        return root / "mine"

    return prepare


def torch_checkpoint(root: Path, yaml: Path) -> Path:
    """A distributed checkpoint of torch that no run of ours committed."""
    step = root / "mine" / "iter_0000001"
    step.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (step / name).write_bytes(b"mine")
    return root / "mine"


def dangling(root: Path, yaml: Path) -> Path:
    (root / "link").symlink_to(root / "gone")
    return root / "link"


CASES: dict[str, tuple[Callable[[Path, Path], Path | str], str]] = {
    "a config.yaml": (own_file("config.yaml"), r"is not a run folder and holds config\.yaml"),
    "a run.json": (own_file("run.json"), r"is not a run folder and holds run\.json"),
    "a log": (own_file("log"), "holds log"),
    "an iter_": (own_file("iter_0000001"), "holds iter_0000001"),
    "a model of the user's": (own_file("model"), "holds model"),
    "rows of the user's": (own_file("rows"), "holds rows"),
    "Megatron": (megatron("*"), "holds config.yaml, iter_0000001, iter_0000100"),
    "Megatron's checkpoints": (megatron("*_*"), "holds iter_0000001, iter_0000100"),
    "Megatron's tracker": (megatron("latest*"), "holds latest_checkpointed_iteration.txt"),
    "torch's checkpoint": (torch_checkpoint, "holds iter_0000001"),
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
    names = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    ended = mm(verb, yaml, f"training.save={save}", *(["--allow-fresh"] if verb == "train" else []))
    assert ended.code == 2, ended
    assert said.replace("\\", "") in ended.out + ended.err
    assert "this is a bug" not in ended.err
    assert everything(tmp_path) | everything(yaml.parent) == before
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == names


@pytest.mark.parametrize("of_a_run", [False, True])
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_users_lock_file_is_kept(verb: str, of_a_run: bool, yaml: Path, tmp_path: Path) -> None:
    if of_a_run:
        mark_run_folder(tmp_path)
    (tmp_path / ".lock").write_text(SECRET)
    before = everything(tmp_path)
    ended = mm(verb, yaml, f"training.save={tmp_path}")
    assert ended.code == 3, ended
    for part in (str(tmp_path / ".lock"), "training.save", "is where a run keeps its lock file, but no run has"):
        assert part in ended.out + ended.err
    assert everything(tmp_path) == before


@pytest.mark.parametrize("kept", ["run.json", "manifests"])
def test_a_run_whose_marker_is_gone_goes_on(kept: str, yaml: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    train(yaml, save)
    (save / MARKER).unlink()
    if kept == "run.json":
        shutil.rmtree(save / "iter_0000001")
        (save / layout.TRACKER).unlink()
    else:
        (save / "run.json").unlink()
    train(yaml, save, "training.train_iters=2")
    assert (save / "iter_0000002").is_dir()


def test_a_foreign_checkpoint_in_a_run_is_kept(yaml: Path, tmp_path: Path) -> None:
    save = tmp_path / "run"
    train(yaml, save)
    foreign = save / "iter_0000002" / "mp_rank_00"
    foreign.mkdir(parents=True)
    (foreign / "model_optim_rng.pt").write_text("mine")
    train(yaml, save, "training.train_iters=2")
    assert (save / "iter_0000002" / "MANIFEST.json").is_file()
    assert (save / "iter_0000002.foreign1" / "mp_rank_00" / "model_optim_rng.pt").read_text() == "mine"


@pytest.mark.parametrize("name", ["model/config.json", "rows/train.jsonl"])
def test_objects_are_not_stored_over_a_users_files(name: str, yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / name).parent.mkdir(parents=True)
    (tmp_path / "mine" / name).write_text(SECRET)
    before = everything(tmp_path)
    rows = [json.loads(line) for line in (yaml.parent / "rows.jsonl").read_text().splitlines()]
    with pytest.raises(ConfigError, match="is not a run folder and holds"):
        api.train(yaml, rows=rows, training={"save": str(tmp_path / "mine")})
    assert everything(tmp_path) == before


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


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_refused_start_names_model_and_rows_and_leaves_nothing(yaml: Path, tmp_path: Path, nproc: int | None) -> None:
    words = [f"--nproc={nproc}"] if nproc else []
    rows = "data.dataset_param.basic_parameters.dataset=none.jsonl"
    save = f"training.save={tmp_path / 'runs' / 'mine'}"
    ended = mm("train", yaml, *words, save, "model.model_name_or_path=no/model", rows)
    assert (ended.code, "2 problems" in ended.err) == (4, True)
    assert "'no/model' does not exist" in ended.err and "none.jsonl" in ended.err
    ended = mm("check", yaml, save, "model.model_name_or_path=no/model", rows)
    assert "'no/model' does not exist" in ended.out + ended.err and "none.jsonl" in ended.out + ended.err
    assert mm("train", yaml, save, rows).code == 4  # refused where rows are read: the folder is there by then
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_what_was_there(yaml: Path, tmp_path: Path) -> None:
    rows = "data.dataset_param.basic_parameters.dataset=none.jsonl"
    assert mm("train", yaml, f"training.save={tmp_path}", rows).code == 4
    assert tmp_path.is_dir()
    mark_run_folder(tmp_path / "mine")
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    clear_unbegun_run([tmp_path / "mine"])
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine" and is_run(tmp_path / "mine")


def test_a_run_folder_that_is_removed_while_the_run_begins_is_told(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of the first lines of the log, which say what else lies in the folder."""
    real = introduction.others_files

    def removed(folder: Path, config: Path | None) -> int:
        shutil.rmtree(folder)
        return real(folder, config)

    monkeypatch.setattr(introduction, "others_files", removed)
    said = mm("train", yaml, f"training.save={tmp_path / 'run'}")
    assert said.code == 3 and "run  the run folder has been removed while the run began" in said.err, said.err
