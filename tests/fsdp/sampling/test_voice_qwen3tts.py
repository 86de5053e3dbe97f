"""Qwen3-TTS speaks: codes as a loop by hand chooses them, on transformers' blocks alone, and sound as its codec makes
it of them; what it cannot say is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from mindspeed_mm.cli.infer import command
from mindspeed_mm.core.errors import DataError, MMError, ModelFolderError, UsageError
from mindspeed_mm.fsdp.data.datasets.qwen3tts.qwen3tts_dataset import speaker_mel
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, Voice, load_voice
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.helpers.tiny_speech import CODES, MARKS
from tests.helpers.tiny_speech_codec import FRAME_SAMPLES, NAMED, VOICE, write_speaker

import transformers  # isort: skip  (after the guard of the lines above)
from mindspeed_mm.fsdp.sampling.speech import qwen3tts  # isort: skip  (likewise)

FRAMES = 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("base") / "model", talker_config={"spk_id": None})


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("named") / "model", **NAMED)


@pytest.fixture(scope="module")
def voices(base: Path, named: Path) -> dict[str, Any]:
    return {"base": load_voice(base), "named": load_voice(named)}


class Noted:
    """What the talker said last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = qwen3tts.talk

        def noting(*words: Any) -> Any:
            self.codes, finished = plain(*words)
            return self.codes, finished

        monkeypatch.setattr(qwen3tts, "talk", noting)


# --- by hand ----------------------------------------------------------------------------------------------------------


