"""MOSS-Audio-Tokenizer, the codec of MOSS-TTS: sound to 32 codes each 80 ms, and codes to sound.

Both ways are a row of causal transformers, each of which sees 10 s, between which neighbouring frames are laid side by
side, or apart. Codes are those of a residual quantizer whose vectors have no length (`rlfq`). Modules are named as the
released weights are; architecture and names: the MOSS-Audio-Tokenizer repository, whose codes and sound these are where
it takes the whole at once. Shapes: B rows, L frames, D widths, G codebooks, T samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from mindspeed_mm.checkpoint.hf_folder import codec_folder
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, read_json_object
from mindspeed_mm.fsdp.models.moss_tts_delay.configuration_moss_tts_delay import MossTTSDelayConfig

FOLDER = "MOSS-Audio-Tokenizer"
_KINDS = ("rlfq", "random_prefix_rlfq")
_KNOWN = {"causal": True, "norm": "layer_norm", "gating": "none", "positional_embedding": "rope"}
"""Settings of a transformer that are built."""
_NEEDED = ("encoder_kwargs", "decoder_kwargs", "quantizer_kwargs")
_LOUDNESS_DB, _MOST_GAIN_DB, _SILENCE = -20.0, 3.0, 1e-9


class _Scale(nn.Module):
    """A factor for each width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scale * hidden


class _WindowAttention(nn.Module):
    """Each frame sees itself and those before it, `context` in all. Rotary places of neighbouring widths."""

    def __init__(self, width: int, heads: int, context: int, period: float) -> None:
        super().__init__()
        self.in_projs = nn.ModuleList([nn.Linear(width, 3 * width, bias=False)])
        self.out_projs = nn.ModuleList([nn.Linear(width, width, bias=False)])
        self._heads, self._context, self._period = heads, context, period

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        qkv = self.in_projs[0](hidden_BLD).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = self._turned(qkv[0]), self._turned(qkv[1]), qkv[2]
        made, length = [], hidden_BLD.shape[1]
        for begin in range(0, length, self._context):  # memory grows with the window, not with the square of the sound
            end, first = min(begin + self._context, length), max(begin - self._context + 1, 0)
            behind = torch.arange(begin, end, device=query.device)[:, None] - torch.arange(
                first, end, device=query.device
            )
            sees = (behind >= 0) & (behind < self._context)
            made.append(
                F.scaled_dot_product_attention(
                    query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end], sees
                )
            )
        return self.out_projs[0](torch.cat(made, dim=2).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _turned(self, heads_BHLD: torch.Tensor) -> torch.Tensor:
        """Rotated by their places, in single precision at least."""
        width, wide = heads_BHLD.shape[-1], torch.promote_types(heads_BHLD.dtype, torch.float32)
        device = heads_BHLD.device
        frequencies = self._period ** (-torch.arange(0, width, 2, device=device, dtype=wide) / width)
        angles = torch.arange(heads_BHLD.shape[2], device=device, dtype=wide)[:, None] * frequencies
        even, odd = heads_BHLD.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2).to(heads_BHLD.dtype)


class _CodecLayer(nn.Module):
    """Attention and two linear layers, each behind a norm and in front of factors."""

    def __init__(self, width: int, heads: int, inner: int, context: int, period: float) -> None:
        super().__init__()
        self.self_attn = _WindowAttention(width, heads, context, period)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.layer_scale_1, self.layer_scale_2 = _Scale(width), _Scale(width)

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        hidden_BLD = hidden_BLD + self.layer_scale_1(self.self_attn(self.norm1(hidden_BLD)))
        inner = F.gelu(self.linear1(self.norm2(hidden_BLD)))
        return hidden_BLD + self.layer_scale_2(self.linear2(inner))  # type: ignore[no-any-return]


