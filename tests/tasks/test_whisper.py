"""Whisper trains with nothing but its folder named, and `mm check` refuses the batches that training could not use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from mindspeed_mm.tasks import train
from mindspeed_mm.tasks.check import check
from tests.fsdp.data.conftest import conversation, write_jsonl
from tests.helpers.tiny_processors import MEL_BINS, build_processor
from tests.helpers.tiny_run import tiny_config
from tests.helpers.tiny_sounds import sound_bytes, tone

ensure_torchvision()

import transformers  # noqa: E402  (the guard comes first)

pytestmark = pytest.mark.edge("R13")


def make_run(folder: Path, **collate: Any) -> Path:
    processor = build_processor("whisper")
    config = transformers.WhisperConfig(
        vocab_size=len(processor.tokenizer), num_mel_bins=MEL_BINS, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=100, max_target_positions=64, pad_token_id=processor.tokenizer.pad_token_id,
        bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    (folder / "a.wav").write_bytes(sound_bytes(tone(0.5, 16000), 16000))
    rows = [conversation("<audio>", "seven " * (n + 1), audios=["a.wav"]) for n in range(4)]
    write_jsonl(folder / "rows.jsonl", rows)
    settings = tiny_config(folder)
    settings["data"]["dataloader_param"]["collate_param"] = collate
    settings["training"] |= {"train_iters": 2, "save": str(folder / "run")}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_the_collator_is_that_of_the_processor(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    assert check.run(path).findings == []
    assert train.run(path).iteration == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("loss", 0) > 0 for line in lines)


def test_check_refuses_a_collator_whose_batches_the_model_cannot_use(tmp_path: Path) -> None:
    path = make_run(tmp_path, model_name="llm_pretrain")
    [problem] = check.run(path).findings
    assert "collate_param.model_name" in str(problem)
    with pytest.raises((MMError, TypeError, ValueError)):
        train.run(path)
