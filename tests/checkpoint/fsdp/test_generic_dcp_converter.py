"""Hugging Face folder → distributed checkpoint → Hugging Face folder, compared with transformers and with torch's own
reader of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "moe":
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **experts))
    if kind == "vlm":
        text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=VISION))
    return Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=kind == "tied"))


KINDS = ("tied", "untied", "vlm", "moe")


def hub_folder(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A folder as transformers writes it, in three shards, and the model in it."""
    model = build(kind).to(dtype)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[key].dtype == two[key].dtype and torch.equal(one[key], two[key]) for key in one
    )


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_bitwise_the_same_and_torch_reads_transformers_names(kind: str, tmp_path: Path) -> None:
    model = hub_folder(tmp_path / "hf", kind)
    converter = GenericDCPConverter()
    converter.hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")

    assert (tmp_path / "dcp/latest_checkpointed_iteration.txt").read_text() == "release\n"
    dcp_to_torch_save(tmp_path / "dcp/release", tmp_path / "whole.pt")
    held = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    ties = set(model.all_tied_weights_keys) if kind == "tied" else set()
    assert same(held, {name: tensor for name, tensor in model.state_dict().items() if name not in ties})

    converter.dcp_to_hf(tmp_path / "dcp", tmp_path / "back", tmp_path / "hf", max_shard_bytes=30_000)
    assert same(stored(tmp_path / "back"), stored(tmp_path / "hf"))
    again = type(model).from_pretrained(tmp_path / "back", dtype="auto")
    assert same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("place", [".", "release"])
def test_the_folder_with_the_tracker_and_its_release_are_both_read(place: str, tmp_path: Path) -> None:
    hub_folder(tmp_path / "hf", "tied")
    GenericDCPConverter().hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    GenericDCPConverter().dcp_to_hf(tmp_path / "dcp" / place, tmp_path / "back", tmp_path / "hf")
    assert same(stored(tmp_path / "back"), stored(tmp_path / "hf"))


@pytest.mark.parametrize("shape", ["bare", "wrapped", "two names"])
def test_checkpoints_of_other_trainers_are_read(shape: str, tmp_path: Path) -> None:
    """A bare state dict, one whose names all have `model.` in front, and one that holds a tied tensor twice."""
    model = hub_folder(tmp_path / "hf", "tied")
    names = dict(model.state_dict())
    if shape != "two names":
        del names["lm_head.weight"]
    if shape == "wrapped":
        names = {f"model.{name}": tensor for name, tensor in names.items()}
    tree: dict[str, Any] = names if shape == "bare" else {"model": names, "checkpoint_version": 3.0}
    dcp.save(tree, checkpoint_id=tmp_path / "run/iter_0000007", no_dist=True)
    GenericDCPConverter().dcp_to_hf(tmp_path / "run", tmp_path / "back", tmp_path / "hf")
    assert same(stored(tmp_path / "back"), stored(tmp_path / "hf"))


def test_a_tied_tensor_is_stored_once_and_read_back_under_both_names(tmp_path: Path) -> None:
    model = hub_folder(tmp_path / "hf", "tied")
    GenericDCPConverter().hf_to_dcp(tmp_path / "hf", tmp_path / "plain")
    GenericDCPConverter().hf_to_dcp(
        tmp_path / "hf", tmp_path / "dcp", tie_weight_mapping={"lm_head.weight": "model.embed_tokens.weight"}
    )
    tree = {"model": {name: torch.empty_like(model.state_dict()[name]) for name in ("lm_head.weight",)}}
    dcp.load(tree, checkpoint_id=tmp_path / "dcp/release", no_dist=True)
    assert torch.equal(tree["model"]["lm_head.weight"], model.get_input_embeddings().weight)
    sizes = [(tmp_path / place / "release/__0_0.distcp").stat().st_size for place in ("plain", "dcp")]
    assert sizes[0] == sizes[1]


