"""What was trained, in MindSpeed-MM's layout and back: distributed checkpoints, files of LayerZeRO, adapters."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mindspeed_mm.checkpoint.stored_weights import open_stored, stored_files
from mindspeed_mm.cli.mm_convert import run
from mindspeed_mm.core.errors import CheckpointError
from tests.helpers.generator_weights import read, same, small_model

RANK = "release/mp_rank_00/model_optim_rng.pt"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan in diffusers' layout, and beside it the same in MindSpeed-MM's."""
    place: Path = tmp_path_factory.mktemp("trained")
    small_model("Wan").save_pretrained(place / "hub")
    run(["WanConverter", "hf_to_mm", *flags(place / "hub", place / "mm")])
    return place / "hub"


def flags(source: Path, target: Path) -> list[str]:
    return ["--cfg.source_path", str(source), "--cfg.target_path", str(target)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "diffusion_pytorch_model.safetensors")


def ranks(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = torch.load(folder / RANK, weights_only=True)["model"]
    return held


def in_checkpoint(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / "release", scratch)
    held: dict[str, torch.Tensor] = torch.load(scratch, weights_only=True)["model"]
    return held


def test_a_checkpoint_of_a_run_becomes_diffusers_and_mindspeed_mms_folder(hub: Path, tmp_path: Path) -> None:
    whole = {key: tensor.double() for key, tensor in weights(hub).items()}
    dcp.save({"model": whole}, checkpoint_id=tmp_path / "run/iter_0000002", no_dist=True)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("2\n")
    told = ["--cfg.hf_dir", str(hub)]
    run(["WanConverter", "mm_to_hf", *flags(tmp_path / "run", tmp_path / "hf"), *told])
    same(weights(tmp_path / "hf"), weights(hub))
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "hf").values())
    run(["WanConverter", "layerzero_to_mm", *flags(tmp_path / "run", tmp_path / "mm"), *told])
    same(ranks(tmp_path / "mm"), ranks(hub.parent / "mm"))
    dcp.save(
        {"model": {"blocks.0.attn1.to_q.lora_A.default.weight": torch.ones(2, 2)}},
        checkpoint_id=tmp_path / "lora/iter_0000002",
        no_dist=True,
    )
    with pytest.raises(CheckpointError, match=r"holds adapters \(1 tensors"):
        run(["WanConverter", "mm_to_hf", *flags(tmp_path / "lora", tmp_path / "x"), *told])


@pytest.mark.parametrize("section", ["model", "ema_model"])
def test_files_of_layerzero_are_joined(
    section: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mindspeed.core.distributed.layerzero.state.fqn"
    names = ("in_shard", "numel", "shape", "tensor_model_parallel")
    info: Any = dataclasses.make_dataclass("ShardFlattenInfo", names)
    info.__module__ = name
    module = types.ModuleType(name)
    module.ShardFlattenInfo = info  # type: ignore[attr-defined]
    for part in range(1, 6):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:part]), types.ModuleType(name.split(".")[part - 1]))
    monkeypatch.setitem(sys.modules, name, module)
    held = ranks(hub.parent / "mm")
    step = tmp_path / "run/iter_0000007"
    step.mkdir(parents=True)
    for rank in range(2):
        pieces, shapes = {}, {}
        for key, tensor in held.items():
            wrapped = f"predictor._zero3_wrapped_module.{key}"
            if key == "head.modulation":  # not sharded
                pieces[wrapped] = tensor
                continue
            flat, cut = tensor.flatten(), tensor.numel() // 3
            pieces[wrapped] = (flat[:cut] if rank == 0 else flat[cut:]).clone()
            shapes[f"predictor.{key}"] = info(True, cut, tensor.shape, False)
        content = {"args": argparse.Namespace(num_layers=4), section: pieces, "shard_state_dict": shapes}
        torch.save(content, step / f"model_{rank}.pt")
    words = ["--cfg.hf_dir", str(hub), "--ema_model", str(section != "model").lower()]
    run(["WanConverter", "layerzero_to_mm", *flags(tmp_path / "run", tmp_path / "mm"), *words])
    same(ranks(tmp_path / "mm"), held)
    (step / "model_1.pt").unlink()
    with pytest.raises(CheckpointError, match="elements on all ranks, and its shape is"):
        run(["WanConverter", "layerzero_to_mm", *flags(tmp_path / "run", tmp_path / "x"), *words])


