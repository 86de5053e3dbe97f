"""Examples of Megatron-style launches: sizes are those of the releases, plans those of the devices that they name, and
each starts a run on a small folder of its family, with paths and sizes replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.provider.generator_json import OPENSORAPLAN_SIZES
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.provider.model_sizes import LANGUAGE_SIZES, text_config
from mindspeed_mm.tasks.config import run_flags
from tests.helpers.released_examples import as_trained
from tests.helpers.released_layouts import release
from tests.helpers.released_rows import ROWS, write_rows
from tests.helpers.runs import losses
from tests.helpers.tiny_deepseek_ocr import make_tiny_deepseek_ocr
from tests.helpers.tiny_deepseek_vl2 import make_tiny_deepseek_vl2
from tests.helpers.tiny_generator_run import make_clips
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_opensoraplan import make_tiny_opensoraplan, make_tiny_opensoraplan_1_5
from tests.helpers.tiny_stepvideo import make_tiny_stepvideo
from tests.helpers.tiny_video_families import (
    make_tiny_cogvideox,
    make_tiny_hunyuan_video,
    make_tiny_hunyuan_video_1_5,
    make_tiny_wan2_2,
)

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    path.parent.name: path for path in sorted((ROOT / "examples").glob("*/*_flags.sh")) if "extract" not in path.name
}
SEES = ("image",)
FRAMES = 17
"""Of clips: what all families can encode."""


@dataclass(frozen=True)
class Family:
    """What an example trains.

    Args:
        size: Of `tests/released`; empty where nothing is recorded.
        devices: That its first lines name.
        make: Writes a small folder.
        kinds: Media in its rows.
    """

    size: str
    devices: int
    make: Callable[[Path], object]
    kinds: tuple[str, ...] = SEES


def make_small_cogvideox(folder: Path) -> None:
    """CogVideoX 1.5."""
    make_tiny_cogvideox(folder, patch_size_t=2, patch_bias=False)


def _row(name: str, devices: int, size: str = "") -> Family:
    row = ROWS[name]
    return Family(size or row.size, devices, row.write, row.kinds)


FAMILIES = {
    "qwen2vl": _row("qwen2vl", 8, "qwen2-vl-7b"),
    "qwen2.5vl": _row("qwen2_5vl", 8, "qwen2.5-vl-7b"),
    "qwen3vl": _row("qwen3vl", 8, "qwen3-vl-8b"),
    "internvl2.5": _row("internvl", 8, "internvl2.5-4b"),
    "internvl3": _row("internvl", 8),
    "internvl3.5": _row("internvl", 16, "internvl3.5-30b-a3b"),
    "glm4.1v": _row("glm4v", 8),
    "glm4.5v": _row("glm4v_moe", 64),
    "deepseekvl2": Family("deepseek-vl2-base", 16, make_tiny_deepseek_vl2),
    "deepseekocr": Family("deepseek-ocr", 8, make_tiny_deepseek_ocr),
    "deepseekocr2": Family("", 8, ROWS["deepseek_ocr2"].write),
    "ming": Family("ming-lite-omni-1.5", 8, ROWS["ming"].write, ROWS["ming"].kinds),
    "qwen2.5omni": _row("qwen2_5omni", 8),
    "qwen3omni": _row("qwen3omni", 16),
    "whisper": _row("whisper", 8),
    "wan2.1": Family("", 8, make_tiny_wan, ()),
    "wan2.2": Family("", 8, make_tiny_wan2_2, ()),
    "hunyuanvideo": Family("", 8, make_tiny_hunyuan_video, ()),
    "hunyuanvideo_1.5": Family("", 8, make_tiny_hunyuan_video_1_5, ()),
    "cogvideox": Family("", 8, make_small_cogvideox, ()),
    "opensoraplan1.3": Family("", 8, make_tiny_opensoraplan, ()),
    "opensoraplan1.5": Family("", 8, make_tiny_opensoraplan_1_5, ()),
    "stepvideo": Family("", 64, make_tiny_stepvideo, ()),
}
ALONE = ("whisper", "deepseekocr", "deepseekocr2")
"""Language models without model.json."""
GENERATORS = tuple(name for name, family in FAMILIES.items() if not family.kinds and name not in ALONE)
DEFAULT = ("qwen2.5vl", "wan2.1")
ONE = {"NPROC": "1", "NNODES": "1", "TP": "1", "PP": "1", "CP": "1", "EP": "1", "MBS": "1", "GRAD_ACC_STEP": "2"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's examples, without models and data."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "mindspeed_mm").mkdir()
    shutil.copytree(ROOT / "mindspeed_mm" / "tools", tmp_path / "mindspeed_mm" / "tools")
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", *ONE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def files(name: str, kind: str) -> list[Path]:
    """The JSON files of an example, as paths in the checkout."""
    return [path.relative_to(ROOT) for path in SCRIPTS[name].parent.glob(f"{kind}_*.json")]


def folder_of(name: str) -> Path:
    """The model's folder that an example names."""
    launch = read_launch([str(SCRIPTS[name])], {})
    texts = [SCRIPTS[name].read_text(), *(path.read_text() for path in SCRIPTS[name].parent.glob("*_*.json"))]
    assert launch.entry
    found = [word.strip('",') for text in texts for word in text.split() if word.strip('",').startswith("models/")]
    return Path(*Path(found[0]).parts[:2])


