"""Runs that add tokens, from the checkpoint on: what is exported, merged and resumed has the tokens and their rows, and
computes what was trained, read by plain transformers and PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.export import export, merge
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model
from mindspeed_mm.tasks.requests.export import ExportRequest, MergeRequest
from mindspeed_mm.tasks.serve.backend import Served, running
from tests.helpers.added_tokens import ANSWER, IDS, make_run, plain_batch, plain_model, plain_tokenizer

prepare_for_transformers()

from peft import PeftModel  # noqa: E402  (the guard comes first)
from transformers import AutoTokenizer  # noqa: E402

pytestmark = pytest.mark.edge("BR16")
LORA = {"lora": {"enable": True, "rank": 4, "alpha": 12}}
STEPS = {"train_iters": 4, "save_interval": 2, "lr": 0.01}


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def trained(yaml: Path, *words: str) -> Any:
    return Trainer(load_with_plugins(yaml, [f"training.save={yaml.parent / 'run'}", *words])).train()


@pytest.fixture(scope="module", params=["lora, tied", "full", *map(slow, ("lora, untied", "lora, vlm, tied"))])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, bool]:
    """A run of fp32, what it computes when it ends, and whether it trained adapters."""
    tie, adapts = ", tied" in request.param, request.param != "full"
    kind = "vlm" if "vlm" in request.param else "text"
    folder = tmp_path_factory.mktemp("run")
    yaml = make_run(folder, kind, tie=tie, training=STEPS | (LORA if adapts else {}))
    engine = trained(yaml, "parallel.fsdp_plan.param_dtype=null", "training.save_format=hf")
    return folder, logits(engine.model.eval(), folder), adapts


@torch.no_grad()
def logits(model: Any, folder: Path) -> torch.Tensor:
    return model(input_ids=plain_batch(folder / "model", 1)[0]).logits


def check_whole(written: Path, run: tuple[Path, torch.Tensor, bool]) -> None:
    folder, expected, _ = run
    model = plain_model(written, torch.float32, grown=False)
    config = json.loads((written / "config.json").read_text())
    assert config.get("text_config", config)["vocab_size"] == 384 == model.config.get_text_config().vocab_size
    torch.testing.assert_close(logits(model, folder), expected, rtol=0, atol=1e-5)
    check_tokenizer(written, folder)


def check_tokenizer(written: Path, folder: Path) -> None:
    tokenizer, plain = AutoTokenizer.from_pretrained(written), plain_tokenizer(folder / "model")
    assert tokenizer(ANSWER)["input_ids"] == plain(ANSWER)["input_ids"]
    assert set(IDS) <= set(tokenizer(ANSWER)["input_ids"])
    for skip in (True, False):
        ids = plain(ANSWER)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=skip) == plain.decode(ids, skip_special_tokens=skip)
    assert tokenizer.chat_template == plain.chat_template


def test_the_exported_model(run: tuple[Path, torch.Tensor, bool], tmp_path: Path) -> None:
    folder, _, adapts = run
    export.run(ExportRequest(folder / "run", tmp_path / "out", merge=adapts))
    check_whole(tmp_path / "out", run)
    if adapts:  # of rows that are not new, none has moved
        before = plain_model(folder / "model", torch.float32, grown=False)
        after = plain_model(tmp_path / "out", torch.float32, grown=False)
        for get in ("get_input_embeddings", "get_output_embeddings"):
            assert torch.equal(getattr(after, get)().weight[:320], getattr(before, get)().weight)
    else:
        check_whole(folder / "run" / "hf" / "iter_0000004", run)


def test_exported_adapters(run: tuple[Path, torch.Tensor, bool], tmp_path: Path) -> None:
    folder, expected, adapts = run
    if not adapts:
        pytest.skip("it has none")
    export.run(ExportRequest(folder / "run", tmp_path / "adapters"))
    assert "model.resize_token_embeddings(384)" in (tmp_path / "adapters" / "README.md").read_text()
    for adapters in (tmp_path / "adapters", folder / "run" / "hf" / "iter_0000004"):
        base = plain_model(folder / "model", torch.float32, grown=False)
        base.resize_token_embeddings(len(AutoTokenizer.from_pretrained(adapters)), pad_to_multiple_of=64)
        model = PeftModel.from_pretrained(base, str(adapters)).eval()
        found = logits(model, folder)
        torch.testing.assert_close(found[..., :323], expected[..., :323], rtol=0, atol=1e-5)
        check_tokenizer(adapters, folder)
    merge.run(MergeRequest(folder / "model", [tmp_path / "adapters"], out=tmp_path / "merged"))
    check_whole(tmp_path / "merged", run)
    source = ModelSource(folder / "model", lora=tmp_path / "adapters")
    generator = load_generator(source.folder, source.lora, rows_view(source))
    torch.testing.assert_close(logits(generator.model, folder), expected, rtol=0, atol=1e-5)
    assert generator.encoder.tokenizer.convert_tokens_to_ids("<call>") == IDS[2]
    with pytest.raises(ModelFolderError, match="have a row for token 322, and the tokenizer has 320 tokens"):
        load_generator(folder / "model", adapters={"own": tmp_path / "adapters"})
    served = Served(source.folder, "model", rows_view(source), source.lora)
    with pytest.raises(UsageError, match="rows of added tokens"), running("vllm", served):
        pass


def test_a_run_that_goes_on(run: tuple[Path, torch.Tensor, bool], tmp_path: Path) -> None:
    folder, expected, _ = run
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "iter_0000004")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    config = load_with_plugins(
        folder / "run.yaml", [f"training.save={tmp_path / 'run'}", "parallel.fsdp_plan.param_dtype=null"]
    )
    engine = Trainer(config).train()
    assert engine is not None and engine.first_iteration == 2
    assert torch.equal(logits(engine.model.eval(), folder), expected)


def test_a_run_is_asked_by_its_own_tokens(run: tuple[Path, torch.Tensor, bool]) -> None:
    folder, expected, _ = run
    generator = load_generator(resolve_model(folder / "run").folder)
    assert generator.encoder.tokenizer.convert_tokens_to_ids("<think>") == IDS[0]
    torch.testing.assert_close(logits(generator.model, folder), expected, rtol=0, atol=1e-5)


def test_tokens_of_the_folder_are_reported_and_kept(
    run: tuple[Path, torch.Tensor, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that was exported with the tokens: nothing is added, and no row begins anew."""
    folder, expected, adapts = run
    export.run(ExportRequest(folder / "run", tmp_path / "out", merge=adapts))
    words = [f"model.model_name_or_path={tmp_path / 'out'}", "training.lora.enable=false", "training.lr=0"]
    engine = Trainer(load_with_plugins(folder / "run.yaml", [*words, "parallel.fsdp_plan.param_dtype=null"])).train()
    assert "3 that the tokenizer already has (<think>, </think>, <call>)" in capsys.readouterr().out
    torch.testing.assert_close(logits(engine.model.eval(), folder), expected, rtol=0, atol=1e-5)


def test_tokens_of_a_file(tmp_path: Path) -> None:
    """One a line, beside the YAML; the configuration holds the tokens, not the file's name."""
    (tmp_path / "tokens.txt").write_text("<think>\n\n</think>\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text("model: {add_tokens: tokens.txt}\n")
    arguments = load_with_plugins(tmp_path / "run.yaml").arguments
    assert arguments.model.add_tokens == ("<think>", "</think>")
    assert arguments.data.dataset_param.preprocess_parameters.add_tokens == ("<think>", "</think>")
