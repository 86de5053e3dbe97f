"""What a run does that sets no length, no schedule and no retention; and a run that began when other defaults held."""

from __future__ import annotations

import json
import math
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.run_length import run_length
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.params.yaml.origins import Origin, dump_with_origins, read_defaults
from mindspeed_mm.fsdp.train.build_engine import TOTAL_STEPS, build_lr_schedule, jump_of_rate
from mindspeed_mm.fsdp.train.run.began import kept_defaults
from mindspeed_mm.provider.translate import from_flags
from tests.helpers.runs import differing, lines, losses, mm, newest, tensors, train
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_tiny_run

OLD_RUN = Path(__file__).parent / "run_with_older_defaults.tar.xz"
"""Three steps of a tiny text model, saved by the version of 1e0cc957: constant rate, no warm-up, all checkpoints kept,
10,000 steps. Its YAML sets none of them."""
OLD_LOSSES = [5.481541633605957, 5.314481258392334, 5.247622489929199]
"""Of steps 4 to 6, as that version took them."""


def unset(yaml: Path, *names: str, **training: object) -> Path:
    """The YAML without some keys of `training`, and with others."""
    reader = YAML()
    config = reader.load(yaml)
    for name in names:
        config["training"].pop(name, None)
    config["training"].update(training)
    reader.dump(config, yaml)
    return yaml


TRUNCATION = "data.dataset_param.basic_parameters.truncation"
LENGTH = ("train_iters", "lr_decay_style", "lr_warmup_ratio", "save_total_limit")


@pytest.mark.edge("BU3")
def test_a_run_without_a_length_is_one_epoch_with_cosine_and_two_checkpoints(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]}] * 80
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yaml = unset(make_tiny_run(tmp_path), *LENGTH, save_interval=10)
    out = train(yaml, tmp_path / "save")
    rates = [line["lr"] for line in lines(tmp_path / "save" / "metrics.jsonl")]
    assert len(rates) == 40  # 80 rows, 2 a step
    warmup = round(0.03 * 40)
    cosine = [1e-3 * (1 + math.cos(math.pi * (step - warmup) / (40 - warmup))) / 2 for step in range(warmup, 40)]
    assert rates == pytest.approx([1e-3 * (step + 1) / warmup for step in range(warmup)] + cosine, rel=1e-9)
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == ["iter_0000030", "iter_0000040"]
    said = next(line for line in out.splitlines() if line.startswith("unset"))
    assert "one epoch" in said and "cosine" in said and "3% warm-up" in said and "newest 2" in said


@pytest.mark.edge("BU3")
def test_what_is_set_is_not_told_as_unset(tmp_path: Path) -> None:
    out = train(make_tiny_run(tmp_path, training={"train_iters": 1}), None)
    assert "unset" not in out


@pytest.mark.edge("BU3")
def test_streamed_rows_need_a_length(tmp_path: Path) -> None:
    yaml = unset(make_tiny_run(tmp_path), "train_iters")
    word = "data.dataset_param.basic_parameters.streaming=true"
    for verb in (("train",), ("check",), ("check", "--config-only")):
        said = mm(*verb, yaml, word)
        assert said.code == 2 and "how long" in said.out + said.err, verb


