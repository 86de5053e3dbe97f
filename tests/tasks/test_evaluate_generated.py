"""`mm evaluate --generated`: measures equal to those of torchmetrics, scipy and piq, and to transformers' own CLIP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.tasks.evaluate.generated import evaluate
from mindspeed_mm.tasks.evaluate.generated.measures import frechet_distance, kernel_distance, psnr, ssim
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.helpers.runs import mm
from tests.helpers.tiny_clip import make_tiny_clip


def test_pairs_are_measured_as_by_torchmetrics_and_piq() -> None:
    """torchmetrics 1.9.0 says 27.60709 dB; piq 0.8.0, in fp32, an SSIM of 0.993781. torchmetrics' SSIM has windows that
    reach over the border, into the mirrored picture: 0.991668."""
    x = (torch.arange(1024) / 1023).reshape(1, 32, 32).expand(3, 32, 32)
    y = 0.9 * x + 0.02
    assert psnr(x, y) == pytest.approx(27.60709, abs=1e-5)
    assert ssim(x, y) == pytest.approx(0.993781, abs=1e-5)  # fp32 costs 4e-6
    mirrored = [F.pad(each.double(), (5, 5, 5, 5), mode="reflect") for each in (x, y)]
    assert ssim(*mirrored) == pytest.approx(0.991668, abs=1e-5)
    assert (psnr(x, x), ssim(x, x)) == (float("inf"), pytest.approx(1.0))
    with pytest.raises(ValueError, match="smaller than a window"):
        ssim(x[:, :5], y[:, :5])


def test_distributions_are_measured_as_by_scipy_and_torchmetrics() -> None:
    draw = np.random.default_rng(0)
    a = torch.from_numpy(draw.normal(size=(200, 8)))
    b = torch.from_numpy(draw.normal(size=(200, 8)) * 1.5 + 0.5)
    assert frechet_distance(a, b) == pytest.approx(4.0589923, abs=1e-7)
    assert kernel_distance(a, b) == pytest.approx(1.9773081, abs=1e-7)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match="two rows"):
        frechet_distance(a[:1], b)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_clip(tmp_path_factory.mktemp("clip"))


def make_pictures(folder: Path, count: int, seed: int) -> Path:
    """`0.png` … of 32 × 32 random pixels, and the manifest of their prompts."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    entries = []
    for number in range(count):
        name = f"{number}.png"
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / name)
        entries.append(json.dumps({"prompt": f"a red box {number}", "file": name}) + "\n")
    (folder / "samples.jsonl").write_text("".join(entries))
    return folder


