"""CosyVoice3 speaks: tokens are those of the published loop, sound is what flow and vocoder make of them, and voices
come from recordings or from those that were saved."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()

from mindspeed_mm.core.errors import DataError, MMError, UsageError  # noqa: E402
from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3LM  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling  # noqa: E402
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError  # noqa: E402
from mindspeed_mm.fsdp.sampling.speech.cosyvoice3.voice import (  # noqa: E402  # noqa: E402
    CosyVoice3Voice,
    RepetitionAware,
    TokenSpeaker,
    passages,
    without_long_silence,
)
from mindspeed_mm.fsdp.sampling.speech.voice import SpeechJob, load_voice  # noqa: E402
from tests.helpers.tiny_cosyvoice3 import CODEC, FLOW, SPECIAL, VOCODER, make_tiny_cosyvoice3, sound_by_parts  # noqa: E402
from tests.helpers.tiny_processors import byte_tokenizer  # noqa: E402

TEXT = "seven one two"
PREFIX = "You are a helpful assistant.<|endofprompt|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_cosyvoice3(tmp_path_factory.mktemp("cosyvoice3") / "model")


@pytest.fixture(scope="module")
def voice(folder: Path) -> CosyVoice3Voice:
    found = load_voice(folder)
    assert isinstance(found, CosyVoice3Voice)
    return found


@pytest.fixture(scope="module")
def language_model(folder: Path) -> CosyVoice3LM:
    model = CosyVoice3LM.from_pretrained(folder).eval()
    with torch.no_grad():  # few ends, and tokens that differ in their probabilities
        model.llm_decoder.weight.mul_(40)
        model.llm_decoder.weight[CODEC:] *= 0.1
    return model


# --- tokens -----------------------------------------------------------------------------------------------------------


def by_hand(
    model: CosyVoice3LM, prompt: list[int], text: list[int], told: list[int], seed: int
) -> tuple[list[int], bool, int]:
    """After `inference` of CosyVoice3LM and `ras_sampling`, without a cache; also how often a token was drawn anew."""
    words, speech = model.llm.model.model.embed_tokens.weight, model.speech_embedding.weight
    rows = [speech[CODEC], *words[[*prompt, *text]], speech[CODEC + 2], *speech[told]]
    generator, said, redrawn = torch.Generator().manual_seed(seed), list[int](), 0
    for step in range(20 * len(text)):
        hidden = model.llm.model.model(inputs_embeds=torch.stack(rows)[None]).last_hidden_state[0, -1]
        scores = hidden @ model.llm_decoder.weight.T
        if step < 2 * len(text):
            scores[CODEC:] = -math.inf
        shares, order = scores.softmax(0).sort(descending=True, stable=True)
        kept, total = 0, 0.0
        while kept < 25 and total < 0.8:
            total += float(shares[kept])
            kept += 1
        token = int(order[shares[:kept].multinomial(1, replacement=True, generator=generator)])
        if said[-10:].count(token) >= 1:
            redrawn += 1
            scores[token] = -math.inf
            token = int(scores.softmax(0).multinomial(1, replacement=True, generator=generator))
        if token >= CODEC:
            return said, True, redrawn
        said.append(token)
        rows.append(speech[token])
    return said, False, redrawn


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_the_published_loop(language_model: CosyVoice3LM, seed: int) -> None:
    prompt, text, told = [5, 8, 9], [10, 11, 12], [3, 4, 5] if seed % 2 else []
    with torch.inference_mode():
        said, finished, redrawn = by_hand(language_model, prompt, text, told, seed)
    choice = RepetitionAware.of(Sampling(1000, seed=seed))
    assert TokenSpeaker(language_model).talk(prompt, text, told, choice, 1000) == (said, finished)
    assert redrawn > 0 and len(said) >= 2 * len(text)


def test_lengths_are_kept(language_model: CosyVoice3LM) -> None:
    """The shares of the text, the limit of the caller, and a caller who gives up."""
    model = CosyVoice3LM(language_model.config).eval()
    model.llm_decoder.weight.data.zero_()  # ends are as likely as any token
    answers = iter([False, False, True])

    def talk(most: int, **settings: Any) -> tuple[int, bool]:
        choice = RepetitionAware.of(Sampling(most, seed=0, top_p=1.0, top_k=0))
        said, finished = TokenSpeaker(model).talk([], [1, 2, 3], [], choice, most, **settings)
        return len(said), finished

    assert talk(4) == (4, False)
    assert talk(1000, is_given_up=lambda: next(answers)) == (2, False)
    assert talk(1000)[1] and 6 <= talk(1000)[0] <= 60


def test_zero_temperature_takes_the_likeliest() -> None:
    scores = torch.tensor([0.1, 3.0, 0.2])
    choice = RepetitionAware.of(Sampling(9, temperature=0.0))
    assert choice.choose(scores.clone(), [1, 1, 1]) == 1
    narrow = RepetitionAware.of(Sampling(9, top_k=1, seed=4))
    assert [narrow.choose(scores.clone(), []) for _ in range(5)] == [1] * 5
    assert narrow.choose(scores.clone(), [1]) != 1


def test_long_silence_is_cut() -> None:
    assert without_long_silence([3, 1, 2, 28, 29, 55, 1, 2, 3, 1]) == [3, 1, 2, 28, 29, 55, 3, 1]


def test_long_texts_are_said_in_parts() -> None:
    def length(text: str) -> int:
        return len(text.split())

    assert passages(" One. Two. ", length) == ["One. Two."]
    sentence = " ".join(["word"] * 30) + "."
    parts = passages(f"{sentence} At 3.5 or 10:30, {sentence} {sentence} {sentence} Short one.", length)
    assert [length(part) for part in parts] == [64, 62]
    assert parts[0].endswith("word.") and "3.5 or 10:30," in parts[0] and parts[1].endswith("Short one.")
    assert passages("word " * 200, length) == [("word " * 200).strip()]
    chinese = "今天天气很好。" * 20
    assert "".join(passages(chinese, len)) == chinese and len(passages(chinese, len)) == 2


# --- sound ------------------------------------------------------------------------------------------------------------


def test_saved_voices_speak(folder: Path, voice: CosyVoice3Voice) -> None:
    saved = torch.load(folder / "spk2info.pt", weights_only=True)
    vera, anna = saved["Vera"], saved["anna"]
    known = (vera["flow_embedding"][0], [3, 14, 15, 9, 2], vera["prompt_speech_feat"][0])
    alone = (anna["embedding"][0], [], torch.zeros(0, FLOW.mel_dim))
    cases = (
        ({}, (vera["prompt_text"][0].tolist(), known[1], known)),
        ({"name": "ANNA"}, (PREFIX, [], alone)),
        ({"instructions": PREFIX}, (vera["prompt_text"][0].tolist(), known[1], known)),
        ({"instructions": "Speak slowly.<|endofprompt|>"}, ("Speak slowly.<|endofprompt|>", [], known)),
        ({"instructions": "Whisper."}, (f"You are a helpful assistant. Whisper.{PREFIX[-15:]}", [], known)),
    )
    for job, expected in cases:
        said = voice.speak(SpeechJob(TEXT, Sampling(99, seed=7), **job))  # type: ignore[arg-type]
        assert said.sound.rate == 24_000 and said.name == job.get("name", "Vera").replace("ANNA", "anna")
        np.testing.assert_allclose(said.sound.samples[0], sound_by_parts(voice, TEXT, *expected), atol=1e-6)
    assert voice.names == {"vera": "Vera", "anna": "anna"} and voice.usual_name == "Vera"


def test_a_seed_says_it_again(voice: CosyVoice3Voice) -> None:
    one, again, other = (voice.speak(SpeechJob(TEXT, Sampling(99, seed=seed))).sound.samples for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert one.shape != other.shape or not np.array_equal(one, other)


def test_long_texts_are_one_sound(voice: CosyVoice3Voice) -> None:
    text = "one two three four five six. " * 16
    parts = passages(text.strip(), lambda part: len(voice._ids(part)))
    assert len(parts) > 1
    # What is said of the parts, all drawn from one stream, stands one behind the other.
    choice, samples = RepetitionAware.of(Sampling(5000, seed=1)), 0
    guide = voice._saved["Vera"]
    for part in parts:
        tokens, _ = voice._talker.talk(guide.prompt or (), voice._ids(part), guide.tokens, choice, 5000)
        samples += len(without_long_silence(tokens)) * FLOW.token_mel_ratio * VOCODER.samples_a_frame
    said = voice.speak(SpeechJob(text, Sampling(5000, seed=1)))
    assert said.sound.samples.shape == (1, samples)
    cut = voice.speak(SpeechJob(text, Sampling(7, seed=1)))
    assert not cut.finished and cut.sound.samples.shape[1] <= 7 * FLOW.token_mel_ratio * VOCODER.samples_a_frame


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_sentence_for_which_there_is_no_room(voice: CosyVoice3Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before the sentences ahead of it are said."""
    monkeypatch.setattr(voice._talker.model.config.llm_config, "max_position_embeddings", 200)
    monkeypatch.setattr(voice._talker, "talk", lambda *_: pytest.fail("speaks"))
    with pytest.raises(DataError, match="the model takes 200"):
        voice.speak(SpeechJob("Short one. " * 9 + "nine " * 200, Sampling(3, seed=0), "anna"))


