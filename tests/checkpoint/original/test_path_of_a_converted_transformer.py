"""The path of a generator that is converted in place: it trains, is loaded by name, is sampled from, and what was
trained becomes a folder of diffusers again."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from mindspeed_mm.cli.mm_convert import run as convert
from tests.helpers.runs import losses, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run

NAMES = "diffusion_pytorch_model.safetensors"


def flags(source: Path, target: Path) -> list[str]:
    return ["--cfg.source_path", str(source), "--cfg.target_path", str(target)]


def test_convert_in_place_train_sample_and_convert_back(tmp_path: Path) -> None:
    yaml = make_tiny_generator_run(tmp_path, "t2v")
    model = tmp_path / "model"
    words = ["training.train_iters=2", "training.save_interval=2"]
    train(yaml, tmp_path / "before", *words)
    drawn = ["--prompt", "a", "--size", "16x16", "--frames", "5", "--steps", "2"]
    assert mm("infer", str(model), *drawn, "--out", str(tmp_path / "drawn")).code == 0

    assert convert(["WanConverter", "hf_to_mm", *flags(model / "transformer", model / "transformer")]) == 0
    assert not list((model / "transformer").glob("*.safetensors"))
    train(yaml, tmp_path / "after", *words)
    assert losses(tmp_path / "after") == losses(tmp_path / "before")
    train(yaml, tmp_path / "named", *words, f"training.load={model / 'transformer'}")
    assert losses(tmp_path / "named") == losses(tmp_path / "before")

    assert mm("infer", str(model), *drawn, "--out", str(tmp_path / "again")).code == 0
    files = [
        {file.name: file.read_bytes() for file in (tmp_path / name).rglob("*") if file.suffix in (".mp4", ".png")}
        for name in ("drawn", "again")
    ]
    assert files[0] == files[1] and files[0]

    assert convert(["WanConverter", "mm_to_hf", *flags(tmp_path / "after", tmp_path / "hub")]) == 0
    exported = mm("export", str(tmp_path / "before"), str(tmp_path / "exported"))
    assert exported.code == 0, exported.err
    ours, expected = load_file(tmp_path / "hub" / NAMES), load_file(tmp_path / "exported" / "transformer" / NAMES)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
