"""`mm-convert Qwen3TTSConverter`: a folder there and back, and a trained step as a model of one voice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.cli import mm_convert
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import read_audio
from mindspeed_mm.fsdp.data.datasets.qwen3tts.qwen3tts_dataset import speaker_mel
from tests.helpers.released_rows import ROWS, write_run
from tests.helpers.runs import losses, mm
from tests.helpers.tiny_sounds import sound_bytes, tone

from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig  # isort: skip  (after the guard of the lines above)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet  # isort: skip

WEIGHTS = "model.safetensors"
TABLE, HEAD = "talker.model.codec_embedding.weight", "talker.codec_head.weight"
CODES, ROW = 3008, 3000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model, whose table has as many rows as those of released models need."""
    yaml = write_run(ROWS["qwen3tts"], tmp_path_factory.mktemp("qwen3tts"))
    model = yaml.parent / "model"
    config = json.loads((model / "config.json").read_text())
    config["talker_config"]["vocab_size"] = CODES
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / WEIGHTS)
    for key in (TABLE, HEAD):
        rows = tensors[key]
        tensors[key] = torch.cat([rows, 0.02 * torch.randn(CODES - len(rows), rows.shape[1])])
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    (model / "speech_tokenizer").mkdir()
    (model / "speech_tokenizer" / "config.json").write_text("{}")
    return yaml


@pytest.fixture(scope="module")
def trained(run: Path) -> Path:
    """Its run of one step."""
    said = mm("train", run, "training.train_iters=1", f"training.save={run.parent / 'save'}")
    assert said.code == 0, said.err
    return run.parent / "save"


def convert(subcommand: str, **flags: object) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert mm_convert.run(["Qwen3TTSConverter", subcommand, *words]) == 0


def assert_same(found: Path, wanted: dict[str, torch.Tensor]) -> None:
    written = load_file(found / WEIGHTS)
    assert written.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(written[key], wanted[key])] == []


def test_a_folder_there_and_back_is_the_same_to_the_bit(run: Path, tmp_path: Path) -> None:
    model = run.parent / "model"
    convert("hf_to_dcp", hf_dir=model, dcp_dir=tmp_path / "dcp")
    convert("dcp_to_hf", load_dir=tmp_path / "dcp", save_dir=tmp_path / "hf", model_assets_dir=model)
    assert_same(tmp_path / "hf", load_file(model / WEIGHTS))
    assert (tmp_path / "hf" / "config.json").read_text() == (model / "config.json").read_text()
    assert (tmp_path / "hf" / "speech_tokenizer" / "config.json").is_file()


def test_a_trained_step_becomes_a_model_of_one_voice(run: Path, trained: Path, tmp_path: Path) -> None:
    model, sound = run.parent / "model", tmp_path / "voice.wav"
    sound.write_bytes(sound_bytes(tone(0.5, 16000, 300), 16000))
    exported = mm("export", trained, tmp_path / "exported")
    assert exported.code == 0, exported.err
    wanted = load_file(tmp_path / "exported" / WEIGHTS)
    assert not torch.equal(wanted[TABLE], load_file(model / WEIGHTS)[TABLE])

    step = trained / "iter_0000001"
    convert("dcp_to_hf", load_dir=step, save_dir=tmp_path / "plain", model_assets_dir=model)
    assert_same(tmp_path / "plain", wanted)

    speaker = {"speaker_name": "Otto", "speaker_audio_path": sound}
    convert("dcp_to_hf", load_dir=step, save_dir=tmp_path / "voice", model_assets_dir=model, **speaker)
    config = json.loads((model / "config.json").read_text())
    encoder = ECAPA_TimeDelayNet(Qwen3TTSConfig(**config).speaker_encoder_config).eval()
    prefix = "speaker_encoder."
    encoder.load_state_dict({key.removeprefix(prefix): wanted.pop(key) for key in list(wanted) if prefix in key})
    with sound.open("rb") as file:
        spectrum = speaker_mel(read_audio(file, 24000).samples, 16)
    with torch.no_grad():
        wanted[TABLE][ROW] = encoder(torch.from_numpy(spectrum)[None])[0]
    assert_same(tmp_path / "voice", wanted)
    written = json.loads((tmp_path / "voice" / "config.json").read_text())
    config["tts_model_type"] = "custom_voice"
    config["talker_config"] |= {"spk_id": {"otto": ROW}, "spk_is_dialect": {"otto": False}}
    assert written == config

    rows = [json.loads(line) for line in (run.parent / "rows" / "rows.jsonl").read_text().splitlines()]
    named = [{"text": row["text"], "audio_codes": row["audio_codes"], "speaker": "Otto"} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    dataset = "data.dataset_param"
    said = mm(
        "train", run, f"training.save={tmp_path / 'save'}", "training.train_iters=1",
        f"model.model_name_or_path={tmp_path / 'voice'}",
        f"{dataset}.preprocess_parameters.model_name_or_path={tmp_path / 'voice'}",
        f"{dataset}.basic_parameters.dataset={tmp_path / 'rows.jsonl'}",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert losses(tmp_path / "save")[1] > 0


def test_what_a_voice_lacks_is_named_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    model, short = run.parent / "model", tmp_path / "short.wav"
    short.write_bytes(sound_bytes(tone(0.05, 24000), 24000))
    places = {"load_dir": tmp_path / "dcp", "save_dir": tmp_path / "hf", "model_assets_dir": model}
    convert("hf_to_dcp", hf_dir=model, dcp_dir=tmp_path / "dcp")
    with pytest.raises(UsageError, match=r"--speaker_audio_path.*go together"):
        convert("dcp_to_hf", **places, speaker_name="otto")
    with pytest.raises(UsageError, match=r"lasts 0\.050 s"):
        convert("dcp_to_hf", **places, speaker_name="otto", speaker_audio_path=short)
    with pytest.raises(UsageError, match="does not exist"):
        convert("dcp_to_hf", **places, speaker_name="otto", speaker_audio_path=tmp_path / "none.wav")
    assert not (tmp_path / "hf").exists()


def test_other_models_and_tables_without_the_row_are_refused(tmp_path: Path) -> None:
    model, sound = ROWS["qwen3tts"].write(tmp_path / "model"), tmp_path / "voice.wav"
    sound.write_bytes(sound_bytes(tone(0.5, 24000), 24000))
    convert("hf_to_dcp", hf_dir=model, dcp_dir=tmp_path / "dcp")
    places = {"load_dir": tmp_path / "dcp", "save_dir": tmp_path / "hf", "model_assets_dir": model}
    speaker = {"speaker_name": "otto", "speaker_audio_path": sound}
    with pytest.raises(ModelFolderError, match="no row 3000"):
        convert("dcp_to_hf", **places, **speaker)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tts_model_type": "custom_voice"}))
    with pytest.raises(UsageError, match="no speaker encoder"):
        convert("dcp_to_hf", **places, **speaker)
    (model / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(UsageError, match="this converter is for qwen3_tts"):
        convert("dcp_to_hf", **places)
    assert not (tmp_path / "hf").exists()
