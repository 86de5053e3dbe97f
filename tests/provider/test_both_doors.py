"""Flags and the YAML that somebody writes by hand for the same run: equal configurations, three steps and their
checkpoints equal to the bit, for each kind of model under each kind of plan."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from ruamel.yaml import YAML
from torch import nn

from mindspeed_mm import pretrain_sora, pretrain_transformers, pretrain_vlm, training
from mindspeed_mm.checkpoint.layout import MANIFEST, METADATA
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.provider.translate import from_flags
from tests.helpers.distributed import run_ranks
from tests.helpers.mindspeed_files import make_folder
from tests.helpers.runs import lines
from tests.helpers.tiny_generator_run import make_clips
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3_vl, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_rows, tiny_config

STEPS = 3
FLAGS = (
    f"--micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --lr-decay-style cosine --seed 7 "
    "--num-workers 0 --log-interval 1 --save-interval 1 --mm-model model.json --mm-data data.json --save"
)
TRAINING = {
    "micro_batch_size": 1, "train_iters": STEPS, "lr": 1e-3, "lr_decay_style": "cosine", "seed": 7,
    "weight_decay": 0.01, "lr_warmup_ratio": 0.0, "save_total_limit": None, "log_interval": 1, "save_interval": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of model: what its launch folder holds, and what the YAML says of it.

    Args:
        make: Writes the model into the folder `hf`, and rows beside it.
        build: The entry's model provider.
        model: Of model.json.
        blocks: The blocks, as fsdp2_config.yaml calls them, and as the model does.
        yaml: Sections of the YAML.
        words: Flags of its own.
    """

    make: Callable[[], object]
    build: Callable[..., nn.Module]
    model: dict[str, Any]
    blocks: tuple[str, str]
    yaml: dict[str, Any] = field(default_factory=dict)
    words: str = ""


@dataclass(frozen=True)
class Spread:
    """A plan: flags, and the sections of the YAML; micro-batches of a step on each rank that reads rows of its own."""

    ranks: int
    words: str
    parallel: dict[str, Any]
    accumulation: int


def _qwen2_5_vl() -> None:
    make_folder("qwen2_5_vl", Path("hf"))
    make_rows(Path())


def _qwen3_vl() -> None:
    make_tiny_qwen3_vl(Path("hf"), num_hidden_layers=4)
    make_rows(Path())


def _experts() -> None:
    make_tiny_qwen3_vl_moe(Path("hf"), num_hidden_layers=4)
    make_rows(Path())


def _wan() -> None:
    make_tiny_wan(Path("hf"), num_layers=4)
    make_clips(Path(), size=32)


FROZEN_TOWER = {"model": {"freeze": ["model.visual.patch_embed", "model.visual.blocks.{*}"]}}
NOISE = {"timestep_density": "uniform", "loss_weighting": "bell", "shift": 3.0}
CLIPS = {
    "dataset_type": "t2v",
    "basic_parameters": {"data_path": "rows.jsonl", "data_folder": "."},
    "preprocess_parameters": {"num_frames": 5, "max_height": 32, "max_width": 32},
}
ROWS_OF_CLIPS = {
    "dataset_type": "generation",
    "basic_parameters": {"dataset": "rows.jsonl", "dataset_dir": "."},
    "preprocess_parameters": {"num_frames": 5, "height": 32, "width": 32},
}

KINDS = {
    "Qwen2.5-VL": Kind(
        _qwen2_5_vl,
        pretrain_vlm.model_provider,
        {
            "model_id": "qwen2_5vl",
            "text_decoder": {"freeze": False},
            "image_encoder": {"vision_encoder": {}, "vision_projector": {}},
        },
        ("text_decoder.decoder.layers.{*}", "model.language_model.layers.{*}"),
        FROZEN_TOWER,
    ),
    "Qwen3-VL": Kind(
        _qwen3_vl,
        pretrain_transformers.model_provider,
        {"init_from_hf_path": "hf", "loss_cfg": {"compute_mode": "chunk", "chunk_size": 16}},
        ("language_model.layers.{*}", "model.language_model.layers.{*}"),
        {"features": {"enable_chunk_loss": True, "chunkloss_plan": {"chunk_size": 16}}},
    ),
    "Wan": Kind(
        _wan,
        pretrain_sora.model_provider,
        {
            "predictor": {"model_id": "wandit", "num_layers": 4, "num_heads": 2, "hidden_size": 24},
            "diffusion": {"model_id": "wan_flow_match_scheduler", "shift": 3.0},
        },
        ("predictor.blocks.{*}", "blocks.{*}"),
        {"training": {"diffusion": NOISE}, "data": {"dataset_param": ROWS_OF_CLIPS}},
        "--load hf/transformer --sequence-parallel",  # of which a generator has nothing
    ),
    "experts": Kind(
        _experts,
        pretrain_transformers.model_provider,
        {"init_from_hf_path": "hf"},
        ("model.language_model.layers.{*}", "model.language_model.layers.{*}"),
    ),
}

