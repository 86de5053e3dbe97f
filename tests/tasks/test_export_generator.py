"""`mm export` of a generator's run: a folder that diffusers' `from_pretrained` takes, or its transformer alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mindspeed_mm.cli.export import command
from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.errors import MachineError, ModelFolderError, UsageError
from mindspeed_mm.core.folder_kinds import MARKER
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.export import contents, export
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.helpers.adapters import denoised
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3

prepare_for_transformers()

import diffusers  # noqa: E402  (the guard comes first)

Trained = tuple[Path, TrainEngine]
"""A run of two steps with an average, and the engine as it ended."""


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("flux"), "flux")


@pytest.fixture(scope="module")
def i2v(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("i2v"), "i2v")


def train(folder: Path, family: str) -> Trained:
    training = {"train_iters": 2, "save": str(folder / "run"), "save_format": "hf", "lr": 1e-2}
    yaml = make_tiny_generator_run(folder, family, training=training | {"ema": {"enable": True, "decay": 0.5}})
    engine = Trainer(load_with_plugins(yaml, [])).train()
    assert engine is not None
    return folder / "run", engine


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("family", ["flux", "i2v"])
def test_whole_folder(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run, engine = request.getfixturevalue(family)
    exported = export.run(ExportRequest(run, tmp_path / "out", weights="model", max_shard_bytes=30_000))
    assert (exported.kind, exported.weights, exported.step) == ("generator", "model", 2)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(exported.folder)
    stored, live = pipeline.transformer.state_dict(), engine.model.state_dict()
    assert stored.keys() == live.keys() and all(torch.equal(stored[key], live[key]) for key in live)
    source, copy = digests(run.parent / "model"), digests(exported.folder)
    others = {name for name in source if not name.startswith("transformer/")}
    assert {name: copy[name] for name in others} == {name: source[name] for name in others}
    assert {name for name in copy if not name.startswith("transformer/")} == others | {"README.md", MARKER}
    index = json.loads((exported.folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(live) and len(set(index["weight_map"].values())) > 1


@pytest.mark.edge("BN15")
def test_the_average_is_what_is_written(flux: Trained, tmp_path: Path) -> None:
    run, engine = flux
    exported = export.run(ExportRequest(run, tmp_path / "out", transformer_only=True))
    assert (exported.kind, exported.weights) == ("transformer", "ema")
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(exported.folder / "transformer")
    live = engine.model.state_dict()
    assert not all(torch.equal(tensor, live[key]) for key, tensor in transformer.state_dict().items())
    assert sorted(p.name for p in exported.folder.iterdir()) == [MARKER, "README.md", "transformer"]


def test_what_a_run_writes_beside_its_checkpoints(flux: Trained) -> None:
    run, engine = flux
    folder = run / "hf" / "iter_0000002"
    assert sorted(p.name for p in folder.iterdir()) == [MARKER, "transformer"]
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert stored.keys() == engine.model.state_dict().keys()


def test_training_and_inference_take_what_was_written(flux: Trained, tmp_path: Path) -> None:
    run, engine = flux
    exported = export.run(ExportRequest(run, tmp_path / "out", weights="model"))
    model_args = ModelArguments(model_name_or_path=str(run.parent / "model"))
    for folder in (exported.folder, exported.folder / "transformer"):
        model = ModelHub.build(model_args)
        ModelHub.load_weights(model, model_args, seed=0, device=torch.device("cpu"), folder=folder)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), engine.model.parameters(), strict=True))
    assert resolve_model(exported.folder).folder == exported.folder
    source = resolve_model(run, "model")
    assert (source.folder, source.run, source.lora) == (run.parent / "model", run, None)
    assert source.transformer is not None
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(source.transformer).eval()
    adapter = facts_of(engine.model).adapter
    expected = denoised(engine.model.eval(), adapter)
    torch.testing.assert_close(denoised(transformer, adapter), expected, rtol=0, atol=2e-6)
    exported_names = {p.name for p in (run / "exported").iterdir()}
    assert source.fingerprint() == resolve_model(run, "model").fingerprint() != resolve_model(run).fingerprint()
    assert len(exported_names) == 1 and len(list((run / "exported").iterdir())) == 1


def test_dtype_and_settings(flux: Trained, tmp_path: Path) -> None:
    run, _ = flux
    folder = (
        export.run(ExportRequest(run, tmp_path / "out", dtype="bf16", transformer_only=True)).folder / "transformer"
    )
    assert {t.dtype for t in load_file(folder / "diffusion_pytorch_model.safetensors").values()} == {torch.bfloat16}
    source = json.loads((run.parent / "model" / "transformer" / "config.json").read_text())
    assert json.loads((folder / "config.json").read_text()) == source


def test_card(flux: Trained, tmp_path: Path) -> None:
    run, _ = flux
    whole = (export.run(ExportRequest(run, tmp_path / "whole")).folder / "README.md").read_text()
    alone = (export.run(ExportRequest(run, tmp_path / "alone", transformer_only=True)).folder / "README.md").read_text()
    for card in (whole, alone):
        assert "library_name: diffusers\npipeline_tag: text-to-image\nbase_model: model\n" in card
        assert "longest sample" not in card and str(tmp_path) not in card
    assert 'DiffusionPipeline.from_pretrained("path/to/this/folder")' in whole
    assert 'FluxTransformer2DModel.from_pretrained("path/to/this/folder/transformer")' in alone


def test_refusals(flux: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = flux
    language = make_tiny_qwen3(tmp_path / "language")
    with pytest.raises(UsageError, match=r"--transformer-only +the model is not a generator"):
        export.run(ExportRequest(run, tmp_path / "out", transformer_only=True, model_folder=language))
    monkeypatch.setattr(contents, "free_bytes", lambda path: 300_000)
    with pytest.raises(MachineError, match=r"bytes are needed, but only 300,000 are free"):
        export.run(ExportRequest(run, tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["language"]


def test_a_component_that_is_gone(flux: Trained, tmp_path: Path) -> None:
    run, _ = flux
    model = Path(shutil.copytree(run.parent / "model", tmp_path / "model"))
    shutil.rmtree(model / "tokenizer_2")
    with pytest.raises(ModelFolderError, match=r"'tokenizer_2' is listed in model_index\.json"):
        export.run(ExportRequest(run, tmp_path / "out", model_folder=model))
    assert not (tmp_path / "out").exists()


def test_command(flux: Trained, tmp_path: Path) -> None:
    run, _ = flux
    arguments = [str(run), str(tmp_path / "out"), "--transformer-only", "--weights", "model", "--json"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["kind"] == "transformer"
