"""The example of MOSS-TTS: its script starts what it names, its configuration holds on a small folder, and its
extraction of codes makes rows that train."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.helpers.released_rows import ROWS, dataset_of, rows_of
from tests.helpers.runs import mm
from tests.helpers.tiny_moss_codec import FRAME_SAMPLES, RATE, write_moss_codec
from tests.helpers.tiny_sounds import sound_bytes, tone

ROOT = Path(__file__).parents[2]
ROW = ROWS["moss_tts_delay"]


def test_the_script_starts_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "torchrun").chmod(0o755)
    words = ["bash", str(ROOT / "examples/moss_tts/finetune_moss_tts_delay.sh"), "training.lr=5e-6"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NPROC": "2"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=True)
    config = "examples/moss_tts/moss_tts_delay_config.yaml"
    expected = f"--nproc-per-node 2 mindspeed_mm/fsdp/train/trainer.py {config} training.lr=5e-6"
    assert done.stdout.strip() == expected


def test_the_configuration_holds_on_a_small_folder(tmp_path: Path) -> None:
    ROW.write(tmp_path / "model")
    rows = rows_of(ROW, tmp_path / "rows")
    config = ROOT / "examples/moss_tts/moss_tts_delay_config.yaml"
    said = mm("check", config, f"model.model_name_or_path={tmp_path / 'model'}",
              f"data.dataset_param.basic_parameters.dataset={rows}", "data.dataloader_param.drop_last=false",
              f"training.save={tmp_path / 'run'}")  # fmt: skip
    assert said.code == 0, said.out + said.err
    assert "fails" not in said.out


@pytest.mark.parametrize("skips", [False, True])
def test_extracted_codes_are_rows_that_train(tmp_path: Path, skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write_moss_codec(tmp_path / "codec")
    for name, seconds in (("a", 0.2), ("b", 0.1)):
        (tmp_path / f"{name}.wav").write_bytes(sound_bytes(tone(seconds, RATE, 300), RATE))
    rows = [
        {"audio": "a.wav", "text": "one"},
        {"audio": "a.wav", "text": "two", "ref_audio": "b.wav"},
        {"audio": "b.wav", "text": "six", "reference": [None, "b.wav"]},
    ]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--codec-path",
        "codec",
        "--input-jsonl",
        "raw.jsonl",
        "--output-jsonl",
        "out/rows.jsonl",
        "--device",
        "cpu",
    ]
    words += ["--skip-reference-audio-codes"] if skips else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *words])
    runpy.run_path(str(ROOT / "examples/moss_tts/prepare_data.py"), run_name="__main__")
    made = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    frames = {name: int(seconds * RATE) // FRAME_SAMPLES for name, seconds in (("a", 0.2), ("b", 0.1))}
    assert [len(row["audio_codes"]) for row in made] == [frames["a"], frames["a"], frames["b"]]
    if skips:
        assert not any("ref_audio_codes" in row or "reference_audio_codes" in row for row in made)
        return
    assert made[1]["ref_audio_codes"] == made[2]["audio_codes"]
    assert made[2]["reference_audio_codes"] == [None, made[2]["audio_codes"]]
    ROW.write(tmp_path / "model")
    param = DatasetParam.model_validate(dataset_of(ROW, tmp_path / "out" / "rows.jsonl", tmp_path / "model"))
    dataset = build_mm_dataset(param)[0]
    read = [int((dataset[n]["codec_ids"] >= 0).sum()) // 3 for n in range(3)]
    assert read == [frames["a"], frames["a"] + frames["b"], 2 * frames["b"]]
