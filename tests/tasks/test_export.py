"""`mm export`: a run's checkpoint becomes a folder that plain transformers loads and that answers the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.cli.export import command
from mindspeed_mm.core.artifacts import RunFolder, append_jsonl
from mindspeed_mm.core.errors import CheckpointError, MachineError, ModelFolderError, UsageError
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.loader import dump_resolved, load_config
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.export import contents, export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.helpers.tiny_models import make_tiny_qwen3_vl

prepare_for_transformers()

from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: E402  (the guard comes first)

YAML = """\
model: {{model_id: qwen3_vl, model_name_or_path: {model}, freeze: [model.visual]}}
data: {{dataset_param: {{basic_parameters: {{dataset: /data/secret/digits.jsonl}}}}}}
training: {{lr: 3.0e-4, train_iters: 4, save: {save}}}
"""


def make_run(folder: Path, source: Path) -> tuple[Path, nn.Module]:
    """A run of two checkpoints whose weights have moved between them, and the model as it ended."""
    run = RunFolder(folder / "digits")
    run.prepare()
    run.config.write_text(YAML.format(model=source, save=run.path))
    config = load_config(run.config)
    arguments = config.arguments
    run.resolved.write_text(dump_resolved(config))
    run.run_json.write_text(json.dumps({"model_name_or_path": str(source), "global_batch": 8, "dataset": {"rows": 99}}))
    model = ModelHub.build(arguments.model)
    ModelHub.load_weights(model, arguments.model, seed=0, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    manager = CheckpointManager(run.path, arguments.training, context={}, note=print)
    for step in (2, 4):
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name) + step))
                    parameter += 0.05 * noise
        manager.save(step, model, optimizer, {})
        append_jsonl(run.metrics, {"step": step, "loss": 1.0 / step})
        append_jsonl(run.metrics, {"step": step, "val_loss": 2.0 / step})
    scores = {"naming": {"correct": 3, "n": 4, "accuracy": 0.75, "low": 0.3, "high": 0.95}}
    run.evaluation.mkdir()
    (run.evaluation / "results.json").write_text(json.dumps({"tasks": scores}))
    return run.path, model


@pytest.fixture(scope="module", params=["tied", "untied"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_tiny_qwen3_vl(folder / "tiny-qwen", tie=request.param == "tied")
    return make_run(folder, source)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16")
    return make_run(folder, make_tiny_qwen3_vl(folder / "tiny-qwen", dtype=torch.bfloat16))[0]


def question(folder: Path) -> dict[str, torch.Tensor]:
    """A real image and a question through the folder's own processor."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 56, 3), dtype=np.uint8)
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit is this?"}]}
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([turn], add_generation_prompt=True)
    return dict(processor(text=[text], images=[Image.fromarray(pixels)], return_tensors="pt"))


def test_plain_transformers_gives_the_same_logits(tree: tuple[Path, nn.Module], tmp_path: Path) -> None:
    run, trained = tree
    exported = export.run(ExportRequest(run, tmp_path / "out", max_shard_bytes=50_000))
    assert (exported.step, exported.notes) == (4, ())
    model = AutoModelForImageTextToText.from_pretrained(exported.folder).eval()
    inputs = question(exported.folder)
    trained = trained.eval()
    trained.set_attn_implementation(model.config._attn_implementation)  # type: ignore[operator]
    with torch.no_grad():
        expected, given = trained(**inputs).logits, model(**inputs).logits
    assert torch.equal(expected, given)
    assert len(list(exported.folder.glob("model-*-of-*.safetensors"))) > 2
    trained.set_attn_implementation("sdpa")  # type: ignore[operator]


def test_step_and_checkpoint_folder(tree: tuple[Path, nn.Module], tmp_path: Path) -> None:
    run, _ = tree
    older = export.run(ExportRequest(run, tmp_path / "older", step=2))
    same = export.run(ExportRequest(run / "iter_0000002", tmp_path / "same"))
    newest = export.run(ExportRequest(run, tmp_path / "newest"))
    assert (older.step, same.step, newest.step) == (2, 2, 4)
    weights = [load_file(e.folder / "model.safetensors") for e in (older, same, newest)]
    key = "model.language_model.norm.weight"
    assert torch.equal(weights[0][key], weights[1][key])
    assert not torch.equal(weights[0][key], weights[2][key])


