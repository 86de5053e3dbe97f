"""`mm evaluate --generated` of clips: motion and consistency by VBench's definitions, likeness frame by frame, LPIPS as
its authors' formula has it, RAFT as torchvision runs it, VBench by its own package."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.core.errors import CheckpointError, UsageError
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from mindspeed_mm.tasks.evaluate.generated import motion
from mindspeed_mm.tasks.evaluate.generated.pairs import Lpips
from mindspeed_mm.tasks.evaluate.generated.samples import frames_of
from tests.helpers.runs import mm
from tests.helpers.tiny_clip import make_tiny_clip
from tests.helpers.tiny_media import write_video
from tests.tasks.test_evaluate_generated import make_pictures


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips of eight frames and two scenes, with their prompts."""
    folder = tmp_path_factory.mktemp("clips")
    entries = []
    for number, grays in enumerate([range(0, 160, 20), [90] * 8, [0, 200] * 4]):
        write_video(folder / f"{number}.mp4", list(grays))
        entries.append(json.dumps({"prompt": f"a red box {number}", "file": f"{number}.mp4"}) + "\n")
    (folder / "samples.jsonl").write_text("".join(entries))
    return folder


def measured(*words: object) -> dict[str, Any]:
    said = mm("evaluate", *words, "--json")
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


# --- motion -----------------------------------------------------------------------------------------------------------


def test_flickering_and_smoothness_by_hand() -> None:
    still = np.full((4, 8, 8, 3), 77, np.uint8)
    assert motion.temporal_flickering(still) == motion.linear_smoothness(still) == 1
    ramp = np.arange(0, 50, 10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    assert motion.temporal_flickering(ramp) == pytest.approx((255 - 10) / 255)  # VBench: (255 - mean of MAEs) / 255
    assert motion.linear_smoothness(ramp) == 1
    flicker = np.array([0, 255, 0], np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    assert motion.temporal_flickering(flicker) == motion.linear_smoothness(flicker) == 0
    with pytest.raises(ValueError, match="one frame"):
        motion.temporal_flickering(still[:1])
    with pytest.raises(ValueError, match="fewer than three"):
        motion.linear_smoothness(still[:2])


def test_consistency_is_vbenchs() -> None:
    """`subject_consistency` of vbench 0.1.5, frame by frame."""
    torch.manual_seed(3)
    clips = [torch.randn(frames, 5) + 0.5 for frames in (4, 9)]
    total, count = 0.0, 0
    for features in clips:
        for t in range(1, len(features)):
            to_previous = max(0.0, F.cosine_similarity(features[t], features[t - 1], dim=0).item())
            to_first = max(0.0, F.cosine_similarity(features[t], features[0], dim=0).item())
            total, count = total + (to_previous + to_first) / 2, count + 1
    found = motion.consistency_of(clips)
    assert found["value"] == pytest.approx(total / count, abs=1e-6) and found["n"] == 2


@pytest.mark.parametrize(
    ("speeds", "moves"), [([7.0] * 15, True), ([5.9] * 15, False), ([7.0] * 3 + [0.0] * 12, False),
                          ([7.0] * 4 + [0.0] * 11, True), ([], False), ([0.0], True)],
)  # fmt: skip
def test_a_dynamic_clip_is_as_vbench_has_it(speeds: list[float], moves: bool) -> None:
    """Of sixteen frames four move by more than 6 pixels at a side of 256; VBench calls two frames dynamic always."""
    assert motion.moves(speeds, 256, 480) is moves


@pytest.mark.slow
def test_flow_is_torchvisions(tmp_path: Path) -> None:
    from torchvision.models.optical_flow import raft_large

    torch.manual_seed(0)
    model = raft_large(weights=None).eval()
    torch.save(model.state_dict(), tmp_path / "raft.pth")
    frames = torch.rand(2, 3, 132, 128) * 255
    (speed,) = motion.Flow(tmp_path / "raft.pth").speeds(frames)
    with torch.no_grad():
        a, b = (F.pad(frame[None], (0, 0, 2, 2), mode="replicate") / 255 * 2 - 1 for frame in frames)
        flow = model(a, b, num_flow_updates=20)[-1][0].numpy()
    speeds = np.sort(np.sqrt(flow[0] ** 2 + flow[1] ** 2).ravel())[::-1]
    assert speed == pytest.approx(speeds[: int(136 * 128 * 0.05)].mean(), rel=1e-4)
    torch.save({"weight": frames}, tmp_path / "other.pth")
    with pytest.raises(UsageError, match="no weights of torchvision's raft_large"):
        motion.Flow(tmp_path / "other.pth")


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_alexnet(tmp_path_factory.mktemp("trunk") / "alexnet.pth")


def save_alexnet(path: Path) -> Path:
    """AlexNet as torchvision publishes it, without training."""
    ensure_torchvision()
    from torchvision.models import alexnet

    torch.manual_seed(1)
    torch.save(alexnet(weights=None).state_dict(), path)
    return path


def by_formula(a: torch.Tensor, b: torch.Tensor, trunk: Path) -> float:
    """Equation 1 of the paper: distances of features of unit length, weighted by channel, mean over places, summed over
    five layers of AlexNet; pictures from -1 to 1, scaled as version 0.1 does."""
    from torchvision.models import alexnet

    spec = importlib.util.find_spec("lpips")
    assert spec is not None and spec.origin is not None
    weights = torch.load(Path(spec.origin).parent / "weights/v0.1/alex.pth", map_location="cpu", weights_only=True)
    model = alexnet(weights=None).eval()
    model.load_state_dict(torch.load(trunk, weights_only=True))
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
    x, y = (((2 * picture[None] - 1) - shift) / scale for picture in (a, b))
    total, layer = 0.0, 0
    for place, module in enumerate(model.features[:12]):
        x, y = module(x), module(y)
        if place in (1, 4, 7, 9, 11):
            unit_x, unit_y = (z / (z.square().sum(1, keepdim=True).sqrt() + 1e-10) for z in (x, y))
            channels = weights[f"lin{layer}.model.1.weight"].view(1, -1, 1, 1)
            total += float(((unit_x - unit_y).square() * channels).sum(1).mean())
            layer += 1
    return total


@torch.no_grad()
def test_lpips_is_its_authors_formula(trunk: Path, tmp_path: Path) -> None:
    a, b = torch.rand(2, 3, 64, 72, generator=torch.Generator().manual_seed(0))
    lpips = Lpips(trunk)
    assert lpips.network == "alex"
    assert lpips.distance(a[None], b[None]) == pytest.approx(by_formula(a, b, trunk), rel=1e-4)
    assert lpips.distance(a[None], a[None]) == 0
    with pytest.raises(ValueError, match="12×12 pixels, too few for LPIPS"):
        lpips.distance(a[None, :, :12, :12], b[None, :, :12, :12])
    torch.save({"weight": a}, tmp_path / "other.pth")
    with pytest.raises(UsageError, match="holds none of torchvision's"):
        Lpips(tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="No such file"):
        Lpips(tmp_path / "nowhere.pth")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "network"), [("vgg16", "vgg"), ("squeezenet1_1", "squeeze")])
