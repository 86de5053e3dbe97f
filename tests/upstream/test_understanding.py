"""The understanding pipeline by scripts of the documented shape: convert, train in two stages, convert back, answer,
score; each script in processes of its own, and the short path in this one."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_mm import pretrain_vlm, training
from mindspeed_mm.cli import mm_convert
from mindspeed_mm.provider.launch import read_launch
from tests.helpers.distributed import run_ranks
from tests.helpers.mindspeed_files import make_folder
from tests.helpers.runs import losses, tensors
from tests.helpers.tiny_run import make_rows
from tests.upstream.workplace import copy_scripts, run_script

SCRIPTS = Path(__file__).with_name("understanding")
HUB, STAGES, BACK = (f"ckpt/{name}/Qwen2.5-VL" for name in ("hf_path", "mm_path", "mm_to_hf"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model, rows, and a question of a published set."""
    root = copy_scripts(SCRIPTS, tmp_path / "root")
    make_folder("qwen2_5_vl", root / HUB)
    make_rows(root / "data")
    (root / "AI2D_TEST.tsv").write_text("index\tquestion\tA\tB\tanswer\n1\twhat?\tone\ttwo\tB\n")
    monkeypatch.chdir(root)
    return root


def logits_of(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """What transformers alone computes of a picture and words, in single precision.

    Args:
        folder: A Hugging Face folder.
        weights: By the names of transformers' module, instead of those of the folder.
    """
    from PIL import Image
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it like?"}]}]
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    given = processor(text=[text], images=[Image.open("data/images/0_0.png")], return_tensors="pt")
    with torch.no_grad():
        logits: torch.Tensor = model(**given).logits
    return logits


def assert_what_was_trained_came_back(root: Path) -> None:
    """The folder that was written back holds the weights of the run's last step, as torch alone reads them, and
    transformers computes the same of both."""
    trained = {name.removeprefix("model."): tensor.float() for name, tensor in tensors(root / "save_dir").items()}
    found, before = logits_of(root / BACK), logits_of(root / HUB)
    assert torch.equal(found, logits_of(root / HUB, trained))
    assert not torch.equal(found, before)


@pytest.mark.slow
def test_scripts_of_the_documented_shape_one_after_another(root: Path) -> None:
    run_script(root, "convert.sh")
    assert sorted(path.name for path in (root / STAGES / "release").glob("mp_rank_*")) == [
        "mp_rank_00_000", "mp_rank_00_001",
    ]  # fmt: skip
    untrained = run_script(root, "inference.sh", LOAD_PATH=STAGES)
    assert untrained.strip() and untrained == run_script(root, "inference.sh", LOAD_PATH=HUB)

    said = run_script(root, "finetune.sh")
    assert "plan   cpu × 2, pp 2" in said
    assert "Elapsed Time Per iteration: 0" not in said and "Elapsed Time Per iteration: \n" not in said
    assert sorted(losses(root / "save_dir")) == [1, 2]

    run_script(root, "convert_back.sh")
    assert_what_was_trained_came_back(root)

    assert run_script(root, "inference.sh") == run_script(root, "inference.sh", LOAD_PATH=BACK)
    scores = run_script(root, "evaluate.sh")
    assert scores.startswith("AI2D: ")
    results = json.loads((root / "evaluation_outputs" / "results.json").read_text())
    assert results["benchmark"] == "ai2d_test"


def train(root: str) -> None:
    """A rank of the launch, as its entry starts it."""
    os.chdir(root)
    sys.argv = ["pretrain_vlm.py", *read_launch(["finetune.sh"], os.environ).flags]
    training.pretrain(
        training.train_valid_test_datasets_provider, pretrain_vlm.model_provider, None, training.forward_step
    )


def convert(script: str) -> None:
    """The one command of a script."""
    words = shlex.split(Path(script).read_text().replace("\\\n", " "), comments=True)
    assert words[0] == "mm-convert"
    assert mm_convert.run(words[1:]) == 0


def test_what_two_stages_trained_is_read_by_transformers_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert("convert.sh")
    run_ranks(2, train, str(root))
    assert sorted(losses(root / "save_dir")) == [1, 2]
    convert("convert_back.sh")
    assert_what_was_trained_came_back(root)
    assert "cfg.parallel_config has no effect: save_dir holds whole tensors" in capsys.readouterr().err
    words = ["Qwen2_5_VLConverter", "resplit", "--cfg.source_dir", "save_dir", "--cfg.target_dir", "divided"]
    assert mm_convert.run([*words, "--cfg.target_parallel_config.tp_size", "2"]) == 0
    assert sorted(path.name for path in (root / "divided" / "release").glob("mp_rank_*")) == [
        "mp_rank_00",
        "mp_rank_01",
    ]
