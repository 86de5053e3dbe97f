"""`mm export` under other tools' names: what diffusers' own loaders make of the files equals what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor
from mindspeed_mm.checkpoint.original import lora_names
from mindspeed_mm.checkpoint.original.lora_names import LayerAdapter, renamed_adapters
from mindspeed_mm.cli.export import command
from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_WEIGHTS
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.helpers.adapters import denoised
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.tasks.test_export_lora import make_run

prepare_for_transformers()

import diffusers  # noqa: E402  (the guard comes first)
from diffusers.loaders import FluxLoraLoaderMixin  # noqa: E402

ATTENTION = [f"*.attn{n}.to_{name}" for n in (1, 2) for name in ("q", "k", "v", "out.0")]
EVERY_LINEAR = [*ATTENTION, "*.ffn.net.0.proj", "*.ffn.net.2"]
DOUBLE = ["transformer_blocks.{*}.attn.*"]
CASES: dict[str, tuple[Callable[..., Path], str, list[str]]] = {
    "Wan, ComfyUI": (make_tiny_wan, "comfyui", ATTENTION),
    "Wan, kohya": (make_tiny_wan, "kohya", EVERY_LINEAR),  # diffusers wants all of them under kohya's names
    "FLUX, ComfyUI": (make_tiny_flux, "comfyui", DOUBLE),
    "FLUX, kohya": (make_tiny_flux, "kohya", DOUBLE),
}
"""Case → model, names, layers with adapters."""


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_loads_what_was_trained(case: str, tmp_path: Path) -> None:
    make, lora_format, targets = CASES[case]
    run, trained = make_run(tmp_path, make(tmp_path / "base"), alpha=8, target_modules=targets)
    outputs = {}
    for name in ("diffusers", lora_format):
        exported = export.run(ExportRequest(run, tmp_path / name, lora_format=name))
        pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "base")
        before = denoised(pipeline.transformer, facts_of(trained).adapter)
        pipeline.load_lora_weights(exported.folder)
        outputs[name] = denoised(pipeline.transformer, facts_of(trained).adapter)
        assert not torch.equal(outputs[name], before)
    # alpha / rank is 2: nothing rounds.
    assert torch.equal(outputs[lora_format], outputs["diffusers"])
    start = {"comfyui": "diffusion_model.", "kohya": "lora_unet_"}[lora_format]
    assert all(key.startswith(start) for key in load_file(tmp_path / lora_format / DIFFUSERS_WEIGHTS))


@pytest.mark.parametrize("lora_format", ["comfyui", "kohya"])
def test_names_that_diffusers_does_not_read_are_told(lora_format: Any, tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, make_tiny_conditioned(tmp_path / "base", "vace"))
    (note,) = export.run(ExportRequest(run, tmp_path / "out", lora_format=lora_format)).notes
    assert f"diffusers does not load adapters of WanVACETransformer3DModel by {lora_format}'s names" in note
    assert "load_lora_weights" not in (tmp_path / "out" / "README.md").read_text()
    assert export.run(ExportRequest(run, tmp_path / "own")).notes == ()
    assert "load_lora_weights" in (tmp_path / "own" / "README.md").read_text()


def held(*shape: int, seed: int) -> Any:
    return HeldTensor(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def flux_single_block(wide: int = 3072) -> tuple[dict[str, LayerAdapter], dict[str, tuple[int, ...]]]:
    """Adapters of queries and values, and the shapes of all that the authors have in one layer."""
    at = "single_transformer_blocks.0."
    shapes = {f"{at}attn.to_{letter}.weight": (wide, wide) for letter in "qkv"}
    shapes[f"{at}proj_mlp.weight"] = (4 * wide, wide)
    made = {
        f"{at}attn.to_q": LayerAdapter(held(2, wide, seed=0), held(wide, 2, seed=1), 0.5),
        f"{at}attn.to_v": LayerAdapter(held(1, wide, seed=2), held(wide, 1, seed=3), 2.0),
    }
    return made, shapes


@pytest.mark.parametrize("lora_format", ["comfyui", "kohya"])
def test_parts_of_one_layer_come_out_again(lora_format: Any) -> None:
    """diffusers knows FLUX's joint layers of single blocks in their released width alone."""
    made, shapes = flux_single_block()
    file = {
        key: lazy.read() for key, lazy in renamed_adapters(made, shapes, "FluxTransformer2DModel", lora_format).items()
    }
    assert len(file) == 3
    loaded = FluxLoraLoaderMixin.lora_state_dict(file)
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    for layer in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"):
        name = f"single_transformer_blocks.0.{layer}"
        a, b = (loaded[f"transformer.{name}.lora_{side}.weight"] for side in "AB")
        if name not in made:
            assert not b.any()
            continue
        expected = made[name].scale * made[name].b.read() @ made[name].a.read()
        assert torch.equal(b @ a, expected)


def test_a_layer_without_its_alpha_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, trained = make_run(tmp_path, make_tiny_wan(tmp_path / "base"), alpha=8)
    real = lora_names.LayerAdapter
    monkeypatch.setattr("mindspeed_mm.fsdp.checkpoint.adapters.LayerAdapter", lambda a, b, _scale: real(a, b, 1.0))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "base")
    pipeline.load_lora_weights(export.run(ExportRequest(run, tmp_path / "out", lora_format="comfyui")).folder)
    adapter = facts_of(trained).adapter
    assert not torch.allclose(denoised(pipeline.transformer, adapter), denoised(trained, adapter), atol=1e-4)


@pytest.mark.parametrize(
    ("lora", "options", "said"),
    [
        ({"use_dora": True}, ["--lora-format", "kohya"], "not a plain adapter"),
        ({}, ["--lora-format", "kohya", "--merge"], "no adapters are written"),
        ({}, ["--single-file"], "the run trained adapters"),
    ],
    ids=["DoRA", "merged", "adapters as a file"],
)
def test_what_is_refused(lora: dict[str, Any], options: list[str], said: str, tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, make_tiny_wan(tmp_path / "base"), **lora)
    result = CliRunner().invoke(command, [str(run), str(tmp_path / "out"), *options])
    assert said in str(result.exception or result.output)
    assert getattr(result.exception, "exit_code", result.exit_code) == ExitCode.USAGE
    assert not (tmp_path / "out").exists()


@pytest.mark.edge("BN15")
@pytest.mark.parametrize("family", ["t2v", pytest.param("i2v", marks=pytest.mark.slow), "vace"])
def test_a_single_file_is_the_trained_transformer(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_tiny_conditioned(base, family) if family == "vace" else make_tiny_wan(base, task=family)
    run, _ = make_run(tmp_path, base, alpha=8)
    whole = export.run(ExportRequest(run, tmp_path / "whole", merge=True, transformer_only=True))
    single = export.run(ExportRequest(run, tmp_path / "single", merge=True, single_file=True))
    assert (single.kind, single.tensors, single.size_bytes) == ("single_file", whole.tensors, whole.size_bytes)
    (file,) = single.folder.glob("*.safetensors")
    assert any(".self_attn.q.weight" in key for key in load_file(file))
    (line,) = [line for line in (single.folder / "README.md").read_text().splitlines() if "from_single_file" in line]
    code = line.replace("path/to/this/folder", str(single.folder)).replace("path/to/base", str(base))
    scope: dict[str, Any] = {name: getattr(diffusers, name) for name in dir(diffusers) if name.startswith("Wan")}
    exec(code, scope)
    expected = type(scope["transformer"]).from_pretrained(whole.folder / "transformer").state_dict()
    loaded = scope["transformer"].state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
