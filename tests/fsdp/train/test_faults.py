"""What goes wrong in one process: each fault has its message and exit code, and costs nothing that was committed."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.checkpoint import commit
from mindspeed_mm.fsdp.data.dataloader import dataloader as loader_module
from mindspeed_mm.fsdp.data.dataloader.dataloader import MMDataLoader
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.train.memory import advice
from mindspeed_mm.fsdp.train.run import record as run_record
from mindspeed_mm.fsdp.train.run.event_file import EventFile
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.utils import device
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import differing, kinds, lines, losses, mm, newest, tensors, train, watched_steps


def break_losses(monkeypatch: pytest.MonkeyPatch, *steps: int, value: float = math.nan) -> None:
    """Make the loss of these steps not finite."""
    real, calls = TokenCrossEntropy.terms, iter(range(1, 10_000))

    def terms(self: Any, model: Any, batch: Any) -> Any:
        factor = value if next(calls) in steps else 1.0
        return {name: loss * factor for name, loss in real(self, model, batch).items()}

    monkeypatch.setattr(TokenCrossEntropy, "terms", terms)


# --- a step that is not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_loss_stops_before_the_update(
    value: float, yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, torch.Tensor]] = []

    def keep(engine: TrainEngine, _batches: Any) -> None:
        states = {f"{n}.{k}": t for n, s in enumerate(engine.optimizer.state.values()) for k, t in s.items()}
        weights = dict(engine.model.named_parameters())
        kept.append({name: t.detach().clone() for name, t in (states | weights).items()})
        engines.append(engine)

    engines: list[TrainEngine] = []
    break_losses(monkeypatch, 3, value=value)
    with watched_steps(keep) as seen:
        said = mm("train", yaml, f"training.save={tmp_path}", "training.save_interval=1")
    assert said.code == 5
    assert "step 3 is not finite" in said.err
    assert f"rank 0: samples {', '.join(seen[2])}" in said.err
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    keep(engines[0], None)
    assert differing(kept[2], kept[3]) == []
    assert differing(kept[1], kept[2]) != []
    assert newest(tmp_path) == 2


def test_skipped_steps_are_told_and_trained_on(yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_losses(monkeypatch, 3, 4, 6)
    with watched_steps() as seen:
        words = ("training.on_nonfinite=skip", "training.max_skipped_steps=2", "training.log_interval=5")
        train(yaml, tmp_path, *words)
    told = [event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "warning"]
    assert [event["step"] for event in told] == [3, 4, 6]
    assert ", ".join(seen[2]) in told[0]["message"]
    updates = tensors(tmp_path)["optimizer.state.model.language_model.norm.weight.step"]
    assert updates == 6  # nine steps, three of them skipped


def test_one_skip_too_many_in_a_row_stops(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_losses(monkeypatch, 2, 3, 4)
    said = mm("train", yaml, "training.on_nonfinite=skip", "training.max_skipped_steps=2")
    assert said.code == 5
    assert "step 4 is not finite" in said.err
    assert "2 steps in a row were skipped" in said.err


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_weights_that_are_not_finite_are_named_and_no_sample(policy: str, yaml: Path, tmp_path: Path) -> None:
    """No step can be finite, so none is skipped either."""
    folder = Path(shutil.copytree(yaml.parent / "model", tmp_path / "model"))
    weights = folder / "model.safetensors"
    state, name = load_file(weights), "model.language_model.layers.1.mlp.up_proj.weight"
    state[name][0, 0] = math.nan
    save_file(state, weights, metadata={"format": "pt"})
    said = mm("train", yaml, f"model.model_name_or_path={folder}", f"training.on_nonfinite={policy}")
    assert said.code == 5
    assert f"rank 0: {name}" in said.err and "step 1 is not finite" in said.err and "weights contain NaN" in said.err
    assert "samples" not in said.err
    assert f"NaN or infinity in {name}, stored in model.safetensors" in said.out + said.err


# --- memory, device, features ----------------------------------------------------------------------------------------


def test_out_of_memory_names_batch_and_levers(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terms(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(TokenCrossEntropy, "terms", terms)
    with watched_steps() as seen:
        said = mm("train", yaml)
    assert said.code == 3
    for part in ("out of memory on rank 0 in step 1", "micro_batch_size", "predicted", *seen[0]):
        assert part in said.err
    assert re.search(rf"{re.escape(seen[0][0])} \(\d+ tokens", said.err)
    assert "Traceback" not in said.err


def test_out_of_memory_of_the_host(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(*_: Any) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(TrainEngine, "_update", update)
    monkeypatch.setattr(advice, "candidates", lambda *_: ())  # a forecast for each of them is another test's
    said = mm("train", yaml)
    assert (said.code, "out of memory on rank 0 in step 1" in said.err) == (3, True)


def test_device_that_is_not_there(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    said = mm("train", yaml, "--nproc", 2)
    assert said.code == 3
    assert "2 ranks on this host need 2 devices, but it has 1 (cuda)" in said.err


def test_half_a_launcher_environment(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = mm("train", yaml)
    assert said.code == 3
    assert "RANK is not set" in said.err


@pytest.mark.parametrize("nproc", [1, 2])
def test_unbuilt_features_are_named_with_their_place(nproc: int, yaml: Path, tmp_path: Path) -> None:
    text = yaml.read_text().replace("model:\n", "model:\n  checkpoint_path: x\n", 1)
    (tmp_path / "run.yaml").write_text(text)
    said = mm("train", tmp_path / "run.yaml", "inference.seed=7", "--nproc", nproc)
    assert said.code == 2
    line = text.splitlines().index("  checkpoint_path: x") + 1
    assert f"run.yaml:{line}:20" in said.err and "model.checkpoint_path" in said.err
    assert "inference.seed" in said.err


# --- the run folder --------------------------------------------------------------------------------------------------


def test_run_folder_that_is_a_file(yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    said = mm("train", yaml, f"training.save={tmp_path / 'file'}")
    assert (said.code, "is a file" in said.err) == (2, True)
    assert (tmp_path / "file").read_text() == "precious"


def test_run_folder_that_cannot_be_written(yaml: Path) -> None:
    said = mm("train", yaml, "training.save=/proc/nowhere/run")
    assert (said.code, "cannot be written" in said.err) == (3, True)


def test_second_job_in_a_folder(yaml: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock("first-run"):
        said = mm("train", yaml, f"training.save={tmp_path}")
    assert (said.code, "in use by run first-run" in said.err) == (3, True)
    train(yaml, tmp_path, "--steps", 1)


def test_dry_run_leaves_no_records(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path, "--steps", 1)
    before = {name: (tmp_path / name).read_bytes() for name in ("run.json", "resolved.yaml", "metrics.jsonl")}
    out = train(yaml, tmp_path, "--dry-run", "training.lr=3e-3")
    assert "dry run" in out and "steps 2 to 9" in out
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert newest(tmp_path) == 1


def test_result_for_machines(yaml: Path, tmp_path: Path) -> None:
    said = mm("train", yaml, f"training.save={tmp_path}", "--steps", 1, "--json")
    assert json.loads(said.out) == {"iteration": 1, "exit_code": 0, "save": str(tmp_path)}
    assert "loss" in said.err


# --- what may fail without ending a run ------------------------------------------------------------------------------


def disk_full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def break_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventFile, "add_numbers", disk_full)


def break_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "append_jsonl", disk_full)
    monkeypatch.setattr(run_record, "atomic_write_text", disk_full)


def break_log(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    class Full:
        def write(self, _text: str) -> None:
            disk_full()

        def close(self) -> None: ...

    monkeypatch.setattr(Path, "open", lambda p, *a, **k: Full() if p.name == "train.log" else real(p, *a, **k))


def refuse_log(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda p, *a, **k: disk_full() if p.name == "log" else real(p, *a, **k))


@pytest.mark.parametrize("fault", [break_tensorboard, break_records, break_log, refuse_log])
def test_reporting_that_fails_stops_nothing(
    fault: Callable[[pytest.MonkeyPatch], None], yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    out = train(yaml, tmp_path, "--steps", 3)
    assert newest(tmp_path) == 3
    assert out.count("No space left on device") == 1


def test_reader_of_the_output_that_goes_away(yaml: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone, mock.patch("sys.stdout", gone):
        assert run(["train", str(yaml), f"training.save={tmp_path}", "--steps", "3"]) == 0
    assert newest(tmp_path) == 3


# --- failures after training -----------------------------------------------------------------------------------------


def test_validation_that_fails_finds_the_weights_committed(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validate(*_: Any) -> Any:
        raise DataError("is broken", where="picture.png")

    monkeypatch.setattr(TrainEngine, "validate", validate)
    word = f"data.dataset_param.basic_parameters.val_dataset={yaml.parent / 'rows.jsonl'}"
    said = mm("train", yaml, f"training.save={tmp_path}", word, "training.val_interval=100", "training.save_async=true")
    assert (said.code, "picture.png" in said.err) == (4, True)
    assert newest(tmp_path) == 9
    assert kinds(tmp_path) == ["save"]


@pytest.mark.edge("BS14")
@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize("mode", ["false", "true"])
def test_save_that_fails(policy: str, mode: str, yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commit.write_tree

    def write_tree(tree: Any, draft: Path, ranks: Any) -> Any:
        if draft.name == ".mindspeed-mm-iter_0000004.draft":
            disk_full()
        return real(tree, draft, ranks)

    monkeypatch.setattr(commit, "write_tree", write_tree)
    words = ("training.save_interval=2", f"training.on_save_error={policy}", f"training.save_async={mode}")
    said = mm("train", yaml, f"training.save={tmp_path}", *words)
    assert said.code == (3 if policy == "stop" else 0)
    assert "the disk is full" in said.out + said.err
    saved = [event["step"] for event in lines(tmp_path / "events.jsonl") if event["kind"] == "save"]
    assert saved == sorted(int(path.name.removeprefix("iter_")) for path in tmp_path.glob("iter_*"))
    assert 4 not in saved and 2 in saved
    if policy == "continue":
        assert saved == [2, 6, 8, 9] and len(losses(tmp_path)) == 9


def expect_told(save: Path, said: str, line: str, kind: str) -> None:
    """A line is on the screen, in the log and, without its "warning: ", in the events."""
    events = [event for event in lines(save / "events.jsonl") if event["kind"] == kind]
    messages = [event["message"] for event in events if line.endswith(event["message"])]
    assert line in said and line in (save / "log" / "train.log").read_text() and messages


def test_deleted_checkpoints_and_a_disk_that_is_nearly_full_are_in_the_log_and_the_events(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "SPACE_MARGIN", 1e12)  # every disk is nearly full
    monkeypatch.setattr(commit, "free_bytes", lambda _folder: 10**12)
    said = train(yaml, tmp_path, "training.save_interval=1", "training.save_total_limit=2", "--steps", 3)
    expect_told(tmp_path, said, f"deleted {tmp_path / 'iter_0000001'}", "note")
    (warning,) = {line for line in said.splitlines() if "are free" in line}
    assert warning.startswith(f"warning: {tmp_path}: a checkpoint needs ") and "1,000,000,000,000 are free" in warning
    expect_told(tmp_path, said, warning, "warning")


def test_warnings_of_rows_are_in_the_log_and_the_events(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MMDataLoader.__iter__

    def warn(loader: MMDataLoader) -> Any:
        warnings.warn_explicit("a row is odd", UserWarning, loader_module.__file__, 1)
        warnings.warn_explicit("a library is odd", UserWarning, torch.__file__, 1)
        return real(loader)

    monkeypatch.setattr(MMDataLoader, "__iter__", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = train(yaml, tmp_path, "--steps", 1)
    expect_told(tmp_path, said, "warning: a row is odd", "warning")
    assert "a library is odd" not in (tmp_path / "events.jsonl").read_text()


# --- numbers that are shown ------------------------------------------------------------------------------------------


def test_time_of_validation_counts_for_the_time_left_only(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, validated_s = time.perf_counter, [0.0]

    def validate(*_: Any) -> dict[str, float]:
        validated_s[0] += 1000
        return {"loss": 1.0}

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + validated_s[0])
    monkeypatch.setattr(TrainEngine, "validate", validate)
    word = f"data.dataset_param.basic_parameters.val_dataset={yaml.parent / 'rows.jsonl'}"
    train(yaml, tmp_path, word, "training.val_interval=1", "--steps", 3)
    logged = [line for line in lines(tmp_path / "metrics.jsonl") if "loss" in line]
    assert all(line["step_ms"] < 1e6 and line["tokens_per_s"] > line["tokens"] / 1000 for line in logged)
    assert logged[1]["eta_s"] > 500  # one step to go, and half of a validation for each step so far
    assert logged[-1]["eta_s"] == 0


def test_a_bar_with_the_time_left_on_a_terminal(yaml: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with mock.patch("sys.stdout", Terminal()) as terminal:
        assert run(["train", str(yaml), "--steps", "2"]) == 0
    assert "2/2  00:00:00 left" in terminal.getvalue()
    *_, bar, afterwards = terminal.getvalue().rpartition("left")
    assert bar and afterwards.startswith("\r\033[K")  # it is taken away before the last words


# --- keys that are small ---------------------------------------------------------------------------------------------


def test_only_the_last_step_is_saved(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path, "training.save_interval=0")
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000009"]


def test_loading_that_is_not_strict(yaml: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.helpers.tiny_models import make_tiny_qwen3_vl

    file = make_tiny_qwen3_vl(tmp_path / "model") / "model.safetensors"
    weights = load_file(file)
    del weights["model.language_model.norm.weight"]
    save_file(weights | {"model.spare": torch.zeros(1)}, file, {"format": "pt"})
    word = f"model.model_name_or_path={file.parent}"
    said = mm("train", yaml, word, "--dry-run")
    assert (said.code, "1 missing, 1 unexpected" in said.err) == (4, True)
    out = train(yaml, None, word, "training.load_strict=false", "--dry-run")
    assert "warning" in out
    assert "model.language_model.norm.weight not stored; initialised" in out
    assert "model.spare stored but not used" in out


@pytest.mark.parametrize("value", ["true", "false"])
def test_shortened_fp32(value: str, yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr("mindspeed_mm.fsdp.train.run.job.allow_short_fp32", calls.append)
    train(yaml, None, "--dry-run", f"training.allow_hf32={value}")
    train(yaml, None, "--dry-run")
    assert calls == [value == "true"]


def test_hugging_face_folder_beside_each_checkpoint(yaml: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    words = ("training.save_format=hf", "training.save_interval=3", "training.save_total_limit=2")
    train(yaml, tmp_path, *words)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["iter_0000006", "iter_0000009"]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf" / "iter_0000009")
    AutoProcessor.from_pretrained(tmp_path / "hf" / "iter_0000009")
    for name, tensor in tensors(tmp_path).items():
        if name.startswith("model."):
            assert torch.equal(model.state_dict()[name.removeprefix("model.")], tensor)


@pytest.mark.edge("S1")
def test_a_hugging_face_folder_that_a_user_changed_is_kept(yaml: Path, tmp_path: Path) -> None:
    words = ("training.save_format=hf", "training.train_iters=2", "training.save_interval=1")
    train(yaml, tmp_path, *words)
    shutil.rmtree(tmp_path / "iter_0000002")
    (tmp_path / "hf" / "iter_0000002" / "config.json").write_text("mine")
    train(yaml, tmp_path, *words)
    names = ["iter_0000001", "iter_0000002", "iter_0000002.foreign1"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == names
    assert (tmp_path / "hf" / names[2] / "config.json").read_text() == "mine"
    assert json.loads((tmp_path / "hf" / names[1] / "config.json").read_text())


def test_secrets_stay_out_of_the_run_folder(yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mm", "train", "tools.password=hunter2"])
    (tmp_path / "run.yaml").write_text(yaml.read_text() + "# password: hunter2\n# hf_abcdefghijklmnopqrstu\n")
    train(tmp_path / "run.yaml", tmp_path / "save", "--steps", 1)
    for path in (tmp_path / "save").rglob("*"):
        assert not path.is_file() or not any(word in path.read_bytes() for word in (b"hunter2", b"hf_abcdefgh")), path


def test_bad_samples_are_told_at_the_end(yaml: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (yaml.parent / "rows.jsonl").read_text().splitlines()]
    rows[3]["images"] = ["images/none.png"] * len(rows[3]["images"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    basic = "data.dataset_param.basic_parameters"
    words = (
        f"{basic}.dataset={tmp_path / 'rows.jsonl'}",
        f"{basic}.on_bad_sample=skip",
        f"{basic}.max_bad_fraction=0.1",
    )
    out = train(yaml, tmp_path / "save", *words)
    told = [event for event in lines(tmp_path / "save" / "events.jsonl") if event["kind"] == "data"]
    assert [event["step"] for event in told] == [7, 9]  # the second epoch begins with step 7
    assert all(len(event["bad"]) == 1 and "none.png" in str(event["bad"]) for event in told)
    assert "1 bad samples were replaced" in out


def few_bad_samples(yaml: Path, tmp_path: Path, *numbers: int) -> tuple[str, ...]:
    """Overrides: rows in order, some of them bad, of which one may be."""
    rows = [json.loads(line) for line in (yaml.parent / "rows.jsonl").read_text().splitlines()]
    for number in numbers:
        rows[number]["images"] = ["images/none.png"] * max(1, len(rows[number]["images"]))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    basic = "data.dataset_param.basic_parameters"
    return (
        f"{basic}.dataset={tmp_path / 'rows.jsonl'}",
        f"{basic}.on_bad_sample=skip",
        f"{basic}.max_bad_fraction={0.5 / len(rows)}",  # a part of a row is rounded up
        "data.dataloader_param.shuffle=false",
        f"training.save={tmp_path / 'save'}",
    )


def test_bad_samples_are_counted_over_a_stop(yaml: Path, tmp_path: Path) -> None:
    words = few_bad_samples(yaml, tmp_path, 0, -3)
    first = mm("train", yaml, *words, "--steps", 2)
    assert first.code == 0, first.err
    second = mm("train", yaml, *words)
    assert second.code == 4
    assert "2 of 24 samples are bad" in second.err
    done = [record["step"] for record in lines(tmp_path / "save" / "metrics.jsonl")]
    assert max(done) < 6  # where the first epoch meets the other row; the second one meets both


def test_bad_samples_are_counted_over_ranks(yaml: Path, tmp_path: Path) -> None:
    """One on each rank, in the first step: no rank by itself would stop."""
    for code, err in run_ranks(2, trained_here, str(yaml), few_bad_samples(yaml, tmp_path, 0, 5)):
        assert code == 4
        assert "2 of 24 samples are bad" in err


def trained_here(yaml: str, words: tuple[str, ...]) -> tuple[int, str]:
    """How `mm train` ends on this rank, and what it says."""
    said = mm("train", yaml, *words)
    return said.code, said.err
