"""The converters of Megatron-style checkpoints, folder to folder: through any division and back, every bit is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.common.config import (
    CommonModelConfig,
    ConvertHFConfig,
    ConvertMMConfig,
    HfConfig,
    ParallelConfig,
)
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, LazyTensor, Sliced
from mindspeed_mm.checkpoint.megatron import sharding
from mindspeed_mm.checkpoint.megatron.family import TensorCut
from mindspeed_mm.checkpoint.ptd.config import (
    AdapterModelConfig,
    ConvertLoraHFConfig,
    ConvertLoraMMConfig,
    ResplitConfig,
)
from mindspeed_mm.checkpoint.ptd.converters import (
    DeepSeekVLConverter,
    GlmConverter,
    InternVLConverter,
    Qwen2_5_OmniConverter,
    Qwen2_5_VLConverter,
    Qwen2VLConverter,
    Qwen3VLMegatronConverter,
)
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from tests.helpers.megatron_models import save_tiny

CONVERTERS = {
    "qwen2_vl": Qwen2VLConverter,
    "qwen2_5_vl": Qwen2_5_VLConverter,
    "qwen2_5_omni": Qwen2_5_OmniConverter,
    "qwen3_vl": Qwen3VLMegatronConverter,
    "qwen3_vl_moe": Qwen3VLMegatronConverter,
    "internvl_chat": InternVLConverter,
    "internlm2": InternVLConverter,
    "internvl_hf": InternVLConverter,
    "glm4v": GlmConverter,
    "deepseek_vl": DeepSeekVLConverter,
    "deepseek_vl2": DeepSeekVLConverter,
}
WITH_EXPERTS = ("qwen3_vl_moe", "deepseek_vl2")
UNLIKE = ("qwen2_5_omni", "qwen3_vl_moe", "internvl_chat", "deepseek_vl2")
"""Three towers, experts, no class of transformers, latent attention: the others repeat what these do."""
CHUNKED = {"llm_pp_layers": [[0, 1], [2, 2]], "vit_pp_layers": [[2, 1], [0, 0]], "tp_size": 2}
FLAT = {"llm_pp_layers": [1, 1, 1, 2], "vit_pp_layers": [3, 0, 0, 0], "tp_size": 4}


def division(name: str, values: dict) -> ParallelConfig:
    more: dict = {"ep_size": 2} if name in WITH_EXPERTS else {}
    if name == "qwen2_5_omni":
        stages = values["vit_pp_layers"]
        more["audio_pp_layers"] = [[4, 0], [0, 0]] if isinstance(stages[0], list) else [4, 0, 0, 0]
    return ParallelConfig(**values, **more)


def to_mm(name: str, hf: Path, mm: Path, values: dict, **more: object) -> None:
    cfg = ConvertMMConfig(mm_dir=mm, hf_config=HfConfig(hf_dir=hf), parallel_config=division(name, values), **more)
    CONVERTERS[name]().hf_to_mm(cfg)


def to_hf(name: str, mm: Path, hf: Path, target: Path, values: dict | None = None, **more: object) -> None:
    said = division(name, values) if values else None
    cfg = ConvertHFConfig(mm_dir=mm, hf_config=HfConfig(hf_dir=hf), save_hf_dir=target, parallel_config=said, **more)
    CONVERTERS[name]().mm_to_hf(cfg)


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key
    assert (found / "config.json").read_bytes() == (expected / "config.json").read_bytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", [n if n in UNLIKE else pytest.param(n, marks=pytest.mark.slow) for n in CONVERTERS])
def test_a_folder_goes_through_two_divisions_and_comes_back_to_the_bit(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf, mm, again, back = saved(name), tmp_path / "mm", tmp_path / "again", tmp_path / "hf"
    to_mm(name, hf, mm, CHUNKED)
    first = "mp_rank_00_000_000" if name in WITH_EXPERTS else "mp_rank_00_000"
    content = torch.load(mm / "release" / first / "model_optim_rng.pt", weights_only=True)
    assert content.keys() == {"model0", "model1", "checkpoint_version"}
    assert content["checkpoint_version"] == 3.0
    assert (mm / "latest_checkpointed_iteration.txt").read_text() == "release"
    resplit = ResplitConfig(source_dir=mm, target_dir=again, target_parallel_config=division(name, FLAT))
    CONVERTERS[name]().resplit(resplit)
    to_hf(name, again, hf, back)
    assert_same(back, hf)


@pytest.mark.parametrize("name", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl_moe"])
def test_a_folder_of_another_program_is_read_by_what_was_said(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing lies beside the weights: no layout.json, no config.json; and a number instead of `release`."""
    hf, mm, again, back = saved(name), tmp_path / "mm", tmp_path / "again", tmp_path / "hf"
    to_mm(name, hf, mm, CHUNKED)
    step = (mm / "release").rename(mm / "iter_0000012")
    (mm / "latest_checkpointed_iteration.txt").write_text("12")
    (step / "layout.json").unlink()
    (mm / "config.json").unlink()
    source, target = division(name, CHUNKED), division(name, FLAT)
    cfg = {"source_dir": mm, "target_dir": again, "source_parallel_config": source, "target_parallel_config": target}
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        CONVERTERS[name]().resplit(ResplitConfig(**cfg))
    CONVERTERS[name]().resplit(ResplitConfig(**cfg, hf_config=HfConfig(hf_dir=hf)))
    to_hf(name, again, hf, back)
    assert_same(back, hf)


