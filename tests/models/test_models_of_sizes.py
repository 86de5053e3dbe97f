"""Training from scratch by flags and JSON alone: no folder is named, and model.json has the sizes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm import pretrain_sora, pretrain_vlm
from mindspeed_mm.models.configured import SIZED
from mindspeed_mm.tasks.extract import extract
from tests.helpers.mindspeed_files import make_folder
from tests.helpers.runs import losses, mm, tensors
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_processors import PATCH_SIZE
from tests.helpers.tiny_run import make_rows, tiny_config

WORDS = "--micro-batch-size 2 --train-iters {} --lr 1e-3 --lr-decay-style constant --num-workers 0 --log-interval 1"
WEIGHT = "model.model.language_model.layers.0.mlp.down_proj.weight"


def run(monkeypatch: pytest.MonkeyPatch, entry: Any, steps: int, *words: str) -> int:
    files = ["--mm-model", "model.json", "--mm-data", "data.json", "--save", "run"]
    monkeypatch.setattr(sys, "argv", ["entry.py", *WORDS.format(steps).split(), *files, *words])
    try:
        entry.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def write(name: str, content: Any) -> None:
    Path(name).write_text(json.dumps(content), encoding="utf-8")


def of_processor(folder: Path) -> dict[str, Any]:
    """Leave the processor of a model's folder; returns what it says of the model's sizes."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for path in (folder / "config.json", folder / "generation_config.json", *folder.glob("*.safetensors*")):
        path.unlink(missing_ok=True)
    return config


def test_a_model_of_words_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = of_processor(make_folder("qwen2_5_vl", Path("processor")))
    make_rows(Path())
    model: dict[str, Any] = {
        "model_id": "qwen2_5vl",
        "img_context_token_id": config["image_token_id"],
        "video_token_id": config["video_token_id"],
        "vision_start_token_id": config["vision_start_token_id"],
        "image_encoder": {
            "vision_encoder": {
                "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2, "freeze": False,
                "patch_size": PATCH_SIZE, "spatial_merge_size": 2, "temporal_patch_size": 2,
                "window_attn_size": PATCH_SIZE * 4, "fullatt_block_indexes": [1],
            }
        },
        "text_decoder": {
            "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 72, "num_attention_heads": 4, "num_query_groups": 2,
            "vocab_size": config.get("vocab_size") or config["text_config"]["vocab_size"], "mrope_section": [4, 2, 2],
        },
    }  # fmt: skip
    write("model.json", model)
    dataset = tiny_config(Path())["data"]["dataset_param"]
    dataset |= {"preprocess_parameters": {"model_name_or_path": "processor"}}
    dataset["basic_parameters"] = {"dataset": "rows.jsonl", "dataset_dir": "."}
    write("data.json", {"dataset_param": dataset})
    assert run(monkeypatch, pretrain_vlm, 2) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert "the model is built of the sizes, without weights" in told
    assert json.loads((Path("run") / SIZED / "config.json").read_text())["vision_config"]["out_hidden_size"] == 64
    assert tensors(Path("run"))[WEIGHT].shape == (64, 72)
    assert run(monkeypatch, pretrain_vlm, 3) == 0, capsys.readouterr().err
    assert list(losses(Path("run"))) == [1, 2, 3]
    said = mm("export", "run", "exported")
    assert said.code == 0, said.err
    assert json.loads(Path("exported/config.json").read_text())["model_type"] == "qwen2_5_vl"
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        assert Path("exported", name).read_bytes() == Path("processor", name).read_bytes(), name
    Path("processor").rename("elsewhere")
    gone = mm("export", "run", "without")
    assert gone.code == 4 and "processor" in gone.err and not Path("without").exists()
    Path("elsewhere").rename("processor")
    model["text_decoder"]["ffn_hidden_size"] = 80
    write("model.json", model)
    capsys.readouterr()
    assert run(monkeypatch, pretrain_vlm, 4) == 2
    assert "model.json  the sizes are not those that the run began with" in capsys.readouterr().err


def test_a_generator_on_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    extract.run(make_tiny_generator_run(tmp_path, "t2v"), out=Path("features"), batch_size=2)
    shutil.rmtree("model")
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_size": 24, "in_dim": 16, "out_dim": 16, "ffn_dim": 40}
    predictor = {"model_id": "wandit", "model_type": "t2v", "freq_dim": 16, "text_dim": 32, "max_seq_len": 32} | sizes
    write("model.json", {"predictor": predictor, "diffusion": {"model_id": "wan_flow_match_scheduler", "shift": 3}})
    basic = {"data_path": "features/data.jsonl", "data_folder": "features"}
    write("data.json", {"dataset_param": {"dataset_type": "feature", "basic_parameters": basic}})
    assert run(monkeypatch, pretrain_sora, 2) == 0, capsys.readouterr().err
    assert list(losses(Path("run"))) == [1, 2]
    assert tensors(Path("run"))["model.blocks.1.ffn.net.0.proj.weight"].shape == (40, 24)
    assert mm("export", "run", "exported", "--transformer-only").code == 0
