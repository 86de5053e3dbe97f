"""Examples on several devices: by the memory forecast, a step of a file as it is written fits the devices that it
names. Files with selective recomputation are held to that by tests/examples/test_fast_examples.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.tasks.config import run_flags
from tests.examples.test_small_cards import SHARE
from tests.helpers.needed_memory import write_configuration
from tests.helpers.released_examples import ROOT, Example, examples, full_batch

LINEAR = ("kimi_k3/", "qwen3.5/", "qwen3next/")
"""Beginnings of names that are left out: forecasts of linear attention at their lengths take many minutes."""
WRITTEN = [
    each
    for each in examples()
    if not each.name.startswith(LINEAR) and "mode: selective" not in each.path.read_text(encoding="utf-8")
]
STEPVIDEO = ROOT / "examples" / "stepvideo"


def needed_gib(arguments: Arguments, batch: Batch, devices: int) -> float:
    """GiB of a step on each of so many devices."""
    return forecast(arguments, batch, world_size=devices, device_type="npu").peak / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("example", WRITTEN, ids=lambda example: example.path.stem)
def test_a_full_micro_batch_fits_the_devices_of_the_first_line(example: Example, tmp_path: Path) -> None:
    arguments = example.arguments(tmp_path / "model", "model.train_from_scratch=false")
    batch = full_batch(build_outline(arguments).model, arguments)
    needed = needed_gib(arguments, batch, example.promise.devices)
    print(f"{example.path.stem}: {needed:.1f} of {example.promise.gigabytes} GB on {example.promise.devices} devices")
    assert needed < SHARE * example.promise.gigabytes


def write_stepvideo(folder: Path, *, takes_a_picture: bool) -> None:
    """The configurations of Step-Video, as released."""
    (card,) = (card for card in families() if card.name == "stepvideo")
    write_configuration(card, "stepfun-ai/stepvideo-t2v", folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_additional_conditions": takes_a_picture}))


def clip(frames: int, height: int, width: int) -> Batch:
    """One captioned clip."""
    pixels = torch.empty(1, 3, frames, height, width, device="meta")
    return {"sample_ids": ["a"], "epochs": [0], "fps": [25.0], "captions": ["a"], "pixels": pixels}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_adapters_of_stepvideo_fit_the_devices_of_the_page(task: str, tmp_path: Path) -> None:
    write_stepvideo(tmp_path, takes_a_picture=task == "i2v")
    path = STEPVIDEO / f"stepvideo_{task}_30B_config.yaml"
    arguments = load_with_plugins(path, [f"model.model_name_or_path={tmp_path}", "training.save=null"]).arguments
    size = arguments.data.dataset_param.preprocess_parameters
    assert size.num_frames and size.height and size.width
    page = (STEPVIDEO / "README.md").read_text(encoding="utf-8")
    ((devices, memory),) = re.findall(rf"(?m)^\| `{re.escape(path.name)}`.*\| (\d+) of (\d+) GB \|$", page)
    needed = needed_gib(arguments, clip(size.num_frames, size.height, size.width), int(devices))
    print(f"{path.stem}: {needed:.1f} of {memory} GB on {devices} devices")
    assert needed < SHARE * int(memory)


@pytest.mark.slow
def test_all_weights_of_stepvideo_by_flags_fit_the_devices_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(STEPVIDEO, tmp_path / "examples" / "stepvideo")
    shutil.copytree(ROOT / "mindspeed_mm" / "tools", tmp_path / "mindspeed_mm" / "tools")
    write_stepvideo(tmp_path / "models" / "stepvideo-t2v", takes_a_picture=False)
    monkeypatch.chdir(tmp_path)
    script = Path("examples/stepvideo/pretrain_stepvideo_t2v_30B_flags.sh")
    arguments = run_flags([str(script)], {}).arguments
    media = json.loads((script.parent / "media_30B.json").read_text())["dataset_param"]["preprocess_parameters"]
    ((devices, memory),) = re.findall(r"on the (\d+) devices of \d+ hosts, (\d+) GB each:", script.read_text())
    batch = clip(media["num_frames"], media["max_height"], media["max_width"])
    needed = needed_gib(arguments, batch, int(devices))
    print(f"{script.stem}: {needed:.1f} of {memory} GB on {devices} devices")
    assert needed < SHARE * int(memory)