def test_a_folder_is_measured(clip: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor, CLIPModel

    own, real = make_pictures(tmp_path / "own", 4, 1), make_pictures(tmp_path / "real", 6, 2)
    said = mm("evaluate", own, "--generated", "--reference", real, "--clip", clip, "--out", tmp_path / "out", "--json")
    assert said.code == 0, said
    result = json.loads(said.out)
    assert result == json.loads((tmp_path / "out" / evaluate.RESULTS).read_text())
    assert result["counted"] == {"pictures": 4, "clips": 0, "real": 6, "pairs": 4}
    names = ["PSNR", "SSIM", "CLIP score", "Fréchet distance of CLIP features", "kernel distance of CLIP features"]
    assert list(result["measures"]) == names

    model, processor = CLIPModel.from_pretrained(clip).eval(), AutoProcessor.from_pretrained(clip, use_fast=False)
    scores = []
    for number in range(4):  # one at a time, by the model's own similarity
        picture = Image.open(own / f"{number}.png")
        inputs = processor(images=picture, text=f"a red box {number}", return_tensors="pt")
        with torch.no_grad():
            similarity = model(**inputs).logits_per_image / model.logit_scale.exp()
        scores.append(max(0.0, 100 * float(similarity)))
    assert result["measures"]["CLIP score"]["value"] == pytest.approx(np.mean(scores), abs=1e-3)
    assert (
        evaluate.run(EvaluateRequest(str(own), reference=real, out=tmp_path / "out")).facts["counted"]["pairs"] == 4
    )  # its own


def test_prompts_of_what_mm_infer_drew_are_found(clip: Path, tmp_path: Path) -> None:
    own, real = make_pictures(tmp_path / "own", 2, 1), make_pictures(tmp_path / "real", 2, 2)
    request = EvaluateRequest(str(own), reference=real, clip=clip, out=tmp_path / "out")
    score = evaluate.run(request).measures["CLIP score"]
    (own / "samples.jsonl").rename(own / "manifest.jsonl")
    assert evaluate.run(request).measures["CLIP score"] == score
    (own / "manifest.jsonl").unlink()
    assert evaluate.run(request).lines()[-1].startswith("CLIP score: none, no samples.jsonl or manifest.jsonl")


def test_what_cannot_be_measured_is_said(clip: Path, tmp_path: Path) -> None:
    own = make_pictures(tmp_path / "own", 2, 1)
    (tmp_path / "empty").mkdir()
    small = make_pictures(tmp_path / "small", 1, 1)
    Image.new("RGB", (40, 32)).save(small / "0.png")
    for words, message in (
        ([own, "--generated"], "nothing to measure the pictures by"),
        ([tmp_path / "empty", "--generated", "--reference", own], "not a folder with pictures"),
        ([own, "--generated", "--reference", tmp_path / "empty"], "--reference"),
        ([own, "--generated", "--clip", own], "holds no CLIP model"),
        ([own, "--reference", own], "Add --generated"),
        ([own, "--generated", "--loss"], "--loss"),
        ([own, "--generated", "--reference", small], "has 32×32 pixels"),
    ):
        said = mm("evaluate", *words, "--out", tmp_path / "out")
        assert said.code in (2, 4), said
        assert message in said.err, said


@pytest.mark.parametrize(("place", "key"), [("own", "MODEL"), ("real", "--reference")])
def test_of_two_samples_of_one_name_none_is_passed_over(place: str, key: str, tmp_path: Path) -> None:
    own, real = make_pictures(tmp_path / "own", 2, 1), make_pictures(tmp_path / "real", 2, 2)
    Image.open(tmp_path / place / "0.png").save(tmp_path / place / "0.webp")
    with pytest.raises(UsageError, match=r"holds 0\.png and 0\.webp") as caught:
        evaluate.run(EvaluateRequest(str(own), reference=real, out=tmp_path / "out"))
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (str(tmp_path / place), key)


def test_given_features_are_compared_as_by_scipy_and_torchmetrics(tmp_path: Path) -> None:
    own, draw = make_pictures(tmp_path / "own", 200, 1), np.random.default_rng(0)
    a, b = draw.normal(size=(200, 8)), draw.normal(size=(200, 8)) * 1.5 + 0.5
    np.save(tmp_path / "own.npy", a)
    np.savez(tmp_path / "real.npz", features=b)
    words = ["evaluate", own, "--generated", "--features", tmp_path / "own.npy", "--out", tmp_path / "out", "--json"]
    for _ in range(2):  # its own results are replaced
        said = mm(*words, "--reference-features", tmp_path / "real.npz")
        assert said.code == 0, said.err
    values = [one["value"] for one in json.loads(said.out)["measures"].values()]
    assert values == pytest.approx([4.0589923, 1.9773081], abs=1e-7)
    np.save(tmp_path / "narrow.npy", b[:, :3])
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    np.save(tmp_path / "flat.npy", b[0])
    for name, message in (("narrow", "of width 3"), ("objects", "not a file of one array"), ("flat", "an array of 8")):
        said = mm(*words, "--reference-features", tmp_path / f"{name}.npy")
        assert said.code == 4 and message in said.err, said.err
    assert mm(*words).code == 2
    np.save(tmp_path / "own.npy", a[:9])
    said = mm(*words, "--reference-features", tmp_path / "real.npz")
    assert said.code == 4 and "9 pictures, and there are 200" in said.err


def test_identical_pairs_are_counted_and_the_others_have_a_mean(tmp_path: Path) -> None:
    own, real = make_pictures(tmp_path / "own", 3, 1), make_pictures(tmp_path / "real", 3, 2)
    words = ["evaluate", own, "--generated", "--reference", real, "--out", tmp_path / "out"]
    values = []
    for number in range(3):
        a, b = (np.asarray(Image.open(folder / f"{number}.png")) / 255 for folder in (own, real))
        values.append(-10 * np.log10(np.square(a - b).mean()))
    (real / "0.png").write_bytes((own / "0.png").read_bytes())
    said = mm(*words, "--json")
    found = json.loads(said.out)["measures"]["PSNR"]
    assert found["value"] == pytest.approx(np.mean(values[1:]), rel=1e-6)
    assert (found["n"], found["identical"]) == (2, 1)
    assert "1 identical pair left out" in mm(*words).out
    for number in (1, 2):
        (real / f"{number}.png").write_bytes((own / f"{number}.png").read_bytes())
    assert "PSNR: infinite; 3 identical pairs left out" in mm(*words).out
    assert json.loads(mm(*words, "--json").out)["measures"]["PSNR"] == {"value": None, "n": 0, "identical": 3}
