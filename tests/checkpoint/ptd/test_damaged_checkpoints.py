"""Checkpoints and folders that are not the model of their config.json: refused in every direction, and nothing is
written. Before, most of them were converted and verified: what is read back is what was written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.common.config import ConvertHFConfig, ConvertMMConfig, HfConfig, ParallelConfig
from mindspeed_mm.checkpoint.ptd.config import ResplitConfig
from mindspeed_mm.checkpoint.ptd.converters import (
    DeepSeekVLConverter,
    InternVLConverter,
    Qwen2_5_VLConverter,
    Qwen3VLMegatronConverter,
)
from mindspeed_mm.core.errors import MMError, UsageError
from tests.helpers.megatron_models import save_tiny

PARALLEL = {"llm_pp_layers": [2, 3], "vit_pp_layers": [3, 0], "tp_size": 2}
CONVERTERS: dict[str, Any] = {
    "qwen2_5_vl": Qwen2_5_VLConverter,
    "qwen3_vl_moe": Qwen3VLMegatronConverter,
    "internvl_chat": InternVLConverter,
    "internvl_hf": InternVLConverter,
    "deepseek_vl2": DeepSeekVLConverter,
}
WITH_EXPERTS = ("qwen3_vl_moe", "deepseek_vl2")
LAYER = "text_decoder.decoder.layers.0."
QKV, NORM = f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}input_layernorm.weight"
FC2, HEAD = f"{LAYER}mlp.linear_fc2.weight", "text_decoder.output_layer.weight"
State = dict[str, torch.Tensor]


def to_mm(name: str, hf: Path, mm: Path, **more: object) -> None:
    parallel = ParallelConfig(**{**PARALLEL, **({"ep_size": 2} if name in WITH_EXPERTS else {}), **more})
    CONVERTERS[name]().hf_to_mm(ConvertMMConfig(mm_dir=mm, hf_config=HfConfig(hf_dir=hf), parallel_config=parallel))


def to_hf(name: str, mm: Path, hf: Path, target: Path) -> None:
    CONVERTERS[name]().mm_to_hf(ConvertHFConfig(mm_dir=mm, hf_config=HfConfig(hf_dir=hf), save_hf_dir=target))


def resplit(name: str, mm: Path, target: Path) -> None:
    parallel = ParallelConfig(llm_pp_layers=[5], vit_pp_layers=[3])
    CONVERTERS[name]().resplit(ResplitConfig(source_dir=mm, target_dir=target, target_parallel_config=parallel))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    def make(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        save_tiny(name, folder / "hf")
        to_mm(name, folder / "hf", folder / "mm")
        return folder / "hf", folder / "mm"

    return cache(make)


class Damaged:
    """A copy of a model's two folders."""

    def __init__(self, name: str, hf: Path, mm: Path, at: Path) -> None:
        self.name, self.hf, self.mm, self.at = name, at / "hf", at / "mm", at
        shutil.copytree(hf, self.hf)
        shutil.copytree(mm, self.mm)
        (self.mm / "conversion_manifest.json").unlink()  # as another program leaves it: checksums would tell first

    def change(self, ranks: str, how: Callable[[State], object]) -> None:
        """In the files of ranks whose names match."""
        files = [file for file in self.mm.glob("release/*/model_optim_rng.pt") if re.search(ranks, file.parent.name)]
        assert files
        for file in files:
            content = torch.load(file, weights_only=True)
            how(content["model"])
            torch.save(content, file)

    def change_config(self, section: str, **values: object) -> None:
        for folder in (self.hf, self.mm):
            config = json.loads((folder / "config.json").read_text())
            (config[section] if section else config).update(values)
            (folder / "config.json").write_text(json.dumps(config))

    def change_hf(self, how: Callable[[State], object]) -> None:
        weights = load_file(self.hf / "model.safetensors")
        how(weights)
        save_file(weights, self.hf / "model.safetensors")

    def refused(self, *directions: str) -> str:
        """What is said in each of these directions, and that nothing is left of the attempt."""
        told: list[MMError] = []
        for direction in directions:
            with pytest.raises(MMError) as caught:
                if direction == "hf_to_mm":
                    to_mm(self.name, self.hf, self.at / "out")
                elif direction == "mm_to_hf":
                    to_hf(self.name, self.mm, self.hf, self.at / "out")
                else:
                    resplit(self.name, self.mm, self.at / "out")
            assert not (self.at / "out").exists()
            told.append(caught.value)
        assert len({error.problems for error in told}) == 1, told
        return str(told[0])


