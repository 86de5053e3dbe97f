"""Files of adapters: PEFT and diffusers compute with them what the run computed, and a run can start from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.folder_kinds import MARKER
from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_WEIGHTS, PEFT_CONFIG, PEFT_WEIGHTS, load_adapters
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers.adapters import adapted_model, denoised, logits

prepare_for_transformers()

from diffusers import DiffusionPipeline  # noqa: E402  (the guard comes first)
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


@pytest.fixture(scope="module")
def peft_folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "peft"
    save_adapters(adapted_model(folders["text"]), folder, folders["text"])
    return folder


def through_peft(base: Path, folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, folder).eval()


def files_of(folder: Path) -> list[str]:
    """What other libraries see of a folder: all but the marker of its writer."""
    return sorted(path.name for path in folder.iterdir() if path.name != MARKER)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("text", {}),
        ("text", {"modules_to_save": ["lm_head", "model.norm"], "target_modules": ["mlp.down_proj", "q_proj"]}),
        ("tied", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("tied", {"target_modules": ["model.layers.{1}.*_proj"]}),
    ],
    ids=["plain", "with modules trained whole", "with tied modules trained whole", "of one layer"],
)
def test_peft_gives_the_same_logits(kind: str, lora: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    model = adapted_model(folders[kind], **lora)
    save_adapters(model, tmp_path / "out", folders[kind])
    assert torch.equal(logits(through_peft(folders[kind], tmp_path / "out")), logits(model))
    assert files_of(tmp_path / "out") == [PEFT_CONFIG, PEFT_WEIGHTS]


def test_what_peft_is_told(peft_folder: Path, folders: dict[str, Path]) -> None:
    settings = json.loads((peft_folder / PEFT_CONFIG).read_text())
    told = {key: settings[key] for key in ("r", "lora_alpha", "target_modules", "task_type", "inference_mode")}
    targets = ["k_proj", "q_proj", "v_proj"]
    assert told == {
        "r": 4, "lora_alpha": 12, "target_modules": targets, "task_type": "CAUSAL_LM", "inference_mode": True,
    }  # fmt: skip
    assert settings["base_model_name_or_path"] == str(folders["text"])


def test_a_wrong_alpha_or_prefix_would_show(peft_folder: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    expected = logits(adapted_model(folders["text"]))
    for fault in (without_alpha, with_another_prefix):
        folder = tmp_path / fault.__name__
        shutil.copytree(peft_folder, folder)
        fault(folder)
        assert not torch.allclose(logits(through_peft(folders["text"], folder)), expected, atol=1e-4)


def without_alpha(folder: Path) -> None:
    change_settings(folder, lora_alpha=4)


def with_another_prefix(folder: Path) -> None:
    tensors = load_file(folder / PEFT_WEIGHTS)
    save_file({f"base_model.{key}": tensor for key, tensor in tensors.items()}, folder / PEFT_WEIGHTS)


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("flux", None),
        ("flux", ["single_transformer_blocks.{*}.proj_out", "norm_out.linear"]),
        ("t2v", None),
        ("t2v", ["proj_out", "*.ffn.net.2", "ffn.net.0.proj"]),
    ],
)
def test_pipelines_take_the_file(
    family: str, targets: list[str] | None, generators: dict[str, Path], tmp_path: Path
) -> None:
    model = adapted_model(generators[family], **({"target_modules": targets} if targets else {}))
    save_adapters(model, tmp_path / "out", generators[family])
    assert files_of(tmp_path / "out") == [DIFFUSERS_WEIGHTS]
    pipeline = DiffusionPipeline.from_pretrained(generators[family])
    before = denoised(pipeline.transformer, facts_of(model).adapter)
    pipeline.load_lora_weights(tmp_path / "out")
    expected = denoised(model, facts_of(model).adapter)
    torch.testing.assert_close(denoised(pipeline.transformer, facts_of(model).adapter), expected, rtol=0, atol=2e-6)
    assert not torch.allclose(before, expected, atol=1e-3)


def test_a_pipeline_that_is_not_told_alpha_would_differ(generators: dict[str, Path], tmp_path: Path) -> None:
    model = adapted_model(generators["flux"])
    save_adapters(model, tmp_path / "out", generators["flux"])
    file = tmp_path / "out" / DIFFUSERS_WEIGHTS
    alphas = {key for key in load_file(file) if key.endswith(".alpha")}
    save_file({key: tensor for key, tensor in load_file(file).items() if key not in alphas}, file)
    assert alphas
    pipeline = DiffusionPipeline.from_pretrained(generators["flux"])
    pipeline.load_lora_weights(tmp_path / "out")
    given, expected = (denoised(m, facts_of(model).adapter) for m in (pipeline.transformer, model))
    assert not torch.allclose(given, expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["text", "tied", "flux"])
def test_a_run_starts_from_files(
    kind: str, folders: dict[str, Path], generators: dict[str, Path], tmp_path: Path
) -> None:
    folder = {**folders, **generators}[kind]
    lora = {"modules_to_save": ["lm_head", "embed_tokens"]} if kind == "tied" else {}
    model = adapted_model(folder, **lora)
    save_adapters(model, tmp_path / "out", folder)
    file = next((tmp_path / "out").glob("*.safetensors"))
    for path in (tmp_path / "out", file):
        started = adapted_model(folder, random=False, pretrained_lora_path=str(path), **lora)
        pairs = zip(model.named_parameters(), started.named_parameters(), strict=True)
        assert all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)


@pytest.mark.parametrize(
    ("damage", "lora", "message"),
    [
        (None, {"rank": 8}, r"has rank 4, this run 8.*training\.lora\.rank=4"),
        (lambda folder: change_settings(folder, r="four"), {}, r"has rank four, this run 4"),
        (None, {"alpha": 16}, r"has alpha 12, this run 16.*training\.lora\.alpha=12"),
        (None, {"target_modules": ["q_proj"]}, r"0 missing, 8 unexpected"),
        (None, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, r"4 missing, 0 unexpected"),
        (with_another_prefix, {}, r"12 missing, 12 unexpected"),
        (lambda folder: change_settings(folder, use_dora=True), {}, r"'use_dora' is true in it.*use_dora: true"),
        (lambda folder: change_settings(folder, peft_type="IA3"), {}, r"'IA3' adapters"),
        (lambda folder: (folder / PEFT_CONFIG).write_text("{"), {}, r"is not valid JSON"),
        (lambda folder: (folder / PEFT_WEIGHTS).unlink(), {}, r"holds adapter_config\.json: no adapters"),
        (lambda folder: (folder / PEFT_WEIGHTS).write_bytes(b"\x09" * 64), {}, r"adapter_model\.safetensors"),
        (shutil.rmtree, {}, r"is not there"),
    ],
)
def test_files_that_do_not_fit(
    damage: Callable[[Path], object] | None,
    lora: dict[str, Any],
    message: str,
    peft_folder: Path,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(peft_folder, folder)
    if damage is not None:
        damage(folder)
    model = adapted_model(folders["text"], random=False, **lora)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(MMError, match=message):
        load_adapters(model, folder)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
