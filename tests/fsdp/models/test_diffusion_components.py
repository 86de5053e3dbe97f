"""Encoders of generators' folders: frozen, complete, from libraries that are trusted; and the pixel-space VAE."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.diffusion.components import encoder_files, load_component, load_encoders, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("flux", {"vae", "text_encoder", "text_encoder_2"}),
        ("t2v", {"vae", "text_encoder"}),
        ("i2v", {"vae", "text_encoder", "image_encoder"}),
    ],
)
def test_encoders_are_frozen_and_without_a_transformer(generators: dict[str, Path], kind: str, names: set[str]) -> None:
    pipeline = load_encoders(find_adapter(generators[kind]), CPU)
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    assert modules.keys() == names
    assert not isinstance(pipeline.transformer, nn.Module)
    for module in modules.values():
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_pipeline_shares_the_encoders_and_takes_a_live_transformer(generators: dict[str, Path]) -> None:
    adapter = find_adapter(generators["t2v"])
    encoders, transformer = load_encoders(adapter, CPU), load_component(adapter, "transformer")
    pipeline = load_pipeline(adapter, transformer, encoders)
    assert pipeline.transformer is transformer
    assert pipeline.vae is encoders.vae and pipeline.text_encoder is encoders.text_encoder
    assert pipeline.scheduler is not encoders.scheduler
    assert pipeline.scheduler.config.flow_shift == encoders.scheduler.config.flow_shift == 3.0
    assert encoders.transformer is not transformer
    assert vars(encoders.transformer.config).items() >= {"in_channels": 16, "num_layers": 2}.items()


def test_dtype_is_the_stored_one_unless_asked_for(copied_generator: Callable[[str], Path]) -> None:
    folder = copied_generator("flux")
    file = folder / "text_encoder_2/model.safetensors"
    save_file(
        {key: value.to(torch.bfloat16) for key, value in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    adapter = find_adapter(folder)
    stored, asked = load_encoders(adapter, CPU), load_encoders(adapter, CPU, torch.float64)
    assert (stored.text_encoder_2.dtype, stored.vae.dtype) == (torch.bfloat16, torch.float32)
    assert (asked.text_encoder_2.dtype, asked.vae.dtype) == (torch.float64, torch.float64)


def test_files_of_the_encoders(generators: dict[str, Path]) -> None:
    adapter = find_adapter(generators["i2v"])
    found = {name: [path.name for path in files] for name, files in encoder_files(adapter).items()}
    assert found.keys() == {"vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"}
    assert found["vae"] == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert found["text_encoder"] == ["config.json", "model.safetensors"]
    assert "tokenizer.json" in found["tokenizer"]
    assert found["image_processor"] == ["preprocessor_config.json"]


def test_a_file_that_nobody_reads_is_not_among_them(copied_generator: Callable[[str], Path]) -> None:
    folder = copied_generator("flux")
    for name in ("model.fp16.safetensors", "pytorch_model.bin", "README.md"):
        (folder / "text_encoder" / name).write_bytes(b"")
    names = [path.name for path in encoder_files(find_adapter(folder))["text_encoder"]]
    assert names == ["config.json", "model.safetensors"]


def _change_index(folder: Path, **changes: Any) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | changes))


def _foreign_library(folder: Path) -> None:
    _change_index(folder, vae=["os", "PathLike"])


def _no_class(folder: Path) -> None:
    _change_index(folder, text_encoder=["transformers", "pipeline"])


def _own_code(folder: Path) -> None:
    (folder / "vae/my_vae.py").write_text("raise SystemExit('run')")
    _change_index(folder, vae=["my_vae", "MyVAE"])


def _missing_weight(folder: Path) -> None:
    file = folder / "text_encoder_2/model.safetensors"
    weights = load_file(file)
    weights.pop("encoder.final_layer_norm.weight")
    save_file(weights, file, metadata={"format": "pt"})


def _pickled(folder: Path) -> None:
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()


def _no_folder(folder: Path) -> None:
    (folder / "tokenizer").rename(folder / "tok")


def _no_vocabulary(folder: Path) -> None:
    (folder / "tokenizer/tokenizer.json").unlink()


def _bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer/tokenizer.json").write_text("{")


def _link(folder: Path) -> None:
    (folder / "tokenizer/secret.json").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_foreign_library, r"comes from 'os', whose code is not run"),
        (_no_class, r"transformers has no class pipeline"),
        (_own_code, r"comes from 'my_vae', whose code is not run"),
        (_missing_weight, r"text_encoder_2.*encoder\.final_layer_norm\.weight"),
        (_pickled, r"only pickled weights"),
        (_no_folder, r"'tokenizer' is listed in model_index\.json"),
        (_bad_tokenizer, r"tokenizer .*cannot be loaded"),
        (_no_vocabulary, r"tokenizer  the tokenizer has no vocabulary: tokenizer\.json is missing"),
        (_link, r"links out of the folder"),
    ],
)
def test_bad_components_are_one_clear_error(
    copied_generator: Callable[[str], Path], damage: Callable[[Path], None], message: str
) -> None:
    folder = copied_generator("flux")
    damage(folder)
    with pytest.raises(ModelFolderError, match=message):
        load_encoders(find_adapter(folder), CPU)


def test_files_of_an_absent_component_are_one_clear_error(copied_generator: Callable[[str], Path]) -> None:
    folder = copied_generator("flux")
    _no_folder(folder)
    with pytest.raises(ModelFolderError, match=r"'tokenizer' is listed in model_index\.json"):
        encoder_files(find_adapter(folder))


def test_loading_prints_nothing(generators: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    adapter = find_adapter(generators["flux_pixels"])
    load_pipeline(adapter, load_component(adapter, "transformer"), load_encoders(adapter, CPU))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 5, 4, 6)])
def test_identity_vae_gives_pixels_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    IdentityVAE(video=len(shape) == 5).save_pretrained(tmp_path)
    vae = IdentityVAE.from_pretrained(tmp_path, local_files_only=True)
    pixels = torch.randn(shape)
    posterior = vae.encode(pixels).latent_dist
    assert torch.equal(posterior.mode(), pixels) and torch.equal(posterior.sample(), pixels)
    assert torch.equal(vae.decode(pixels, return_dict=False)[0], pixels)
    assert vae.dtype == torch.float32
    assert (vae.config.z_dim, *vae.config.latents_mean, *vae.config.latents_std) == (3, 0, 0, 0, 1, 1, 1)


def test_identity_vae_of_one_channel_is_grey() -> None:
    vae = IdentityVAE(latent_channels=1)
    pixels = torch.randn(2, 3, 4, 6)
    (posterior,) = vae.encode(pixels, return_dict=False)
    grey = vae.decode(posterior.mode()).sample
    assert posterior.mode().shape == (2, 1, 4, 6)
    assert all(torch.equal(grey[:, channel], pixels.mean(dim=1)) for channel in range(3))
    with pytest.raises(ValueError, match="1 or 3"):
        IdentityVAE(latent_channels=2)


@pytest.mark.edge("G6")
@pytest.mark.parametrize(("kind", "name"), [("flux", "text_encoder"), ("t2v", "tokenizer")])
def test_an_encoder_that_a_family_cannot_do_without_is_named(
    copied_generator: Callable[[str], Path], kind: str, name: str
) -> None:
    folder = copied_generator(kind)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {name: [None, None]}))
    for work in (encoder_files, lambda adapter: load_encoders(adapter, CPU)):
        with pytest.raises(ModelFolderError, match=f"lists no {name}, and nothing can be encoded without"):
            work(find_adapter(folder))
