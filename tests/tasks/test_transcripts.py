"""Speech recognisers say what transformers' own `generate` says, token for token, and their word errors are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from tests.helpers.packed_more_families import OMNI3
from tests.helpers.runs import mm
from tests.helpers.tiny_processors import MEL_BINS, build_processor
from tests.helpers.tiny_sounds import sound_bytes, tone

ensure_torchvision()

import transformers  # noqa: E402  (the guard comes first)

TOKENS = 8
SOUNDS = {"low.wav": 220.0, "high.wav": 1760.0, "long.wav": 660.0}
START = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]


def make_whisper(folder: Path, *, dtype: torch.dtype = torch.float32, **generation: Any) -> Path:
    """A Whisper whose transcripts depend on what it hears."""
    torch.manual_seed(0)
    processor = build_processor("whisper")
    tokenizer = processor.tokenizer
    start, english, transcribe, no_times = tokenizer.convert_tokens_to_ids(START)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=MEL_BINS, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.5,
        max_source_positions=100, max_target_positions=16, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=start,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).to(dtype)
    settings: dict[str, Any] = {"no_timestamps_token_id": no_times, "is_multilingual": True}
    settings |= {"lang_to_id": {"<|en|>": english}, "task_to_id": {"transcribe": transcribe}, **generation}
    model.save_pretrained(folder)
    common = {name: getattr(config, name) for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
    transformers.GenerationConfig(**common, **settings).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_qwen3_asr(folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A Qwen3-ASR of the same kind."""
    torch.manual_seed(0)
    processor = build_processor("qwen3_asr")
    # The released folders' own, which fills sounds up to whole windows of the encoder.
    processor.feature_extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=MEL_BINS)
    tokenizer = processor.tokenizer
    text = {"model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Qwen3ASRConfig(
        text_config=text | {"initializer_range": 0.5},
        audio_config={"model_type": "qwen3_asr_encoder", **OMNI3, "initializer_range": 0.5},
        audio_token_id=processor.audio_token_id, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.5,
    )  # fmt: skip
    transformers.Qwen3ASRForConditionalGeneration(config).to(dtype).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sounds, of one length and of another, and rows of them."""
    folder = tmp_path_factory.mktemp("sounds")
    rows = []
    for name, hertz in SOUNDS.items():
        (folder / name).write_bytes(sound_bytes(tone(1.2 if name == "long.wav" else 0.7, 16000, hertz), 16000))
        turns = [{"role": "user", "content": "<audio>"}, {"role": "assistant", "content": "one two three"}]
        rows.append({"id": name, "messages": turns, "audios": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def asked(folder: Path, sound: Path) -> dict[str, Any]:
    said = mm("infer", folder, "--audio", sound, "--max-new-tokens", TOKENS, "--json")
    assert said.code == 0, said.err
    return dict(json.loads(said.out))


def samples(sound: Path) -> Any:
    return soundfile.read(sound, dtype="float32")[0]


def plain_whisper(folder: Path, sound: Path, **options: Any) -> list[int]:
    """Of transformers alone."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype="auto").eval()
    heard = processor(samples(sound), sampling_rate=16000, return_tensors="pt").to(model.dtype)
    made = model.generate(heard.input_features, max_new_tokens=TOKENS, do_sample=False, **options)
    return list(made[0].tolist())


def without_end(folder: Path, answer: dict[str, Any]) -> list[int]:
    """`generate` leaves the end token of a transcript out."""
    ids = list(answer["token_ids"])
    end = tokenizer_of(load_processor(folder)).eos_token_id
    assert (ids[-1] == end) == answer["finished"]
    return ids[:-1] if answer["finished"] else ids


@pytest.mark.parametrize(
    "generation",
    [
        pytest.param({"language": "en", "task": "transcribe"}, id="named"),
        pytest.param({"language": "english"}, id="language-alone"),
        pytest.param({}, id="found-out"),
        pytest.param({"begin_suppress_tokens": [300], "language": "<|en|>"}, id="suppressed"),
    ],
)
def test_transcripts_are_those_of_transformers(tmp_path: Path, sounds: Path, generation: dict[str, Any]) -> None:
    folder = make_whisper(tmp_path, **generation)
    found = [without_end(folder, asked(folder, sounds / name)) for name in SOUNDS]
    assert found == [plain_whisper(folder, sounds / name) for name in SOUNDS]
    assert found[0] != found[1]


def test_a_batch_says_what_each_row_says(tmp_path: Path, sounds: Path) -> None:
    folder = make_whisper(tmp_path / "model", language="en")
    out = tmp_path / "answers.jsonl"
    said = mm("infer", folder, "--data", sounds / "rows.jsonl", "--out", out, "--max-new-tokens", TOKENS)
    assert said.code == 0, said.err
    texts = [json.loads(line)["answer"] for line in out.read_text().splitlines()]
    assert texts == [asked(folder, sounds / name)["text"] for name in SOUNDS]


def test_a_transcript_has_no_more_places_than_the_decoder(tmp_path: Path, sounds: Path) -> None:
    folder = make_whisper(tmp_path, language="en")
    said = mm("infer", folder, "--audio", sounds / "low.wav", "--json")  # 512 tokens are asked for
    assert said.code == 0, said.err
    assert len(json.loads(said.out)["token_ids"]) <= 16 - len(START) + 1


