"""A small Qwen2-VL to train VideoAlign's reward model from, pairs of small clips with choices, and released files."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from tests.helpers.released_layouts import merged
from tests.helpers.released_rows import ROWS, dataset_of
from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_run import STEADY

MARKS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
CHOICES = [("A", "B", "same"), ("same", "A", "invalid"), ("B", "same", "A"), ("A", "A", "B")]
"""Of the rows: every word that a choice may be."""
_CLIP = {"fps": 4, "height": 32, "width": 32}


def write_pairs(folder: Path) -> Path:
    """Four pairs of clips of uneven length; returns the CSV, laid out as the published one."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, choices in enumerate(CHOICES):
        for side in "AB":
            frames = range(20 + 9 * number, 120 + (40 if side == "A" else 0), 10)
            write_video(folder / f"{number}_{side}.mp4", frames, **_CLIP)
        rows.append([f"{number}_A.mp4", f"./{number}_B.mp4", f"clip {number}, {{calm}}", *choices, 4.0, 9, 4.0, 8])
    path = folder / "pairs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        names = ["path_A", "path_B", "prompt", "VQ", "MQ", "TA", "fps_A", "num_frames_A", "fps_B", "num_frames_B"]
        csv.writer(file).writerows([names, *rows])
    return path


def write_reward_run(folder: Path, **sections: Any) -> Path:
    """A small Qwen2-VL in `model`, pairs in `rows` and `run.yaml` that trains a reward model of them; returns the
    YAML. `sections` are merged into it."""
    ROWS["qwen2vl"].write(folder / "model")
    rows = write_pairs(folder / "rows")
    param = merged(dataset_of(ROWS["qwen2vl"], rows, folder / "model"), {"dataset_type": "rewardvideo"})
    config: dict[str, Any] = {
        "model": {
            "model_id": "videoalign",
            "model_name_or_path": str(folder / "model"),
            "add_special_tokens": MARKS,
        },
        "data": {"dataset_param": param, "dataloader_param": {"num_workers": 0, "shuffle": False}},
        "parallel": {},
        "training": {
            "lr": 1e-3, "micro_batch_size": 2, "train_iters": 2, "log_interval": 1, "seed": 7,
            "allow_missing": ["rm_head.weight"], **STEADY,
        },
    }  # fmt: skip
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(merged(config, sections), file)
    return path


# --- released files ---------------------------------------------------------------------------------------------------

RANK, ALPHA = 4, 8
_NORM = {"VQ_mean": 3.0, "VQ_std": 2.0, "MQ_mean": 1.0, "MQ_std": 0.5, "TA_mean": 2.0, "TA_std": 4.0}


@dataclass(frozen=True)
class Released:
    """Both forms of VideoReward's files, and the weights that they stand for."""

    root: Path
    expected: dict[str, torch.Tensor]

    def path(self, form: str) -> Path:
        """The whole state in one file, or the folder of adapters and of what was trained without them."""
        return self.root / "checkpoint-7" / "model.pth" if form == "whole" else self.root / "checkpoint-8"

    def copy(self, folder: Path) -> Path:
        """A copy of the whole form; returns its file's folder."""
        return Path(shutil.copytree(self.root, folder / "copy")) / "checkpoint-7"