def test_conversions_in_place_keep_the_one_original_and_every_layout_is_read(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    small_model("Wan").save_pretrained(folder)
    before = weights(folder)
    for command, kind in (("hf_to_mm", "*.pt"), ("mm_to_dcp", "*.distcp")):
        run(["WanConverter", command, *flags(folder, folder)])
        same(weights(tmp_path / "transformer.bak"), before)
        assert (folder / "config.json").is_file()
        with open_stored(folder, None) as stored:
            same(read(stored), before)
        assert [file.match(kind) for file in stored_files(folder)] == [True]
    same(in_checkpoint(folder, tmp_path / "all.pt"), before)


def test_a_lora_takes_mindspeed_mms_names_and_then_those_of_training(tmp_path: Path) -> None:
    down, up = torch.randn(2, 16), torch.randn(16, 2)
    (tmp_path / "lora").mkdir()
    layer = "blocks.1.self_attn.q"  # as DiffSynth saves it
    tensors = {f"{layer}.lora_A.default.weight": down, f"{layer}.lora_B.default.weight": up}
    save_file(tensors, tmp_path / "lora/step.safetensors")
    run(["WanConverter", "lora_hf_to_mm", *flags(tmp_path / "lora", tmp_path / "mm")])
    name = "blocks.1.self_attn.proj_q"
    same(ranks(tmp_path / "mm"), {f"{name}.lora_A.default.weight": down, f"{name}.lora_B.default.weight": up})
    run(["WanConverter", "mm_to_dcp", *flags(tmp_path / "mm", tmp_path / "dcp")])
    name = "blocks.1.attn1.to_q"
    wanted = {f"{name}.lora_A.default.weight": down, f"{name}.lora_B.default.weight": up}
    same(in_checkpoint(tmp_path / "dcp", tmp_path / "all.pt"), wanted)


def test_the_authors_lora_of_hunyuan_video_is_taken_apart_as_its_layers_are(tmp_path: Path) -> None:
    down, up = torch.randn(2, 4), torch.randn(14, 2)  # queries, keys, values and 4 of the projection, 2 rows each
    flat = "Hunyuan_video_I2V_lora_single_blocks_3_linear1"
    alpha = torch.tensor(6.0)
    tensors = {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up, f"{flat}.alpha": alpha}
    save_file(tensors, tmp_path / "kohya.safetensors")
    words = flags(tmp_path / "kohya.safetensors", tmp_path / "mm")
    run(["HunyuanVideoConverter", "--version", "i2v-lora", "source_to_mm", *words])
    wanted = {}
    for name, rows in (("linear1_qkv", up[:6]), ("linear1_mlp", up[6:])):
        at = f"single_blocks.3.{name}"
        wanted |= {f"{at}.lora_A.default.weight": down, f"{at}.lora_B.default.weight": rows}
    same(ranks(tmp_path / "mm"), wanted)
    assert json.loads((tmp_path / "mm/adapter_config.json").read_text()) == {"r": 2, "lora_alpha": 6.0}


def test_the_language_model_of_a_llava_folder_stands_alone(tmp_path: Path) -> None:
    tensors = {
        "language_model.model.norm.weight": torch.randn(4),
        "language_model.lm_head.weight": torch.randn(5, 4),
        "vision_tower.weight": torch.randn(3),
    }
    (tmp_path / "llava").mkdir()
    save_file(tensors, tmp_path / "llava/model.safetensors")
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 4}}
    (tmp_path / "llava/config.json").write_text(json.dumps(config))
    (tmp_path / "llava/tokenizer.json").write_text("{}")
    run(["HunyuanVideoConverter", "--version", "t2v", "t2v_text_encoder", *flags(tmp_path / "llava", tmp_path / "out")])
    found = load_file(tmp_path / "out/model.safetensors")
    same(found, {key.removeprefix("language_model."): t.half() for key, t in tensors.items() if "language" in key})
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"] and written["hidden_size"] == 4
    assert (tmp_path / "out/tokenizer.json").is_file()
