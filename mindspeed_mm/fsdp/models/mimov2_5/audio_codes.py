"""Sound to the codes that MiMo-V2.5 hears: spectra, a frozen encoder, and residual vector quantizers. A released folder
keeps them in `audio_tokenizer/`.

Modules are named as the weights are. Shapes: M frames of spectra, N frames of codes, D features, C codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchFeature, SequenceFeatureExtractor

from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, read_json_object
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded
from mindspeed_mm.fsdp.ops.windowed_attention import window_mask

FOLDER = "audio_tokenizer"
_LEAST = 1e-7
"""Of a spectrum, before its logarithm."""
_AS_BUILT = {"kernel_size": 3, "stride_size": 2, "ln_type": "LayerNorm", "activation_function": "gelu"}
_SETTINGS: JsonMapping = {
    "encoder_causal": False,
    "encoder_attn_window_size": (-1, -1),
    "encoder_skip_layer_id": None,
    "hybrid_attention": False,
    "swa_per_block": 2,
    "avg_pooler": 1,
    "rope_theta": 10000.0,
    "fmin": 0.0,
    "fmax": None,
}
"""What a file may leave out, with the released code's values."""


class _FrameAttention(nn.Module):
    def __init__(self, width: int, heads: int, window: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.window, self.causal = heads, window, causal
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden_ND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        parts = [proj(hidden_ND).unflatten(1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (part.transpose(0, 1)[None] for part in parts)  # (1, heads, N, width)
        q, k = (each * cos + torch.cat([-each.chunk(2, -1)[1], each.chunk(2, -1)[0]], -1) * sin for each in (q, k))
        frames, mask = len(hidden_ND), None
        if self.window > 0 or self.causal:
            reach = frames
            if self.window > 0:
                reach = self.window + 1  # `window` others, and the frame itself
            mask = window_mask(frames, frames, reach, hidden_ND.device, two_way=not self.causal)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: torch.Tensor = self.out_proj(attended[0].transpose(0, 1).flatten(1))
        return output


class _FrameLayer(nn.Module):
    def __init__(self, settings: JsonMapping, window: int) -> None:
        super().__init__()
        width, inner = settings["d_model"], settings["encoder_ffn_dim"]
        heads, causal = settings["encoder_attention_heads"], bool(settings["encoder_causal"])
        self.self_attn = _FrameAttention(width, heads, window, causal=causal)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), cos, sin)
        output: torch.Tensor = hidden + self.fc2(F.gelu(self.fc1(self.final_layer_norm(hidden))))
        return output


class MiMoSoundEncoder(nn.Module):
    """Spectra to codes.

    Args:
        settings: Of `audio_tokenizer/config.json`.
    """

    def __init__(self, settings: JsonMapping) -> None:
        super().__init__()
        width, pooled = settings["d_model"], settings["avg_pooler"]
        self.skip, self.pooled = settings["encoder_skip_layer_id"], pooled
        head = width // settings["encoder_attention_heads"]
        self.speeds = 1 / settings["rope_theta"] ** (torch.arange(0, head, 2) / head)
        self.conv1 = nn.Conv1d(settings["n_mels"], width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(_FrameLayer(settings, window) for window in _windows(settings))
        self.layer_norm = nn.LayerNorm(width)
        if pooled > 1:
            self.down_sample_layer = nn.Sequential(nn.Conv1d(width, width, pooled, pooled, bias=False))
            self.down_sample_norm = nn.LayerNorm(width)
        sizes = settings["codebook_size"][: settings["num_quantizers"]]
        self.quantizer: Any = nn.Module()
        self.quantizer.vq = nn.Module()
        self.quantizer.vq.layers = nn.ModuleList(nn.Module() for _ in sizes)
        for layer, size in zip(self.quantizer.vq.layers, sizes, strict=True):
            layer._codebook = nn.Module()
            layer._codebook.embed = nn.Parameter(torch.zeros(size, width))

    @torch.inference_mode()
    def forward(self, spectrum_MD: torch.Tensor) -> torch.Tensor:
        """(M, bands) → (N, C): of one piece, which is encoded without those beside it."""
        spectrum = spectrum_MD.T[None].to(self.conv1.weight.dtype)
        hidden = F.gelu(self.conv2(F.gelu(self.conv1(spectrum))))[0].T
        angles = torch.arange(len(hidden))[:, None] * self.speeds
        turned = torch.cat([angles, angles], dim=1)
        skipped: torch.Tensor | float = 0.0
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, turned.cos(), turned.sin())
            if number == self.skip:
                skipped = hidden
        hidden = self.layer_norm(hidden + skipped)
        if self.pooled > 1:
            # Zeros fill up the last pool, so that no frame is lost.
            filled = F.pad(hidden, (0, 0, 0, -len(hidden) % self.pooled))
            hidden = self.down_sample_norm(F.gelu(self.down_sample_layer(filled.T[None]))[0].T)
        return self._codes(hidden)

    def _codes(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The nearest row of each table to what the tables before it leave over."""
        codes = []
        for layer in self.quantizer.vq.layers:
            table = layer._codebook.embed
            # |h − t|² without |h|², which is the same for all rows of the table.
            distances = table.square().sum(1) - 2 * hidden_ND @ table.T
            codes.append(distances.argmin(dim=1))
            hidden_ND = hidden_ND - table[codes[-1]]
        return torch.stack(codes, dim=1)


def _windows(settings: JsonMapping) -> list[int]:
    """Of each layer, how many frames one sees on a side; -1: all."""
    window, every = settings["encoder_attn_window_size"][0], settings["swa_per_block"]
    layers = range(settings["encoder_layers"])
    if not settings["hybrid_attention"]:
        return [window for _ in layers]
    return [window if number % every < every - 1 else -1 for number in layers]


def load_sound_encoder(folder: Path) -> tuple[MiMoSoundEncoder, JsonMapping]:
    """The encoder of a model's folder in fp32, and its settings.

    Args:
        folder: Of the model.

    Raises:
        ModelFolderError: There is none, it is damaged, or it asks for what is not built.
    """
    place = folder / FOLDER
    path = place / "config.json"
    if not path.is_file():
        raise ModelFolderError(
            "the folder has no audio_tokenizer, which makes codes of sound",
            where=str(folder),
            way_out=f"Copy {FOLDER}/ of the released folder, or drop rows with sound.",
        )
    settings = {**_SETTINGS, **read_json_object(path, ModelFolderError)}
    for name, built in _AS_BUILT.items():
        if settings.get(name, built) != built:
            raise ModelFolderError(f"{settings[name]!r}; known is {built!r} only", where=str(path), key=name)
    encoder = MiMoSoundEncoder(settings)
    wanted = {f"encoder.{key}": tensor.shape for key, tensor in encoder.state_dict().items()}
    with open_weights(place) as stored:
        held = {key: stored[key] for key in wanted if key in stored}
        unfit = [key for key, tensor in held.items() if tensor.shape != tuple(wanted[key])]
        check_all_loaded({"missing_keys": wanted.keys() - held.keys(), "mismatched_keys": unfit}, place)
        encoder.load_state_dict({key.removeprefix("encoder."): tensor.read() for key, tensor in held.items()})
    return encoder.float().eval().requires_grad_(False), settings


class MiMoV2FeatureExtractor(SequenceFeatureExtractor):
    """Sound to codes in whole groups, by the encoder of a model's folder, which is read with the first sound.

    Args:
        folder: Of the model.
        sampling_rate: Samples a second that it takes.
        group_size: Frames of codes of one token; the last one of a sound is repeated until they are full.
        segment_size: Frames of spectra that are encoded at a time.
        kwargs: What every feature extractor has.
    """

    model_input_names = ("audio_codes",)

    def __init__(
        self,
        folder: str | Path = "",
        sampling_rate: int = 24000,
        group_size: int = 4,
        segment_size: int = 6000,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_size=1, sampling_rate=sampling_rate, padding_value=0.0, **kwargs)
        self.folder, self.group_size, self.segment_size = str(folder), group_size, segment_size

    def __getstate__(self) -> JsonObject:
        """Without the encoder: each process reads its own."""
        return {name: value for name, value in vars(self).items() if name != "_encoder"}

    @cached_property
    def _encoder(self) -> tuple[MiMoSoundEncoder, JsonMapping]:
        return load_sound_encoder(Path(self.folder))

    def __call__(
        self, audio: Sequence[object] | np.ndarray, sampling_rate: int | None = None, **kwargs: object
    ) -> BatchFeature:
        """`audio_codes`, (frames of all sounds, C), and how many tokens each sound is.

        Args:
            audio: Sounds, each of samples in -1…1.
            sampling_rate: Of them.
            kwargs: Means nothing here.

        Raises:
            ValueError: They have another rate than the encoder.
        """
        if sampling_rate not in (None, self.sampling_rate):
            raise ValueError(f"{sampling_rate} samples a second, where the model takes {self.sampling_rate}")
        codes = [self._of_one(torch.as_tensor(np.asarray(sound, dtype=np.float32))) for sound in audio]
        tokens = [len(each) // self.group_size for each in codes]
        return BatchFeature({"audio_codes": torch.cat(codes), "num_audio_tokens": tokens})

    def _of_one(self, samples: torch.Tensor) -> torch.Tensor:
        encoder, settings = self._encoder
        # Cut behind the spectrum, so that windows of frames reach over the cuts.
        pieces = log_spectrum(samples, settings).split(self.segment_size)
        codes = torch.cat([encoder(piece) for piece in pieces])
        return torch.cat([codes, codes[-1:].expand(-len(codes) % self.group_size, -1)]).clone()


def log_spectrum(samples: torch.Tensor, settings: JsonMapping) -> torch.Tensor:
    """(M, bands): the logarithm of magnitudes in bands of the HTK mel scale.

    Args:
        samples: (samples,) of a sound.
        settings: `nfft`, `hop_length`, `window_size`, `n_mels`, `sampling_rate`, `fmin` and `fmax`.

    Raises:
        ValueError: The sound is too short for a frame.
    """
    from transformers.audio_utils import mel_filter_bank  # seconds to import

    rate, size = settings["sampling_rate"], settings["nfft"]
    if len(samples) <= size // 2:
        raise ValueError(f"{len(samples)} samples are fewer than the {size // 2 + 1} that a frame needs")
    highest = settings["fmax"] or rate / 2
    bands = mel_filter_bank(size // 2 + 1, settings["n_mels"], settings["fmin"], highest, rate, mel_scale="htk")
    window = torch.hann_window(settings["window_size"])
    found = torch.stft(
        samples, size, settings["hop_length"], settings["window_size"], window, return_complex=True
    ).abs()
    return (torch.from_numpy(bands).to(found).T @ found).clamp(min=_LEAST).log().T