def write_released(model: Path, root: Path) -> Released:
    """A model as PEFT wraps and saves it: adapters on every layer of the language model, three more tokens."""
    base, draws = load_file(model / "model.safetensors"), torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws) * 0.1

    whole: dict[str, torch.Tensor] = {}
    adapters: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    prefix = "base_model.model."
    for name, tensor in base.items():
        layer, _, kind = name.rpartition(".")
        if name.startswith("model.layers.") and "_proj" in name:
            whole[f"{prefix}{layer}.base_layer.{kind}"] = expected[name] = tensor
            if kind == "weight":
                down, up = drawn(RANK, tensor.shape[1]), drawn(tensor.shape[0], RANK)
                whole |= {f"{prefix}{layer}.lora_A.default.weight": down, f"{prefix}{layer}.lora_B.default.weight": up}
                adapters |= {f"{prefix}{layer}.lora_A.weight": down, f"{prefix}{layer}.lora_B.weight": up}
                expected[name] = tensor + ALPHA / RANK * (up @ down)
            continue
        if name == "model.embed_tokens.weight":
            tensor = torch.cat([tensor, drawn(len(MARKS), tensor.shape[1])])
        if name == "model.embed_tokens.weight" or name.startswith("visual."):  # trained without adapters
            tensor = tensor + 0.01
            others[f"{prefix}{name}"] = tensor
        whole[f"{prefix}{name}"] = expected[name] = tensor
    head = drawn(1, base["model.norm.weight"].shape[0])
    for state in (whole, others):
        state[f"{prefix}rm_head.weight"] = head
    expected["rm_head.weight"] = head
    whole[f"{prefix}lm_head.weight"] = whole[f"{prefix}model.embed_tokens.weight"]
    for step in (7, 8):
        (root / f"checkpoint-{step}").mkdir(parents=True)
    torch.save(whole, root / "checkpoint-7" / "model.pth")
    torch.save(others, root / "checkpoint-8" / "non_lora_state_dict.pth")
    save_file(adapters, root / "checkpoint-8" / "adapter_model.safetensors")
    settings = {
        "data_config": {"fps": 2.0, "num_frames": None, "max_frame_pixels": 200704, "sample_type": "uniform"},
        "model_config": {"output_dim": 1, "reward_token": "special"},
        "peft_lora_config": {"lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
        "inference_config": _NORM,
    }
    (root / "model_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Released(root, expected)


def launch_files(root: Path, rows: Path, model: Path, **preprocess: Any) -> list[str]:
    """data.json and model.json with the keys of MindSpeed-MM's example, and its flags."""
    data = {
        "dataset_param": {
            "dataset_type": "rewardvideo",
            "preprocess_parameters": {
                "model_name_or_path": str(model), "split_special_tokens": True, "eval_dim": ["VQ", "MQ", "TA"],
                "prompt_template_type": "detailed_special", "use_tied_data": True, "sample_type": "uniform",
                "fps": 2.0, "video_reader_type": "DecordVideo", **preprocess,
            },
            "basic_parameters": {"data_path": str(rows / "pairs.csv"), "data_folder": str(rows)},
        },
        "inference_param": {
            "data_folder": str(rows), "data_path": str(rows / "pairs.csv"), "save_path": str(root / "scores"),
            "task": "evaluate", "reward_attributes": ["VQ", "TA"], "use_norm": True,
            "norm_param": {"VQ_mean": 1.0, "VQ_std": 2.0, "MQ_mean": 0.0, "MQ_std": 1.0, "TA_mean": 0.0, "TA_std": 1.0},
        },
        "dataloader_param": {"dataloader_mode": "sampler", "shuffle": False,
                             "collate_param": {"model_name": "videoalign"}},
    }  # fmt: skip
    model_json = {
        "model_id": "videoalign", "output_dim": 1, "reward_token": "special", "loss_type": "btt",
        "lora_apply_modules": ["text_decoder"], "lora_mixed_training": True,
        "image_encoder": {"vision_encoder": {"model_id": "videoalign_vit", "num_layers": 2, "hidden_size": 48}},
        "text_decoder": {"model_id": "videoalign_lm", "num_layers": 2, "hidden_size": 32},
    }  # fmt: skip
    for name, content in (("data", data), ("model", model_json)):
        (root / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ["--mm-data", str(root / "data.json"), "--mm-model", str(root / "model.json"), "--load", str(model),
            "--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "1", "--seq-length", "16", "--num-workers", "0",
            "--no-shuffle",
            "--lora-r", "2", "--lora-alpha", "4", "--lora-target-modules", "linear_proj", "q_proj"]  # fmt: skip
