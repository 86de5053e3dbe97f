"""The codec of Qwen3-TTS: its decoder against plain torch in fp64, its released names, and what its encoder hears."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.core.errors import ModelFolderError
from tests.helpers.packed_families import InDouble
from tests.helpers.released_layouts import RELEASED
from tests.helpers.tiny_speech import CODEBOOKS, CODES
from tests.helpers.tiny_speech_codec import DECODER, ENCODER, FRAME_SAMPLES, write_speech_codec

import transformers  # isort: skip  (after the guard of the lines above)
from mindspeed_mm.fsdp.models.qwen3tts.speech_codec import (  # isort: skip  (likewise)
    Qwen3TTSSpeechDecoder,
    SpeechCodec,
    decoder_config,
)

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech_codec(tmp_path_factory.mktemp("codec")).parent


# --- by hand ----------------------------------------------------------------------------------------------------------


def convolved(x: torch.Tensor, w: Weights, name: str, dilation: int = 1, groups: int = 1) -> torch.Tensor:
    """Each place sees itself and places before it."""
    kernel = w[f"{name}.conv.weight"]
    padded = F.pad(x, ((kernel.shape[-1] - 1) * dilation, 0))
    return F.conv1d(padded, kernel, w[f"{name}.conv.bias"], dilation=dilation, groups=groups)


def widened(x: torch.Tensor, w: Weights, name: str, rate: int) -> torch.Tensor:
    made = F.conv_transpose1d(x, w[f"{name}.conv.weight"], w[f"{name}.conv.bias"], stride=rate)
    return made[..., : x.shape[-1] * rate]


def snake(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    rate, size = (w[f"{name}.{part}"].exp()[:, None] for part in ("alpha", "beta"))
    return x + torch.sin(rate * x) ** 2 / (size + 1e-9)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def attended(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    """(N, D) → (N, D), each frame seeing itself and the three before it."""
    heads, width, count = DECODER["num_attention_heads"], DECODER["head_dim"], len(x)
    q, k, v = (
        (x @ w[f"{name}.{part}_proj.weight"].T).view(count, heads, width).transpose(0, 1) for part in ("q", "k", "v")
    )
    angles = torch.outer(torch.arange(count).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width)).repeat(
        1, 2
    )

    def turned(t: torch.Tensor) -> torch.Tensor:
        half = torch.cat([-t[..., width // 2 :], t[..., : width // 2]], dim=-1)
        return t * angles.cos() + half * angles.sin()

    scores = turned(q) @ turned(k).mT / math.sqrt(width)
    ahead = torch.arange(count)[:, None] - torch.arange(count)[None]
    scores = scores.masked_fill((ahead < 0) | (ahead >= DECODER["sliding_window"]), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, heads * width)
    return mixed @ w[f"{name}.o_proj.weight"].T


def by_hand(w: Weights, codes: torch.Tensor) -> torch.Tensor:
    """(G, N) codes → samples."""
    latent = torch.zeros(DECODER["codebook_dim"], codes.shape[1], dtype=torch.float64)
    for book, told in enumerate(codes):
        part, layer = ("rvq_first", 0) if book == 0 else ("rvq_rest", book - 1)
        table = f"quantizer.{part}.vq.layers.{layer}._codebook"
        vectors = w[f"{table}.embedding_sum"] / w[f"{table}.cluster_usage"][:, None]
        latent += w[f"quantizer.{part}.output_proj.weight"][..., 0] @ vectors[told].T
    x = convolved(latent[None], w, "pre_conv")[0].T
    p = "pre_transformer"
    x = x @ w[f"{p}.input_proj.weight"].T + w[f"{p}.input_proj.bias"]
    for layer in range(DECODER["num_hidden_layers"]):
        at = f"{p}.layers.{layer}"
        x = x + w[f"{at}.self_attn_layer_scale.scale"] * attended(
            normed(x, w[f"{at}.input_layernorm.weight"]), w, f"{at}.self_attn"
        )
        inner = normed(x, w[f"{at}.post_attention_layernorm.weight"])
        gate, up = (inner @ w[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + w[f"{at}.mlp_layer_scale.scale"] * ((F.silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T)
    x = normed(x, w[f"{p}.norm.weight"]) @ w[f"{p}.output_proj.weight"].T + w[f"{p}.output_proj.bias"]
    x = x.T[None]
    for stage, rate in enumerate(DECODER["upsampling_ratios"]):
        at, x = f"upsample.{stage}.1", widened(x, w, f"upsample.{stage}.0", rate)
        inner = convolved(x, w, f"{at}.dwconv", groups=x.shape[1]).mT
        inner = F.layer_norm(inner, inner.shape[-1:], w[f"{at}.norm.weight"], w[f"{at}.norm.bias"], 1e-6)
        inner = F.gelu(inner @ w[f"{at}.pwconv1.weight"].T + w[f"{at}.pwconv1.bias"])
        x = x + (w[f"{at}.gamma"] * (inner @ w[f"{at}.pwconv2.weight"].T + w[f"{at}.pwconv2.bias"])).mT
    x = convolved(x, w, "decoder.0")
    for stage, rate in enumerate(DECODER["upsample_rates"], start=1):
        at = f"decoder.{stage}.block"
        x = widened(snake(x, w, f"{at}.0"), w, f"{at}.1", rate)
        for unit, dilation in ((2, 1), (3, 3), (4, 9)):
            inner = convolved(snake(x, w, f"{at}.{unit}.act1"), w, f"{at}.{unit}.conv1", dilation)
            x = x + convolved(snake(inner, w, f"{at}.{unit}.act2"), w, f"{at}.{unit}.conv2")
    last = len(DECODER["upsample_rates"]) + 1
    return convolved(snake(x, w, f"decoder.{last}"), w, f"decoder.{last + 1}").flatten().clamp(-1, 1)


@pytest.fixture(scope="module")
def double(folder: Path) -> Qwen3TTSSpeechDecoder:
    """In fp64, tables of angles too."""
    stored = SpeechCodec(folder).decoder.state_dict()
    with InDouble():
        made = Qwen3TTSSpeechDecoder(decoder_config(DECODER)).double().eval()
    made.load_state_dict(stored)
    return made


def codes_of(frames: int) -> torch.Tensor:
    return torch.randint(0, CODES, (CODEBOOKS, frames), generator=torch.Generator().manual_seed(frames))


@torch.no_grad()
def test_the_decoder_is_the_one_by_hand(double: Qwen3TTSSpeechDecoder) -> None:
    codes = codes_of(11)
    with InDouble():
        (made,) = double(codes[None])
    expected = by_hand(dict(double.state_dict()), codes)
    assert made.shape == (11 * FRAME_SAMPLES,) and (made.abs() < 1).float().mean() > 0.9
    torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_long_speech_is_decoded_in_pieces_that_overlap(double: Qwen3TTSSpeechDecoder) -> None:
    """300 frames at a time, with 25 before them, as published: the model's memory is longer, but fades."""
    codes, weights = codes_of(310), dict(double.state_dict())
    with InDouble():
        (made,) = double.decode(codes[None])
    pieces = [by_hand(weights, codes[:, :300]), by_hand(weights, codes[:, 275:])[25 * FRAME_SAMPLES :]]
    torch.testing.assert_close(made, torch.cat(pieces), rtol=1e-9, atol=1e-10)


