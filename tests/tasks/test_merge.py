"""`mm merge`: what is written computes what PEFT computes with the adapters beside the weights, and can be undone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.cli.merge import command
from mindspeed_mm.core.errors import MMError, ModelFolderError, UsageError
from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora import merge as lora_merge
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.export import merge
from mindspeed_mm.tasks.model_source import ModelSource, with_adapters
from mindspeed_mm.tasks.requests.export import MergeRequest
from tests.helpers.adapters import adapted_model, denoised, logits, move_trained
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe

prepare_for_transformers()

from diffusers import FluxTransformer2DModel  # noqa: E402  (the guard comes first)
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "dense": make_tiny_qwen3(root / "dense"),
        "moe": make_tiny_qwen3_moe(root / "moe", initializer_range=0.3),
        "flux": make_tiny_flux(root / "flux"),
    }


def loaded(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


def by_peft(base: Path, folder: Path) -> Any:
    return PeftModel.from_pretrained(loaded(base), folder, autocast_adapter_dtype=False).eval()


def foreign(base: Path, folder: Path, **config: Any) -> Path:
    """Adapters that PEFT made and wrote, moved from their first values."""
    model = get_peft_model(loaded(base), LoraConfig(lora_alpha=12, task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                generator = torch.Generator().manual_seed(index)
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    model.save_pretrained(folder)
    return folder


FOREIGN: dict[str, dict[str, Any]] = {
    "rslora": {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "o_proj"]},
    "ranks by pattern": {
        "r": 4, "rank_pattern": {"layers.0.*q_proj": 2}, "alpha_pattern": {"v_proj": 3},
        "target_modules": ["q_proj", "v_proj"],
    },
    "dora, a head trained whole": {
        "r": 4, "use_dora": True, "target_modules": "all-linear", "modules_to_save": ["lm_head"],
    },
    "pissa": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", list(FOREIGN))
def test_adapters_that_peft_wrote(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = foreign(bases["dense"], tmp_path / "adapter", **FOREIGN[kind])
    merged = merge.run(MergeRequest(bases["dense"], [adapter], out=tmp_path / "out", dtype="fp64"))
    expected = logits(by_peft(bases["dense"], adapter))
    torch.testing.assert_close(logits(loaded(merged.folder)), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(logits(loaded(bases["dense"])), expected, atol=1e-3)
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= {p.name for p in merged.folder.iterdir()}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_peft_trained_beside_adapters(bias: str, tmp_path: Path) -> None:
    base = make_tiny_qwen3(tmp_path / "base", attention_bias=True)
    model = get_peft_model(loaded(base), LoraConfig(r=4, target_modules=["q_proj"], bias=bias, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double() / 10
    model.save_pretrained(tmp_path / "adapter")
    merged = merge.run(MergeRequest(base, [tmp_path / "adapter"], out=tmp_path / "out", dtype="fp64"))
    weights = load_file(merged.folder / "model.safetensors")
    moved = {name for name in weights if name.endswith(".bias") and bool(weights[name].any())}
    assert any("q_proj" in name for name in moved) and any("k_proj" in name for name in moved) == (bias == "all")
    torch.testing.assert_close(
        logits(loaded(merged.folder)), logits(by_peft(base, tmp_path / "adapter")), rtol=0, atol=1e-12
    )


OWN: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "dora over olora": {"use_dora": True, "init_lora_weights": "olora", "modules_to_save": ["model.norm"]},
    "experts": {"target_modules": ["q_proj", "mlp.experts"]},
    "one parameter of experts": {"target_modules": ["*.layers.{1}.mlp.experts.down_proj"]},
    "single experts' names": {
        "target_modules": ["gate_proj", "up_proj", "down_proj"], "disable_peft_moe_conversion": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", list(OWN))
def test_own_adapters_in_peft_and_merged(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """The model as it is trained, PEFT with our files, and the merged folder: the same outputs."""
    base = bases["moe" if "expert" in kind else "dense"]
    model = adapted_model(base, dtype=torch.float64, **OWN[kind])
    save_adapters(model, tmp_path / "adapter", base)
    merged = merge.run(
        MergeRequest(base, [tmp_path / "adapter"], out=tmp_path / "out", dtype="fp64", max_shard_bytes=60_000)
    )
    for found in (by_peft(base, tmp_path / "adapter"), loaded(merged.folder)):
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-12)
    assert not torch.allclose(logits(loaded(base)), logits(model), atol=1e-4)


def test_several_with_scales_and_back(bases: dict[str, Path], tmp_path: Path) -> None:
    adapters = []
    for index, lora in enumerate(({}, {"rank": 2, "target_modules": ["q_proj", "o_proj"]})):
        model = adapted_model(bases["dense"], random=False, **lora)
        move_trained(model, index)
        save_adapters(model, tmp_path / str(index), bases["dense"])
        adapters.append(tmp_path / str(index))
    merged = merge.run(
        MergeRequest(bases["dense"], adapters, out=tmp_path / "both", scales=[0.5, 2.0], dtype="fp64")
    ).folder
    peft = by_peft(bases["dense"], adapters[0])
    peft.load_adapter(adapters[1], "second", autocast_adapter_dtype=False)
    peft.base_model.set_adapter(["default", "second"])
    for module in peft.modules():
        for name, times in (("default", 0.5), ("second", 2.0)):
            if isinstance(getattr(module, "scaling", None), dict) and name in module.scaling:
                module.scaling[name] *= times
    torch.testing.assert_close(logits(loaded(merged)), logits(peft.eval()), rtol=0, atol=1e-12)
    back = merge.run(MergeRequest(merged, adapters, out=tmp_path / "back", scales=[-0.5, -2.0], dtype="fp64")).folder
    found, base = load_file(back / "model.safetensors"), load_file(bases["dense"] / "model.safetensors")
    assert all(torch.allclose(found[key], base[key].double(), rtol=0, atol=1e-12) for key in base)


def test_generator(bases: dict[str, Path], tmp_path: Path) -> None:
    for use_dora in (False, True):
        model = adapted_model(bases["flux"], dtype=torch.float64, use_dora=use_dora)
        save_adapters(model, tmp_path / "adapter", bases["flux"], overwrite=True)
        out = merge.run(
            MergeRequest(bases["flux"], [tmp_path / "adapter"], out=tmp_path / f"out{use_dora}", dtype="fp64")
        ).folder
        transformer = FluxTransformer2DModel.from_pretrained(out / "transformer", torch_dtype=torch.float64)
        expected = denoised(model, facts_of(model).adapter)
        torch.testing.assert_close(denoised(transformer, facts_of(model).adapter), expected, rtol=0, atol=1e-12)
        assert (out / "model_index.json").exists() and (out / "vae").is_dir()


def test_a_wrong_merge_would_show(bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: lengths of rows are taken of the base alone."""
    model = adapted_model(bases["dense"], dtype=torch.float64, use_dora=True)
    save_adapters(model, tmp_path / "adapter", bases["dense"])
    whole = lora_merge.Delta.added

    def faulty(self: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return whole(self, weight, a, b) + (rest[0] / torch.linalg.norm(weight, dim=1) - 1)[:, None] * weight

    monkeypatch.setattr(lora_merge.Delta, "added", faulty)
    merged = merge.run(MergeRequest(bases["dense"], [tmp_path / "adapter"], out=tmp_path / "out", dtype="fp64")).folder
    assert not torch.allclose(logits(loaded(merged)), logits(model), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (lambda f: settings(f, layer_replication=[[0, 1]]), {}, ModelFolderError, "'layer_replication' is set"),
        (lambda f: settings(f, lora_bias=True), {}, ModelFolderError, "'lora_bias' is set"),
        (lambda f: settings(f, peft_type="IA3"), {}, ModelFolderError, "'IA3' adapters"),
        (shutil.rmtree, {}, ModelFolderError, "no adapters"),
        (None, {"base": "moe"}, ModelFolderError, "do not belong to this model"),
        (None, {"scales": [1.0, 2.0]}, UsageError, r"2 numbers for 1 adapters"),
        (None, {"adapters": []}, UsageError, "nothing to merge"),
    ],
)
def test_refusals(
    change: Any, options: dict[str, Any], error: type[MMError], message: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = foreign(bases["dense"], tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    if change is not None:
        change(folder)
    base, adapters = bases[options.pop("base", "dense")], options.pop("adapters", [folder])
    with pytest.raises(error, match=message):
        merge.run(MergeRequest(base, adapters, out=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_dora_is_merged_once(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = foreign(bases["dense"], tmp_path / "adapter", r=4, use_dora=True, target_modules=["q_proj"])
    with pytest.raises(UsageError, match="DoRA"):
        merge.run(MergeRequest(bases["dense"], [folder], out=tmp_path / "out", scales=[0.5]))


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_command(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = foreign(bases["dense"], tmp_path / "adapter", r=4, target_modules=["q_proj"])
    words = [str(bases["dense"]), str(folder), "--out", str(tmp_path / "out"), "--scale", "-0.5", "--json"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["merged"] == [str(folder)]


def test_inference_with_adapters_beside_the_weights(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = foreign(bases["dense"], tmp_path / "adapter", r=4, target_modules=["q_proj"])
    source = with_adapters(ModelSource(bases["dense"]), folder)
    assert source.fingerprint() != ModelSource(bases["dense"]).fingerprint()
    generator = load_generator(source.folder, source.lora)
    assert isinstance(generator.model, nn.Module)
    merged = merge.run(MergeRequest(bases["dense"], [folder], out=tmp_path / "out")).folder
    expected = load_generator(merged)
    torch.testing.assert_close(logits(generator.model), logits(expected.model), rtol=0, atol=1e-5)
    other = foreign(bases["moe"], tmp_path / "other", r=4, target_parameters=["experts.down_proj"], target_modules=[])
    with pytest.raises(ModelFolderError, match="do not belong to this model"):
        load_generator(bases["dense"], other)