class _CodecTransformer(nn.Module):
    """Layers between a projection into their width and one out of it, where widths differ.

    Args:
        values: Of `encoder_kwargs` or `decoder_kwargs`.
        context: Frames that each frame sees.
    """

    def __init__(self, values: JsonMapping, context: int) -> None:
        super().__init__()
        width, given, made = (int(values[name]) for name in ("d_model", "input_dimension", "output_dimension"))
        self.input_proj = nn.Identity() if width == given else nn.Linear(given, width, bias=False)
        self.output_proj = nn.Identity() if width == made else nn.Linear(width, made, bias=False)
        sizes = int(values["num_heads"]), int(values["dim_feedforward"])
        period = float(values.get("max_period", 10_000))
        self.transformer: Any = nn.Module()
        self.transformer.layers = nn.ModuleList(
            _CodecLayer(width, *sizes, context, period) for _ in range(int(values["num_layers"]))
        )

    def forward(self, hidden_BDL: torch.Tensor) -> torch.Tensor:
        hidden_BLD = self.input_proj(hidden_BDL.mT)
        for layer in self.transformer.layers:
            hidden_BLD = layer(hidden_BLD)
        return self.output_proj(hidden_BLD).mT  # type: ignore[no-any-return]


class _Fold(nn.Module):
    """Lays that many neighbouring frames side by side: (B, D, L · n) → (B, D · n, L); or apart."""

    def __init__(self, count: int, *, is_apart: bool) -> None:
        super().__init__()
        self._count, self._is_apart = count, is_apart

    def forward(self, hidden_BDL: torch.Tensor) -> torch.Tensor:
        if self._is_apart:
            return hidden_BDL.unflatten(1, (-1, self._count)).mT.flatten(2)
        return hidden_BDL.unflatten(2, (-1, self._count)).mT.flatten(1, 2)


