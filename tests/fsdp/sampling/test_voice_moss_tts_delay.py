"""MOSS-TTS speaks: codes as a loop by hand chooses them, which reads everything anew at each place, and sound as its
codec makes it of them, in fp64 by hand, too; what it cannot say is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.hf_folder import copy_assets
from mindspeed_mm.cli import mm_convert
from mindspeed_mm.core.errors import MMError, ModelFolderError
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, load_voice
from tests.helpers.runs import mm
from tests.helpers.tiny_moss_codec import CODEC, FRAME_SAMPLES, RATE, codec_shapes, write_moss_codec, write_moss_speaker
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.helpers.tiny_speech import MOSS_CODEBOOKS, MOSS_CODES, MOSS_MARKS

import transformers  # isort: skip  (after the guard of the lines above)
from mindspeed_mm.fsdp.models.moss_tts_delay.audio_codec import (  # isort: skip  (likewise)
    even_loudness,
    load_codec,
)
from mindspeed_mm.fsdp.sampling.speech import moss_tts_delay  # isort: skip  (likewise)

PLACES = 30
HEARD = sound_bytes(tone(0.11, RATE, 300.0), RATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moss_speaker(tmp_path_factory.mktemp("moss"))


@pytest.fixture(scope="module")
def voice(folder: Path) -> Any:
    return load_voice(folder)


# --- codes ------------------------------------------------------------------------------------------------------------


def drawn(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """By the published filters: divided, the likeliest `top_k`, and of these as many as have `top_p` together."""
    if not temperature:
        return int(scores.argmax())
    scores = scores / temperature
    scores = scores.masked_fill(scores < scores.topk(min(top_k, len(scores))).values[-1], -torch.inf)
    shares, order = scores.softmax(0).sort(descending=True)
    before = shares.cumsum(0) - shares
    scores = scores.index_fill(0, order[before >= top_p], -torch.inf) if top_p < 1 else scores
    return int(torch.multinomial(scores.softmax(0), 1, generator=generator))


@torch.no_grad()
def by_hand(voice: Any, prompt: Any, temperature: float | None, places: int, seed: int) -> tuple[list[Any], bool]:
    """Codes of each sound, and whether the answer has ended."""
    model, config, books = voice.model, voice.model.config, range(MOSS_CODEBOOKS)
    w = dict(model.state_dict())
    settings = transformers.Qwen3Config(**config.language_config.to_dict() | {"vocab_size": 8})
    blocks = transformers.Qwen3Model._from_config(settings, attn_implementation="eager").eval()
    own = {name.removeprefix("language_model."): t for name, t in w.items() if name.startswith("language_model.")}
    own.pop("embed_tokens.weight")
    blocks.load_state_dict(own, strict=False)
    mark = {key.removesuffix("_token_id"): getattr(config, key) for key in MOSS_MARKS}
    start, end, stop = mark["audio_start"], mark["audio_end"], mark["im_end"]
    slot, delay = mark["audio_assistant_gen_slot"], mark["audio_assistant_delay_slot"]
    generator = torch.Generator().manual_seed(seed)
    rows = [(int(t), c) for t, c in zip(prompt.input_ids, prompt.codec_ids.tolist(), strict=True)]
    first, in_sound, since, ended = len(rows), False, 0, None
    while len(rows) - first < places:
        read = []
        for text, codes in rows:
            here = w["language_model.embed_tokens.weight"][text]
            for book, code in enumerate(codes):
                here = here + w[f"emb_ext.{book}.weight"][code if code >= 0 else MOSS_CODES]
            read.append(here)
        hidden = blocks(inputs_embeds=torch.stack(read)[None]).last_hidden_state[0, -1]
        scores = w["lm_heads.0.weight"] @ hidden
        if in_sound:
            allowed = torch.full_like(scores, -torch.inf)
            allowed[[slot, delay]] = scores[[slot, delay]]
            scores = allowed
        else:
            scores[[config.pad_token_id, slot, delay, end]] = -torch.inf
        if len(rows) - first <= MOSS_CODEBOOKS:
            scores[stop] = -torch.inf
        if ended is None:
            text = drawn(scores, 1.5 if temperature is None else temperature, 50, 1.0, generator)
        else:
            text = delay if ended < MOSS_CODEBOOKS else end
        codes = [-1] * MOSS_CODEBOOKS
        for book in books:
            if book < since and (ended is None or book >= ended):
                logits = (w[f"lm_heads.{book + 1}.weight"] @ hidden)[:MOSS_CODES]
                codes[book] = drawn(logits, 1.7 if temperature is None else temperature, 25, 0.8, generator)
        rows.append((text, codes))
        if text == stop:
            break
        in_sound = (in_sound or text == start) and text != end
        since = 0 if text == end else since + (text in (start, slot, delay))
        if text == end:
            ended = None
        elif text == delay or ended is not None:
            ended = (ended or 0) + 1
    sounds: list[Any] = []
    for text, codes in rows[first:]:
        if text == start:
            sounds.append([])
        elif text in (slot, delay):
            sounds[-1].append(codes)
    frames = [[[s[n + b][b] for b in books] for n in range(len(s) - MOSS_CODEBOOKS + 1)] for s in sounds]
    return [sound for sound in frames if sound], rows[-1][0] == stop


@pytest.mark.parametrize("temperature", [0.0, None], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("kind", ["plain", "instructed", "heard"])
def test_codes_are_those_by_hand(
    voice: Any, kind: str, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []
    speak = moss_tts_delay.speak_delayed

    def noting(*words: Any) -> Any:
        noted.append((words[1], speak(*words)))
        return noted[-1][1]

    monkeypatch.setattr(moss_tts_delay, "speak_delayed", noting)
    fields: dict[str, Any] = {"instructed": {"instructions": "slowly"}, "heard": {"reference": Reference(HEARD, "v")}}
    job = SpeechJob("mind the gap", Sampling(PLACES, temperature=temperature, seed=5), **fields.get(kind, {}))
    said = voice.speak(job)
    ((prompt, (sounds, finished)),) = noted
    expected, is_whole = by_hand(voice, prompt, temperature, PLACES, 5)
    assert [sound.tolist() for sound in sounds] == expected and finished == said.finished == is_whole
    assert max(len(sound) for sound in expected) > 1
    with torch.inference_mode():
        sound = torch.cat([voice._codec.decode(torch.tensor(codes)) for codes in expected]).numpy()
    np.testing.assert_array_equal(said.sound.samples[0], sound)
    assert said.sound.rate == RATE and len(sound) == FRAME_SAMPLES * sum(map(len, expected))


def test_a_prompt_has_the_codes_of_the_voice_and_the_instructions(voice: Any) -> None:
    heard = voice._codes_of(Reference(HEARD, "v.wav"))
    samples = even_loudness(torch.from_numpy(Reference(HEARD, "v.wav").at(RATE)))
    assert heard.tolist() == voice._codec.encode(samples).tolist() and len(heard) == int(0.11 * RATE) // FRAME_SAMPLES
    prompt = voice._writer.question({"text": "a<|im_end|>", "instruction": "slowly"}, [heard], "here")
    assert (prompt.codec_ids >= 0).sum() == heard.size
    ends = (prompt.input_ids == voice.model.config.im_end_token_id).sum()
    assert ends == 1  # that of the user's turn: what people write is text
    loudness = 10 * math.log10(float(even_loudness(0.2 * samples).square().mean()))
    assert loudness == pytest.approx(10 * math.log10(float((0.2 * samples).square().mean())) + 3, abs=1e-3)


def test_seeds_tell_speech_apart_and_nobody_need_wait(voice: Any) -> None:
    def said(seed: int, **changes: Any) -> list[float]:
        return voice.speak(SpeechJob("nine", Sampling(20, seed=seed), **changes)).sound.samples.tolist()  # type: ignore[no-any-return]

    assert said(1) == said(1) != said(2)
    asked: list[int] = []
    voice.speak(SpeechJob("nine", Sampling(20, seed=1), is_given_up=lambda: bool(asked.append(1)) or len(asked) > 3))
    assert len(asked) == 4


# --- the codec --------------------------------------------------------------------------------------------------------


def layers_by_hand(w: dict[str, torch.Tensor], name: str, part: dict[str, Any], x: torch.Tensor, window: int) -> Any:
    """(L, D) frames through a transformer, query after query."""
    width, heads = part["d_model"], part["num_heads"]
    each = width // heads
    if f"{name}.input_proj.weight" in w:
        x = x @ w[f"{name}.input_proj.weight"].T
    for layer in range(part["num_layers"]):
        own = f"{name}.transformer.layers.{layer}"
        normed = F.layer_norm(x, (width,), w[f"{own}.norm1.weight"], w[f"{own}.norm1.bias"])
        q, k, v = (normed @ w[f"{own}.self_attn.in_projs.0.weight"].T).split(width, dim=1)

        def turned(rows: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(rows.reshape(len(rows), heads, each // 2, 2).contiguous())
            rates = 10000.0 ** (-2 * torch.arange(each // 2).double() / each)
            angles = torch.arange(len(rows)).double()[:, None, None] * rates
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)

        q, k, v = turned(q), turned(k), v.reshape(len(v), heads, each)
        mixed = torch.zeros(len(x), heads, each, dtype=torch.float64)
        for place in range(len(x)):
            seen = slice(max(0, place - window + 1), place + 1)
            shares = (torch.einsum("hd,lhd->hl", q[place], k[seen]) / math.sqrt(each)).softmax(1)
            mixed[place] = torch.einsum("hl,lhd->hd", shares, v[seen])
        x = x + w[f"{own}.layer_scale_1.scale"] * (mixed.flatten(1) @ w[f"{own}.self_attn.out_projs.0.weight"].T)
        inner = F.layer_norm(x, (width,), w[f"{own}.norm2.weight"], w[f"{own}.norm2.bias"])
        inner = inner @ w[f"{own}.linear1.weight"].T
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + w[f"{own}.layer_scale_2.scale"] * (inner @ w[f"{own}.linear2.weight"].T)
    return x @ w[f"{name}.output_proj.weight"].T if f"{name}.output_proj.weight" in w else x


def projected(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    length, direction = (w[f"{name}.parametrizations.weight.original{n}"][:, :, 0] for n in (0, 1))
    return x @ (length * direction / direction.norm(dim=1, keepdim=True)).T + w[f"{name}.bias"]


def test_codes_and_sound_of_the_codec_are_those_by_hand(tmp_path: Path) -> None:
    path = write_moss_codec(tmp_path / "codec")
    codec = load_codec(path).double()
    w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
    assert {name: tuple(tensor.shape) for name, tensor in codec.state_dict().items()} == codec_shapes()
    samples = torch.randn(35 * FRAME_SAMPLES + 5, generator=torch.Generator().manual_seed(3)).double()
    x = samples[: 35 * FRAME_SAMPLES, None]
    rate = float(RATE)
    for number, part in enumerate(CODEC["encoder_kwargs"]):
        if part["module_type"] == "PatchedPretransform":
            count = part["patch_size"]
            # Of each width, its neighbours lie side by side.
            x = x.reshape(len(x) // count, count, x.shape[1]).transpose(1, 2).flatten(1)
            rate /= count
        else:
            x = layers_by_hand(w, f"encoder.{number}", part, x, int(rate * 0.05))
    left, codes = projected(w, "quantizer.input_proj", x), []
    for book in range(MOSS_CODEBOOKS):
        name = f"quantizer.quantizers.{book}"
        told, table = projected(w, f"{name}.in_proj", left), w[f"{name}.codebook.weight"]
        apart = (told / told.norm(dim=1, keepdim=True))[:, None] - (table / table.norm(dim=1, keepdim=True))[None]
        codes.append(apart.square().sum(-1).argmin(1))
        left = left - projected(w, f"{name}.out_proj", table[codes[-1]])
    expected = torch.stack(codes, dim=1)
    assert torch.equal(codec.encode(samples), expected) and len(expected) == 35
    y = sum(
        projected(w, f"quantizer.quantizers.{b}.out_proj", w[f"quantizer.quantizers.{b}.codebook.weight"][codes[b]])
        for b in range(MOSS_CODEBOOKS)
    )
    y = projected(w, "quantizer.output_proj", y)  # type: ignore[arg-type]
    for number, part in enumerate(CODEC["decoder_kwargs"]):
        if part["module_type"] == "PatchedPretransform":
            count = part["patch_size"]
            y = y.reshape(len(y), y.shape[1] // count, count).transpose(1, 2).flatten(0, 1)
            rate *= count
        else:
            y = layers_by_hand(w, f"decoder.{number}", part, y, int(rate * 0.05))
    torch.testing.assert_close(codec.decode(expected), y.flatten(), rtol=1e-9, atol=1e-9)
    assert len(codec.encode(samples[: FRAME_SAMPLES - 1])) == 0 and len(codec.decode(expected[:0])) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantizer_kwargs": CODEC["quantizer_kwargs"] | {"quantizer_type": "rvq"}}, "built is 'rlfq'"),
        ({"encoder_kwargs": [CODEC["encoder_kwargs"][1] | {"gating": "silu"}]}, "gating is 'silu'"),
        ({"decoder_kwargs": None}, "has no decoder_kwargs"),
        ({"decoder_kwargs": CODEC["decoder_kwargs"][:2]}, "decodes 400"),
        ({"quantizer_kwargs": CODEC["quantizer_kwargs"] | {"codebook_size": 41}}, "weights do not fit"),
    ],
)
def test_a_codec_that_is_not_built_is_told(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write_moss_codec(tmp_path / "codec")
    (path / "config.json").write_text(json.dumps(CODEC | change))
    with pytest.raises(ModelFolderError, match=says):
        load_codec(path)


# --- what is refused, and the commands --------------------------------------------------------------------------------


def test_what_cannot_be_said(voice: Any, folder: Path, tmp_path: Path) -> None:
    for fields, says in (({"text": " "}, "nothing to say"), ({"name": "vera"}, "no voice 'vera'")):
        with pytest.raises(MMError, match=says):
            voice.speak(SpeechJob(**{"text": "nine", "sampling": Sampling(3, seed=0), **fields}))
    shutil.copytree(folder, tmp_path / "alone")
    with pytest.raises(ModelFolderError, match="no codec that makes sound"):
        load_voice(tmp_path / "alone")
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config | {"n_vq": MOSS_CODEBOOKS + 1}))
    write_moss_codec(tmp_path / "alone" / "MOSS-Audio-Tokenizer")
    with pytest.raises(ModelFolderError, match="the codec has 3 codebooks of 40 codes, the model 4"):
        load_voice(tmp_path / "alone")


@pytest.mark.parametrize("part", ["lm_heads.0.weight", "lm_heads.2.weight"])
def test_numbers_that_are_not_finite_are_no_speech(voice: Any, part: str) -> None:
    weight = voice.model.get_parameter(part)
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0] = float("nan")
        with pytest.raises(NotFiniteError, match=rf"not finite numbers(?s:.)*{part}"):
            voice.speak(SpeechJob("nine", Sampling(3, seed=0)))
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_the_command_writes_what_it_said(folder: Path, tmp_path: Path) -> None:
    words = [
        "--prompt",
        "mind the gap",
        "--speak",
        tmp_path / "gap.wav",
        "--temperature",
        "0",
        "--max-new-tokens",
        "30",
    ]
    said = mm("infer", folder, *words)
    assert said.code == 0, said.err
    samples, rate = soundfile.read(tmp_path / "gap.wav")
    assert rate == RATE and len(samples) % FRAME_SAMPLES == 0 and len(samples)


def test_its_converter_takes_a_folder_with_its_codec_there_and_back(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    folder = tmp_path / "model"
    shutil.copytree(write_moss_codec(tmp_path / "codec"), folder / "MOSS-Audio-Tokenizer")

    def convert(subcommand: str, **flags: object) -> None:
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        assert mm_convert.run(["MOSSTTSConverter", subcommand, *words]) == 0

    convert("hf_to_dcp", hf_dir=folder, dcp_dir=tmp_path / "dcp")
    convert("dcp_to_hf", load_dir=tmp_path / "dcp", save_dir=tmp_path / "hf", model_assets_dir=folder)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []
    for name in ("config.json", "model.safetensors"):
        stored, kept = ((each / "MOSS-Audio-Tokenizer" / name).read_bytes() for each in (folder, tmp_path / "hf"))
        assert stored == kept


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_what_makes_sound_goes_where_the_model_goes(tmp_path: Path, inside: bool) -> None:
    """A folder with the model's settings has the codec, wherever it was: runs and exported folders speak."""
    folder = write_moss_speaker(tmp_path / "release")
    codec = folder.parent / "MOSS-Audio-Tokenizer"
    if inside:
        codec = codec.rename(folder / codec.name)
    (tmp_path / "exported").mkdir()
    copy_assets(folder, tmp_path / "exported")
    for file in codec.iterdir():
        assert (tmp_path / "exported" / codec.name / file.name).read_bytes() == file.read_bytes()
