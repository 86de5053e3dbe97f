"""Weights of generators go from any layout to any other, in any division, and come back to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.lazy_tensor import Concatenated
from mindspeed_mm.checkpoint.megatron.family import TensorCut
from mindspeed_mm.checkpoint.original.converting import Adapter, GeneratorTarget, convert_generator
from mindspeed_mm.checkpoint.original.generator import Naming
from mindspeed_mm.checkpoint.original.lora import LoraScaling
from mindspeed_mm.core.errors import MMError, ModelFolderError, UsageError
from tests.helpers.generator_weights import SMALL, TRANSFORMERS, reload, same, small_model

DIFFUSERS, ORIGINAL = GeneratorTarget(Naming.DIFFUSERS), GeneratorTarget(Naming.ORIGINAL)


def mm(tp: int = 1, pp: Any = None) -> GeneratorTarget:
    """MindSpeed-MM's layout in a division."""
    return GeneratorTarget(Naming.MM, tp, pp)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One diffusers folder a family."""
    made = {}
    for case in SMALL:
        made[case] = tmp_path_factory.mktemp(case.replace(" ", "_"))
        small_model(case).save_pretrained(made[case])
    return made


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read with safetensors alone."""
    return load_file(folder / "diffusion_pytorch_model.safetensors")


def ranks_file(folder: Path, rank: str) -> dict[str, Any]:
    """Read with torch alone."""
    return torch.load(folder / "release" / rank / "model_optim_rng.pt", weights_only=True)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_diffusers_to_the_authors_files_and_back_loads_in_diffusers(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    convert_generator(folders[case], tmp_path / "original", ORIGINAL)
    convert_generator(tmp_path / "original", tmp_path / "back", DIFFUSERS)
    same(reload(case, tmp_path / "back"), weights(folders[case]))
    told = json.loads((tmp_path / "back/config.json").read_text())
    before = json.loads((folders[case] / "config.json").read_text())
    assert {key: before[key] for key in told if key in before} == told


@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        ("Wan", 1, [[1, 1], [1, 1]]),
        ("CogVideoX", 2, [[1, 0], [2, 1]]),
        ("HunyuanVideo", 4, None),
        *(
            pytest.param(*simpler, marks=pytest.mark.slow)
            for simpler in (
                ("VACE", 1, None),
                ("CogVideoX", 4, [1, 2, 1]),
                ("Wan", 1, None),
                ("Wan", 1, [1, 3]),
                ("Wan I2V", 1, None),
                ("CogVideoX", 2, None),
                ("HunyuanVideo", 1, None),
                ("HunyuanVideo", 2, None),
            )
        ),
    ],
)
def test_mindspeed_mm_in_every_division_and_resplit_and_back(
    case: str, tp: int, pp: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    convert_generator(folders[case], tmp_path / "mm", mm(tp, pp))
    convert_generator(tmp_path / "mm", tmp_path / "one", mm())
    for source in ("mm", "one"):
        back = GeneratorTarget(Naming.DIFFUSERS, hf_dir=folders[case])
        convert_generator(tmp_path / source, tmp_path / f"{source}_back", back)
        same(weights(tmp_path / f"{source}_back"), weights(folders[case]))
    (tmp_path / "mm/release/layout.json").unlink()  # as a folder of another program
    convert_generator(tmp_path / "mm", tmp_path / "again", DIFFUSERS)
    same(reload(case, tmp_path / "again"), weights(folders[case]))


def test_a_divided_cogvideox_computed_by_hand(folders: dict[str, Path], tmp_path: Path) -> None:
    convert_generator(folders["CogVideoX"], tmp_path / "mm", mm(2, [3, 1]))
    assert (tmp_path / "mm/latest_checkpointed_iteration.txt").read_text() == "release"
    hub = weights(folders["CogVideoX"])
    content = ranks_file(tmp_path / "mm", "mp_rank_01_001")
    assert content["checkpoint_version"] == 3.0
    held, block = content["model"], "transformer_blocks.3."
    qkv = torch.cat([hub[f"{block}attn1.to_{name}.weight"].chunk(2)[1] for name in "qkv"])
    by_hand = {
        "videodit_blocks.0.self_atten.proj_qkv.weight": qkv,
        "videodit_blocks.0.self_atten.proj_out.weight": hub[f"{block}attn1.to_out.0.weight"].chunk(2, 1)[1],
        "videodit_blocks.0.self_atten.proj_out.bias": hub[f"{block}attn1.to_out.0.bias"],
        "videodit_blocks.0.ff.net.0.proj.bias": hub[f"{block}ff.net.0.proj.bias"].chunk(2)[1],
        "videodit_blocks.0.ff.net.2.weight": hub[f"{block}ff.net.2.weight"].chunk(2, 1)[1],
        "videodit_blocks.0.norm2.weight": hub[f"{block}norm2.norm.weight"],
        "adaLN_modulation.1.weight": hub["norm_out.linear.weight"].chunk(2)[1],
        "proj_out_linear.weight": hub["proj_out.weight"],
    }
    assert all(torch.equal(held[name], tensor) for name, tensor in by_hand.items())
    assert not any(name.startswith(("videodit_blocks.1.", "patch_embed.", "time_embed.")) for name in held)
    first = ranks_file(tmp_path / "mm", "mp_rank_00_000")["model"]
    assert {"patch_embed.proj.weight", "caption_projection.weight", "videodit_blocks.2.norm1.weight"} <= set(first)


def test_a_divided_single_block_of_hunyuan_video_computed_by_hand(folders: dict[str, Path], tmp_path: Path) -> None:
    convert_generator(folders["HunyuanVideo"], tmp_path / "mm", mm(2))
    hub, held = weights(folders["HunyuanVideo"]), ranks_file(tmp_path / "mm", "mp_rank_01")["model"]
    attention, projection = hub["single_transformer_blocks.1.proj_out.weight"].split([16, 64], dim=1)
    linear2 = torch.cat([attention.chunk(2, 1)[1], projection.chunk(2, 1)[1]], 1)
    assert torch.equal(held["single_blocks.1.linear2.weight"], linear2)
    modulation = torch.cat(hub["norm_out.linear.weight"].chunk(2)[::-1])  # scale, shift there; shift, scale here
    assert torch.equal(held["adaLN_modulation.1.weight"], modulation.chunk(2)[1])


def test_the_authors_pickled_file_with_other_parts_becomes_mindspeed_mms(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    convert_generator(folders["CogVideoX"], tmp_path / "sat", ORIGINAL)
    file = tmp_path / "sat/1/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    content["module"]["model.diffusion_model.mixins.pos_embed.freqs_cos"] = torch.ones(3)
    torch.save(content, file)
    convert_generator(file, tmp_path / "mm", mm(2))
    manifest = json.loads((tmp_path / "mm/conversion_manifest.json").read_text())
    left = {"model.diffusion_model.mixins.pos_embed.freqs_cos": "is computed anew from the configuration"}
    assert manifest["left_out"] == left
    convert_generator(tmp_path / "mm", tmp_path / "back", DIFFUSERS)
    same(weights(tmp_path / "back"), weights(folders["CogVideoX"]))


def test_a_piece_of_a_generator_that_is_left_out_is_named(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_generator(folders["CogVideoX"], tmp_path / "mm", mm(2))
    monkeypatch.setattr(TensorCut, "whole", lambda self, pieces, *_: Concatenated([pieces[0]] * len(pieces), self.dim))
    with pytest.raises(ModelFolderError, match=r"mp_rank_01/model\..*  is not used"):
        convert_generator(tmp_path / "mm", tmp_path / "out", DIFFUSERS)
    assert not (tmp_path / "out").exists()


def test_wan_is_converted_in_place_and_the_original_is_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "Wan2.1-T2V/transformer"
    small_model("Wan").save_pretrained(place)
    before = weights(place)
    convert_generator(place, place, mm(1, [2, 2]))
    assert (place / "release/mp_rank_00_001/model_optim_rng.pt").is_file()
    same(weights(place.parent / "transformer.bak"), before)
    convert_generator(place, tmp_path / "back", GeneratorTarget(Naming.DIFFUSERS, hf_dir=folders["Wan"]))
    same(weights(tmp_path / "back"), before)


@pytest.mark.parametrize(
    ("case", "target", "message"),
    [
        ("Wan", mm(2), "not divided by tensor parallelism"),
        ("HunyuanVideo", mm(1, [1, 1]), "not divided into stages"),
        ("Wan", mm(1, [2, 1]), "are 3 layers, and the model has 4"),
        ("FLUX.1", mm(), "trains FLUX.1 as diffusers' own model"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    case: str, target: GeneratorTarget, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(MMError, match=message):
        convert_generator(folders[case], tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_of_another_model_is_refused_with_both_values(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["Wan"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ffn_dim": 99}))
    with pytest.raises(ModelFolderError, match=r"ffn_dim.*is 99, and the weights have 24"):
        convert_generator(folders["Wan"], tmp_path / "out", GeneratorTarget(Naming.DIFFUSERS, hf_dir=tmp_path))


def test_a_key_too_many_is_named_and_nothing_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(folders["Wan"] / "config.json", source)
    save_file(weights(folders["Wan"]) | {"extra.weight": torch.ones(1)}, source / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelFolderError, match=r"extra\.weight"):
        convert_generator(source, tmp_path / "out", ORIGINAL)
    assert not (tmp_path / "out").exists()


def test_a_lora_is_merged_as_diffusers_fuses_it(folders: dict[str, Path], tmp_path: Path) -> None:
    from peft import LoraConfig

    model = small_model("Wan")
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["to_q", "to_out.0", "ffn.net.0.proj"], init_lora_weights=False
    )
    model.add_adapter(config)
    model.save_lora_adapter(tmp_path / "lora")
    model.fuse_lora()
    model.unload_lora()
    convert_generator(folders["Wan"], tmp_path / "merged", DIFFUSERS, adapter=Adapter(tmp_path / "lora"))
    found = weights(tmp_path / "merged")
    same(found, dict(model.state_dict()))
    assert not torch.equal(found["blocks.1.attn2.to_q.weight"], weights(folders["Wan"])["blocks.1.attn2.to_q.weight"])


def test_a_lora_on_a_fused_layer_is_merged_under_the_authors_names(folders: dict[str, Path], tmp_path: Path) -> None:
    down, up = torch.randn(2, 16), torch.randn(48, 2)
    name = "diffusion_model.double_blocks.1.img_attn_qkv"
    file = tmp_path / "lora.safetensors"
    save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, file)
    source, target = folders["HunyuanVideo"], tmp_path / "merged"
    with pytest.raises(UsageError, match="does not say the adapter's alpha"):
        convert_generator(source, target, DIFFUSERS, adapter=Adapter(file))
    convert_generator(source, target, mm(2), adapter=Adapter(file, LoraScaling(alpha=3.0)))
    hub, held = weights(source), ranks_file(target, "mp_rank_00")["model"]
    qkv = torch.cat([hub[f"transformer_blocks.1.attn.to_{n}.weight"] for n in "qkv"]).double()
    by_hand = qkv + 1.5 * up.double() @ down.double()
    by_hand = torch.cat([part.chunk(2)[0] for part in by_hand.chunk(3)])
    torch.testing.assert_close(held["double_blocks.1.img_attn_qkv.weight"].double(), by_hand, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("said", "alpha", "message"),
    [
        ("{", None, "is not valid JSON"),
        ("[1]", None, "is not a table of values"),
        ('{"lora_alpha": "many"}', None, "lora_alpha +is 'many', no number"),
        ("{}", torch.ones(2), r"to_q\.alpha +is not a single number, its shape is \[2\]"),
    ],
)
def test_an_alpha_that_is_no_number_is_one_clear_error(
    said: str, alpha: torch.Tensor | None, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = {"blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 16)}
    tensors |= {"blocks.0.attn1.to_q.lora_B.weight": torch.ones(16, 2)}
    tensors |= {} if alpha is None else {"blocks.0.attn1.to_q.alpha": alpha}
    save_file(tensors, tmp_path / "lora.safetensors")
    (tmp_path / "adapter_config.json").write_text(said)
    with pytest.raises(ModelFolderError, match=message):
        convert_generator(folders["Wan"], tmp_path / "out", DIFFUSERS, adapter=Adapter(tmp_path / "lora.safetensors"))


def test_a_lora_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    parts = {f"transformer.blocks.9.attn1.to_q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file({**parts, "transformer.blocks.9.attn1.to_q.alpha": torch.tensor(2.0)}, file)
    with pytest.raises(ModelFolderError, match=r"blocks\.9\.attn1\.to_q.*not a layer of the base"):
        convert_generator(folders["Wan"], tmp_path / "out", DIFFUSERS, adapter=Adapter(file))