class _Codebook(nn.Module):
    """A table of small vectors between two projections."""

    def __init__(self, width: int, size: int, inner: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = _projection(width, inner), _projection(inner, width)
        self.codebook = nn.Embedding(size, inner)

    def nearest(self, hidden_BDL: torch.Tensor) -> torch.Tensor:
        """(B, L) codes whose vectors point where the projected ones do."""
        told_BLd = F.normalize(self.in_proj(hidden_BDL).mT, dim=-1)
        return (told_BLd @ F.normalize(self.codebook.weight, dim=-1).T).argmax(dim=-1)

    def vectors(self, codes: torch.Tensor) -> torch.Tensor:
        """(B, L) codes → (B, D, L)."""
        return self.out_proj(self.codebook(codes).mT)  # type: ignore[no-any-return]


class _Quantizer(nn.Module):
    """Codebooks whose vectors add up, each over what those before it left.

    Args:
        values: `quantizer_kwargs`.
    """

    def __init__(self, values: JsonMapping) -> None:
        super().__init__()
        given = int(values["input_dim"])
        width, made = int(values.get("rvq_dim") or given), int(values.get("output_dim") or given)
        self.input_proj, self.output_proj = _projection(given, width), _projection(width, made)
        sizes = int(values["codebook_size"]), int(values["codebook_dim"])
        self.quantizers = nn.ModuleList(_Codebook(width, *sizes) for _ in range(int(values["num_quantizers"])))

    def encode(self, hidden_BDL: torch.Tensor) -> torch.Tensor:
        """(B, D, L) → (B, G, L) codes."""
        left, codes = self.input_proj(hidden_BDL), []
        for book in self.quantizers:
            codes.append(book.nearest(left))  # type: ignore[operator]
            left = left - book.vectors(codes[-1])  # type: ignore[operator]
        return torch.stack(codes, dim=1)

    def decode(self, codes_BGL: torch.Tensor) -> torch.Tensor:
        """(B, G, L) codes of the first G codebooks → (B, D, L)."""
        books = list(self.quantizers)[: codes_BGL.shape[1]]
        vectors = [book.vectors(codes) for book, codes in zip(books, codes_BGL.unbind(1), strict=True)]  # type: ignore[operator]
        return self.output_proj(torch.stack(vectors).sum(dim=0))  # type: ignore[no-any-return]


def _projection(given: int, made: int) -> nn.Module:
    if given == made:
        return nn.Identity()
    return weight_norm(nn.Conv1d(given, made, 1))


class MossAudioCodec(nn.Module):
    """The codec.

    Args:
        config: Of its config.json.

    Raises:
        ValueError: It has parts that are not built.
    """

    def __init__(self, config: JsonMapping) -> None:
        super().__init__()
        if lacking := [name for name in _NEEDED if not config.get(name)]:
            raise ValueError(f"has no {', '.join(lacking)}")
        quantizer = config["quantizer_kwargs"]
        kind = quantizer.get("quantizer_type", config.get("quantizer_type", _KINDS[0]))
        if kind not in _KINDS:
            raise ValueError(f"quantizer_type is {kind!r}; built is {_KINDS[0]!r}")
        self.rate = int(config.get("sampling_rate") or config.get("sample_rate") or 24_000)
        seen_s = float(config.get("causal_transformer_context_duration", 10.0))
        self.encoder, frames_per_s = _parts(config["encoder_kwargs"], float(self.rate), seen_s, is_apart=False)
        self.quantizer = _Quantizer(quantizer)
        self.decoder, back = _parts(config["decoder_kwargs"], frames_per_s, seen_s, is_apart=True)
        if back != self.rate:
            raise ValueError(f"encodes {self.rate} samples a second, and decodes {back:g}")
        self.frame_samples = round(self.rate / frames_per_s)
        """Samples of each frame."""
        self.books, self.codes = int(quantizer["num_quantizers"]), int(quantizer["codebook_size"])

    def encode(self, samples_T: torch.Tensor) -> torch.Tensor:
        """Samples of one channel → (frames, G) codes of all whole frames in it."""
        frames = len(samples_T) // self.frame_samples
        hidden = samples_T[: frames * self.frame_samples].to(next(self.parameters()))[None, None]
        if not frames:
            return torch.zeros((0, self.books), dtype=torch.long, device=hidden.device)
        for part in self.encoder:
            hidden = part(hidden)
        return self.quantizer.encode(hidden)[0].T

    def decode(self, codes_LG: torch.Tensor) -> torch.Tensor:
        """(frames, G) codes → (T,) samples."""
        if not len(codes_LG):
            return codes_LG.new_zeros(0, dtype=torch.float32)
        hidden = self.quantizer.decode(codes_LG.T[None])
        for part in self.decoder:
            hidden = part(hidden)
        return hidden.flatten()


def _parts(
    values: Sequence[JsonMapping], frames_per_s: float, seen_s: float, *, is_apart: bool
) -> tuple[nn.ModuleList, float]:
    """The parts of one way, and the frames a second behind them."""
    parts = nn.ModuleList()
    for each in values:
        if each["module_type"] == "PatchedPretransform":
            count = int(each["patch_size"])
            parts.append(_Fold(count, is_apart=is_apart))
            frames_per_s = frames_per_s * count if is_apart else frames_per_s / count
            continue
        for name, known in _KNOWN.items():
            if each.get(name, known) != known:
                raise ValueError(f"{name} is {each[name]!r}; built is {known!r}")
        parts.append(_CodecTransformer(each, int(frames_per_s * seen_s)))
    return parts, frames_per_s


def even_loudness(samples_T: torch.Tensor) -> torch.Tensor:
    """Samples nearer to a mean square of -20 dB, by 3 dB at most: what the codec is given, as published."""
    if not len(samples_T):
        return samples_T
    loudness = 10 * torch.log10(samples_T.float().square().mean() + _SILENCE)
    gain = (_LOUDNESS_DB - loudness).clamp(-_MOST_GAIN_DB, _MOST_GAIN_DB)
    return samples_T.float() * 10 ** (gain / 20)


def load_codec(folder: Path) -> MossAudioCodec:
    """The codec of a folder, in single precision, on the CPU.

    Raises:
        ModelFolderError: It is missing, broken, or has parts that are not built.
    """
    path = folder / "config.json"
    try:
        codec = MossAudioCodec(read_json_object(path, ModelFolderError))
    except (KeyError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ModelFolderError(what, where=str(path), way_out=f"Name a released folder of {FOLDER}.") from error
    with open_weights(folder) as stored:
        weights = {name: each.read().float() for name, each in stored.items()}
    try:
        codec.load_state_dict(weights)
    except RuntimeError as error:
        what = f"weights do not fit its config.json: {' '.join(str(error).split())[:300]}"
        raise ModelFolderError(what, where=str(folder), way_out="Copy the codec again.") from error
    return codec.eval().requires_grad_(False)


def needed_codec(model: Path) -> Path:
    """Where the codec of a model's folder lies: inside it, or beside it.

    Raises:
        ModelFolderError: There is none.
    """
    folder = codec_folder(model, MossTTSDelayConfig.model_type)
    if folder is None:
        raise ModelFolderError(
            "there is no codec that makes sound of codes",
            where=str(model),
            way_out=f"Copy the released folder '{FOLDER}' into it, or beside it.",
        )
    return folder
