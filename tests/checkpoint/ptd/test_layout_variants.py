"""Divisions that are not the plain one: encoders whole on every stage, the shape of a U; and a language model that
comes from a folder of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, HfConfig, ParallelConfig
from mindspeed_mm.checkpoint.ptd.config import ResplitConfig
from mindspeed_mm.checkpoint.ptd.converters import Qwen2_5_OmniConverter, Qwen2_5_VLConverter
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from tests.checkpoint.ptd.test_converters import CONVERTERS, ConvertMMConfig, assert_same, to_hf
from tests.helpers.megatron_models import save_tiny

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


def config(mm: Path, hf: Path, division: dict, **more: object) -> ConvertMMConfig:
    said = ParallelConfig(**division)
    return ConvertMMConfig(mm_dir=mm, hf_config=HfConfig(hf_dir=hf), parallel_config=said, **more)


def state(mm: Path, rank: str, chunk: str = "model") -> State:
    return torch.load(mm / "release" / f"mp_rank_{rank}" / "model_optim_rng.pt", weights_only=True)[chunk]


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def encoders(held: State) -> State:
    return {key: tensor for key, tensor in held.items() if key.startswith(("image_encoder.", "audio_encoder."))}


def test_every_stage_holds_the_whole_encoders(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf, every, plain, single = saved("qwen2_5_omni"), tmp_path / "every", tmp_path / "plain", tmp_path / "single"
    converter, ranks = Qwen2_5_OmniConverter(), {"tp_size": 2, "vit_tp_size": 1}
    stages = {"llm_pp_layers": [1, 4], **ranks}
    converter.hf_to_mm(config(every, hf, {**stages, "encoders_on_every_stage": True}))
    converter.hf_to_mm(config(plain, hf, stages))
    converter.hf_to_mm(config(single, hf, {"llm_pp_layers": [5], **ranks}))
    for tp in ("00", "01"):
        whole = state(single, tp)
        assert len(encoders(whole)) > 50
        for stage in ("000", "001"):
            held, usual = (state(folder, f"{tp}_{stage}") for folder in (every, plain))
            assert equal(encoders(held), encoders(whole))
            text = {key: tensor for key, tensor in held.items() if key not in encoders(held)}
            assert equal(text, {key: tensor for key, tensor in usual.items() if key not in encoders(usual)})
    to_hf("qwen2_5_omni", every, hf, tmp_path / "hf")
    assert_same(tmp_path / "hf", hf)
    flat = {"source_dir": every, "target_dir": tmp_path / "again", "target_parallel_config": ParallelConfig(**stages)}
    converter.resplit(ResplitConfig(**flat))
    assert equal(state(tmp_path / "again", "01_001"), state(plain, "01_001"))


def test_encoders_on_every_stage_are_seen_without_a_note_and_compared(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf, mm = saved("qwen2_vl"), tmp_path / "mm"
    division = {"llm_pp_layers": [2, 3], "encoders_on_every_stage": True}
    CONVERTERS["qwen2_vl"]().hf_to_mm(config(mm, hf, division))
    for name in ("release/layout.json", "conversion_manifest.json"):
        (mm / name).unlink()
    to_hf("qwen2_vl", mm, hf, tmp_path / "hf")
    assert_same(tmp_path / "hf", hf)
    file = mm / "release/mp_rank_00_001/model_optim_rng.pt"
    content = torch.load(file, weights_only=True)
    content["model"]["image_encoder.encoder.blocks.layers.1.mlp.linear_fc1.bias"] += 1
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="differs from mp_rank_00_000"):
        to_hf("qwen2_vl", mm, hf, tmp_path / "no")


def test_in_the_shape_of_a_u_both_ends_stand_on_the_first_stage(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf, mm = saved("qwen2_5_vl"), tmp_path / "mm"
    division = {"llm_pp_layers": [[0, 3], [0, 2]], "vit_pp_layers": [[2, 1], [0, 0]]}
    Qwen2_5_VLConverter().hf_to_mm_ldt(config(mm, hf, division))
    hub = load_file(hf / "model.safetensors")
    first, last = state(mm, "00_000", "model0"), state(mm, "00_000", "model1")
    assert torch.equal(first["text_decoder.embedding.word_embeddings.weight"], hub["model.embed_tokens.weight"])
    assert last.keys() == {"text_decoder.output_layer.weight", "text_decoder.decoder.final_layernorm.weight"}
    assert torch.equal(last["text_decoder.output_layer.weight"], hub["lm_head.weight"])
    for chunk, layers in (("model0", 3), ("model1", 2)):
        numbers = {key.split(".")[3] for key in state(mm, "00_001", chunk) if key.startswith("text_decoder.")}
        assert numbers == {f"{number}" for number in range(layers)}
    to_hf("qwen2_5_vl", mm, hf, tmp_path / "hf")
    assert_same(tmp_path / "hf", hf)


OWN_NAMES = {
    "qwen2_5_vl": {"model.": "model.", "lm_head.": "lm_head."},
    "qwen3_vl_moe": {"model.language_model.": "model.", "lm_head.": "lm_head."},
    "internvl_chat": {"language_model.": ""},
    "internlm2": {"language_model.": ""},
    "deepseek_vl2": {"language.": ""},
}
"""Beginnings of a language model's keys in the larger model → in a folder of its own."""


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_language_model_of_its_own_folder_takes_the_place_of_the_model_s(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf, other, text = saved(name), tmp_path / "other", tmp_path / "text"
    shutil.copytree(hf, other)
    text.mkdir()
    torch.manual_seed(3)
    whole, alone = load_file(hf / "model.safetensors"), {}
    for key, tensor in whole.items():
        for start, own in OWN_NAMES[name].items():
            if key.startswith(start):
                whole[key] = alone[own + key.removeprefix(start)] = torch.randn_like(tensor)
    save_file(whole, other / "model.safetensors", {"format": "pt"})
    save_file(alone, text / "model.safetensors", {"format": "pt"})
    converter, division = CONVERTERS[name](), {"llm_pp_layers": [2, 3], "tp_size": 2}
    converter.hf_to_mm(config(tmp_path / "expected", other, division))
    told = {"common_model_config": CommonModelConfig(llm_hf_dir=text)}
    converter.hf_to_mm(config(tmp_path / "found", hf, division, **told))
    for rank in ("00_000", "00_001", "01_000", "01_001"):
        assert equal(state(tmp_path / "found", rank), state(tmp_path / "expected", rank))
    left_out = json.loads((tmp_path / "found/conversion_manifest.json").read_text())["left_out"]
    assert len(left_out) == len(alone) and set(left_out.values()) == {f"comes from {text}"}


def test_a_language_model_that_does_not_fit_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf, division = saved("qwen2_5_vl"), {"llm_pp_layers": [5]}
    for name, error, message in (
        ("qwen3", ModelFolderError, "cannot interleave"),
        ("llama", CheckpointError, r"linear_proj\.bias *has no place in the model"),
    ):
        told = CommonModelConfig(llm_hf_dir=saved(name))
        with pytest.raises(error, match=message):
            Qwen2_5_VLConverter().hf_to_mm(config(tmp_path / "mm", hf, division, common_model_config=told))
    two = {"common_model_config": CommonModelConfig(llm_hf_dir=hf), "llm_hf_config": HfConfig(hf_dir=tmp_path)}
    with pytest.raises(UsageError, match="Leave one of them out"):
        Qwen2_5_VLConverter().hf_to_mm(config(tmp_path / "mm", hf, division, **two))
    told = CommonModelConfig(llm_hf_dir=hf)
    with pytest.raises(UsageError, match="the whole model is written"):
        to_hf("qwen2_5_vl", tmp_path / "mm", hf, tmp_path / "hf", common_model_config=told)
    assert not (tmp_path / "mm").exists()