def test_what_contradicts_the_checkpoint_is_refused_with_both_values(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf, mm = saved("glm4v"), tmp_path / "mm"
    to_mm("glm4v", hf, mm, CHUNKED)
    with pytest.raises(UsageError, match=r"4 was given, and the checkpoint has 2"):
        to_hf("glm4v", mm, hf, tmp_path / "hf", {**CHUNKED, "tp_size": 4})
    with pytest.raises(UsageError, match=r"7 was given, and config.json has 5"):
        to_hf("glm4v", mm, hf, tmp_path / "hf", common_model_config=CommonModelConfig(llm_num_layers=7))
    with pytest.raises(UsageError, match=r"2 was given, and config.json has 4"):
        to_hf("glm4v", mm, hf, tmp_path / "hf", common_model_config=CommonModelConfig(num_key_value_heads=2))
    assert not (tmp_path / "hf").exists()


def test_a_division_of_too_few_layers_is_refused_and_leaves_nothing(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"\[\[1, 3\]\] are 4 layers, the model's text tower has 5"):
        to_mm("glm4v", saved("glm4v"), tmp_path / "mm", {"llm_pp_layers": [1, 3], "vit_pp_layers": [3, 0]})
    assert not (tmp_path / "mm").exists()


def test_a_rank_that_is_missing_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf, mm = saved("glm4v"), tmp_path / "mm"
    to_mm("glm4v", hf, mm, CHUNKED)
    shutil.rmtree(mm / "release/mp_rank_01_001")
    with pytest.raises(CheckpointError, match="mp_rank_01_001 is missing"):
        to_hf("glm4v", mm, hf, tmp_path / "hf")


def twice_the_first(self: TensorCut, pieces: Sequence[LazyTensor], true_length: int | None = None) -> LazyTensor:
    """A fault: rank 0's piece instead of every other's. Keys and shapes are as they should be."""
    whole = Concatenated([pieces[0]] * len(pieces), self.dim)
    return whole if true_length is None or not self.padded else Sliced(whole, self.dim, 0, true_length)


def test_a_piece_that_is_left_out_on_the_way_back_is_named(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, mm = saved("glm4v"), tmp_path / "mm"
    to_mm("glm4v", hf, mm, CHUNKED)
    monkeypatch.setattr(TensorCut, "whole", twice_the_first)
    resplit = ResplitConfig(source_dir=mm, target_dir=tmp_path / "out", target_parallel_config=division("glm4v", FLAT))
    for convert in (lambda: to_hf("glm4v", mm, hf, tmp_path / "out"), lambda: GlmConverter().resplit(resplit)):
        with pytest.raises(ModelFolderError, match=r"mp_rank_01_000/model0\..*  is not used") as caught:
            convert()
        assert "mp_rank_00_000/model0." in str(caught.value)  # and this is used twice
        assert not (tmp_path / "out").exists()


def test_a_copy_that_is_not_written_is_named(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_division = sharding._pieces

    def without_last_norm(name: str, *more: Any) -> Iterator[Any]:
        pieces = list(whole_division(name, *more))
        return iter(pieces[:-1] if name.endswith("final_layernorm.weight") else pieces)

    monkeypatch.setattr(sharding, "_pieces", without_last_norm)
    with pytest.raises(ModelFolderError, match=r"model\.language_model\.norm\.weight +is used 1 times, and 2 are"):
        to_mm("glm4v", saved("glm4v"), tmp_path / "mm", CHUNKED)


def test_what_kernels_keep_and_an_optimizer_are_left_out_by_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf, mm = saved("glm4v"), tmp_path / "mm"
    to_mm("glm4v", hf, mm, CHUNKED)
    (mm / "conversion_manifest.json").unlink()
    file = mm / "release/mp_rank_00_000/model_optim_rng.pt"
    content = torch.load(file, weights_only=True)
    content["model0"]["text_decoder.decoder.layers.0.x._extra_state"] = torch.ones(3)
    torch.save({**content, "optimizer": {"exp_avg": torch.ones(2)}}, file)
    to_hf("glm4v", mm, hf, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/conversion_manifest.json").read_text())["left_out"] == {
        "mp_rank_00_000/model0.text_decoder.decoder.layers.0.x._extra_state": "is what Megatron's kernels keep for "
        "themselves",
        "mp_rank_00_000/optimizer": "is not part of the model",
    }


def test_a_talker_stays_in_the_original_folder_and_comes_back_from_there(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    thinker, whole = saved("qwen2_5_omni"), tmp_path / "whole"
    whole.mkdir()
    config = json.loads((thinker / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": config}))
    weights = {f"thinker.{key}": tensor for key, tensor in load_file(thinker / "model.safetensors").items()}
    weights |= {"talker.a.weight": torch.randn(3, 2), "token2wav.b": torch.randn(2)}
    save_file(weights, whole / "model.safetensors")
    to_mm("qwen2_5_omni", whole, tmp_path / "mm", CHUNKED)
    to_hf("qwen2_5_omni", tmp_path / "mm", whole, tmp_path / "hf")
    assert_same(tmp_path / "hf", whole)


def test_a_canonical_checkpoint_says_so_itself(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf, mm, again = saved("qwen2_5_vl"), tmp_path / "mm", tmp_path / "again"
    canonical = CommonModelConfig(enable_canonical_hf_struct=True)
    to_mm("qwen2_5_vl", hf, mm, CHUNKED, common_model_config=canonical)
    content = torch.load(mm / "release/mp_rank_00_000/model_optim_rng.pt", weights_only=True)
    assert "text_decoder.decoder.layers.0.self_attention.q_proj.weight" in content["model1"]
    said = {"source_parallel_config": ParallelConfig(**CHUNKED), "target_parallel_config": ParallelConfig(**FLAT)}
    Qwen2_5_VLConverter().resplit(ResplitConfig(source_dir=mm, target_dir=again, **said))
    to_hf("qwen2_5_vl", again, hf, tmp_path / "hf")
    assert_same(tmp_path / "hf", hf)
    fused = tmp_path / "fused"
    to_mm("qwen2_5_vl", hf, fused, CHUNKED)
    with pytest.raises(UsageError, match="projections are fused"):
        to_hf("qwen2_5_vl", fused, hf, tmp_path / "no", common_model_config=canonical)


def test_a_family_that_knows_no_canonical_form_refuses_it(saved: Callable[[str], Path], tmp_path: Path) -> None:
    canonical = CommonModelConfig(enable_canonical_hf_struct=True)
    with pytest.raises(UsageError, match=r"GLM-4\.1V has fused projections alone"):
        to_mm("glm4v", saved("glm4v"), tmp_path / "mm", CHUNKED, common_model_config=canonical)
    assert not (tmp_path / "mm").exists()


def test_a_vision_tower_alone_has_no_text(saved: Callable[[str], Path], tmp_path: Path) -> None:
    to_mm("qwen2_vl", saved("qwen2_vl"), tmp_path / "mm", CHUNKED, save_vit_only=True)
    names = set()
    for file in (tmp_path / "mm").glob("release/*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=True)
        names |= content["model0"].keys() | content["model1"].keys()
    assert names
    assert all(name.startswith("image_encoder.") for name in names)


def test_adapters_are_divided_and_joined_as_peft_names_them(tmp_path: Path) -> None:
    peft, mm, back = tmp_path / "peft", tmp_path / "mm", tmp_path / "back"
    peft.mkdir()
    torch.manual_seed(0)
    weights = {}
    for module in ("model.language_model.layers.{}.self_attn.k_proj", "model.language_model.layers.{}.mlp.down_proj"):
        for number in range(5):
            name = f"base_model.model.{module.format(number)}"
            weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"] = torch.randn(2, 8), torch.randn(8, 2)
    save_file(weights, peft / "adapter_model.safetensors")
    (peft / "adapter_config.json").write_text('{"r": 2}')
    naming = AdapterModelConfig(
        enable_canonical_hf_struct=True, new_transformers_weight_key=True, model_prefix="base_model.model."
    )
    said = ParallelConfig(**CHUNKED)
    to = ConvertLoraMMConfig(
        mm_dir=mm, hf_config=HfConfig(hf_dir=peft), parallel_config=said, common_model_config=naming
    )
    Qwen2_5_VLConverter().lora_hf_to_mm(to)
    content = torch.load(mm / "release/mp_rank_01_001/model_optim_rng.pt", weights_only=True)
    name = "text_decoder.decoder.layers.0.mlp.linear_fc2.lora_A.default.weight"  # layer 0 of text is alone on stage 1
    expected = weights["base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight"]
    assert torch.equal(content["model0"][name], expected[:, 4:])
    Qwen2_5_VLConverter().lora_mm_to_hf(ConvertLoraHFConfig(mm_dir=mm, save_hf_dir=back, common_model_config=naming))
    found = load_file(back / "adapter_model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in found.items())
    assert (back / "adapter_config.json").read_text() == '{"r": 2}'


def test_adapters_of_fused_projections_are_refused(tmp_path: Path) -> None:
    to = ConvertLoraMMConfig(
        mm_dir=tmp_path / "mm", hf_config=HfConfig(hf_dir=tmp_path), parallel_config=ParallelConfig(**CHUNKED)
    )
    with pytest.raises(UsageError, match="none of the hub's"):
        Qwen2VLConverter().lora_hf_to_mm(to)


def test_every_converter_offers_the_documented_subcommands() -> None:
    for converter in set(CONVERTERS.values()):
        assert issubclass(converter, Converter)
        assert {"hf_to_mm", "mm_to_hf", "resplit"} <= converter.subcommands().keys()
    assert {"lora_hf_to_mm", "lora_mm_to_hf"} <= Qwen2_5_VLConverter.subcommands().keys()