def places_of(voice: Any, job: SpeechJob, heard: list[list[int]]) -> list[tuple[int, list[int]]]:
    """The prompt, place by place: a word, and codes; -2 where a voice that was heard stands."""
    tokenizer = voice._tokenizer
    pad, begin, end = (tokenizer.convert_tokens_to_ids(f"<|{each}|>") for each in ("endoftext", "im_start", "im_end"))

    def words(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    told = words(job.text)
    if job.reference is not None and job.reference.words:
        told = words(job.reference.words) + told
    places: list[tuple[int, list[int]]] = []
    if job.instructions:
        places += [(word, []) for word in words(f"<|im_start|>user\n{job.instructions}<|im_end|>\n")]
    places += [(word, []) for word in words("<|im_start|>assistant\n")]
    if job.name == "uncle":
        head = [MARKS["codec_think_id"], MARKS["codec_think_bos_id"], 59, MARKS["codec_think_eos_id"], 71]
    else:
        head = [MARKS["codec_nothink_id"], MARKS["codec_think_bos_id"], MARKS["codec_think_eos_id"]]
        head += [-2] if job.reference is not None else [70] if job.name == "vera" else []
    places += [(pad, [code]) for code in head]
    silent = MARKS["codec_pad_id"]
    places += [(begin, [silent]), *((word, [silent]) for word in told), (end, [silent]), (pad, [MARKS["codec_bos_id"]])]
    return places + [(pad, frame) for frame in heard]


def blocks(model: Any, config: Any) -> Any:
    """transformers' own blocks with these weights."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("layers.", "norm."))}
    settings = transformers.Qwen3Config(**{**config.to_dict(), "vocab_size": 8})
    made = transformers.Qwen3Model._from_config(settings, attn_implementation="eager").eval()
    assert not made.load_state_dict(own, strict=False).unexpected_keys
    return made


def drawn(scores: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """By published defaults: of the 50 likeliest."""
    if not temperature:
        return int(scores.argmax())
    scores = scores / temperature
    scores = scores.masked_fill(scores < scores.topk(min(50, len(scores))).values[-1], -torch.inf)
    return int(torch.multinomial(scores.softmax(0), 1, generator=generator))


@torch.no_grad()
def by_hand(voice: Any, job: SpeechJob, heard: list[list[int]]) -> list[list[int]]:
    """Codes, frame by frame: everything is read anew for each."""
    model = voice.model
    w, t, p = dict(model.state_dict()), "talker.", "talker.code_predictor."
    config = model.config.talker_config
    talker, predictor = (
        blocks(model.talker.model, config),
        blocks(model.talker.code_predictor.model, config.code_predictor_config),
    )
    temperature = 0.9 if job.sampling.temperature is None else job.sampling.temperature
    generator = torch.Generator().manual_seed(job.sampling.seed or 0)

    def at(word: int, codes: list[int]) -> torch.Tensor:
        inner = F.silu(F.linear(w[f"{t}model.text_embedding.weight"][word], w[f"{t}text_projection.linear_fc1.weight"],
                                w[f"{t}text_projection.linear_fc1.bias"]))  # fmt: skip
        here = F.linear(inner, w[f"{t}text_projection.linear_fc2.weight"], w[f"{t}text_projection.linear_fc2.bias"])
        for number, code in enumerate(codes):
            if code == -2:
                assert job.reference is not None
                mel = torch.from_numpy(speaker_mel(job.reference.at(24000), 16))
                here = here + model.speaker_encoder(mel[None])[0]
            else:
                table = f"{t}model.codec_embedding" if not number else f"{p}model.codec_embedding.{number - 1}"
                here = here + w[f"{table}.weight"][code]
        return here

    read, told = [at(*place) for place in places_of(voice, job, heard)], []
    while len(told) < job.sampling.max_new_tokens:
        hidden = talker(inputs_embeds=torch.stack(read)[None]).last_hidden_state[0, -1]
        scores = w[f"{t}codec_head.weight"] @ hidden
        if temperature or job.sampling.repetition_penalty:
            for code in {frame[0] for frame in told}:
                scores[code] = scores[code] / 1.05 if scores[code] > 0 else scores[code] * 1.05
        for mark in range(CODES, len(scores)):
            if mark != MARKS["codec_eos_token_id"] or len(told) < 2:
                scores[mark] = -torch.inf
        frame = [drawn(scores, temperature, generator)]
        if frame[0] == MARKS["codec_eos_token_id"]:
            break
        below = [hidden, w[f"{t}model.codec_embedding.weight"][frame[0]]]
        for number in range(config.num_code_groups - 1):
            given = F.linear(
                torch.stack(below), w[f"{p}small_to_mtp_projection.weight"], w[f"{p}small_to_mtp_projection.bias"]
            )
            made = predictor(inputs_embeds=given[None]).last_hidden_state[0, -1]
            frame.append(drawn(w[f"{p}lm_head.{number}.weight"] @ made, temperature, generator))
            below.append(w[f"{p}model.codec_embedding.{number}.weight"][frame[-1]])
        told.append(frame)
        read.append(at(model.config.tts_pad_token_id, frame))
    return told


JOBS = {
    "nobody": ("base", SpeechJob("seven one", Sampling(FRAMES))),
    "a voice by its name": ("named", SpeechJob("two six", Sampling(FRAMES), "VERA")),
    "a dialect": ("named", SpeechJob("two six", Sampling(FRAMES), "uncle")),
    "instructions": ("named", SpeechJob("nine", Sampling(FRAMES), "vera", instructions="very slow")),
    "a voice that was heard": ("base", SpeechJob("seven", Sampling(FRAMES), reference=Reference(VOICE, "v.wav"))),
    "its words, too": ("base", SpeechJob("seven", Sampling(FRAMES), reference=Reference(VOICE, "v.wav", "one two"))),
}


@pytest.mark.parametrize("temperature", [0.0, None], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("name", JOBS)
def test_codes_are_those_by_hand(
    voices: dict[str, Any], name: str, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, job = JOBS[name]
    voice, noted = voices[kind], Noted(monkeypatch)
    penalty = 1.05 if temperature == 0 else None
    job = replace(job, sampling=Sampling(FRAMES, temperature=temperature, seed=5, repetition_penalty=penalty))
    said = voice.speak(job)
    heard = voice._codes_of(job.reference).tolist()
    assert bool(heard) == (name == "its words, too")
    checked = voice.checked(job)
    assert checked.name == (None if kind == "base" else "uncle" if name == "a dialect" else "vera")
    expected = by_hand(voice, checked, heard)
    assert noted.codes.tolist() == expected and len(expected) > 1
    whole = torch.tensor(heard + expected).T[None]
    with torch.inference_mode():
        sound = voice._codec.decoder.decode(whole)[0, len(heard) * FRAME_SAMPLES :].numpy()
    np.testing.assert_array_equal(said.sound.samples[0], sound)
    assert said.sound.rate == 24000 and said.finished == (len(expected) < FRAMES)


def test_seeds_and_voices_tell_speech_apart(voices: dict[str, Voice]) -> None:
    def said(seed: int = 1, **changes: Any) -> list[float]:
        job = SpeechJob("nine", Sampling(4, seed=seed), **changes)
        return voices["named"].speak(job).sound.samples.tolist()  # type: ignore[no-any-return]

    first = said()
    assert said() == first == said(name="Uncle")
    assert first != said(seed=2) and first != said(name="vera") and first != said(instructions="slow")


def test_special_tokens_that_people_write_are_text(voices: dict[str, Any]) -> None:
    ids = voices["base"]._words("nine<|im_end|>")
    assert voices["base"]._tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    assert voices["base"]._tokenizer.decode(ids) == "nine<|im_end|>"
    assert voices["base"]._words(" nine\n") == voices["base"]._tokenizer("nine")["input_ids"]


def test_speech_ends_when_nobody_waits(voices: dict[str, Voice]) -> None:
    asked: list[int] = []

    def is_given_up() -> bool:
        asked.append(1)
        return len(asked) > 3

    said = voices["base"].speak(SpeechJob("nine", Sampling(50, seed=0), is_given_up=is_given_up))
    assert said.sound.samples.shape[1] <= 3 * FRAME_SAMPLES and not said.finished


def test_settings_of_the_folder_are_the_usual_ones(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"temperature": 0.5, "do_sample": True, "subtalker_dosample": False, "max_new_tokens": 9, "top_k": 3}
    (named / "generation_config.json").write_text(json.dumps(settings))
    try:
        voice: Any = load_voice(named)
    finally:
        (named / "generation_config.json").unlink()
    choices: list[Any] = []
    monkeypatch.setattr(
        qwen3tts, "talk", lambda _model, _prompt, choice: (choices.append(choice), (torch.zeros(0, 4).long(), True))[1]
    )
    voice.speak(SpeechJob("nine", Sampling(9, seed=1)))
    (choice,) = choices
    assert voice.usual_tokens == 9
    assert (choice.first.temperature, choice.first.top_k, choice.first.repetition_penalty) == (0.5, 3, 1.05)
    assert choice.others.temperature == 0 and choice.others.repetition_penalty == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_said(voices: dict[str, Voice]) -> None:
    short = Reference(sound_bytes(tone(0.05, 24000), 24000), "short.wav")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("named", {"name": "nobody"}, r"no voice 'nobody'(?s:.)*uncle, vera"),
        ("base", {"name": "vera"}, r"no voice 'vera'(?s:.)*a recording of a voice"),
        ("named", {"reference": Reference(VOICE, "v.wav")}, r"does not copy voices(?s:.)*vera"),
        ("base", {"instructions": "slow"}, "takes no instructions"),
        ("base", {"reference": short}, "too short to be a voice"),
        ("base", {"text": " \n"}, "nothing to say"),
        ("base", {"reference": Reference(b"no sound", "x.wav")}, "x.wav"),
    ]
    for kind, fields, says in cases:
        job = SpeechJob(**{"text": "nine", "sampling": Sampling(3, seed=0), **fields})
        with pytest.raises(MMError, match=says):
            voices[kind].speak(job)


def test_a_text_for_which_there_is_no_room(voices: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices["base"].model.config.talker_config, "max_position_embeddings", 40)
    with pytest.raises(DataError, match="the model takes 40"):
        voices["base"].speak(SpeechJob("nine " * 40, Sampling(3, seed=0)))


@pytest.mark.parametrize("part", ["talker.codec_head.weight", "talker.code_predictor.lm_head.1.weight", "decoder"])
def test_numbers_that_are_not_finite_are_no_speech(voices: dict[str, Any], part: str) -> None:
    voice = voices["base"]
    codec = part == "decoder"
    owner = voice._codec.decoder if codec else voice.model
    weight = dict(owner.named_parameters())["decoder.0.conv.weight" if codec else part]
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0] = float("nan")
        named = "speech_tokenizer.decoder.decoder.0.conv.weight" if codec else part
        with pytest.raises(NotFiniteError, match=rf"not finite numbers(?s:.)*{named}"):
            voice.speak(SpeechJob("nine", Sampling(3, seed=0)))
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_a_codec_of_another_talker(base: Path) -> None:
    path = base / "config.json"
    text = path.read_text()
    config = json.loads(text)
    try:
        config["talker_config"]["num_code_groups"] = 5
        config["talker_config"]["code_predictor_config"]["num_code_groups"] = 5
        path.write_text(json.dumps(config))
        with pytest.raises(ModelFolderError):
            load_voice(base)
    finally:
        path.write_text(text)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_what_the_voice_says(base: Path, voices: dict[str, Voice], tmp_path: Path) -> None:
    import soundfile

    (tmp_path / "voice.wav").write_bytes(VOICE)
    words = [
        str(base),
        "--prompt",
        "seven",
        "--speak",
        str(tmp_path / "said.wav"),
        "--audio",
        str(tmp_path / "voice.wav"),
    ]
    words += ["--audio-text", "one two", "--max-new-tokens", "5", "--seed", "3", "--json"]
    told = json.loads(CliRunner().invoke(command, words, catch_exceptions=False).stdout)
    job = SpeechJob("seven", Sampling(5, seed=3), reference=Reference(VOICE, "v", "one two"))
    expected = voices["base"].speak(job)
    samples, rate = soundfile.read(tmp_path / "said.wav", dtype="int16")
    assert rate == 24000 and told["seconds"] == pytest.approx(len(samples) / rate) and told["speaker"] is None
    np.testing.assert_array_equal(samples, np.round(expected.sound.samples[0].clip(-1, 1) * 32767).astype(np.int16))
    for more, says in (
        (["--image", "voice.wav"], "no such file"),
        (["--image", str(tmp_path / "voice.wav")], "one recording of a voice, and nothing else"),
        (["--beams", "2"], "not searched by beams"),
        (["--lora", str(base)], "adapters that are not merged"),
    ):
        found = CliRunner().invoke(command, [*words, *more])
        assert isinstance(found.exception, MMError) and says in str(found.exception), (more, found.exception)
    alone = CliRunner().invoke(command, [str(base), "--prompt", "x", "--audio-text", "y", "--speak", "a.wav"])
    assert isinstance(alone.exception, UsageError) and "no recording" in str(alone.exception)
