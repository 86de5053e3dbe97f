"""Weights that are not those of their model are refused in every direction, and a model keeps its configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.original.converting import GeneratorTarget, convert_generator
from mindspeed_mm.checkpoint.original.diffusers_model import (
    check_blocks,
    check_diffusers_model,
    fitting_config,
    told_version,
)
from mindspeed_mm.checkpoint.original.families import GENERATORS
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.reading import GeneratorWeights
from mindspeed_mm.core.errors import ModelFolderError
from tests.helpers.generator_weights import TRANSFORMERS, diffusers, lazy, outline, small_model

STEM = "diffusion_pytorch_model.safetensors"
RANK = "release/mp_rank_00/model_optim_rng.pt"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("wan")
    small_model("Wan").save_pretrained(folder)
    return folder


def without(*starts: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith(starts)]


def replaced(key: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blocks.0.attn2.to_q.bias"), r"blocks\.0\.attn2\.to_q\.bias +is missing"),
        (without("blocks.1."), r"blocks\.1\.attn1\.to_q\.weight +is missing"),
        (without("blocks.3."), r"num_layers +is 4, and the weights have 3"),
        (without("proj_out.weight"), r"proj_out\.weight +is missing"),
        (without("patch_embedding.weight"), r"patch_embedding\.weight +is missing"),
        (replaced("blocks.2.ffn.net.0.proj.bias", torch.zeros(3, 3)), r"has shape \[3, 3\], the model wants \[24\]"),
        (replaced("proj_out.weight", torch.zeros(3)), r"proj_out\.weight +has shape \[3\]"),
        (without("proj_out.bias"), r"are Wan, and do not fit WanTransformer3DModel as .*source describes it\. Name a"),
    ],
)
@pytest.mark.parametrize("target", Naming)
def test_a_diffusers_folder_that_is_not_its_model_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, target: Naming, hub: Path, tmp_path: Path
) -> None:
    shutil.copytree(hub, tmp_path / "source")
    tensors = load_file(hub / STEM)
    change(tensors)
    save_file(tensors, tmp_path / "source" / STEM)
    with pytest.raises(ModelFolderError, match=message):
        convert_generator(tmp_path / "source", tmp_path / "out", GeneratorTarget(target))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keeps_config", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blocks.0.cross_attn.proj_q.bias"), r"blocks\.0\.attn2\.to_q\.bias +is missing"),
        (replaced("blocks.0.cross_attn.proj_q.bias", 5), r"blocks\.0\.attn2\.to_q\.bias +is missing"),
        (replaced("blocks.0.cross_attn.proj_q.bias", torch.zeros(3, 3)), r"has shape \[3, 3\], the model wants"),
    ],
)
def test_a_mindspeed_mm_folder_that_is_not_its_model_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, keeps_config: bool, hub: Path, tmp_path: Path
) -> None:
    convert_generator(hub, tmp_path / "mm", GeneratorTarget(Naming.MM))
    content = torch.load(tmp_path / "mm" / RANK, weights_only=True)
    change(content["model"])
    torch.save(content, tmp_path / "mm" / RANK)
    if not keeps_config:  # as a folder of another program
        (tmp_path / "mm/config.json").unlink()
    told = None if keeps_config else hub
    for target in Naming:
        with pytest.raises(ModelFolderError, match=message):
            convert_generator(tmp_path / "mm", tmp_path / "out", GeneratorTarget(target, hf_dir=told))
    assert not (tmp_path / "out").exists()


def test_where_diffusers_has_no_such_class_all_blocks_hold_the_same(hub: Path, tmp_path: Path) -> None:
    shutil.copytree(hub, tmp_path / "source")
    config = json.loads((hub / "config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps(config | {"_class_name": "OfNoLibrary"}))
    convert_generator(tmp_path / "source", tmp_path / "mm", GeneratorTarget(Naming.MM))
    tensors = load_file(hub / STEM)
    del tensors["blocks.2.attn2.to_q.bias"]
    tensors["blocks.3.ffn.net.2.bias"] = torch.zeros(2)
    save_file(tensors, tmp_path / "source" / STEM)
    with pytest.raises(ModelFolderError) as caught:
        convert_generator(tmp_path / "source", tmp_path / "out", GeneratorTarget(Naming.ORIGINAL))
    assert {problem.key for problem in caught.value.problems} == {"blocks.2.attn2.to_q.bias", "blocks.3.ffn.net.2.bias"}


def test_the_first_block_of_a_branch_may_hold_more_and_no_block_may_be_absent() -> None:
    tensors: dict[str, LazyTensor] = lazy(dict(outline("VACE").state_dict()))
    assert check_blocks(tensors) == []
    left = {key: tensor for key, tensor in tensors.items() if not key.startswith(("blocks.2.", "vace_blocks.0.attn1."))}
    missing = {problem.key for problem in check_blocks(left)}
    assert missing == tensors.keys() - left.keys()


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_the_model_of_the_told_configuration_has_these_keys_and_shapes(case: str) -> None:
    family = next(found for found in GENERATORS if found.name == case.removesuffix(" I2V"))
    tensors = lazy(dict(outline(case).state_dict()))
    weights = GeneratorWeights(Path("model"), family, Naming.ORIGINAL, {}, {"num_heads": 2})
    assert fitting_config(tensors, weights)["_class_name"] == TRANSFORMERS[case][0]
    first = next(iter(tensors))
    del tensors[first]
    with pytest.raises(ModelFolderError) as caught:
        fitting_config(tensors, weights)
    assert [problem.key for problem in caught.value.problems] == [first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("proj_out.weight"), r"proj_out\.weight +is missing"),
        (without("blocks.1."), r"blocks\.1\.attn1\.to_q\.weight +is missing"),
        (replaced("ema.decay", torch.zeros(1)), r"ema\.decay +is not one of the model's"),
        (replaced("proj_out.weight", torch.zeros(3)), r"proj_out\.weight +has shape \[3\]"),
    ],
)
def test_tensors_of_a_plugin_s_converter_are_compared_with_its_configuration(
    change: Callable[[dict[str, Any]], Any], message: str, hub: Path
) -> None:
    config, tensors = json.loads((hub / "config.json").read_text()), load_file(hub / STEM)
    check_diffusers_model(lazy(tensors), config, Path("authors"))
    change(tensors)
    with pytest.raises(ModelFolderError, match=rf"authors does not hold [\s\S]*{message}"):
        check_diffusers_model(lazy(tensors), config, Path("authors"))
    with pytest.raises(ModelFolderError, match="diffusers has no model WanTransformer"):
        check_diffusers_model(lazy(tensors), config | {"_class_name": "WanTransformer"}, Path("authors"))


def test_a_version_that_no_tensor_tells_names_the_tensor() -> None:
    family = next(found for found in GENERATORS if found.name == "Wan")
    with pytest.raises(ModelFolderError, match=r"patch_embedding\.weight +is missing, and every Wan has it"):
        told_version({}, family)


def test_a_shape_that_tells_nothing_names_the_tensor() -> None:
    family = next(found for found in GENERATORS if found.name == "Wan")
    tensors = lazy(dict(outline("Wan").state_dict()) | {"patch_embedding.weight": torch.ones(3)})
    with pytest.raises(ModelFolderError, match=r"patch_embedding\.weight +has shape \[3\], which is not one of Wan's"):
        told_version(tensors, family)


def test_the_head_size_and_all_else_of_the_configuration_come_back(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 24, "text_dim": 8}
    model = diffusers.WanTransformer3DModel(**sizes, rope_max_seq_len=77, eps=1e-5)
    model.save_pretrained(tmp_path / "hub")
    convert_generator(tmp_path / "hub", tmp_path / "mm", GeneratorTarget(Naming.MM))
    convert_generator(tmp_path / "mm", tmp_path / "again", GeneratorTarget(Naming.MM, pp_layers=[1, 1]))
    convert_generator(tmp_path / "again/release", tmp_path / "back", GeneratorTarget(Naming.DIFFUSERS))
    texts = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hub", "back")]
    assert texts[0] == texts[1]
    (tmp_path / "again/config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"24 wide.*do not tell how many heads"):
        convert_generator(tmp_path / "again", tmp_path / "guessed", GeneratorTarget(Naming.DIFFUSERS))
    assert not (tmp_path / "guessed").exists()