WHOLE = {"fully_shard_parallel_size": 1}
FSDP2 = "--use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"
SPREADS = {
    "FSDP2": Spread(2, FSDP2, {"fully_shard_parallel_size": "auto"}, 2),
    "HSDP": Spread(4, FSDP2, {"fully_shard_parallel_size": 2}, 1),
    "TP2": Spread(
        2,
        "--tensor-model-parallel-size 2 --use-distributed-optimizer",
        {"tensor_parallel_size": 2},
        4,
    ),
    "PP2": Spread(2, "--pipeline-model-parallel-size 2", {"pipeline_parallel_size": 2, **WHOLE}, 4),
    "CP2": Spread(
        2,
        "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo",
        {"ulysses_parallel_size": 2, "fully_shard_parallel_size": 2},
        4,
    ),
}
DEFAULT = {("Qwen2.5-VL", "PP2")}
"""Run each time; the others are slow."""


def cells() -> list[Any]:
    return [
        pytest.param(kind, spread, marks=() if (kind, spread) in DEFAULT else pytest.mark.slow)
        for kind in KINDS
        for spread in SPREADS
    ]


def write_files(kind: Kind, spread: Spread) -> None:
    """What a launch folder holds, and `run.yaml`."""
    kind.make()
    Path("model.json").write_text(json.dumps(kind.model))
    conversations = tiny_config(Path())["data"]["dataset_param"]
    conversations["basic_parameters"] = {"dataset": "rows.jsonl", "dataset_dir": "."}
    rows = CLIPS if kind is KINDS["Wan"] else {**conversations, "preprocess_parameters": {"model_name_or_path": "hf"}}
    Path("data.json").write_text(json.dumps({"dataset_param": rows}))
    theirs, ours = kind.blocks
    size = spread.parallel.get("fully_shard_parallel_size", 1)
    Path("fsdp2.yaml").write_text(
        f"sharding_size: {size}\n"
        f'sub_modules_to_wrap: ["{theirs}"]\nrecompute_modules: ["{theirs}"]\nuse_reentrant: False\n'
        "num_to_forward_prefetch: 1\n"
    )
    config: dict[str, Any] = {
        "model": {"model_name_or_path": "hf"},
        "data": {"dataset_param": rows, "dataloader_param": {"num_workers": 0}},
        "training": {**TRAINING, "gradient_accumulation_steps": spread.accumulation},
        "parallel": dict(spread.parallel),
        "features": {
            "enable_chunk_loss": False,
            "compile": False,
            "fused_kernels": False,
            **({} if kind is KINDS["Wan"] else {"loss_cfg": {"loss_type": "per_micro_batch_loss"}}),
        },
    }
    if spread.words == FSDP2:
        config["parallel"]["fsdp_plan"] = {"apply_modules": [ours], "num_to_forward_prefetch": 1}
        config["features"] |= {"recompute": True, "recompute_plan": {"apply_modules": [ours], "use_reentrant": False}}
    for name, content in kind.yaml.items():
        config[name] |= content
    with Path("run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(config, file)


def words_of(kind: Kind, spread: Spread, save: str) -> list[str]:
    return [*FLAGS.split(), save, *spread.words.split(), *kind.words.split()]


def through_both(folder: str, kind_name: str, spread_name: str) -> None:
    """On each rank: train by flags, then by the YAML."""
    os.chdir(folder)
    kind, spread = KINDS[kind_name], SPREADS[spread_name]
    sys.argv = ["entry.py", *words_of(kind, spread, "by_flags")]
    training.pretrain(training.train_valid_test_datasets_provider, kind.build, None, training.forward_step)
    Trainer(load_with_plugins(Path("run.yaml"), ["training.save=by_yaml"])).train()


def contents(save: Path) -> dict[str, str]:
    """File of a checkpoint → the hash of its bytes. The manifest has the time in it, and the hashes of the others; the
    index of torch's the folder, and a number that is drawn for each save."""
    files = [path for path in save.glob("iter_*/**/*") if path.is_file() and path.name not in (MANIFEST, METADATA)]
    hashes = {str(path.relative_to(save)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for folder in save.glob("iter_*"):
        index = dcp.FileSystemReader(folder).read_metadata()
        hashes[str(folder.relative_to(save))] = repr((index.state_dict_metadata, index.storage_data))
    return hashes


@pytest.mark.edge("BN7")
@pytest.mark.parametrize(("kind_name", "spread_name"), cells())
def test_flags_train_as_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind_name: str, spread_name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, spread = KINDS[kind_name], SPREADS[spread_name]
    write_files(kind, spread)
    by_flags = from_flags(words_of(kind, spread, "by_yaml"), {"WORLD_SIZE": str(spread.ranks)})
    assert by_flags.arguments == load_config(Path("run.yaml"), ["training.save=by_yaml"]).arguments
    run_ranks(spread.ranks, through_both, str(tmp_path), kind_name, spread_name)
    first, second = (
        [{key: line[key] for key in ("step", "loss", "grad_norm")} for line in lines(Path(save) / "metrics.jsonl")]
        for save in ("by_flags", "by_yaml")
    )
    assert first == second
    assert [line["step"] for line in first] == list(range(1, STEPS + 1)) and len({line["loss"] for line in first}) > 1
    assert contents(Path("by_flags")) == contents(Path("by_yaml"))
    assert sum(name.endswith(".distcp") for name in contents(Path("by_flags"))) == STEPS * spread.ranks