@pytest.mark.edge("BU3")
@pytest.mark.parametrize(
    ("model", "steps", "epochs"),
    [("flux", 500, None), ("wan2_1", 500, None), ("cogvideox", None, 30), ("qwen3", None, 1)],
)
def test_a_generator_takes_the_length_of_the_commands_of_diffusers(
    model: str, steps: int | None, epochs: int | None, tmp_path: Path
) -> None:
    """500 steps in examples/dreambooth/README_flux.md and its like, 30 epochs in examples/cogvideo/README.md."""
    arguments = Arguments.model_validate({"model": {"model_id": model}})
    length = run_length(arguments.model, arguments.training)
    assert (length.steps, length.epochs, length.is_given) == (steps, epochs, False)
    index = {"transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    arguments = Arguments.model_validate({"model": {"model_name_or_path": str(tmp_path)}})
    assert run_length(arguments.model, arguments.training).steps == 500


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stored run in the working directory, where its relative paths start."""
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.edge("BU3")
def test_a_run_of_an_older_version_goes_on_with_its_defaults(old: Path) -> None:
    out = train("run.yaml", None, "--steps", 3)
    run = old / "run"
    rates = [line["lr"] for line in lines(run / "metrics.jsonl")]
    assert rates == [0.01, 0.01, 0.01]
    assert list(losses(run).values()) == pytest.approx(OLD_LOSSES, rel=1e-5)
    assert sorted(int(path.name[5:]) for path in run.glob("iter_*")) == [3, 4, 5, 6]
    kept = next(line for line in out.splitlines() if line.startswith("kept"))
    for key in ("training.lr_decay_style constant", "training.train_iters 10000", "training.save_total_limit None"):
        assert key in kept
    assert "truncation" not in kept  # dropped then as now, though the default is null and not `drop`
    assert "jumps" not in out
    again = train("run.yaml", None, "--steps", 1)  # from the resolved.yaml that this version has written
    assert lines(run / "metrics.jsonl")[-1]["lr"] == 0.01 and "kept" in again


@pytest.mark.edge("BU3")
@pytest.mark.parametrize(("stage", "kept"), [("sft", ""), ("pretrain", f"{TRUNCATION} drop")])
def test_a_kept_value_is_listed_where_the_default_of_now_means_another(stage: str, kept: str) -> None:
    basic = {"stage": stage, "truncation": "drop"}
    config = load_config({"data": {"dataset_param": {"basic_parameters": basic}}})
    began = replace(config, origins={**config.origins, TRUNCATION: Origin("run", "resolved.yaml")})
    assert kept_defaults(began) == kept


@pytest.mark.edge("BU3")
def test_it_is_the_same_run_to_the_bit(old: Path) -> None:
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(old / "second", filter="data")
    train("run.yaml", None, "--steps", 3)
    kept = tensors(old / "run")
    (old / "run").rename(old / "first")
    (old / "second" / "run").rename(old / "run")
    words = ("lr_decay_style=constant", "lr_warmup_ratio=0", "train_iters=10000", "save_total_limit=null")
    train("run.yaml", None, "--steps", 3, *(f"training.{word}" for word in words))
    assert newest(old / "run") == 6
    assert differing(kept, tensors(old / "run")) == []


@pytest.mark.edge("BU3")
def test_check_sees_the_run_as_training_does(old: Path) -> None:
    """A profile of step 9,999 is within the old run's 10,000 steps, and not in one epoch of 8 rows."""
    words = (
        "tools.memory_profile.enable=true",
        "tools.memory_profile.start_step=9990",
        "tools.memory_profile.end_step=9999",
    )
    assert "memory_profile" not in mm("check", "run.yaml", *words).out
    (old / "run").rename(old / "elsewhere")
    assert "memory_profile" in mm("check", "run.yaml", *words).out


@pytest.mark.edge("BU3")
def test_what_is_set_now_wins_over_how_the_run_began(old: Path) -> None:
    out = train("run.yaml", None, "--steps", 1, "training.lr_decay_style=linear", "training.train_iters=8")
    assert lines(old / "run" / "metrics.jsonl")[-1]["lr"] == pytest.approx(0.01 * (1 - 3 / 8))
    assert "from 0.01 at step 3 to 0.00625 at step 4" in out


@pytest.mark.edge("BU3")
def test_weights_of_another_run_start_a_new_run_with_the_defaults_of_now(old: Path) -> None:
    out = train("run.yaml", "new", "training.load=run", "--weights-only")
    assert newest(old / "new") == 4  # 8 rows, 2 a step
    assert "one epoch" in out and "\nkept " not in out


@pytest.mark.edge("BU3")
def test_a_longer_run_tells_the_jump_of_its_rate(tmp_path: Path) -> None:
    yaml = unset(make_tiny_run(tmp_path), "lr_decay_style", lr_warmup_ratio=0.0, train_iters=4)
    train(yaml, tmp_path / "save")
    out = train(yaml, tmp_path / "save", "training.train_iters=8")
    last, first = (1e-3 * (1 + math.cos(math.pi * share)) / 2 for share in (3 / 4, 4 / 8))
    assert f"from {last:.3g} at step 4 to {first:.3g} at step 5" in out
    assert "8 steps long, no longer 4" in out


def test_rates_that_round_alike_are_not_told_as_a_jump() -> None:
    """A thousand steps into a long run the rate stays. What differs is where it goes from there."""
    training = TrainingArguments(lr=1e-3, lr_decay_style="cosine", lr_warmup_ratio=0.0)
    context = {"config": {"training": training.to_dict()}, TOTAL_STEPS: 10**6}
    line = jump_of_rate(context, 1000, build_lr_schedule(training, 2 * 10**6), training)
    new, old = (1e-3 * (1 + math.cos(math.pi * 1000 / total)) / 2 for total in (2 * 10**6, 10**6))
    found = re.fullmatch(r".* long, no longer 1,000,000: the learning rate of step 1001 is (\S+), not (\S+)", line)
    assert found is not None, line
    assert found[1] != found[2]
    assert [float(each) for each in found.groups()] == pytest.approx([new, old], rel=1e-6)
    shortened = jump_of_rate(context, 1000, build_lr_schedule(training, 2000), training)
    assert "jumps from 0.001 at step 1000 to 0.0005 at step 1001" in shortened


@pytest.mark.edge("BU3")
def test_launch_scripts_keep_the_defaults_of_megatron(tmp_path: Path) -> None:
    words = ["--micro-batch-size", "1", "--train-iters", "100", "--lr", "1e-4"]
    training = from_flags(words, {}).arguments.training
    assert (training.lr_decay_style, training.lr_warmup_ratio, training.save_total_limit) == ("linear", 0.0, None)
    words = ["--micro-batch-size", "1", "--max_train_steps", "100", "--learning_rate", "1e-4"]
    training = from_flags(words, {}).arguments.training
    assert (training.lr_decay_style, training.lr_warmup_ratio, training.save_total_limit) == ("constant", 0.0, None)


@pytest.mark.edge("BU3")
def test_the_help_of_each_key_names_its_default() -> None:
    for key, word in {
        "lr_decay_style": "cosine",
        "lr_warmup_ratio": "3 %",
        "train_iters": "one epoch",
        "save_total_limit": "newest two",
    }.items():
        said = mm("schema", f"training.{key}")
        assert word in " ".join(said.out.split()), key


def test_defaults_are_read_back_from_what_was_written() -> None:
    tree = {"a": {"b": 1, 'odd: "name"': 2, "text": "x  # default"}, "c": [1]}
    origins = {
        "a.b": Origin("default"), 'a.odd: "name"': Origin("run", "resolved.yaml"), "a.text": Origin("yaml", "f:1:2"),
        "c": Origin("card"),
    }  # fmt: skip
    assert read_defaults(dump_with_origins(tree, origins)) == {"a.b", 'a.odd: "name"', "c"}
