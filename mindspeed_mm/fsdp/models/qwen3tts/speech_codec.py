"""The 12 Hz codec of Qwen3-TTS (arXiv:2601.15621): codes to sound, and the sound of a reference to codes.

A released folder keeps it in `speech_tokenizer/`. Modules are named as its weights are. The decoder is made of the
parts of Qwen3-Omni's in transformers, between which it has residual vector quantizers and a wider latent; the encoder
is that of Mimi (arXiv:2410.00037). Architecture and names: `tokenizer_12hz` of the Qwen3-TTS repository.

Shapes: B rows, G codebooks, N frames, D widths, T samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MimiConfig, MimiModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavTransformerModel,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded
from mindspeed_mm.fsdp.utils.quiet import quiet

FOLDER = "speech_tokenizer"
_MODEL_TYPE = "qwen3_tts_tokenizer_12hz"
_DEFAULTS: JsonObject = {"latent_dim": 1024, "codebook_dim": 512, "rope_theta": 10000.0}
"""Of the released decoder, beside the defaults of Qwen3-Omni's, which are the same."""
_CHUNK, _CONTEXT = 300, 25
"""Frames that are decoded at a time, and frames before them that are decoded once more, as published."""
_LEAST_USE = 1e-5
_UNUSED = ("decoder", "upsample")
"""Parts of Mimi that this codec does without."""
_RATE, _FRAME_SAMPLES, _CODEBOOKS = 24_000, 1920, 16


def decoder_config(values: Mapping[str, object]) -> object:
    """The settings of a decoder.

    Args:
        values: `decoder_config` of the codec's config.json.
    """
    values = _DEFAULTS | dict(values)
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    return Qwen3OmniMoeCode2WavConfig(**values, rope_parameters=rope)