def test_numbers_that_are_not_finite_are_refused(folder: Path) -> None:
    def spoilt(part: str, weight: str) -> CosyVoice3Voice:
        voice = CosyVoice3Voice(folder)
        with torch.no_grad():
            voice.parts[part].get_parameter(weight)[..., 0] = float("nan")
        return voice

    for part, weight, says in (
        ("", "llm_decoder.weight", "scores of speech token 1"),
        ("flow.pt: ", "decoder.estimator.proj_out.bias", "mel frames of the voice"),
        ("hift.pt: ", "conv_post.bias", "samples of the voice"),
    ):
        with pytest.raises(NotFiniteError, match=f"{says} are not finite numbers: the weight '{part}{weight}'"):
            spoilt(part, weight).speak(SpeechJob(TEXT, Sampling(9, seed=1)))


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            config[name] = config[name] | value if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def _saved(voice: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: torch.save({"Ben": voice}, folder / "spk2info.pt")


WRONG = {
    "no flow": (lambda folder: (folder / "flow.pt").unlink(), r"flow.pt.*does not exist(.|\n)*copy flow.pt"),
    "broken vocoder": (lambda folder: (folder / "hift.pt").write_bytes(b"x"), r"hift.pt.*is broken"),
    "parts exchanged": (lambda folder: shutil.copy(folder / "flow.pt", folder / "hift.pt"), r"hift.pt.*missing"),
    "other sizes": (_config(flow_config={"dim": 64}), r"flow.pt.*weights do not fit: size mismatch"),
    "unknown size": (_config(flow_config={"dims": 64}), r"flow_config.dims(.|\n)*Did you mean 'dim'"),
    "size of no number": (_config(hift_config={"n_fft": "x"}), r"hift_config.n_fft.*valid integer"),
    "size of nothing": (_config(flow_config={"heads": 0}), r"flow_config.heads.*0 is not above 0"),
    "sizes at odds": (_config(hift_config={"upsample_kernel_sizes": [8, 5]}), r"sizes of hift.pt do not fit"),
    "no voices": (lambda folder: torch.save(torch.ones(2), folder / "spk2info.pt"), r"spk2info.pt.*no voices by name"),
    "no section": (_config(flow_config=3), r"flow_config.*is not a section"),
    "other codec": (_config(speech_token_size=40, extra_speech_rows=18), "language model and of the flow differ: 40"),
    "vector too short": (_saved({"embedding": torch.ones(1, 5)}), r"Ben.*5 numbers, and the model takes 12"),
    "no vector": (_saved({"prompt_text": torch.ones(1, 5)}), r"Ben.*neither flow_embedding nor embedding"),
    "token too large": (
        _saved({"embedding": torch.ones(1, 12), "flow_prompt_speech_token": torch.tensor([[CODEC]])}),
        r"Ben.*not from 0 to 49",
    ),
    "mel too short": (
        _saved({"embedding": torch.ones(1, 12), "flow_prompt_speech_token": torch.tensor([[3]])}), r"Ben.*not fit 1"
    ),
    "vector of nothing": (_saved({"embedding": torch.full((1, 12), float("nan"))}), r"Ben.*NaN"),
    "other tokenizer": (
        lambda folder: byte_tokenizer({**SPECIAL, "prompt_end": "<|no|>"}, None).save_pretrained(folder),
        r"no token '<\|endofprompt\|>'(.|\n)*mm convert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folders_are_told(folder: Path, tmp_path: Path, case: str) -> None:
    spoil, says = WRONG[case]
    copy = shutil.copytree(folder, tmp_path / "model")
    spoil(copy)  # type: ignore[operator]
    with pytest.raises(MMError, match=says):
        CosyVoice3Voice(copy)


def test_a_folder_without_voices_asks_for_a_recording(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "spk2info.pt").unlink()
    with pytest.raises(UsageError, match=r"no voice of its own(.|\n)*--audio recording.wav"):
        CosyVoice3Voice(copy).speak(SpeechJob(TEXT, Sampling(9)))