def test_dtype_is_the_source_models_unless_told_otherwise(run_folder: Path, tmp_path: Path) -> None:
    source = load_file(run_folder.parent / "tiny-qwen" / "model.safetensors")
    own = load_file(export.run(ExportRequest(run_folder, tmp_path / "own")).folder / "model.safetensors")
    assert {key: t.dtype for key, t in own.items()} == {key: t.dtype for key, t in source.items()}
    frozen = [key for key in own if "visual" in key]
    assert frozen and all(torch.equal(own[key], source[key]) for key in frozen)
    told = export.run(ExportRequest(run_folder, tmp_path / "told", dtype="fp32"))
    assert {t.dtype for t in load_file(told.folder / "model.safetensors").values()} == {torch.float32}
    assert AutoModelForImageTextToText.from_pretrained(told.folder).dtype == torch.float32


def test_model_card(run_folder: Path, tmp_path: Path) -> None:
    card = (export.run(ExportRequest(run_folder, tmp_path / "my-digits")).folder / "README.md").read_text()
    for line in (
        "library_name: transformers",
        "pipeline_tag: image-text-to-text",
        "base_model: tiny-qwen",
        "# my-digits",
        "Fine-tuned from `tiny-qwen`, 4 steps, with mindspeed-mm",
        "`digits.jsonl`, 99 rows.",
        "| learning rate | 0.0003 |",
        "| frozen | model.visual |",
        "| samples a step | 8 |",
        "| training loss | 0.2500 | step 4 |",
        "| validation loss | 0.5000 | step 4 |",
        "| accuracy, naming | 75.0 % | n=4, 95 % interval 30.0 to 95.0 % |",
    ):
        assert line in card.splitlines() or line in card, line
    assert "/data/secret" not in card and str(tmp_path) not in card  # where things lie is nobody's business
    older = (export.run(ExportRequest(run_folder, tmp_path / "older", step=2)).folder / "README.md").read_text()
    assert "| training loss | 0.5000 | step 2 |" in older
    assert "accuracy" not in older  # scores are the newest checkpoint's


def test_existing_target(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("")
    with pytest.raises(UsageError, match=r"no mm command wrote there \(precious\)"):
        export.run(ExportRequest(run_folder, target, overwrite=True))
    assert [p.name for p in target.iterdir()] == ["precious"]
    (target / "precious").unlink()
    export.run(ExportRequest(run_folder, target))
    with pytest.raises(UsageError, match=r"the target exists.*--overwrite"):
        export.run(ExportRequest(run_folder, target))
    export.run(ExportRequest(run_folder, target, overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_refusals(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"has no step 3\. Steps here: 2, 4\."):
        export.run(ExportRequest(run_folder, tmp_path / "out", step=3))
    with pytest.raises(CheckpointError, match=r"digit +does not exist\. Did you mean '[^']*/digits'\?"):
        export.run(ExportRequest(run_folder.parent / "digit", tmp_path / "out"))
    with pytest.raises(CheckpointError, match="folder of kind 'hf'"):
        export.run(ExportRequest(run_folder.parent / "tiny-qwen", tmp_path / "out"))
    other = make_tiny_qwen3_vl(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"saved from another model: \d+ tensors are missing"):
        export.run(ExportRequest(run_folder, tmp_path / "out", model_folder=other))
    monkeypatch.setattr(contents, "free_bytes", lambda path: 1000)
    with pytest.raises(MachineError, match=r"bytes are needed, but only 1,000 are free"):
        export.run(ExportRequest(run_folder, tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]


def test_run_whose_model_is_gone_takes_another_folder(run_folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(run_folder.parent / "tiny-qwen")
    record = run_folder / "run.json"
    before = record.read_text()
    record.write_text(json.dumps({"model_name_or_path": "/gone/tiny"}))
    try:
        with pytest.raises(ModelFolderError, match=r"/gone/tiny.*no longer exists.*--model FOLDER"):
            export.run(ExportRequest(run_folder, tmp_path / "out"))
        assert export.run(ExportRequest(run_folder, tmp_path / "out", model_folder=moved)).step == 4
    finally:
        record.write_text(before)


def test_damaged_checkpoint_falls_back_and_says_so(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, make_tiny_qwen3_vl(tmp_path / "tiny-qwen"))
    shard = run / "iter_0000004" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    exported = export.run(ExportRequest(run, tmp_path / "out"))
    assert exported.step == 2
    assert "iter_0000004/__0_0.distcp" in exported.notes[0]
    with pytest.raises(CheckpointError, match=r"iter_0000004 is damaged\. An older one is .*iter_0000002"):
        export.run(ExportRequest(run, tmp_path / "again", step=4))


def test_command(run_folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(run_folder), str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["step"] == 4
    done = CliRunner().invoke(command, [str(run_folder), str(tmp_path / "two")])
    assert done.output.startswith(f"{tmp_path / 'two'}: ") and "iter_0000004" in done.output
    assert CliRunner().invoke(command, ["--help"]).output.count("mm export ") == 4
