"""Adapters of PEFT merged into a family's folder, and written as a distributed checkpoint, compared with PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import Qwen3VLForConditionalGeneration

from mindspeed_mm.checkpoint.stored_weights import open_stored
from mindspeed_mm.cli import mm_convert
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.fsdp.checkpoint.base_weights import weights_folder_of_load
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

TARGETS = r".*language_model.*\.(q_proj|down_proj)"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in fp64, and adapters with random numbers as PEFT saves them."""
    place: Path = tmp_path_factory.mktemp("adapters")
    make_tiny_qwen3_vl(place / "base", dtype=torch.float64)
    base = Qwen3VLForConditionalGeneration.from_pretrained(place / "base", dtype=torch.float64)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    get_peft_model(base, config, autocast_adapter_dtype=False).save_pretrained(place / "lora")
    return place


def with_adapters(folders: Path) -> PeftModel:
    base = Qwen3VLForConditionalGeneration.from_pretrained(folders / "base", dtype=torch.float64)
    return PeftModel.from_pretrained(base, folders / "lora", autocast_adapter_dtype=False)


@pytest.mark.parametrize("scaling", [1.0, 0.5])
def test_adapters_are_merged_as_peft_merges_them(scaling: float, folders: Path, tmp_path: Path) -> None:
    words = ["--base_hf_dir", str(folders / "base"), "--lora_dir", str(folders / "lora"), "--scaling", str(scaling)]
    mm_convert.run(["Qwen3VLConverter", "merge_lora_to_base", *words, "--save_merged_hf_dir", str(tmp_path / "out")])
    model = with_adapters(folders)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(scaling)
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "peft"))
    before = load_file(folders / "base/model.safetensors")
    assert found.keys() == wanted.keys() == before.keys()
    changed = [key for key in before if not torch.equal(found[key], before[key])]
    assert changed and all(key.endswith(("q_proj.weight", "down_proj.weight")) for key in changed)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[key], rtol=1e-12, atol=1e-12)
    Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out")


def test_adapters_become_a_checkpoint_under_the_names_of_pefts_model(folders: Path, tmp_path: Path) -> None:
    words = ["--hf_dir", str(folders / "lora"), "--dcp_dir", str(tmp_path / "dcp")]
    mm_convert.run(["Qwen3VLConverter", "lora_hf_to_dcp", *words])
    dcp_to_torch_save(tmp_path / "dcp/release", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)["model"]
    state = with_adapters(folders).state_dict()
    wanted = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items() if ".lora_" in key}
    assert wanted and found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert (tmp_path / "dcp/adapter_config.json").read_bytes() == (folders / "lora/adapter_config.json").read_bytes()


def test_another_family_and_a_folder_without_adapters_are_refused(folders: Path, tmp_path: Path) -> None:
    words = ["--lora_dir", str(folders / "lora"), "--save_merged_hf_dir", str(tmp_path / "out")]
    other = make_tiny_qwen3(tmp_path / "other")
    with pytest.raises(UsageError, match="this converter is for qwen3_vl and qwen3_vl_moe"):
        mm_convert.run(["Qwen3VLConverter", "merge_lora_to_base", "--base_hf_dir", str(other), *words])
    with pytest.raises(ModelFolderError, match=r"has no adapter_config\.json"):
        mm_convert.run(["Qwen3VLConverter", "lora_hf_to_dcp", f"--hf_dir={other}", f"--dcp_dir={tmp_path / 'dcp'}"])
    assert not (tmp_path / "out").exists() and not (tmp_path / "dcp").exists()


def test_the_adapters_of_a_checkpoint_are_merged_with_their_own_factor(folders: Path, tmp_path: Path) -> None:
    words = ["--hf_dir", str(folders / "lora"), "--dcp_dir", str(tmp_path / "dcp")]
    mm_convert.run(["Qwen3VLConverter", "lora_hf_to_dcp", *words])
    words = ["--base_hf_dir", str(folders / "base"), "--lora_dcp_dir", str(tmp_path / "dcp")]
    command = ["Qwen3VLConverter", "merge_mm_lora_dcp_weight_to_base_hf", *words]
    mm_convert.run([*command, "--lora_target_modules", "q_proj", "--save_merged_hf_dir", str(tmp_path / "out")])
    before, found = (load_file(folder / "model.safetensors") for folder in (folders / "base", tmp_path / "out"))
    adapters = load_file(folders / "lora/adapter_model.safetensors")
    for key, tensor in before.items():
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        wanted = tensor
        if f"{stem}.lora_A.weight" in adapters and "q_proj" in key:  # alpha 6, rank 4
            wanted = tensor + 1.5 * adapters[f"{stem}.lora_B.weight"] @ adapters[f"{stem}.lora_A.weight"]
            assert not torch.equal(found[key], tensor)
        torch.testing.assert_close(found[key], wanted, rtol=1e-12, atol=1e-12)


def test_the_base_of_adapters_has_their_names_and_is_read_back_by_the_folders(folders: Path, tmp_path: Path) -> None:
    words = ["--hf_dir", str(folders / "base"), "--dcp_dir", str(tmp_path / "dcp"), "--is_lora_base", "true"]
    mm_convert.run(["Qwen3VLConverter", "hf_to_dcp", *words])
    dcp_to_torch_save(tmp_path / "dcp/release", tmp_path / "all.pt")
    held, own = (
        torch.load(tmp_path / "all.pt", weights_only=True)["model"],
        load_file(folders / "base/model.safetensors"),
    )
    assert held.keys() == {f"base_model.model.model.{key}" for key in own}
    with open_stored(tmp_path / "dcp", None) as stored:
        assert all(torch.equal(stored[key].read(), own[key]) for key in own)
    assert weights_folder_of_load(str(tmp_path / "dcp")) == tmp_path / "dcp"


def test_a_folder_is_written_in_bf16_by_the_flags_of_qwen3_vl(folders: Path, tmp_path: Path) -> None:
    base = folders / "base"
    mm_convert.run(["Qwen3VLConverter", "hf_to_dcp", "--hf_dir", str(base), "--dcp_dir", str(tmp_path / "dcp")])
    words = ["--load_dir", str(tmp_path / "dcp/release"), "--save_dir", str(tmp_path / "out"), "--to_bf16", "True"]
    mm_convert.run(["Qwen3VLConverter", "dcp_to_hf", *words, "--model_assets_dir", str(base)])
    own, found = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert own.keys() == found.keys() and all(torch.equal(found[key], own[key].bfloat16()) for key in own)