Damage = Callable[[str], Damaged]


@pytest.fixture
def damaged(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Damage:
    return lambda name: Damaged(name, *made(name), tmp_path)


BACK = ("mm_to_hf", "resplit")


@pytest.mark.parametrize("weights", [True, False])
def test_a_tensor_of_another_width_on_all_ranks_is_refused(weights: bool, damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    if not weights:
        (it.hf / "model.safetensors").unlink()
    it.change("_000$", lambda state: state.update({FC2: state[FC2][:, :8].clone()}))
    assert f"{FC2}  has shape [32, 16], in the model [32, 48]" in it.refused(*BACK)


def test_a_norm_that_is_missing_on_all_ranks_is_named(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    (it.hf / "model.safetensors").unlink()
    it.change("_000$", lambda state: state.pop(NORM))
    assert f"{NORM}  is missing" in it.refused(*BACK)


def test_a_tensor_that_nobody_knows_is_named(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change("_000$", lambda state: state.update({f"{LAYER}foo.weight": torch.ones(2)}))
    assert f"{LAYER}foo.weight  has no place in the model" in it.refused(*BACK)


def test_padding_that_no_multiple_explains_is_refused(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change("_001$", lambda state: state.update({HEAD: torch.cat([state[HEAD]] * 2)}))
    assert "holds a piece of shape [250, 32], and of [250, 32] it should hold [125, 32]" in it.refused(*BACK)


def test_a_smaller_vocabulary_in_config_is_no_padding(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change_config("text_config", vocab_size=200)
    assert "holds a piece of shape [125, 32], and of [200, 32] it should hold [100, 32]" in it.refused(*BACK)


def test_pieces_of_unequal_lengths_that_sum_up_are_refused(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change("00_000$", lambda state: state.update({FC2: torch.ones(32, 20)}))
    it.change("01_000$", lambda state: state.update({FC2: torch.ones(32, 28)}))
    assert "rank 0 of 2 holds a piece of shape [32, 20], and of [32, 48] it should hold [32, 24]" in it.refused(*BACK)


EXPERT = f"{LAYER}mlp.experts.local_experts."


def test_experts_are_numbered_as_config_counts_them(damaged: Damage) -> None:
    it = damaged("qwen3_vl_moe")
    more = {f"{EXPERT}2.linear_fc{i}.weight": f"{EXPERT}1.linear_fc{i}.weight" for i in (1, 2)}
    it.change(r"_000_00\d$", lambda state: state.update({new: state[old] for new, old in more.items()}))
    assert "it is expert 2, counted from 0, and there are 2 experts here" in it.refused(*BACK)


def test_an_expert_that_is_missing_in_a_layer_is_named(damaged: Damage) -> None:
    it = damaged("qwen3_vl_moe")
    it.change("_000_001$", lambda state: [state.pop(f"{EXPERT}1.linear_fc{i}.weight") for i in (1, 2)])
    assert f"{EXPERT}3.linear_fc1.weight  is missing" in it.refused(*BACK)


def test_a_dense_tensor_that_is_missing_on_one_expert_rank_is_named(damaged: Damage) -> None:
    it = damaged("qwen3_vl_moe")
    it.change("00_000_001$", lambda state: state.pop(NORM))
    assert f"{NORM} is missing on expert rank 1, and there on rank 0" in it.refused(*BACK)


@pytest.mark.parametrize("lost", [NORM, HEAD, "text_decoder.decoder.final_layernorm.weight"])
def test_without_a_class_layers_are_compared_with_one_another(lost: str, damaged: Damage) -> None:
    it = damaged("internvl_chat")
    (it.hf / "model.safetensors").unlink()
    it.change("", lambda state: state.pop(lost, None))
    assert f"{lost}  is missing" in it.refused(*BACK)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("layers.3.mlp.gate.weight", "layers.3.mlp.router.weight  is missing, and there in layer 1"),
        (
            "layers.0.post_attention_layernorm.weight",
            "layers.0.pre_mlp_layernorm.weight  is missing, and there in layer",
        ),
        ("layers.4.mlp.experts.3.", "layers.4.mlp.experts.local_experts.3.linear_fc1.weight  is missing"),
    ],
)
def test_layers_of_two_kinds_are_compared_each_with_its_own(lost: str, told: str, damaged: Damage) -> None:
    it = damaged("deepseek_vl2")
    it.change_hf(lambda weights: [weights.pop(key) for key in list(weights) if f"model.{lost}" in key])
    assert told in it.refused("hf_to_mm")


def test_padding_of_another_program_is_understood_without_layout_json(damaged: Damage) -> None:
    """Megatron fills the vocabulary up to a multiple of 128 times the ranks; 250 words become 256."""
    it = damaged("qwen2_5_vl")
    (it.mm / "release/layout.json").unlink()
    for name, stage in (("text_decoder.embedding.word_embeddings.weight", "000"), (HEAD, "001")):
        whole = torch.cat([load_file(it.hf / "model.safetensors")[HUB_NAMES[name]], torch.full((6, 32), 7.0)])
        for rank in (0, 1):
            piece = whole[128 * rank :][:128].clone()
            it.change(f"0{rank}_{stage}$", lambda state, name=name, piece=piece: state.update({name: piece}))
    to_hf(it.name, it.mm, it.hf, it.at / "out")
    found, expected = (load_file(folder / "model.safetensors") for folder in (it.at / "out", it.hf))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl_hf"])
def test_a_config_that_does_not_say_whether_the_head_is_tied_refuses_none(name: str, damaged: Damage) -> None:
    it = damaged(name)
    for folder in (it.hf, it.mm):
        config = json.loads((folder / "config.json").read_text())
        for section in (config, config["text_config"]):
            section.pop("tie_word_embeddings", None)
        (folder / "config.json").write_text(json.dumps(config))
    to_hf(it.name, it.mm, it.hf, it.at / "out")
    found, expected = (load_file(folder / "model.safetensors") for folder in (it.at / "out", it.hf))
    assert found.keys() == expected.keys()


HUB_NAMES = {"text_decoder.embedding.word_embeddings.weight": "model.embed_tokens.weight", HEAD: "lm_head.weight"}
HUB = "model.layers.1."


@pytest.mark.parametrize(
    "keys",
    [
        [f"{HUB}input_layernorm.weight"],
        ["model.embed_tokens.weight"],
        ["lm_head.weight"],
        [f"{HUB}self_attn.{part}_proj.bias" for part in "qkv"],
    ],
)
def test_a_folder_that_lacks_something_is_not_divided(keys: list[str], damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change_hf(lambda weights: [weights.pop(key) for key in keys])
    assert "is missing" in it.refused("hf_to_mm")


@pytest.mark.parametrize("key", [f"{HUB}mlp.down_proj.weight", f"{HUB}input_layernorm.weight"])
def test_a_folder_of_other_shapes_is_not_divided(key: str, damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change_hf(lambda weights: weights.update({key: torch.ones(*(2 * n for n in weights[key].shape))}))
    assert "has shape [64" in it.refused("hf_to_mm")


def test_a_folder_without_a_class_that_lacks_a_norm_is_not_divided(damaged: Damage) -> None:
    it = damaged("internvl_chat")
    it.change_hf(lambda weights: weights.pop("language_model.model.layers.4.input_layernorm.weight"))
    assert "text_decoder.decoder.layers.4.input_layernorm.weight  is missing, and there in" in it.refused("hf_to_mm")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
@pytest.mark.parametrize("name", [QKV, NORM])
def test_pieces_and_copies_of_different_types_are_refused(name: str, dtype: torch.dtype, damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change("01_000$", lambda state: state.update({name: state[name].to(dtype)}))
    told = it.refused(*BACK)
    assert f"mp_rank_01_000  model.{name}  is {dtype}, and torch.float32 at mp_rank_00_000" in told


def test_queries_and_keys_of_different_types_are_not_merged(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    key = f"{HUB}self_attn.k_proj.weight"
    it.change_hf(lambda weights: weights.update({key: weights[key].double()}))
    assert re.search(
        rf"different types, .*float32 \(.*q_proj.weight\) and .*float64 \({re.escape(key)}\)", it.refused("hf_to_mm")
    )


def test_copies_that_hold_the_same_nan_are_equal(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change("_000$", lambda state: state[NORM].__setitem__(0, float("nan")))
    it.change_hf(lambda weights: None)
    to_hf(it.name, it.mm, it.hf, it.at / "out")
    found = load_file(it.at / "out/model.safetensors")["model.layers.0.input_layernorm.weight"]
    assert found.isnan().tolist() == [True] + [False] * 31


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tp_size", value) for value in (0, -1, 1.5, True, "2", None)),
        ("ep_size", 0),
        ("vit_tp_size", 0),
        ("vocabulary_multiple", 0),
        ("canonical", "false"),
        ("llm_pp_layers", [[]]),
    ],
)
def test_a_wrong_value_in_layout_json_is_named(key: str, value: object, damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    file = it.mm / "release/layout.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert re.search(rf"layout\.json  is not the division of a checkpoint: {key}", it.refused(*BACK))


def test_millions_of_ranks_in_layout_json_are_seen_at_once(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    file = it.mm / "release/layout.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tp_size": 10**12}))
    assert "mp_rank_02_000 is missing" in it.refused(*BACK)


def test_a_folder_of_a_rank_that_is_none_of_the_division_is_refused(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    shutil.copytree(it.mm / "release/mp_rank_01_000", it.mm / "release/mp_rank_02_000")
    assert "mp_rank_02_000  is of none of the 4 ranks" in it.refused(*BACK)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        *((number, "not a number") for number in ("foo", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ZERO}", "00")),
        ("7", "counted from 0"),
    ],
)
def test_a_layer_without_a_place_is_named(number: str, told: str, damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    name = NORM.replace("layers.0", f"layers.{number}")
    it.change("_000$", lambda state: state.update({name: state[NORM]}))
    assert re.search(rf"{name}: it is layer .*{told}", it.refused(*BACK))


def test_a_number_where_a_piece_is_expected_is_named(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    it.change("_000$", lambda state: state.update({QKV: torch.tensor(1.0)}))
    assert "a piece of shape [] has no dim 0" in it.refused(*BACK)


def test_a_tracker_of_thousands_of_digits_is_refused(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    (it.mm / "latest_checkpointed_iteration.txt").write_text("9" * 5000)
    assert "latest_checkpointed_iteration.txt  names '999" in it.refused(*BACK)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "num_attention_heads", 0),
        ("text_config", "num_key_value_heads", "x"),
        ("text_config", "num_key_value_heads", 3),
        ("text_config", "vocab_size", -5),
        ("text_config", "num_hidden_layers", "5"),
        ("text_config", "num_experts", "x"),
        ("", "vision_config", None),
        ("", "text_config", []),
    ],
)
def test_a_wrong_value_in_config_json_is_named(section: str, key: str, value: object, damaged: Damage) -> None:
    it = damaged("qwen3_vl_moe" if key == "num_experts" else "qwen2_5_vl")
    it.change_config(section, **{key: value})
    assert re.search(rf"config\.json +{section}\.?{key} ", it.refused("hf_to_mm", *BACK))


@pytest.mark.parametrize("value", [[], [[]]])
def test_no_stages_at_all_are_refused(value: list, damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    with pytest.raises(UsageError, match=r"llm_pp_layers  \[(\[\])?\] names no stage"):
        to_mm(it.name, it.hf, it.at / "out", llm_pp_layers=value)


def test_a_chunk_that_the_division_does_not_have_is_refused(damaged: Damage) -> None:
    it = damaged("qwen2_5_vl")
    file = it.mm / "release/mp_rank_00_000/model_optim_rng.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "model2": {NORM: torch.ones(32)}}, file)
    assert re.search(
        r"model_optim_rng\.pt  model2  is not a chunk of this division, which has model$", it.refused(*BACK)
    )
