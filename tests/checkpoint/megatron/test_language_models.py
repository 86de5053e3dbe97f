"""Language models alone in Megatron-Core's layout: every tensor of every file against plain torch, and the way back.

Two tensor ranks, two stages, one layer on the first and four on the second; of experts two ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.cli.mm_convert import run
from tests.helpers.megatron_models import GROUPS, LANGUAGE_MODELS, save_tiny
from tests.helpers.runs import mm

TP, STAGES = 2, ((0,), (1, 2, 3, 4))
Hub = dict[str, torch.Tensor]
Pieces = list[torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


def rows(tensor: torch.Tensor) -> Pieces:
    return list(tensor.chunk(TP))


def columns(tensor: torch.Tensor) -> Pieces:
    return list(tensor.chunk(TP, 1))


def whole(tensor: torch.Tensor) -> Pieces:
    return [tensor] * TP


def gated(gate: torch.Tensor, up: torch.Tensor) -> Pieces:
    return [torch.cat(pair) for pair in zip(rows(gate), rows(up), strict=True)]


def attention(hub: Hub, at: str) -> dict[str, Pieces]:
    """Of each group its queries, its key, its value."""
    found = {"linear_proj.weight": columns(hub[f"{at}o_proj.weight"])}
    for part in ("weight", "bias"):
        if f"{at}q_proj.{part}" in hub:
            split = [
                hub[f"{at}{which}_proj.{part}"].view(GROUPS, -1, *hub[f"{at}q_proj.{part}"].shape[1:])
                for which in "qkv"
            ]
            found[f"linear_qkv.{part}"] = rows(torch.cat(split, 1).flatten(0, 1))
    for name, own in {
        "q_norm.weight": "q_layernorm.weight",
        "k_norm.weight": "k_layernorm.weight",
        "o_proj.bias": "linear_proj.bias",
    }.items():
        if at + name in hub:
            found[own] = whole(hub[at + name])
    return found


def latent_attention(hub: Hub, at: str) -> dict[str, Pieces]:
    """Down to the latents whole, from them up by heads."""
    found = {
        "linear_kv_down_proj.weight": whole(hub[f"{at}kv_a_proj_with_mqa.weight"]),
        "kv_layernorm.weight": whole(hub[f"{at}kv_a_layernorm.weight"]),
        "linear_kv_up_proj.weight": rows(hub[f"{at}kv_b_proj.weight"]),
        "linear_proj.weight": columns(hub[f"{at}o_proj.weight"]),
    }
    if f"{at}q_proj.weight" in hub:
        return {**found, "linear_q_proj.weight": rows(hub[f"{at}q_proj.weight"])}
    return {
        **found,
        "linear_q_down_proj.weight": whole(hub[f"{at}q_a_proj.weight"]),
        "q_layernorm.weight": whole(hub[f"{at}q_a_layernorm.weight"]),
        "linear_q_up_proj.weight": rows(hub[f"{at}q_b_proj.weight"]),
    }


def mlp(hub: Hub, at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, Pieces]:
    found = {"linear_fc2.weight": columns(hub[f"{at}{down}.weight"])}
    for part in ("weight", "bias"):
        if f"{at}{gate}.{part}" in hub:
            found[f"linear_fc1.{part}"] = gated(hub[f"{at}{gate}.{part}"], hub[f"{at}{up}.{part}"])
    if f"{at}{down}.bias" in hub:
        found["linear_fc2.bias"] = whole(hub[f"{at}{down}.bias"])
    return found


def routed(hub: Hub, at: str, expert_rank: int) -> dict[str, Pieces]:
    """Of four experts two on each rank, numbered from 0 there."""
    mixtral = f"{at}block_sparse_moe.gate.weight" in hub
    base = f"{at}block_sparse_moe." if mixtral else f"{at}mlp."
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {"router.weight": whole(hub[f"{base}gate.weight"])}
    for name, own in {
        "gate.e_score_correction_bias": "router.expert_bias",
        "shared_expert_gate.weight": "shared_experts.gate_weight",
    }.items():
        if base + name in hub:
            found[own] = whole(hub[base + name])
    for shared in ("shared_expert.", "shared_experts."):
        if f"{base}{shared}gate_proj.weight" in hub:
            found |= {f"shared_experts.{key}": pieces for key, pieces in mlp(hub, base + shared).items()}
    for local in range(2):
        expert = mlp(hub, f"{base}experts.{2 * expert_rank + local}.", *names)
        found |= {f"experts.local_experts.{local}.{key}": pieces for key, pieces in expert.items()}
    return found


def expected(hub: Hub, stage: int, expert_rank: int, tied: bool) -> dict[str, Pieces]:
    found = {}
    if stage == 0:
        found["embedding.word_embeddings.weight"] = rows(hub["model.embed_tokens.weight"])
    else:
        found["decoder.final_layernorm.weight"] = whole(hub["model.norm.weight"])
        found["output_layer.weight"] = rows(hub["model.embed_tokens.weight" if tied else "lm_head.weight"])
    for local, number in enumerate(STAGES[stage]):
        at, own = f"model.layers.{number}.", f"decoder.layers.{local}."
        found[f"{own}input_layernorm.weight"] = whole(hub[f"{at}input_layernorm.weight"])
        found[f"{own}pre_mlp_layernorm.weight"] = whole(hub[f"{at}post_attention_layernorm.weight"])
        latent = f"{at}self_attn.kv_a_layernorm.weight" in hub
        of_attention = (latent_attention if latent else attention)(hub, f"{at}self_attn.")
        is_dense = f"{at}mlp.gate_proj.weight" in hub
        of_mlp = mlp(hub, f"{at}mlp.") if is_dense else routed(hub, at, expert_rank)
        found |= {f"{own}self_attention.{key}": pieces for key, pieces in of_attention.items()}
        found |= {f"{own}mlp.{key}": pieces for key, pieces in of_mlp.items()}
    return found


def divide(hf: Path, target: Path, *words: object) -> None:
    flags = ["--cfg.mm_dir", target, "--cfg.hf_config.hf_dir", hf, "--cfg.parallel_config.tp_size", TP, *words]
    assert run([str(word) for word in ("LanguageModelConverter", "hf_to_mm", *flags)]) == 0


def assert_same(found: Path, wanted: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, wanted))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key


REPEATS = ("qwen2", "glm4_moe", "deepseek_v2")
"""Made of parts that the others have."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in REPEATS else n for n in LANGUAGE_MODELS]
)
def test_every_file_holds_what_plain_torch_computes_and_the_way_back_is_exact(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf = saved(name)
    hub, config = load_file(hf / "model.safetensors"), json.loads((hf / "config.json").read_text())
    ep = 2 if any(".experts." in key for key in hub) else 1
    divide(hf, tmp_path / "mm", "--cfg.parallel_config.llm_pp_layers", "[1,4]", "--cfg.parallel_config.ep_size", ep)
    folders = {path.name for path in (tmp_path / "mm/release").glob("mp_rank_*")}
    for stage in range(2):
        for expert_rank in range(ep):
            wanted = expected(hub, stage, expert_rank, config["tie_word_embeddings"])
            for tp in range(TP):
                folder = f"mp_rank_{tp:02d}_{stage:03d}" + (f"_{expert_rank:03d}" if ep > 1 else "")
                folders.remove(folder)
                file = tmp_path / "mm/release" / folder / "model_optim_rng.pt"
                held = torch.load(file, weights_only=True)["model"]
                assert held.keys() == wanted.keys()
                for key, pieces in wanted.items():
                    assert torch.equal(held[key], pieces[tp]), (folder, key)
    assert not folders
    assert mm("convert", tmp_path / "mm", tmp_path / "hf", "--to", "hf", "--model", hf).code == 0
    assert_same(tmp_path / "hf", hf)


def test_a_model_goes_through_virtual_chunks_and_other_ranks_by_the_short_command(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf, chunks, anew = saved("qwen3_moe"), tmp_path / "chunks", tmp_path / "anew"
    said = mm("convert", hf, chunks, "--to", "megatron", "--pp", 2, "--vpp", 2, "--ep", 2)
    assert said.code == 0, said.err
    assert "logits of 16 tokens are those of the source" in said.out
    assert mm("convert", chunks, anew, "--to", "megatron", "--tp", 4, "--ep", 4).code == 0
    assert mm("convert", anew, tmp_path / "hf", "--to", "hf").code == 0
    assert_same(tmp_path / "hf", hf)


def test_layers_that_predict_further_tokens_stay_in_the_original_folder(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf = tmp_path / "released"
    hf.mkdir()
    config = json.loads((saved("deepseek_v3") / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    weights = load_file(saved("deepseek_v3") / "model.safetensors")
    save_file({**weights, "model.layers.5.enorm.weight": torch.randn(3)}, hf / "model.safetensors")
    divide(hf, tmp_path / "mm")
    left_out = json.loads((tmp_path / "mm/conversion_manifest.json").read_text())["left_out"]
    assert left_out == {"model.layers.5.enorm.weight": "is not part of this layout"}
    assert mm("convert", tmp_path / "mm", tmp_path / "hf", "--to", "hf", "--model", hf).code == 0
    assert_same(tmp_path / "hf", hf)


def with_transformer_engine(state: Hub) -> Hub:
    """The same file as Transformer Engine's modules name it, with what its kernels keep."""
    found: Hub = {"decoder.layers.0.self_attention.linear_qkv._extra_state": torch.zeros(3)}
    for name, tensor in state.items():
        is_sparse = name.replace("pre_mlp_layernorm", "mlp.router") in state
        if name.endswith("input_layernorm.weight"):
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        elif name.endswith("pre_mlp_layernorm.weight") and not is_sparse:
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        elif ".local_experts." in name:
            layer, _, expert = name.partition("local_experts.")
            number, linear, part = expert.split(".")
            name = f"{layer}{linear}.{part}{number}"
        found[name] = tensor
    return found


def test_names_of_transformer_engine_are_read(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("qwen3_moe")
    divide(hf, tmp_path / "mm", "--cfg.parallel_config.llm_pp_layers", "[2,3]", "--cfg.parallel_config.ep_size", 2)
    (tmp_path / "mm/conversion_manifest.json").unlink()
    names = set()
    for file in (tmp_path / "mm/release").glob("*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=True)
        content["model"] = with_transformer_engine(content["model"])
        names |= content["model"].keys()
        torch.save(content, file)
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    assert {"decoder.layers.0.mlp.experts.linear_fc2.weight1", "decoder.layers.0.pre_mlp_layernorm.weight"} <= names
    assert not any("local_experts" in name for name in names)
    assert mm("convert", tmp_path / "mm", tmp_path / "hf", "--to", "hf", "--model", hf).code == 0
    assert_same(tmp_path / "hf", hf)
    content["model"]["decoder.layers.1.input_layernorm.weight"] = torch.ones(32)
    torch.save(content, file)
    said = mm("convert", tmp_path / "mm", tmp_path / "no", "--to", "hf", "--model", hf)
    assert said.code == 4 and "is there as decoder.layers.1.self_attention.linear_qkv.layer_norm_weight too" in said.err