def test_prefixes_and_fused_linears_say_the_names_and_lead_back(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = {
        "thinker.layers.0.experts.gate_up_proj": torch.arange(24.0).reshape(2, 3, 4),
        "thinker.norm.weight": torch.ones(4),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Unknown"], "num_experts": 2}))
    flags: dict[str, Any] = {"dcp_prefix": "model.", "hf_prefix": "thinker.", "fused_linear_names": ["gate_up_proj"]}
    GenericDCPConverter().hf_to_dcp(folder, tmp_path / "dcp", **flags)
    dcp_to_torch_save(tmp_path / "dcp/release", tmp_path / "whole.pt")
    held = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    experts = tensors["thinker.layers.0.experts.gate_up_proj"].reshape(6, 4)
    assert same(held, {"model.layers.0.experts.gate_up_proj": experts, "model.norm.weight": torch.ones(4)})
    GenericDCPConverter().dcp_to_hf(tmp_path / "dcp", tmp_path / "back", folder, **flags)
    assert same(stored(tmp_path / "back"), tensors)


def test_prefixes_and_parts_of_names_that_match_no_key_are_refused_with_keys_that_are_there(tmp_path: Path) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    folder.mkdir()
    tensors = {"thinker.lm.thinker.norm.weight": torch.ones(4), "thinker.experts.up": torch.ones(2, 3, 4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    convert = GenericDCPConverter()
    there = r"Keys there are thinker\.experts\.up, thinker\.lm\.thinker\.norm\.weight\."
    for flags, told in (
        ({"hf_prefix": "thinkr."}, f"--hf_prefix  no key begins with 'thinkr.'. {there}"),
        ({"hf_prefix": "lm.", "dcp_prefix": "model."}, "--hf_prefix  no key begins with 'lm.'"),
        ({"fused_linear_names": ["experts.up", "gate"]}, f"--fused_linear_names  no key holds 'gate'. {there}"),
        ({"fused_linear_names": ["norm"]}, "none of the keys with 'norm' has 3 dims. Keys there are thinker.lm"),
    ):
        with pytest.raises(UsageError, match=told):
            convert.hf_to_dcp(folder, out, **flags)  # type: ignore[arg-type]
    convert.hf_to_dcp(folder, tmp_path / "dcp", hf_prefix="thinker.", fused_linear_names=["experts.up"])
    held = DcpReader(tmp_path / "dcp/release").model_tensors()
    assert held.keys() == {"lm.thinker.norm.weight", "experts.up"}  # the first alone: a prefix stands in front
    for more, told in (
        ({"dcp_prefix": "model."}, "--dcp_prefix  no key begins with 'model.'. Keys there are experts.up"),
        ({"hf_prefix": "thinker.", "fused_linear_names": ["gate"]}, "--fused_linear_names  no key holds 'gate'"),
    ):
        with pytest.raises(UsageError, match=told):
            convert.dcp_to_hf(tmp_path / "dcp", out, folder, **more)  # type: ignore[arg-type]
    assert not out.exists()


def test_two_keys_that_a_prefix_makes_one_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"a.x": torch.ones(1), "b.x": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"b\.x  a\.x and b\.x would both become this"):
        GenericDCPConverter().hf_to_dcp(folder, tmp_path / "dcp", hf_prefix="a.", dcp_prefix="b.")


@pytest.mark.edge("BN9")
def test_what_the_model_has_no_place_for_is_kept_from_its_own_folder(tmp_path: Path) -> None:
    hub_folder(tmp_path / "hf", "moe", torch.float32)
    (file, *_) = sorted((tmp_path / "hf").glob("*.safetensors"))
    more = load_file(file) | {"mtp.norm.weight": torch.full((32,), 3.0)}
    save_file(more, file, {"format": "pt"})
    index_file = tmp_path / "hf/model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["mtp.norm.weight"] = file.name
    index_file.write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=r"would lose a stored tensor.*--allow-unused\.\n.*mtp\.norm\.weight"):
        GenericDCPConverter().hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    done = GenericDCPConverter().hf_to_dcp(tmp_path / "hf", tmp_path / "dcp", allow_unused=True)
    assert "not written: mtp.norm.weight (the model has no place for it)" in done.lines()
    manifest = json.loads((tmp_path / "dcp/conversion_manifest.json").read_text())
    assert manifest["left_out"] == {"mtp.norm.weight": "the model has no place for it"}
    GenericDCPConverter().dcp_to_hf(tmp_path / "dcp", tmp_path / "back", tmp_path / "hf")
    assert same(stored(tmp_path / "back"), stored(tmp_path / "hf"))


def test_a_missing_tensor_a_wrong_shape_and_a_cut_shard_leave_nothing(tmp_path: Path) -> None:
    hub_folder(tmp_path / "hf", "untied")
    file = tmp_path / "hf/model.safetensors.index.json"
    index = json.loads(file.read_text())
    shard = tmp_path / "hf" / index["weight_map"]["model.norm.weight"]
    whole = load_file(shard)

    save_file(whole | {"model.norm.weight": torch.ones(31)}, shard, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"is \[31\], the model's \[32\]"):
        GenericDCPConverter().hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")

    save_file(whole, shard, {"format": "pt"})
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ModelFolderError, match="is cut"):
        GenericDCPConverter().hf_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    shard.write_bytes(content)

    dcp.save({"model": {"model.norm.weight": torch.ones(32)}}, checkpoint_id=tmp_path / "part", no_dist=True)
    with pytest.raises(ModelFolderError, match=r"model\.embed_tokens\.weight +is missing"):
        GenericDCPConverter().dcp_to_hf(tmp_path / "part", tmp_path / "back", tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "part"]


def test_an_empty_folder_and_a_wrong_tie_say_what_to_name(tmp_path: Path) -> None:
    hub_folder(tmp_path / "hf", "tied")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no distributed checkpoint"):
        GenericDCPConverter().dcp_to_hf(tmp_path / "empty", tmp_path / "back", tmp_path / "hf")
    with pytest.raises(UsageError, match=r"model\.embed_token\.weight +is not stored"):
        GenericDCPConverter().hf_to_dcp(
            tmp_path / "hf", tmp_path / "dcp", tie_weight_mapping={"lm_head.weight": "model.embed_token.weight"}
        )