def test_another_number_of_codebooks_is_no_sound(double: Qwen3TTSSpeechDecoder) -> None:
    with pytest.raises(ValueError, match="3 codebooks, and the decoder has 4"):
        double(codes_of(5)[None, :3])


# --- files ------------------------------------------------------------------------------------------------------------


def test_names_and_shapes_are_the_released_ones() -> None:
    record = json.loads((RELEASED / "qwen3-tts-tokenizer-12hz.json").read_text())
    with torch.device("meta"):
        made = Qwen3TTSSpeechDecoder(decoder_config(record["config"]["decoder_config"]))
    found: dict[str, set[tuple[int, ...]]] = {}
    counts: dict[str, int] = {}
    for name, tensor in made.state_dict().items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "N", f"decoder.{name}")
        found.setdefault(pattern, set()).add(tuple(tensor.shape))
        counts[pattern] = counts.get(pattern, 0) + 1
    expected = {entry["key"]: {tuple(shape) for shape in entry["shapes"]} for entry in record["layout"]}
    assert found == expected
    assert counts == {entry["key"]: entry["n"] for entry in record["layout"]}
    assert made.frame_samples == record["config"]["decode_upsample_rate"] == 1920


def test_the_encoder_is_that_of_mimi(folder: Path) -> None:
    """Without the codebooks that are not used, one code for each frame that has begun."""
    codec, sound = SpeechCodec(folder), torch.randn(100, generator=torch.Generator().manual_seed(0))
    codes = codec.encode(sound)
    model = transformers.MimiModel(transformers.MimiConfig(**ENCODER)).eval()
    own = {f"x.{name}": tensor for name, tensor in codec.encoder.state_dict().items()}
    model.load_state_dict({name.removeprefix("x."): tensor for name, tensor in own.items()})
    with torch.inference_mode():
        whole = model.encode(sound[None, None]).audio_codes[0]
    assert codes.shape == (math.ceil(100 / FRAME_SAMPLES), CODEBOOKS)
    assert codes.tolist() == whole[:CODEBOOKS, : len(codes)].T.tolist() and len(set(codes.flatten().tolist())) > 3


def test_a_codec_that_is_not_there_or_another_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no codec that makes sound(?s:.)*Copy 'speech_tokenizer'"):
        SpeechCodec(tmp_path)
    folder = write_speech_codec(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_tts_tokenizer_25hz"}))
    with pytest.raises(ModelFolderError, match="qwen3_tts_tokenizer_25hz"):
        SpeechCodec(tmp_path)
    wider = config | {"decoder_config": DECODER | {"latent_dim": 20}}
    (folder / "config.json").write_text(json.dumps(wider))
    with pytest.raises(ModelFolderError, match="weights do not fit"):
        SpeechCodec(tmp_path)
