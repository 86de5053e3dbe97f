"""`mm infer --speak`: words as without, and the sound that transformers' own `generate` makes of them."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mindspeed_mm.cli.infer import command
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.tasks.answer import infer, speech
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_omni_talker import write_omni, write_spoken_rows

import transformers  # isort: skip  (after the guard of the lines above)

TOKENS = 5
PROMPT = "Which digit?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a speech decoder that is not so loud that all of its samples are cut off at -1 and 1."""
    folder = write_omni(tmp_path_factory.mktemp("omni") / "model")
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.code2wav.decoder[-1].parameters():
            parameter.mul_(0.02)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = write_spoken_rows(tmp_path_factory.mktemp("rows"), ("audio",), 2)
    return rows.parent / json.loads(rows.read_text().splitlines()[0])["audios"][0]


def by_transformers(folder: Path, sound: Path, seed: int, speaker: str) -> tuple[list[int], np.ndarray]:
    """Greedy words and their sound, by the library alone."""
    from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
    from mindspeed_mm.fsdp.sampling.answers.questions import ask

    encoder = QuestionEncoder(folder)
    question = encoder.encode(ask(PROMPT, [MediaItem("audio", str(sound))]).sample, encoder.media(sound.parent))
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder).eval()
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    inputs = encoder.collate([question])
    torch.manual_seed(seed)
    ids, waves = model.generate(
        **inputs, speaker=speaker, return_audio=True, thinker_do_sample=False, thinker_max_new_tokens=TOKENS,
        thinker_eos_token_id=encoder.end_ids,
    )  # fmt: skip
    return ids[0, inputs["input_ids"].shape[1] :].tolist(), waves.reshape(-1).detach().numpy()


def heard(path: Path) -> tuple[int, np.ndarray]:
    with wave.open(str(path)) as file:
        return file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")


@pytest.fixture(scope="module")
def said(folder: Path, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], np.ndarray]:
    """What the command says of an answer in a voice, and its sound."""
    out = tmp_path_factory.mktemp("said") / "said.wav"
    words = [str(folder), "--audio", str(sound), "--prompt", PROMPT, "--max-new-tokens", str(TOKENS)]
    words += ["--temperature", "0", "--seed", "3", "--speaker", "CHELSIE", "--speak", str(out), "--json"]
    told: dict[str, Any] = json.loads(CliRunner().invoke(command, words, catch_exceptions=False).stdout)
    rate, found = heard(out)
    assert told["file"] == str(out) and told["speaker"] == "chelsie" and rate == 24_000
    assert told["seconds"] == pytest.approx(len(found) / 24_000) and told["seconds"] > 0
    return told, found


def asked_of(folder: Path, sound: Path, **options: Any) -> InferRequest:
    """The prompt about a sound, answered by the likeliest tokens."""
    return InferRequest(folder, prompts=(PROMPT,), audios=(sound,), max_new_tokens=TOKENS, temperature=0, **options)


def test_words_and_voice_are_those_of_transformers(
    folder: Path, sound: Path, said: tuple[dict[str, Any], np.ndarray]
) -> None:
    unspoken = infer.answer_prompt(asked_of(folder, sound, seed=3))
    ids, samples = by_transformers(folder, sound, 3, "chelsie")
    told, found = said
    assert told["text"] == unspoken.text and list(unspoken.token_ids) == ids
    assert len(found) == len(samples) > 10 and len(set(found.tolist())) > 3
    np.testing.assert_allclose(found, samples.clip(-1, 1) * 32767, atol=1.5)


def test_voice_and_seed_reach_the_model(
    folder: Path,
    sound: Path,
    said: tuple[dict[str, Any], np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The small model speaks alike with every voice."""
    kind = transformers.Qwen3OmniMoeForConditionalGeneration
    asked, generate = [], kind.generate

    def noted(model: Any, *words: Any, **options: Any) -> Any:
        asked.append(options["speaker"])
        return generate(model, *words, **options)

    monkeypatch.setattr(kind, "generate", noted)
    other = speech.run(asked_of(folder, sound, seed=4, speak=tmp_path / "said.wav", speaker="ethan"))
    assert asked == ["ethan"]
    assert other.answer is not None and other.answer.text == said[0]["text"]
    assert heard(tmp_path / "said.wav")[1].tolist() != said[1].tolist()


def test_what_cannot_be_spoken(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"answers in words, and does not speak(?s:.)*Leave out --speak"):
        speech.run(InferRequest(make_tiny_qwen3(tmp_path / "text"), prompts=("hi",), speak=tmp_path / "a.wav"))
    with pytest.raises(UsageError, match=r"there is no voice 'nobody'(?s:.)*Choose one of"):
        speech.run(InferRequest(folder, prompts=("hi",), speak=tmp_path / "a.wav", speaker="nobody"))
    for words in (
        ["--data", "rows.jsonl", "--out", "a.jsonl", "--speak", "a.wav"],
        ["--prompt", "hi", "--speaker", "ethan"],
        ["--prompt", "hi", "--speak", "a.wav", "--hide-thoughts"],
        ["--prompt", "hi", "--speak", "a.wav", "--stop", "."],
        ["--prompt", "hi", "--speak", "a.wav", "--lora", "adapters"],
    ):
        found = CliRunner().invoke(command, [str(folder), *words])
        assert isinstance(found.exception, UsageError), (words, found.output)
    assert not (tmp_path / "a.wav").exists()
