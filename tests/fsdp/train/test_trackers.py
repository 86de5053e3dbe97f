"""Trackers: what they are told, that a failing one never ends a run, and the real libraries, offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.train.run import trackers
from mindspeed_mm.fsdp.train.run.trackers import TrackedRun, Tracker, Trackers, check_trackers
from tests.helpers.runs import mm, train
from tests.helpers.tiny_run import make_tiny_run

pytestmark = pytest.mark.edge("U4")


class Seen(Tracker):
    """Keeps what it is told, of all runs of a test."""

    package = "json"
    told: list[tuple[Any, ...]] = []

    def begin(self, run: TrackedRun) -> None:
        self.told.append(("begin", run.name, dict(run.settings), dict(run.identities), run.first_step))
        run.identities["seen"] = "abc"

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.told.append(("log", step, dict(numbers)))

    def end(self, exit_code: int) -> None:
        self.told.append(("end", exit_code))


class Broken(Tracker):
    """Works for a step, then fails at everything."""

    package = "json"

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if step > 1:
            raise ConnectionError("no route to host\nand a page of details")

    def end(self, exit_code: int) -> None:
        raise AssertionError("left out after its first failure")


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("tracked"), training={"train_iters": 3})


def test_a_tracker_sees_settings_numbers_and_the_end(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Seen)
    monkeypatch.setattr(Seen, "told", [])
    words = ("training.report_to=wandb", "data.dataset_param.basic_parameters.val_rate=0.2", "training.val_interval=2")
    train(yaml, tmp_path / "run", "training.lr=2e-4", *words, "--steps", 2)
    (begin, name, settings, identities, first_step), *logs, end = Seen.told
    assert (begin, name, identities, first_step, end) == ("begin", "run", {}, 1, ("end", 0))
    assert settings["training.lr"] == 2e-4 and "training.lr_min" not in settings  # what was given, not the defaults
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step, numbers.get("loss"), numbers.get("val_loss")) for _, step, numbers in logs] == [
        (record["step"], record.get("loss"), record.get("val_loss")) for record in written
    ]
    assert not (tmp_path / "run" / "tb").exists()  # the list says all
    train(yaml, tmp_path / "run", *words, "training.lr=2e-4")  # a resumed run is the same one to a service
    assert Seen.told[len(logs) + 2][3:] == ({"seen": "abc"}, 3)


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Broken)
    out = train(yaml, tmp_path / "run", "training.report_to=[mlflow, tensorboard]")
    assert out.count("warning: mlflow stops here (no route to host); metrics.jsonl goes on") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert list((tmp_path / "run" / "tb").iterdir())


def test_a_tracker_that_is_not_installed_is_refused_by_check_and_train(
    yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.SwanLab, "package", "no_such_package")
    with pytest.raises(MachineError, match="no_such_package"):
        check_trackers(["swanlab"])
    for verb in ("train", "check"):
        said = mm(verb, yaml, "training.report_to=swanlab")
        assert said.code == 3
        assert "training.report_to" in said.out + said.err and "mindspeed-mm[track]" in said.out + said.err


def test_an_unknown_tracker_is_a_configuration_error(yaml: Path) -> None:
    said = mm("train", yaml, "training.report_to=[wandbb]")
    assert said.code == 2 and "training.report_to" in said.err


def follow(name: str, folder: Path, steps: range) -> list[str]:
    """A run of some steps, as the trainer has it; returns what people were told."""
    said: list[str] = []
    followed = Trackers.of([name], (), said.append)
    followed.begin(TrackedRun("a-run", {"training.lr": 1e-3, "model.model_name_or_path": "m"}, folder, steps[0]))
    for step in steps:
        followed.log({"step": step, "loss": 1.0 / step, "eta_s": float("nan"), "note": "text"})
        followed.log({"step": step, "val_loss": 2.0 / step})
    followed.end(0)
    return said


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that is also the working directory; nothing may leave the machine."""
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_wandb_offline(run_folder: Path) -> None:
    pytest.importorskip("wandb")
    assert follow("wandb", run_folder, range(1, 3)) + follow("wandb", run_folder, range(3, 4)) == []
    runs = sorted((run_folder / "wandb").glob("offline-run-*"))
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1  # one id for both starts
    assert b"val_loss" in b"".join(file.read_bytes() for path in runs for file in path.glob("*.wandb"))


@pytest.mark.slow
def test_mlflow_in_a_file(run_folder: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")  # mlflow's light edition comes without its databases
    assert follow("mlflow", run_folder, range(1, 3)) + follow("mlflow", run_folder, range(3, 4)) == []
    client = mlflow.MlflowClient()
    (experiment,) = [e for e in client.search_experiments() if e.name == trackers.PROJECT]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["training.lr"] == "0.001"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


@pytest.mark.slow
def test_swanlab_offline(run_folder: Path) -> None:
    pytest.importorskip("swanlab")
    assert follow("swanlab", run_folder, range(1, 3)) == []
    assert any((run_folder / "swanlab").rglob("*"))


@pytest.mark.slow
def test_trackio_in_a_file(run_folder: Path) -> None:
    pytest.importorskip("trackio")
    assert follow("trackio", run_folder, range(1, 3)) + follow("trackio", run_folder, range(3, 4)) == []
    from trackio.sqlite_storage import SQLiteStorage  # its own reader

    rows = SQLiteStorage.get_logs(trackers.PROJECT, "a-run")
    assert {row["step"]: row["loss"] for row in rows if "loss" in row} == {1: 1.0, 2: 0.5, 3: 1 / 3}
