"""A run that was cut into pieces equals one that was not, to the bit; what must not be continued is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.helpers.runs import differing, kinds, lines, losses, mm, newest, tensors, train, watched_steps


def rows_of(yaml: Path) -> Path:
    return yaml.parent / "rows.jsonl"


@pytest.fixture(scope="module")
def whole(yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("whole") / "save"
    with watched_steps() as seen:
        train(yaml, save)
    (save / "order.json").write_text(json.dumps(seen))
    return save


def order(save: Path) -> list[list[str]]:
    return json.loads((save / "order.json").read_text())


WAYS = {
    "in this process": (),
    "two workers": ("data.dataloader_param.num_workers=2",),
    "validation in between": (
        "training.val_interval=2",
        "data.dataset_param.basic_parameters.val_dataset=VALIDATION",
    ),
    "saved in the background": ("training.save_async=true", "training.save_interval=1"),
}


@pytest.mark.parametrize("way", WAYS)
def test_pieces_equal_the_whole(way: str, yaml: Path, whole: Path, tmp_path: Path) -> None:
    rows = tmp_path / "val.jsonl"
    rows.write_text("".join(rows_of(yaml).read_text().splitlines(keepends=True)[:5]))
    words = [word.replace("VALIDATION", str(rows)) for word in WAYS[way]]
    save = tmp_path / "save"
    with watched_steps() as seen:
        for steps in (4, 3, 9):  # in the middle of the first epoch and of the second, then to the end
            train(yaml, save, "--steps", steps, *words)
    assert seen == order(whole)
    assert losses(save) == losses(whole)
    assert samples_by_step(save) == samples_by_step(whole) == {step: 4 * step for step in range(1, 10)}
    assert newest(save) == 9
    assert differing(tensors(save), tensors(whole)) == []


def samples_by_step(save: Path) -> dict[int, int]:
    """Step → samples consumed since the beginning of the run."""
    records = lines(save / "metrics.jsonl")
    return {record["step"]: record["consumed_samples"] for record in records if "loss" in record}


def test_random_numbers_are_part_of_it(yaml: Path, whole: Path, tmp_path: Path) -> None:
    """The control: without its random states a resumed run is another one."""
    train(yaml, tmp_path, "--steps", 4)
    train(yaml, tmp_path, "training.no_load_rng=true")
    assert differing(tensors(tmp_path), tensors(whole)) != []


def test_finished_run_says_so_and_changes_nothing(yaml: Path, whole: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    shutil.copytree(whole, save)
    before = {path: path.read_bytes() for path in save.rglob("*") if path.is_file() and path.suffix != ".log"}
    out = train(yaml, save)
    assert out.splitlines()[-1] == "nothing to do: all 9 steps are done"
    after = {path: path.read_bytes() for path in save.rglob("*") if path.is_file() and path.suffix != ".log"}
    assert before == after


def test_records_of_a_cut_run(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path, "--steps", 1)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("stopped", 0)
    train(yaml, tmp_path, "--steps", 1)
    assert kinds(tmp_path) == ["save", "resume", "save"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_same_command_goes_on(
    number: signal.Signals, yaml: Path, whole: Path, tmp_path: Path
) -> None:
    def ask(engine: TrainEngine, _batches: object) -> None:
        if engine.iteration == 3:
            os.kill(os.getpid(), number)

    with watched_steps(ask):
        said = mm("train", yaml, f"training.save={tmp_path}", "data.dataloader_param.num_workers=1")
    assert said.code == 75
    assert "stopped after step 4; the checkpoint is saved. Run the same command again to continue." in said.err
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("stopped", 75)
    train(yaml, tmp_path)
    assert differing(tensors(tmp_path), tensors(whole)) == []


@pytest.mark.parametrize("words", [(), ("training.save_on_signal=false",)])
def test_signal_without_a_save_says_so(words: tuple[str, ...], yaml: Path, tmp_path: Path) -> None:
    def ask(engine: TrainEngine, _batches: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with watched_steps(ask):
        said = mm("train", yaml, *words, *([f"training.save={tmp_path}"] if words else []))
    assert (said.code, "nothing was saved" in said.err) == (5, True)
    assert newest(tmp_path) == 0


def test_epochs_win_over_steps(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path, "training.train_epochs=1")
    assert newest(tmp_path) == 6


# --- what may be continued, and what may not -------------------------------------------------------------------------


@pytest.fixture
def begun(yaml: Path, tmp_path: Path) -> Path:
    train(yaml, tmp_path / "begun", "--steps", 2)
    return tmp_path / "begun"


def test_never_refuses_a_used_folder(yaml: Path, begun: Path) -> None:
    said = mm("train", yaml, f"training.save={begun}", "--resume", "never")
    assert said.code == 4
    assert "holds a run already, saved up to step 2" in said.err
    train(yaml, begun.parent / "other", "--resume", "never", "--steps", 1)


def test_another_learning_rate_is_noted(yaml: Path, begun: Path) -> None:
    out = train(yaml, begun, "training.lr=2e-3", "--steps", 1)
    assert "training.lr  was 0.001, is 0.002" in out


@pytest.mark.edge("BU6")
def test_another_batch_size_is_refused(yaml: Path, begun: Path) -> None:
    said = mm("train", yaml, f"training.save={begun}", "training.micro_batch_size=2")
    assert said.code == 4
    assert "global batch size" in said.err and "was 4, is 2" in said.err
    (option,) = re.findall(r"Add (training\.gradient_accumulation_steps=\d+)\.", said.err)
    train(yaml, begun, "training.micro_batch_size=2", option, "--steps", 1)
    said = mm("train", yaml, f"training.save={begun}", "training.micro_batch_size=3")
    assert "Add training.micro_batch_size=4 training.gradient_accumulation_steps=1." in said.err


def test_other_data_are_refused_unless_accepted(yaml: Path, begun: Path, tmp_path: Path) -> None:
    rows = rows_of(yaml).read_text().splitlines(keepends=True)
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(rows[:-1]))
    word = f"data.dataset_param.basic_parameters.dataset={fewer}"
    said = mm("train", yaml, f"training.save={begun}", word)
    assert said.code == 4
    assert "--accept-data-change" in said.err
    assert newest(begun) == 2
    train(yaml, begun, word, "--accept-data-change", "--steps", 1)
    assert newest(begun) == 3


def test_weights_only_begins_a_new_run(yaml: Path, begun: Path, tmp_path: Path) -> None:
    said = mm("train", yaml, f"training.save={begun}", "--weights-only")
    assert said.code == 4
    assert f"training.save=<new folder> training.load={begun} --weights-only" in said.err
    train(yaml, tmp_path / "new", f"training.load={begun}", "--weights-only", "--steps", 1, "training.lr=1e-9")
    assert newest(tmp_path / "new") == 1
    old, new = tensors(begun), tensors(tmp_path / "new")
    name = "model.model.language_model.layers.0.mlp.up_proj.weight"
    assert (old[name] - new[name]).abs().max() < 1e-7
    assert new["optimizer.state.model.language_model.layers.0.mlp.up_proj.weight.step"] == 1


def test_fresh_start_only_when_allowed(yaml: Path, begun: Path) -> None:
    for file in begun.glob("iter_*/*.distcp"):
        file.write_bytes(b"damaged")
    said = mm("train", yaml, f"training.save={begun}")
    assert said.code == 4
    assert "--allow-fresh" in said.err
    out = train(yaml, begun, "--allow-fresh", "--steps", 1)
    assert "steps 1 to 9" in out


# --- training.load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["run folder", "step folder"])
def test_load_goes_on_from_another_run(what: str, yaml: Path, whole: Path, begun: Path, tmp_path: Path) -> None:
    source = begun if what == "run folder" else begun / "iter_0000002"
    out = train(yaml, tmp_path / "on", f"training.load={source}")
    assert f"continue from {begun / 'iter_0000002'}" in out
    assert losses(tmp_path / "on") == {step: loss for step, loss in losses(whole).items() if step > 2}
    assert differing(tensors(tmp_path / "on"), tensors(whole)) == []


def test_load_refuses_another_run(yaml: Path, begun: Path, tmp_path: Path) -> None:
    said = mm("train", yaml, f"training.save={tmp_path / 'on'}", f"training.load={begun}", "training.seed=8")
    assert said.code == 4
    assert "training.seed" in said.err
    train(
        yaml, tmp_path / "on", f"training.load={begun}", "training.seed=8", "training.no_load_optim=true", "--steps", 1
    )


def test_load_takes_the_weights_of_a_folder(yaml: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_models import make_tiny_qwen3_vl

    folder = make_tiny_qwen3_vl(tmp_path / "model", seed=5)
    out = train(yaml, tmp_path / "save", f"training.load={folder}", "--steps", 1, "training.lr=1e-9")
    assert f"weights from {folder}" in out
    from safetensors.torch import load_file

    name = "model.language_model.layers.0.mlp.up_proj.weight"
    stored, trained = load_file(folder / "model.safetensors")[name], tensors(tmp_path / "save")[f"model.{name}"]
    assert (stored - trained).abs().max() < 1e-7


def test_load_says_what_it_cannot_read(yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    said = mm("train", yaml, f"training.load={tmp_path / 'old'}")
    assert said.code == 4
    assert "mp_rank_00/model_optim_rng.pt  training.load  does not exist" in said.err
    said = mm("train", yaml, f"training.load={yaml.parent / 'modle'}")
    assert said.code == 4
    assert f"Did you mean '{yaml.parent / 'model'}'?" in said.err