def test_other_networks_are_known_by_their_weights(name: str, network: str, tmp_path: Path) -> None:
    from torchvision import models

    torch.save(getattr(models, name)(weights=None).state_dict(), tmp_path / "trunk.pth")
    lpips = Lpips(tmp_path / "trunk.pth")
    a, b = torch.rand(2, 1, 3, 64, 64)
    assert lpips.network == network and lpips.distance(a, b) > 0


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_folder_of_clips_is_measured(clips: Path, trunk: Path, tmp_path: Path) -> None:
    clip = make_tiny_clip(tmp_path / "clip")
    real = tmp_path / "real"
    real.mkdir()
    write_video(real / "0.mp4", [10] * 8, height=32, width=48)
    words = ["--clip", clip, "--reference", real, "--lpips", trunk, "--out", tmp_path / "out"]
    found = measured(clips, "--generated", *words)
    assert found["counted"] == {"pictures": 0, "clips": 3, "real": 1, "pairs": 1}
    measures = found["measures"]
    frames = [frames_of(clips / f"{number}.mp4").astype(float) for number in range(3)]
    flickering = [1 - np.abs(np.diff(each, axis=0)).mean() / 255 for each in frames]
    assert measures["temporal flickering"]["value"] == pytest.approx(np.mean(flickering))
    assert measures["temporal flickering"]["n"] == 3
    reference = frames_of(real / "0.mp4").astype(float)
    errors = ((frames[0] - reference) ** 2).mean(axis=(1, 2, 3)) / 255**2
    assert measures["PSNR"]["value"] == pytest.approx(np.mean(10 * np.log10(1 / errors)), rel=1e-6)
    assert {"CLIP score", "consistency of CLIP features", "Fréchet distance of CLIP features"} <= measures.keys()
    assert 0.9 < measures["consistency of CLIP features"]["value"] <= 1.0
    assert measures["linear smoothness"]["value"] < 1 and measures["LPIPS (alex)"]["value"] > 0


def test_clips_alone_are_measured(clips: Path, tmp_path: Path) -> None:
    assert measured(clips, "--generated", "--out", tmp_path)["measures"].keys() == {
        "temporal flickering",
        "linear smoothness",
    }


