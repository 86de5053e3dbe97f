"""`mm train` ends with a summary: last and lowest losses, the time, where the run lies, the next commands."""

from __future__ import annotations

import importlib
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.cli.main import VERBS
from mindspeed_mm.fsdp.models.diffusion.media_roles import (
    CONTROL_VIDEO,
    FIRST_FRAME,
    FURTHER_SOURCES,
    LAST_FRAME,
    MASK_OF_PICTURE,
    MASK_OF_VIDEO,
    PICTURE_AROUND_MASK,
    REFERENCES,
    SOURCE_PICTURE,
    SOURCE_VIDEO,
    MediaRole,
)
from mindspeed_mm.fsdp.train.generator_family import GeneratorFamily
from mindspeed_mm.fsdp.train.hooks.log import SummaryHook
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_run import make_tiny_run

pytestmark = pytest.mark.edge("U3")


def described(found: list[tuple[int, float]]) -> str:
    (step, last), (best, lowest) = found[-1], min(found, key=lambda pair: pair[1])
    return f"final {last:.4f}" + ("" if step == best else f", lowest {lowest:.4f} at step {best}")


def test_the_last_lines_of_a_run_are_its_summary(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path, training={"val_interval": 2, "train_iters": 4, "lr": 0.3})
    basic = "data.dataset_param.basic_parameters.val_rate=0.25"
    save = tmp_path / "my run"  # of which a shell makes two words
    said = train(yaml, save, basic).splitlines()[-5:]
    texts = [re.sub(r"^\[[^]]*\] ", "", line) for line in said]
    metrics = lines(save / "metrics.jsonl")
    losses = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    validations = [(line["step"], line["val_loss"]) for line in metrics if "val_loss" in line]
    assert re.fullmatch(r"done   step 4 of 4, 00:00:\d\d for this start", texts[0]), texts
    assert texts[1:4] == [
        f"loss   {described(losses)}",
        f"valid  {described(validations)}",
        f"run    {save}, newest checkpoint 4",
    ]
    assert texts[4].startswith("next   mm infer ")
    commands = [shlex.split(command) for command in texts[4].removeprefix("next   ").split("; ")]
    for _, verb, *words in commands:
        assert verb in VERBS and words[0] == str(save)
        importlib.import_module(f"mindspeed_mm.cli.{verb}").command.make_context(verb, words)
    assert mm(*commands[-1][1:]).code == 0 and (save / "report.html").is_file()


@pytest.mark.parametrize(
    ("roles", "media"),
    [
        ((), ""),
        ((SOURCE_PICTURE, *FURTHER_SOURCES), "--image a.png "),
        ((FIRST_FRAME, LAST_FRAME), "--image a.png --last-image a.png "),
        ((PICTURE_AROUND_MASK, MASK_OF_PICTURE), "--image a.png --mask a.png "),
        ((SOURCE_VIDEO,), "--video a.mp4 "),
        ((CONTROL_VIDEO, MASK_OF_VIDEO, *REFERENCES), "--reference a.png "),
    ],
)
def test_a_trial_names_the_media_that_a_prompt_needs(roles: tuple[MediaRole, ...], media: str) -> None:
    family: Any = SimpleNamespace(adapter=SimpleNamespace(task="task", roles={"task": roles}))
    words = GeneratorFamily.trial_options(family, torch.nn.Identity())
    assert words == f"{media}--prompt 'a prompt' --out samples"
    importlib.import_module("mindspeed_mm.cli.infer").command.make_context("infer", ["run", *shlex.split(words)])


def test_a_run_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    said = train(make_tiny_run(tmp_path, training={"train_iters": 1}), None).splitlines()
    assert said[-1].endswith("run    nothing was saved: training.save is not set")


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([3.0, 1.0, 2.0], "loss   final 2.0000, lowest 1.0000 at step 2"),
        ([3.0, 1.0], "loss   final 1.0000"),
        ([math.nan, 2.0, 3.0], "loss   final 3.0000, lowest 2.0000 at step 2"),
        ([math.nan], "loss   final nan"),
    ],
)
def test_a_loss_that_is_no_number_is_never_the_lowest(losses: list[float], told: str) -> None:
    said: list[str] = []
    hook = SummaryHook(said.append, None, "")
    schedule = SimpleNamespace(total_steps=len(losses))
    engine: Any = SimpleNamespace(validated_step=0, iteration=len(losses), schedule=schedule)
    hook.on_train_begin(engine)
    for step, loss in enumerate(losses, 1):
        result: Any = SimpleNamespace(step=step, loss=loss)
        hook.on_step_end(engine, result)
    hook.on_train_end(engine)
    assert said[1] == told