@pytest.mark.parametrize("make", [make_whisper, make_qwen3_asr])
def test_weights_of_half_precision_hear(tmp_path: Path, sounds: Path, make: Any) -> None:
    asked(make(tmp_path, dtype=torch.bfloat16), sounds / "low.wav")


@pytest.mark.parametrize(
    ("generation", "start"),
    [
        ({"language": "en", "task": "transcribe"}, START),
        ({"language": "english"}, START),
        ({"forced_decoder_ids": [[1, "<|en|>"], [2, "<|transcribe|>"], [3, "<|notimestamps|>"]]}, START),
        ({"forced_decoder_ids": [[1, "<|notimestamps|>"]]}, [START[0], START[3]]),
        ({"forced_decoder_ids": [[1, None], [2, "<|transcribe|>"]]}, [START[0], START[3]]),
    ],
)
def test_training_begins_transcripts_with_the_language_of_the_generation_configuration(
    tmp_path: Path, generation: dict[str, Any], start: list[str]
) -> None:
    folder = make_whisper(tmp_path)
    tokenizer = build_processor("whisper").tokenizer
    path = folder / "generation_config.json"
    told = json.loads(path.read_text())
    if forced := generation.get("forced_decoder_ids"):
        ids = [[place, token and tokenizer.convert_tokens_to_ids(token)] for place, token in forced]
        generation = {"forced_decoder_ids": ids}
    path.write_text(json.dumps(told | generation))
    encoder = QuestionEncoder(folder)
    assert encoder.tokenizer.convert_ids_to_tokens(encoder.tokenizer.prefix_tokens) == start


def test_an_unknown_language_is_refused(tmp_path: Path) -> None:
    folder = make_whisper(tmp_path, language="elvish")
    with pytest.raises(ModelFolderError, match="elvish"):
        QuestionEncoder(folder)


def test_qwen3_asr_says_what_transformers_says(tmp_path: Path, sounds: Path) -> None:
    folder = make_qwen3_asr(tmp_path)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype="auto").eval()
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "audio"}]}], add_generation_prompt=True, tokenize=False
    )
    expected = []
    for name in SOUNDS:
        inputs = processor(text=text, audio=[samples(sounds / name)], return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        expected.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    found = [asked(folder, sounds / name)["token_ids"] for name in SOUNDS]
    assert found == expected
    assert found[0] != found[1]


@pytest.mark.parametrize("make", [make_whisper, make_qwen3_asr])
@pytest.mark.parametrize("metric", ["wer", "cer"])
def test_errors_of_transcripts_are_counted(tmp_path: Path, sounds: Path, make: Any, metric: str) -> None:
    folder = make(tmp_path / "model")
    words = ("--data", sounds / "rows.jsonl", "--out", tmp_path / "eval", "--max-new-tokens", TOKENS)
    said = mm("evaluate", folder, "--metric", metric, *words)
    assert said.code == 0, said.err
    results = json.loads((tmp_path / "eval/results.json").read_text())
    assert results["overall"]["units"] == 3 * (3 if metric == "wer" else len("one two three"))
    assert results["overall"]["errors"] > 0


@pytest.mark.parametrize(("media", "says"), [([], "has 0"), (["low.wav", "high.wav"], "has 2")])
def test_a_transcript_is_of_one_sound(tmp_path: Path, sounds: Path, media: list[str], says: str) -> None:
    folder = make_whisper(tmp_path / "model")
    words = [word for name in media for word in ("--audio", sounds / name)]
    said = mm("infer", folder, "--prompt", "What is said?", *words)
    assert said.code == 4
    assert says in said.err and "Traceback" not in said.err


def training_set(folder: Path, sounds: Path) -> Any:
    preprocess = {"model_name_or_path": str(folder)}
    basic = {"dataset": str(sounds / "rows.jsonl"), "dataset_dir": str(sounds)}
    param = {"basic_parameters": basic, "preprocess_parameters": preprocess}
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


@pytest.mark.edge("N1")
def test_training_shows_what_is_asked(tmp_path: Path, sounds: Path) -> None:
    folder = make_whisper(tmp_path, language="en")
    sample = training_set(folder, sounds)[0]
    first = int(np.flatnonzero(sample["labels"] != -100)[0])
    encoder = QuestionEncoder(folder)
    [question, *_] = read_questions(sounds / "rows.jsonl", needs_answers=True)
    asked = encoder.collate([encoder.encode(question.sample, encoder.media(sounds))])
    assert sample["input_ids"][:first].tolist() == asked["decoder_input_ids"][0].tolist()
    assert encoder.tokenizer.convert_ids_to_tokens(sample["input_ids"][:first]) == START
    assert torch.equal(sample["media"][0].tensors["input_features"], asked["input_features"])


def test_training_wants_a_language_where_generation_would_find_one(tmp_path: Path, sounds: Path) -> None:
    with pytest.raises(ModelFolderError, match="names no language"):
        training_set(make_whisper(tmp_path / "several"), sounds)
    training_set(make_whisper(tmp_path / "one", is_multilingual=False), sounds)