def test_every_example_has_its_case() -> None:
    assert set(SCRIPTS) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_example_fits_its_release(here: Path, name: str) -> None:
    """Sizes are those of the released folder, and the plan those of the devices."""
    family = FAMILIES[name]
    if family.size:
        folder_of(name).mkdir(parents=True)
        config = as_trained(release(family.size).config)
        (folder_of(name) / "config.json").write_text(json.dumps(config))
    translated = run_flags([str(SCRIPTS[name].relative_to(ROOT))], {})
    arguments = translated.arguments
    assert arguments.model.model_name_or_path == str(folder_of(name))
    words = SCRIPTS[name].read_text().split("\n")[1]
    assert f"{family.devices} devices" in words
    sizes = resolve_parallel_sizes(arguments.parallel, family.devices)
    assert sizes.world == family.devices
    assert not any("not known" in note or "has no effect" in note for note in translated.notes), translated.notes
    if name not in (*GENERATORS, *ALONE):
        assert arguments.model.freeze


def resize(name: str) -> None:
    """The small folder's sizes in place of the released ones, in the example's own files."""
    folder = folder_of(name)
    if name in GENERATORS:
        sizes = json.loads((folder / "transformer" / "config.json").read_text())
        (path,) = files(name, "model")
        model = json.loads(path.read_text())
        if model["predictor"]["model_id"] == "wandit":
            model["predictor"] |= {"num_layers": sizes["num_layers"], "num_heads": sizes["num_attention_heads"]}
            model["predictor"] |= {"hidden_size": sizes["num_attention_heads"] * sizes["attention_head_dim"]}
            model["predictor"] |= {"ffn_dim": sizes["ffn_dim"]}
        for key, (theirs,) in OPENSORAPLAN_SIZES.items():
            if name.startswith("opensoraplan") and key in model["predictor"]:
                model["predictor"][key] = sizes[theirs]
        if model["predictor"]["model_id"] == "stepvideodit":
            model["predictor"] |= {"num_layers": sizes["num_layers"], "num_heads": sizes["num_attention_heads"]}
            model["predictor"] |= {"head_dim": sizes["attention_head_dim"], "channel_split": [4, 2, 2]}
            for key in ("in_channels", "out_channels", "caption_channels"):
                model["predictor"][key] = sizes[key]
        for part in (model["ae"], *([each] if isinstance(each := model["text_encoder"], dict) else each)):
            part["dtype"] = "fp32"
        path.write_text(json.dumps(model))
        (media,) = files(name, "media")
        content = json.loads(media.read_text())
        content["dataset_param"]["preprocess_parameters"] = {"num_frames": FRAMES, "max_height": 32, "max_width": 32}
        media.write_text(json.dumps(content))
        return
    config = json.loads((folder / "config.json").read_text())
    for path in files(name, "model"):
        model = json.loads(path.read_text())
        if "text_decoder" in model and "init_from_hf_path" not in model:
            small = text_config(config)
            for key, theirs in LANGUAGE_SIZES.items():
                value = next((small[other] for other in theirs if other in small), None)
                if key in model["text_decoder"] and value is not None:
                    model["text_decoder"][key] = value
            model["image_encoder"]["vision_encoder"] = {"freeze": True}
        path.write_text(json.dumps(model))


def run(monkeypatch: pytest.MonkeyPatch, module: Any, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["entry.py", *words])
    module.main()


@pytest.mark.parametrize(
    "name",
    [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_an_example_trains(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    family, folder = FAMILIES[name], folder_of(name)
    folder.parent.mkdir()
    family.make(folder)
    if name in GENERATORS:
        make_clips(Path("data"), frames=FRAMES, size=32)
        Path("data/rows.jsonl").rename("data/train.jsonl")
    else:
        write_rows(Path("data"), family.kinds).rename("data/train.jsonl")
    resize(name)
    more = ["--train-iters", "2", "--num-workers", "0"]
    more += [] if name in GENERATORS else ["--seq-length", "4096" if name != "whisper" else "100"]
    for config in Path("examples", name).glob("fsdp2_config_*.yaml"):
        config.write_text(config.read_text().replace("expert_parallel_size: 8", "expert_parallel_size: 1"))
    if name in GENERATORS:
        (script,) = Path("examples", name).glob("extract_*_flags.sh")
        launch = read_launch([str(script)], {"NPROC": "1"})
        entry = import_module(f"mindspeed_mm.tools.feature_extraction.{Path(launch.entry).stem}")
        run(monkeypatch, entry, launch.flags)
    launch = read_launch([f"examples/{name}/{SCRIPTS[name].name}", *more], ONE)
    words = list(launch.flags)
    if name in ("deepseekocr", "deepseekocr2"):
        words.remove("--bf16")  # torch computes weight gradients of its small convolutions wrong on CPUs
    run(monkeypatch, import_module(f"mindspeed_mm.{launch.entry.removesuffix('.py')}"), words)
    (save,) = Path("runs").iterdir()
    assert list(losses(save)) == [1, 2]


STUB = '#!/bin/sh\necho "$@"\n'


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shell_starts_what_is_read_here(here: Path, name: str) -> None:
    """The words that the script hands to torchrun are those that are worked out without a shell."""
    stub = here / "bin" / "torchrun"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    script = f"examples/{name}/{SCRIPTS[name].name}"
    environment = {"PATH": f"{stub.parent}{os.pathsep}/usr/bin:/bin", "NODE_RANK": "0"}
    done = subprocess.run(
        ["bash", script, "--lr", "5e-6"], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    words = done.stdout.split()
    assert read_launch(words, {}) == read_launch([script, "--lr", "5e-6"], {})
    assert SCRIPTS[name].stat().st_mode & 0o111 and (ROOT / read_launch(words, {}).entry).is_file()
