"""The encoders of sounds of Ming-Lite-Omni: Whisper's (arXiv:2212.04356) without its window of 30 seconds, and SAN-M
(arXiv:2006.01712) of the preview. Blocks are transformers'; modules are named as the released weights are.

Shapes: N sounds of at most F frames, of which each has as many as its mask says; W features of the encoder. A sound is
encoded as if it were alone, whatever it is padded to.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.fun_asr_nano.modeling_fun_asr_nano import FunAsrNanoEncoderLayer
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer
from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.models.ming.configuration_ming import BailingAudioConfig

_SLOWEST = 10000.0


class _Encoder(PreTrainedModel):
    config: BailingAudioConfig
    main_input_name = "input_features"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["WhisperEncoderLayer", "FunAsrNanoEncoderLayer"]

    def _mask(self, hidden: torch.Tensor, real_NF: torch.Tensor) -> Any:
        return create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=real_NF)


class MingWhisper(_Encoder):
    """Whisper's encoder for sounds of any length.

    Args:
        config: Of the encoder.
    """

    def __init__(self, config: BailingAudioConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.conv1 = nn.Conv1d(config.features, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.positional_embedding = nn.Parameter(torch.empty(config.positions, width), requires_grad=False)
        self.blocks = nn.ModuleList(WhisperEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.ln_post = nn.LayerNorm(width)
        self.post_init()

    @override
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            # Whisper's table: sines in the first half, cosines in the second.
            places = torch.arange(self.config.positions, dtype=torch.float64)[:, None]
            half = self.config.hidden_size // 2
            angles = places * torch.exp(-math.log(_SLOWEST) / (half - 1) * torch.arange(half, dtype=torch.float64))
            with torch.no_grad():
                self.positional_embedding.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(
        self, input_features: torch.Tensor, input_features_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, F, bands) log-mel spectra → (N, ⌈F / 2⌉, W) and which of these are real.

        Args:
            input_features: Spectra, filled up behind their end.
            input_features_mask: (N, F) where a sound is.
        """
        frames = -(-input_features.shape[1] // 2)
        if frames > self.config.positions:
            raise DataError(
                f"a sound of {input_features.shape[1]} frames is longer than the encoder's {2 * self.config.positions}",
                way_out="Cut it into pieces or drop the row.",
            )
        real, dtype = input_features_mask.bool(), self.conv1.weight.dtype
        # Zeros behind a sound's end before each convolution, as if it were alone in its batch.
        hidden = F.gelu(self.conv1((input_features.to(dtype) * real[..., None]).transpose(1, 2)))
        hidden = F.gelu(self.conv2(hidden * real[:, None])).transpose(1, 2)
        real = real[:, ::2]  # with padding 1, output i is centred on frame 2 i
        hidden = hidden + self.positional_embedding[:frames].to(dtype)
        mask = self._mask(hidden, real)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.ln_post(hidden), real


class MingSanm(_Encoder):
    """FunASR's encoder: attention with a memory of neighbouring frames.

    Args:
        config: Of the encoder.
    """

    def __init__(self, config: BailingAudioConfig) -> None:
        super().__init__(config)
        block: Any = FunAsrNanoEncoderLayer
        self.encoders0 = nn.ModuleList([block(config, hidden_size=config.features)])
        self.encoders = nn.ModuleList(block(config) for _ in range(config.num_hidden_layers - 1))
        self.after_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def forward(
        self, input_features: torch.Tensor, input_features_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, F, features) → (N, F, W) and which frames are real. Arguments as of `MingWhisper`."""
        real = input_features_mask.bool()
        # Scaled by the inner width, not by that of the features, as in FunASR.
        hidden = input_features.to(self.after_norm.weight.dtype) * self.config.hidden_size**0.5
        hidden = hidden + _places(hidden)
        mask = self._mask(hidden, real)
        for layer in (*self.encoders0, *self.encoders):
            hidden = layer(hidden, mask, real)
        return self.after_norm(hidden), real


def _places(hidden: torch.Tensor) -> torch.Tensor:
    """(F, width): sines, then cosines; the first frame is the first, not the zeroth."""
    half = hidden.shape[2] // 2
    speeds = torch.exp(torch.arange(half, device=hidden.device).float() * (-math.log(_SLOWEST) / (half - 1)))
    angles = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(hidden.dtype)


class SoundProjection(nn.ModuleList):
    """Takes what an encoder makes to the language model. The numbers of its layers are those of the release, which
    counts the turns of axes and the activations between them.

    Args:
        config: Of the encoder.
        width: H.
        depth: Layers, of which the first is a convolution over frames.
    """

    def __init__(self, config: BailingAudioConfig, width: int, depth: int) -> None:
        self.size, self.stride = config.ds_kernel_size, config.ds_stride
        first = nn.Conv1d(config.hidden_size, width, self.size, stride=self.stride, padding=self.size // 2)
        layers: list[nn.Module] = [first, nn.Identity()]
        for _ in range(1, depth):
            layers += [nn.GELU(), nn.Linear(width, width)]
        super().__init__(layers)

    def forward(self, hidden: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, F, W) → (N, tokens, H) and which tokens are real.

        Args:
            hidden: What the encoder makes.
            real: (N, F) where a sound is.
        """
        first, *others = self
        hidden = first((hidden * real[..., None]).transpose(1, 2)).transpose(1, 2)
        for layer in others:
            hidden = layer(hidden)
        # Length of a convolution's output, of each sound by itself.
        counts = (real.sum(1) - self.size + 2 * (self.size // 2)) // self.stride + 1
        return hidden, torch.arange(hidden.shape[1], device=hidden.device) < counts[:, None]