def make_tiny_dino(folder: Path) -> tuple[Any, Any]:
    """A vision transformer and its image processor, as transformers saves them."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    shown = ViTImageProcessor(size={"height": 16, "width": 16})
    model.save_pretrained(folder)
    shown.save_pretrained(folder)
    return model, shown


def test_consistency_of_dino_features(clips: Path, tmp_path: Path) -> None:
    model, shown = make_tiny_dino(tmp_path / "dino")
    found = measured(clips, "--generated", "--dino", tmp_path / "dino", "--batch-size", 3, "--out", tmp_path / "out")
    features = []
    for number in range(3):
        inputs = shown(list(frames_of(clips / f"{number}.mp4")), return_tensors="pt")
        with torch.no_grad():
            features.append(model(**inputs).last_hidden_state[:, 0])
    expected = motion.consistency_of(features)["value"]
    assert found["measures"]["consistency of DINO features"]["value"] == pytest.approx(expected, abs=1e-5)


VBENCH = """
import json, os, pathlib

class VBench:
    def __init__(self, device, full_info, out):
        self.out = out
        assert os.path.basename(full_info) == "VBench_full_info.json"

    def evaluate(self, videos_path, name, prompt_list, dimension_list, mode, **options):
        assert mode == "custom_input" and sorted(os.listdir(videos_path)) == sorted(prompt_list)
        clips = [os.path.join(videos_path, file) for file in sorted(prompt_list)]
        by_clip = [{"video_path": clip, "video_results": len(prompt_list[os.path.basename(clip)])} for clip in clips]
        if dimension_list[0] == "human_action":
            raise RuntimeError("no weights")
        results = {dimension: [0.25, by_clip] for dimension in dimension_list}
        pathlib.Path(self.out, name + "_eval_results.json").write_text(json.dumps(results))
"""


def install_vbench(environment: Path) -> Path:
    """An environment with a stand-in for VBench, of the interface of release 0.1.5; returns its Python."""
    site = environment / "site"
    (site / "vbench").mkdir(parents=True)
    (site / "vbench" / "__init__.py").write_text(VBENCH)
    (site / "torch.py").write_text("device = str\nclass cuda:\n    is_available = staticmethod(lambda: False)\n")
    python = environment / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def vbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_vbench(tmp_path_factory.mktemp("vbench"))


def test_vbench_is_asked(clips: Path, vbench: Path, tmp_path: Path) -> None:
    asked = [clips, "--generated", "--vbench-python", vbench, "--out", tmp_path]
    found = measured(*asked, "--vbench", "subject_consistency,overall_consistency")
    score = found["measures"]["VBench overall_consistency"]
    assert (score["value"], score["n"], score["low"]) == (0.25, 3, len("a red box 0")) and "vbench" in found
    for dimension, message in (
        ("human_action", "VBench ended with exit code 1 and has written no results"),
        ("color", "'color' is no dimension of any clips"),
    ):
        said = mm("evaluate", *asked, "--vbench", dimension)
        assert said.code in (2, 3) and message in said.err, said.err
    (tmp_path / "plain").mkdir()
    write_video(tmp_path / "plain" / "a.mp4", [1, 2, 3])
    said = mm("evaluate", tmp_path / "plain", *asked[1:], "--vbench", "temporal_style")
    assert said.code == 2 and "that of 'a' is not known" in said.err
    said = mm("evaluate", clips, "--generated", "--vbench", "temporal_style", "--vbench-python", sys.executable)
    assert said.code == 3 and "VBench is not installed" in said.err


def test_what_cannot_be_measured_of_clips_is_said(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    write_video(tmp_path / "short" / "a.mp4", [1, 2])
    write_video(tmp_path / "0.mp4", [1] * 5)
    pictures = make_pictures(tmp_path / "pictures", 1, 1)
    for words, message in (
        ([tmp_path / "short", "--generated"], "fewer than three frames"),
        ([clips, "--generated", "--reference", tmp_path], "8 frames of 48×32 pixels, and"),
        (
            [clips, "--generated", "--reference", tmp_path / "short"],
            "--reference  none of its files has the name of a generated one",
        ),
        (
            [clips, "--generated", "--lpips", tmp_path / "x.pth"],
            "needs generated and real pictures of the same names, but there are none",
        ),
        ([clips, "--generated", "--dino", clips], "holds no vision transformer of DINO's kind"),
        ([clips, "--generated", "--vbench-python", "python"], "no dimensions are given"),
        (
            [pictures, "--generated", "--vbench", "temporal_flickering"],
            "needs video clips, but the samples contain none",
        ),
    ):
        said = mm("evaluate", *words, "--out", tmp_path / "out")
        assert said.code in (2, 4) and message in said.err, said.err
