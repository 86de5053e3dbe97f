"""The documents' converter of Open-Sora Plan 1.3 and 1.5: MindSpeed-MM's names and division and back, and WF-VAE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.cli.mm_convert import run
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers.tiny_opensoraplan import JOINT, TIME_TOO, TRANSFORMER, VAE

prepare_for_transformers()


def convert(command: str, source: Path, target: Path, *words: str, version: str = "v1.3") -> None:
    paths = (f"--cfg.source_path={source}", f"--cfg.target_path={target}")
    run(["OpenSoraPlanConverter", "--version", version, command, *paths, *words])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.parametrize("name", ["OpenSoraT2V_v1_3", pytest.param("OpenSoraInpaint_v1_3", marks=pytest.mark.slow)])
def test_a_transformer_goes_to_the_ranks_and_back(name: str, tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.models.opensoraplan import transformer_1_3

    getattr(transformer_1_3, name)(**TRANSFORMER).save_pretrained(tmp_path / "hub")
    before = weights(tmp_path / "hub")
    division = ("--cfg.target_parallel_config.tp_size=2", "--cfg.target_parallel_config.pp_layers=[1,3]")
    convert("hf_to_mm", tmp_path / "hub", tmp_path / "mm", *division)
    first = torch.load(tmp_path / "mm/release/mp_rank_01_000/model_optim_rng.pt", weights_only=True)["model"]
    rows = before["transformer_blocks.0.attn1.to_k.weight"].chunk(2)[1]
    assert torch.equal(first["videodit_sparse_blocks.0.self_atten.proj_k.weight"], rows)
    columns = before["transformer_blocks.0.ff.net.2.weight"].chunk(2, dim=1)[1]
    assert torch.equal(first["videodit_sparse_blocks.0.ff.net.2.weight"], columns)
    convert("resplit", tmp_path / "mm", tmp_path / "whole")
    convert("mm_to_hf", tmp_path / "whole", tmp_path / "back")
    after = weights(tmp_path / "back")
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert json.loads((tmp_path / "back/config.json").read_text())["_class_name"] == name


def test_the_authors_file_of_1_5_becomes_a_folder_and_is_divided(tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_5 import OpenSoraT2V_v1_5

    before = OpenSoraT2V_v1_5(**JOINT).state_dict()
    file = tmp_path / "model_ema.pt"
    torch.save({"ema_state_dict": before}, file)
    convert("source_to_mm", file, tmp_path / "mm", "--cfg.target_parallel_config.tp_size=2", version="v1.5")
    second = torch.load(tmp_path / "mm/release/mp_rank_01/model_optim_rng.pt", weights_only=True)["model"]
    rows = before["transformer_blocks.1.0.attn1.add_k_proj.weight"].chunk(2)[1]
    assert torch.equal(second["transformer_blocks.1.0.attn1.added_proj_k.weight"], rows)
    columns = before["transformer_blocks.1.1.ff_enc.net.2.weight"].chunk(2, dim=1)[1]
    assert torch.equal(second["transformer_blocks.1.1.ff_enc.net.2.weight"], columns)
    convert("resplit", tmp_path / "mm", tmp_path / "whole", version="v1.5")
    convert("mm_to_hf", tmp_path / "whole", tmp_path / "back", version="v1.5")
    convert("source_to_hf", file, tmp_path / "folder", version="v1.5")
    for folder in ("back", "folder"):
        after, info = OpenSoraT2V_v1_5.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        assert all(torch.equal(value, before[key]) for key, value in after.state_dict().items())
        assert {name: after.config[name] for name in JOINT} == JOINT
    with pytest.raises(MMError, match=r"is v1\.3, and the weights are Open-Sora Plan v1\.5"):
        convert("source_to_mm", file, tmp_path / "wrong")


def test_the_vae_of_1_5_has_its_released_scale(tmp_path: Path) -> None:
    thirty_two = {"latent_dim": 32, "scale": [1.0] * 32, "shift": [0.0] * 32}
    torch.save(stored_vae(**TIME_TOO, **thirty_two)[1], tmp_path / "checkpoint.ckpt")
    convert("vae_convert", tmp_path / "checkpoint.ckpt", tmp_path / "vae", version="v1.5")
    config = json.loads((tmp_path / "vae/config.json").read_text())
    assert (config["scale"][0], config["shift"][-1]) == (0.7031, -0.957) and len(config["scale"]) == 32
    assert config["l1_upsample_block"] == "Spatial2xTime2x3DUpsample"


def stored_vae(**changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model, and its weights as a file has them: with the constants."""
    from mindspeed_mm.fsdp.models.opensoraplan.wf_vae import WFVAEModel

    vae = WFVAEModel(**{**VAE, **changes})
    return vae, {**vae.state_dict(), "encoder.wavelet_transform_in.h_conv.conv.weight": torch.ones(1, 1, 2, 2, 2)}


@pytest.mark.parametrize("averaged", [True, False])
def test_a_vae_becomes_a_folder(averaged: bool, tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.models.opensoraplan.wf_vae import WFVAEModel

    released = {"scale": [0.18215] * 4, "shift": [0.0] * 4, "connect_res_layer_num": 2}
    vae, stored = stored_vae(**released)
    average = {f"module.{key}": value + 1 for key, value in stored.items()}
    torch.save({"ema_state_dict": average, "state_dict": {"gen_model": stored}}, tmp_path / "merged.ckpt")
    convert("vae_convert", tmp_path / "merged.ckpt", tmp_path / "vae", f"--use_ema_model={averaged}")
    found, info = WFVAEModel.from_pretrained(tmp_path / "vae", output_loading_info=True)
    assert not any(info.values()), info
    for key, value in found.state_dict().items():
        assert torch.equal(value, vae.state_dict()[key] + averaged)
    for name, value in {**VAE, **released}.items():
        assert list(found.config[name]) == value if isinstance(value, list) else found.config[name] == value


def test_what_cannot_be_a_folder_of_a_vae_is_refused(tmp_path: Path) -> None:
    torch.save(stored_vae()[1], tmp_path / "vae.ckpt")
    torch.save({"a": torch.ones(1)}, tmp_path / "other.ckpt")
    torch.save(stored_vae(**TIME_TOO)[1], tmp_path / "later.ckpt")
    for source, target, said in (
        ("vae.ckpt", "vae.pt", "names a file"),
        ("other.ckpt", "out", "holds no WF-VAE"),
        ("later.ckpt", "out", "nothing beside it says its scale"),
    ):
        with pytest.raises(MMError, match=said):
            convert("vae_convert", tmp_path / source, tmp_path / target)
    assert not (tmp_path / "out").exists()
