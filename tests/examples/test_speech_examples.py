"""The examples of CosyVoice3 and Fun-ASR: the released weights become a folder, and scripts start what they name."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mindspeed_mm.cli.main import run
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()

from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3Config, CosyVoice3LM  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "cosyvoice3/finetune_cosyvoice3_0.5B.sh": ("tasks/cosyvoice3/train.py", "cosyvoice3/cosyvoice3_0.5B_config.yaml"),
    "funasr/finetune_funasr_nano.sh": ("tasks/funasr/trainer.py", "funasr/funasr_nano_config.yaml"),
}
LLM = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def make_folder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cosyvoice_folder", EXAMPLES / "cosyvoice3" / "make_folder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tied", [True, False])
def test_released_weights_become_a_folder(make_folder: ModuleType, tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    model = CosyVoice3LM(CosyVoice3Config(llm_config=LLM | {"tie_word_embeddings": tied}, speech_token_size=30)).eval()
    release = tmp_path / "release"
    (release / "CosyVoice-BlankEN").mkdir(parents=True)
    (release / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps(LLM | {"tie_word_embeddings": True}))
    torch.save(model.state_dict() | {"epoch": 3, "step": 1000}, release / "llm.pt")
    make_folder.make_folder(release, tmp_path / "folder")
    made, report = CosyVoice3LM.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(report.values()), report
    assert (made.config.speech_token_size, made.config.llm_config.tie_word_embeddings) == (30, tied)
    ids = torch.tensor([[3, 1, 41, 45]])
    assert torch.equal(made.eval()(input_ids=ids).logits, model(input_ids=ids).logits)
    for name, value in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name


def test_the_way_back_gives_what_was_released(make_folder: ModuleType, tmp_path: Path) -> None:
    """By the code of the page, on a folder that was exported as it came."""
    torch.manual_seed(0)
    model = CosyVoice3LM(CosyVoice3Config(llm_config=LLM | {"tie_word_embeddings": True}, speech_token_size=30))
    (tmp_path / "CosyVoice-BlankEN").mkdir()
    (tmp_path / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps(LLM))
    torch.save(model.state_dict(), tmp_path / "llm.pt")
    make_folder.make_folder(tmp_path, tmp_path / "folder")
    (code,) = re.findall(
        r"```python\n(import torch.*?)```",
        (EXAMPLES / "cosyvoice3" / "README.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    exec(code.replace("exported/cosyvoice3_0.5B", str(tmp_path / "folder")), {})
    released, again = (torch.load(path / "llm.pt", weights_only=True) for path in (tmp_path, tmp_path / "folder"))
    assert released.keys() == again.keys()
    assert [name for name, value in released.items() if not torch.equal(value, again[name])] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_start_the_entries_that_they_name(script: str, tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "torchrun").chmod(0o755)
    words = ["bash", str(EXAMPLES / script), "training.lr=5e-6"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NPROC": "2"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    entry, config = SCRIPTS[script]
    expected = f"--nproc-per-node 2 mindspeed_mm/fsdp/{entry} examples/{config} training.lr=5e-6"
    assert done.stdout.strip() == expected
    assert (EXAMPLES.parent / "mindspeed_mm/fsdp" / entry).is_file()


@pytest.mark.parametrize("config", [config for _, config in SCRIPTS.values()])
def test_configurations_are_read(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(EXAMPLES / config), "--config-only"]) == 0, capsys.readouterr().out