class Codebook(nn.Module):
    """A table of vectors, kept as the sums and numbers of what training has assigned to each.

    Args:
        size: Vectors.
        width: Of each.
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """(…) codes → (…, width)."""
        return F.embedding(codes, self.embedding_sum / self.cluster_usage.clamp(min=_LEAST_USE)[:, None])


class ResidualQuantizer(nn.Module):
    """Codebooks whose vectors add up.

    Args:
        config: Of the decoder.
        count: Codebooks.
    """

    def __init__(self, config: Any, count: int) -> None:
        super().__init__()
        inner = config.codebook_dim // 2
        self.input_proj = nn.Conv1d(config.codebook_dim, inner, 1, bias=False)
        """Of encoding, which nothing here does with it; the weights have it."""
        self.output_proj = nn.Conv1d(inner, config.codebook_dim, 1, bias=False)
        self.vq: Any = nn.Module()
        self.vq.layers = nn.ModuleList(nn.Module() for _ in range(count))
        for layer in self.vq.layers:
            layer._codebook = Codebook(config.codebook_size, inner)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """(B, G, N) codes → (B, D, N)."""
        vectors: Any = sum(layer._codebook(codes[:, n]) for n, layer in enumerate(self.vq.layers))
        projected: torch.Tensor = self.output_proj(vectors.mT)
        return projected


class Qwen3TTSSpeechDecoder(nn.Module):
    """Codes to sound.

    Args:
        config: Of `decoder_config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width, latent = config.decoder_dim, config.latent_dim
        self.quantizer = nn.ModuleDict(
            {
                "rvq_first": ResidualQuantizer(config, 1),
                "rvq_rest": ResidualQuantizer(config, config.num_quantizers - 1),
            }
        )
        self.pre_conv = Qwen3OmniMoeCausalConvNet(config.codebook_dim, latent, 3)
        self.pre_transformer: Any = Qwen3OmniMoeCode2WavTransformerModel._from_config(config)
        self.pre_transformer.input_proj = nn.Linear(latent, config.hidden_size)
        self.pre_transformer.output_proj = nn.Linear(config.hidden_size, latent)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [Qwen3OmniMoeCausalTransConvNet(latent, latent, ratio, ratio), Qwen3OmniMoeConvNeXtBlock(latent)]
            )
            for ratio in config.upsampling_ratios
        )
        stages = range(len(config.upsample_rates))
        last = width // 2 ** len(stages)
        self.decoder = nn.ModuleList(
            [
                Qwen3OmniMoeCausalConvNet(latent, width, 7),
                *(Qwen3OmniMoeCode2WavDecoderBlock(config, stage) for stage in stages),
                Qwen3OmniMoeSnakeBeta(last),
                Qwen3OmniMoeCausalConvNet(last, 1, 7),
            ]
        )
        for module in self.modules():
            if isinstance(module, Qwen3OmniMoeCausalTransConvNet):
                module.left_pad = 0  # all that is too much is cut off on the right; Qwen3-Omni's cuts both ends
        self.frame_samples = math.prod((*config.upsample_rates, *config.upsampling_ratios))
        """Samples of each frame."""

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """(B, G, N) codes → (B, T) samples in -1..1.

        Raises:
            ValueError: There are not as many codebooks as the decoder has.
        """
        if codes.shape[1] != self.config.num_quantizers:
            raise ValueError(f"{codes.shape[1]} codebooks, and the decoder has {self.config.num_quantizers}")
        # As in Mimi: the first codebook tells what is said, the others how it sounds.
        latent_BDN = self.quantizer["rvq_first"](codes[:, :1]) + self.quantizer["rvq_rest"](codes[:, 1:])
        blocks = self.pre_transformer
        hidden_BND = blocks(inputs_embeds=blocks.input_proj(self.pre_conv(latent_BDN).mT)).last_hidden_state
        sound: torch.Tensor = blocks.output_proj(hidden_BND).mT
        for stage in (*(part for pair in self.upsample for part in pair), *self.decoder):
            sound = stage(sound)
        return sound.squeeze(1).clamp(-1, 1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """As `forward`, of any number of frames: 300 at a time, each time with 25 before them."""
        pieces = []
        for start in range(0, codes.shape[-1], _CHUNK):
            context = min(start, _CONTEXT)
            made = self(codes[..., start - context : start + _CHUNK])
            pieces.append(made[:, context * self.frame_samples :])  # the context comes out again
        return torch.cat(pieces, dim=1)


class SpeechCodec:
    """The codec of a model folder. Its encoder is read when it is first asked for.

    Args:
        folder: The model's, with `speech_tokenizer/` inside.

    Raises:
        ModelFolderError: The codec is missing or broken, or another one than that of 12 Hz.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        if not self._folder.is_dir():
            way_out = f"Copy '{FOLDER}' of the released folder into it."
            raise ModelFolderError(
                "there is no codec that makes sound of codes", where=str(self._folder), way_out=way_out
            )
        path = self._folder / "config.json"
        self._config = read_json_object(path, ModelFolderError)
        if (found := self._config.get("model_type")) != _MODEL_TYPE:
            raise ModelFolderError(f"is a codec of type {found!r}; known is {_MODEL_TYPE!r}", where=str(path))
        self.rate = int(self._config.get("output_sample_rate", _RATE))
        self.hearing_rate = int(self._config.get("input_sample_rate", _RATE))
        """Samples a second that the encoder hears."""
        self.decoder = Qwen3TTSSpeechDecoder(decoder_config(self._config.get("decoder_config") or {}))
        try:
            self.decoder.load_state_dict(self._weights("decoder."))
        except RuntimeError as error:
            what = f"weights do not fit its config.json: {' '.join(str(error).split())[:300]}"
            raise ModelFolderError(what, where=str(self._folder), way_out="Copy the codec again.") from error
        self.decoder.eval().requires_grad_(False)

    @cached_property
    def encoder(self) -> MimiModel:
        """What hears.

        Raises:
            ModelFolderError: Its weights are missing or broken.
        """
        config = MimiConfig(**(self._config.get("encoder_config") or {}))
        with quiet("transformers"):
            made, report = MimiModel.from_pretrained(
                None, config=config, state_dict=self._weights("encoder."), output_loading_info=True
            )
        lacking = [key for key in report["missing_keys"] if not key.startswith(_UNUSED)]
        check_all_loaded({**report, "missing_keys": lacking}, self._folder)
        return made.eval().requires_grad_(False).to(next(self.decoder.parameters()).device)

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        """(T,) samples at `hearing_rate` → (N, G) codes."""
        books = int(self._config.get("encoder_valid_num_quantizers", _CODEBOOKS))
        frames = math.ceil(len(samples) / int(self._config.get("encode_downsample_rate", _FRAME_SAMPLES)))
        model = self.encoder
        given = samples.to(model.device, model.dtype)[None, None]
        codes: torch.Tensor = model.encode(given).audio_codes
        return codes[0, :books, :frames].T

    def _weights(self, prefix: str) -> dict[str, torch.Tensor]:
        """Those whose names begin so, without it."""
        with open_weights(self._folder) as stored:
            own = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
            return {name: each.read() for name, each in own.items()}
