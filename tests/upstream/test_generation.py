"""The generation pipeline by scripts of the documented shape: convert in place, extract features, train on two ranks,
convert back, draw, score; each script in processes of its own. `tests/checkpoint/original/
test_path_of_a_converted_transformer.py` is its short path."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm import evaluate_gen
from tests.helpers.runs import lines, losses, tensors
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_media import write_video
from tests.upstream.workplace import copy_scripts, run_script

SCRIPTS = Path(__file__).with_name("generation")
MODEL, BACK = "weights/Wan-AI/Wan2.1-T2V-Diffusers", "converted_weights/Wan-AI/Wan2.1-T2V-Diffusers"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
VBENCH = """
import json, os, pathlib

class VBench:
    def __init__(self, device, full_info, out):
        self.prompts = [row["prompt_en"] for row in json.loads(pathlib.Path(full_info).read_text())]
        self.out = out

    def evaluate(self, videos_path, name, prompt_list, dimension_list, mode, local):
        assert mode == "vbench_standard" and prompt_list == [] and local is True
        clips = [os.path.join(videos_path, f"{prompt}-{n}.mp4") for prompt in self.prompts for n in range(5)]
        by_clip = [{"video_path": clip, "video_results": 0.5} for clip in clips if os.path.getsize(clip)]
        results = {dimension: [0.25, by_clip] for dimension in dimension_list}
        pathlib.Path(self.out, name + "_eval_results.json").write_text(json.dumps(results))
"""
"""A stand-in with the interface of vbench 0.1.5, which wants five clips of each prompt."""
PROMPTS = {"subject_consistency": ["a red box", "two blue lines"], "appearance_style": ["a box, in oil", "a red box"]}
CLIPS = ["a red box", "two blue lines", "a box, in oil"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model, clips with captions, and VBench's prompts."""
    root = copy_scripts(SCRIPTS, tmp_path / "root")
    make_tiny_wan(root / MODEL)
    (root / "videos").mkdir()
    rows = []
    for number in range(4):
        write_video(
            root / f"videos/{number}.mp4", range(20 + 40 * number, 32 + 40 * number), fps=8, height=16, width=16
        )
        rows.append({"path": f"{number}.mp4", "cap": f"a box, {number}"})
    (root / "train.json").write_text(json.dumps(rows))
    write_vbench(root)
    monkeypatch.chdir(root)
    return root


def write_vbench(root: Path) -> None:
    """An environment with the stand-in, and what VBench's repository has."""
    site, python = root / "vbench_env/site", root / "vbench_env/bin/python"
    (site / "vbench").mkdir(parents=True)
    (site / "vbench/__init__.py").write_text(VBENCH)
    (site / "torch.py").write_text("device = str\nclass cuda:\n    is_available = staticmethod(lambda: False)\n")
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    folder = root / "vbench/prompts/prompts_per_dimension"
    folder.mkdir(parents=True)
    for name, prompts in PROMPTS.items():
        (folder / f"{name}.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    (root / "t2v-dataset").mkdir()
    info = [{"prompt_en": prompt, "dimension": ["subject_consistency"]} for prompt in CLIPS]
    (root / "t2v-dataset/VBench_full_info.json").write_text(json.dumps(info))


def change(file: str, **values: Any) -> None:
    """Set keys of `eval_config`."""
    content = json.loads(Path(file).read_text())
    content["eval_config"] |= values
    Path(file).write_text(json.dumps(content))


def entry(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The entry's exit code."""
    monkeypatch.setattr(sys, "argv", ["evaluate_gen.py", "--mm-model", "eval_model.json", *words])
    try:
        evaluate_gen.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.slow
def test_scripts_of_the_documented_shape_one_after_another(root: Path) -> None:
    hub = load_file(root / MODEL / WEIGHTS)
    run_script(root, "convert.sh")
    assert not (root / MODEL / WEIGHTS).exists()
    run_script(root, "inference.sh", LOAD_PATH=f"{MODEL}/transformer")
    untrained = {line["file"]: line["sha256"] for line in lines(root / "samples/t2v/manifest.jsonl")}
    (root / "samples").rename(root / "samples_before")

    assert (
        "sora_features: 4 samples"
        in run_script(root, "feature_extraction.sh") + (root / "logs/features.log").read_text()
    )
    said = run_script(root, "pretrain.sh")
    assert "plan   cpu × 2, dp_shard 2" in said and "Average Samples per Second: 0" not in said
    assert sorted(losses(root / "saved_ckpt")) == [1, 2]

    run_script(root, "convert_back.sh")
    back = load_file(root / BACK / WEIGHTS)
    trained = {name.removeprefix("model."): tensor for name, tensor in tensors(root / "saved_ckpt").items()}
    assert back.keys() == trained.keys() == hub.keys()
    assert all(torch.equal(back[name], trained[name].to(back[name].dtype)) for name in back)
    assert any(not torch.equal(back[name], hub[name]) for name in hub)

    run_script(root, "inference.sh")
    found = {line["file"]: line["sha256"] for line in lines(root / "samples/t2v/manifest.jsonl")}
    assert [line["prompt"] for line in lines(root / "samples/t2v/manifest.jsonl")] == ["a red box", "two blue lines"]
    assert found.keys() == untrained.keys() and all(found[name] != untrained[name] for name in found)

    scores = run_script(root, "evaluate.sh").splitlines()
    assert scores[-2].startswith("VBench subject_consistency: 0.25")
    assert scores[-1].startswith("VBench appearance_style: 0.25")
    results = json.loads((root / "eval_result/t2v_eval_results.json").read_text())
    names = {Path(clip["video_path"]).name for clip in results["appearance_style"][1]}
    assert names == {f"{prompt}-{number}.mp4" for prompt in CLIPS for number in range(5)}


def test_clips_that_are_there_are_scored(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change("eval_model.json", need_inference=False)
    assert entry(monkeypatch) == 4
    assert "samples/eval  holds no clips" in capsys.readouterr().err.replace("samples/eval/", "samples/eval")
    (root / "samples/eval").mkdir(parents=True)
    for name in (f"{prompt}-{number}.mp4" for prompt in CLIPS for number in range(5)):
        (root / "samples/eval" / name).write_bytes(b"a clip")
    assert entry(monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("VBench subject_consistency: 0.25")
    assert len(json.loads(Path("eval_result/t2v_eval_results.json").read_text())["appearance_style"][1]) == 15


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dimensions": ["subject_consistenc"]}, "is no dimension of VBench. Did you mean 'subject_consistency'?"),
        ({"eval_type": "i2v"}, "run vbench2_beta_i2v.VBenchI2V(device, 'vbench2_i2v_full_info.json', OUT).evaluate("),
        ({"eval_type": "long"}, "vbench2_beta_long/eval_long.py --videos_path CLIPS"),
        ({"eval_type": "i2"}, "'i2' is not known. Write t2v; i2v and long are scored by packages of their own."),
        ({"vbench_python": "none/bin/python"}, "is not a Python that can be run"),
        ({"dataset": {"basic_param": {"data_folder": "none"}}}, "none/prompts_per_dimension/subject_consistency.txt"),
    ],
)
def test_what_cannot_be_scored_is_named_before_a_clip_is_drawn(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    message: str,
) -> None:
    change("eval_model.json", **values)
    assert entry(monkeypatch, "--load", MODEL) != 0
    assert message in capsys.readouterr().err
    assert not (root / "samples").exists()
