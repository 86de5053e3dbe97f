"""`mm export` of a run that trained adapters: the adapters alone, or the whole model with them merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mindspeed_mm.cli.export import command
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError
from mindspeed_mm.core.folder_kinds import MARKER
from mindspeed_mm.fsdp.checkpoint.adapters import merged_tensors
from mindspeed_mm.fsdp.checkpoint.base_weights import base_weights_mark
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import OwnSettings
from mindspeed_mm.fsdp.models.lora.files import DIFFUSERS_WEIGHTS, PEFT_CONFIG, PEFT_WEIGHTS
from mindspeed_mm.fsdp.models.lora.names import LoraReport
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.loader import dump_resolved, load_config
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.export import contents as export_contents
from mindspeed_mm.tasks.export import export, merge
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.export import ExportRequest, MergeRequest
from tests.helpers.adapters import FEW, adapted_model, denoised, logits
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3

prepare_for_transformers()

from diffusers import DiffusionPipeline, FluxTransformer2DModel  # noqa: E402  (the guard comes first)
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

YAML = """\
model: {{model_name_or_path: {model}}}
training: {{save: {save}, lora: {lora}}}
"""


def make_run(folder: Path, source: Path, whole: list[str] | None = None, **more: Any) -> tuple[Path, Any]:
    """A run of one checkpoint, and the model as it ended; `more` is said of its adapters."""
    lora = {"rank": 4, "alpha": 12, "modules_to_save": whole or [], **more}
    run = RunFolder(folder / "run")
    run.prepare()
    run.config.write_text(YAML.format(model=source, save=run.path, lora=json.dumps({"enable": True, **lora})))
    config = load_config(run.config)
    run.resolved.write_text(dump_resolved(config))
    run.run_json.write_text(json.dumps({"model_name_or_path": str(source)}))
    model = adapted_model(source, **lora)
    context = {"base_weights": base_weights_mark(source)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    CheckpointManager(run.path, config.arguments.training, context=context, note=print).save(3, model, optimizer, {})
    return run.path, model


@pytest.fixture(scope="module", params=["text", "tied"])
def language(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_tiny_qwen3(folder / "base", tie=request.param == "tied", dtype=torch.bfloat16)
    whole = ["lm_head", "embed_tokens"] if request.param == "tied" else ["model.norm"]
    return make_run(folder, source, whole, target_modules=list(FEW))


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("generator")
    return make_run(folder, make_tiny_flux(folder / "base"))


def test_adapters_are_what_is_written(language: tuple[Path, Any], tmp_path: Path) -> None:
    run, trained = language
    exported = export.run(ExportRequest(run, tmp_path / "out"))
    assert (exported.kind, exported.step) == ("adapters", 3)
    assert sorted(p.name for p in exported.folder.iterdir()) == [MARKER, "README.md", PEFT_CONFIG, PEFT_WEIGHTS]
    base = AutoModelForCausalLM.from_pretrained(run.parent / "base", dtype=torch.float32)
    assert torch.equal(logits(PeftModel.from_pretrained(base, exported.folder).eval()), logits(trained))
    card = (exported.folder / "README.md").read_text()
    for line in ("library_name: peft", "- lora", 'PeftModel.from_pretrained(model, "path/to/this/folder")'):
        assert line in card
    assert "| rank of the adapters | 4 |" in card and str(tmp_path) not in card


def test_adapters_of_a_plugin_tell_its_settings(
    language: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = export_contents._adapted_outline

    def outline(source: Any) -> Any:
        model = build(source)
        facts_of(model).note(OwnSettings({"temperature": 0.5}))
        return model

    assert export.run(ExportRequest(language[0], tmp_path / "plain")).notes == ()
    monkeypatch.setattr(export_contents, "_adapted_outline", outline)
    (note,) = export.run(ExportRequest(language[0], tmp_path / "own")).notes
    assert '{"temperature": 0.5}' in note and "--merge" in note


def test_merged_model_equals_the_unmerged(language: tuple[Path, Any], tmp_path: Path) -> None:
    run, trained = language
    exported = export.run(ExportRequest(run, tmp_path / "out", merge=True, dtype="fp64", max_shard_bytes=50_000))
    assert exported.kind == "model" and len(list(exported.folder.glob("model-*-of-*.safetensors"))) > 2
    merged = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float64)
    expected = logits(trained.double())
    torch.testing.assert_close(logits(merged.eval()), expected, rtol=0, atol=1e-12)
    trained.float()


def test_merged_model_keeps_the_layout_and_dtype_of_the_base(language: tuple[Path, Any], tmp_path: Path) -> None:
    run, _ = language
    base = load_file(run.parent / "base" / "model.safetensors")
    merged = load_file(export.run(ExportRequest(run, tmp_path / "out", merge=True)).folder / "model.safetensors")
    assert {key: (t.shape, t.dtype) for key, t in merged.items()} == {k: (t.shape, t.dtype) for k, t in base.items()}
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    assert {key.split(".")[-2] for key in changed} <= {"q_proj", "k_proj", "v_proj", "norm", "embed_tokens"}
    assert len(changed) == 7


def test_what_was_trained_whole_need_not_be_in_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the new head of a reward model that started from the folder of a model that answers."""
    base = make_tiny_qwen3(tmp_path / "base", dtype=torch.bfloat16)
    run, trained = make_run(tmp_path, base, ["model.norm"], target_modules=list(FEW))
    whole = load_file(export.run(ExportRequest(run, tmp_path / "whole", merge=True)).folder / "model.safetensors")
    mark, stored = base_weights_mark(base), load_file(base / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(export_contents, "base_weights_mark", lambda _: mark)
    merged = export.run(ExportRequest(run, tmp_path / "merged", merge=True, dtype="bf16")).folder
    adapters = export.run(ExportRequest(run, tmp_path / "adapters")).folder
    by_files = merge.run(MergeRequest(base, (adapters,), out=tmp_path / "by_files", dtype="bf16")).folder
    for folder in (merged, by_files):
        found = load_file(folder / "model.safetensors")
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    outline = ModelHub.build(ModelArguments.model_validate({"model_name_or_path": str(base)}))
    with merged_tensors(trained, outline, base) as live:
        assert live.keys() == whole.keys()


@pytest.mark.parametrize("fault", ["alpha ignored", "half of the layers"])
def test_a_wrong_merge_would_show(
    fault: str, language: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trained = language
    if fault == "alpha ignored":
        monkeypatch.setattr(LoraReport, "scale", 1.0)
    else:
        whole = export_contents.deltas_of_run
        monkeypatch.setattr(
            export_contents,
            "deltas_of_run",
            lambda *given: {name: delta for name, delta in whole(*given).items() if ".1." not in name},
        )
    merged = AutoModelForCausalLM.from_pretrained(
        export.run(ExportRequest(run, tmp_path / "out", merge=True, dtype="fp64")).folder, dtype=torch.float64
    )
    expected = logits(trained.double())
    trained.float()
    assert not torch.allclose(logits(merged.eval()), expected, atol=1e-3)


def test_generator(generator: tuple[Path, Any], tmp_path: Path) -> None:
    run, trained = generator
    adapter = facts_of(trained).adapter
    expected = denoised(trained, adapter)
    exported = export.run(ExportRequest(run, tmp_path / "adapters", transformer_only=True))
    assert exported.kind == "adapters"
    assert sorted(p.name for p in exported.folder.iterdir()) == [MARKER, "README.md", DIFFUSERS_WEIGHTS]
    pipeline = DiffusionPipeline.from_pretrained(run.parent / "base")
    pipeline.load_lora_weights(exported.folder)
    torch.testing.assert_close(denoised(pipeline.transformer, adapter), expected, rtol=0, atol=2e-6)
    merged = export.run(ExportRequest(run, tmp_path / "merged", merge=True, transformer_only=True, dtype="fp64"))
    assert merged.kind == "transformer"
    transformer = FluxTransformer2DModel.from_pretrained(merged.folder / "transformer", torch_dtype=torch.float64)
    torch.testing.assert_close(denoised(transformer, adapter), denoised(trained.double(), adapter), rtol=0, atol=1e-12)
    trained.float()


def test_what_inference_takes(language: tuple[Path, Any], generator: tuple[Path, Any]) -> None:
    run, _ = language
    source = resolve_model(run)
    assert (source.run, source.lora, source.transformer) == (run, None, None)
    assert (source.folder / "model.safetensors").exists()  # adapters of a language model are merged
    run, _ = generator
    source = resolve_model(run)
    assert (source.folder, source.run, source.transformer) == (run.parent / "base", run, None)
    assert source.lora is not None and (source.lora / DIFFUSERS_WEIGHTS).exists()
    with pytest.raises(ModelFolderError, match=r"holds adapters and no model.*mm export --merge"):
        resolve_model(source.lora)


def test_other_base_weights_are_refused(language: tuple[Path, Any], tmp_path: Path) -> None:
    run, _ = language
    other = make_tiny_qwen3(tmp_path / "other", seed=1, tie="tied" in str(run), dtype=torch.bfloat16)
    with pytest.raises(ModelFolderError, match=r"does not hold the weights that the adapters were trained on"):
        export.run(ExportRequest(run, tmp_path / "out", merge=True, model_folder=other))
    assert export.run(ExportRequest(run, tmp_path / "out", model_folder=other)).kind == "adapters"


def test_a_checkpoint_outside_a_run_does_not_say_which_adapters(language: tuple[Path, Any], tmp_path: Path) -> None:
    run, _ = language
    shutil.copytree(run / "iter_0000003", tmp_path / "copied" / "iter_0000003")
    with pytest.raises(CheckpointError, match="holds adapters and does not say of which kind"):
        export.run(
            ExportRequest(tmp_path / "copied" / "iter_0000003", tmp_path / "out", model_folder=run.parent / "base")
        )
    assert not (tmp_path / "out").exists()


def test_command(language: tuple[Path, Any], tmp_path: Path) -> None:
    run, _ = language
    done = CliRunner().invoke(command, [str(run), str(tmp_path / "out"), "--merge", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["kind"] == "model"
