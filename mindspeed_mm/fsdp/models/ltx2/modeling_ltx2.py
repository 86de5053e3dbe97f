"""LTX-2 and 2.3 (text or a first frame to video with sound) as diffusers has them: one transformer over the tokens of
the pictures and over those of the sound, which look at each other; both are denoised together, at one noise level. A
first frame stands among the tokens of the pictures without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.media_geometry import MediaGeometry, SoundGeometry
from mindspeed_mm.fsdp.models.diffusion.adapter import (
    LATENTS,
    DiffusionAdapter,
    Requirement,
    TextFeatures,
    TransformerOutput,
)
from mindspeed_mm.fsdp.models.diffusion.components import load_component
from mindspeed_mm.fsdp.models.diffusion.family_facts import layers_of
from mindspeed_mm.fsdp.models.diffusion.generator_folder import ReleaseUse
from mindspeed_mm.fsdp.models.diffusion.latents import BY_BUFFERS, LTX2_VAE, LatentSizes, standardised, unstandardised
from mindspeed_mm.fsdp.models.diffusion.media_roles import FIRST_FRAME, SOUND, MediaRole
from mindspeed_mm.fsdp.models.diffusion.text_rows import MASK, UNGUIDED, CaptionRows, own_rows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin


_SOUND_RATIO = 4
"""Frames of a spectrum, and bands of it, in a position of its latents: fixed in the VAE's class."""
_FROM_A_FRAME = ("i2av", "i2v")
_PICTURES_ALONE = ("t2v", "i2v")
_TEXT, _AUDIO_TEXT, _AUDIO = "prompt_embeds", "audio_prompt_embeds", "audio_latents"


@model_register.register("ltx2")
@model_register.register("ltx2_3")
class LTX2Adapter(DiffusionAdapter):
    """LTX-2 19B and LTX-2.3 22B. `t2av` learns pictures and sound, `t2v` pictures alone: then the sound sees nothing of
    the pictures, nor they of it. `i2av` and `i2v` are given the first frame, in training the clip's own, since the VAE
    is causal."""

    transformer_class = "LTX2VideoTransformer3DModel"
    pipelines = {
        "t2av": "LTX2Pipeline",
        "t2v": "LTX2Pipeline",
        "i2av": "LTX2ImageToVideoPipeline",
        "i2v": "LTX2ImageToVideoPipeline",
    }
    more_tasks = {"LTX2Pipeline": _FROM_A_FRAME, "LTX2ImageToVideoPipeline": ("t2av", "t2v")}
    roles = dict.fromkeys(_FROM_A_FRAME, (replace(FIRST_FRAME, is_trained=False),))
    draws = one_by_one = frozenset(_FROM_A_FRAME)
    blocks = ("transformer_blocks.{*}",)
    whole_because = "its pictures and its sound are two sequences that look at each other in every block"
    # Positions are turned before heads are told apart, but for the attention to captions.
    never_split = tuple(
        f"*.{name}.*" for name in ("attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn")
    )
    cut_points = CutPoints(
        layers={"transformer_blocks": ("hidden_states", "audio_hidden_states")},
        behind=("norm_out", "proj_out", "audio_norm_out", "audio_proj_out"),
        behind_parameters=("scale_shift_table", "audio_scale_shift_table"),
        carried=(
            *("time_embed", "audio_time_embed", "prompt_adaln", "audio_prompt_adaln"),
            *("av_cross_attn_video_scale_shift", "av_cross_attn_video_a2v_gate"),
            *("av_cross_attn_audio_scale_shift", "av_cross_attn_audio_v2a_gate"),
            *("caption_projection", "audio_caption_projection"),
        ),
    )
    lora_targets = layers_of(
        "*.attn1", "*.attn2", "*.audio_attn1", "*.audio_attn2", "*.audio_to_video_attn", "*.video_to_audio_attn"
    )
    streams = {
        "*time_embed*": "samples",
        "av_cross_attn_*": "samples",
        "*prompt_adaln*": "samples",
        "*caption_projection*": "caption",
        "transformer_blocks.{*}.*attn2.to_k": "caption",
        "transformer_blocks.{*}.*attn2.to_v": "caption",
        "transformer_blocks.{*}.audio_to_video_attn.to_k": "sound",
        "transformer_blocks.{*}.audio_to_video_attn.to_v": "sound",
        "transformer_blocks.{*}.video_to_audio_attn.to_k": "latents",
        "transformer_blocks.{*}.video_to_audio_attn.to_v": "latents",
        "transformer_blocks.{*}.video_to_audio_attn.*": "sound",
        "transformer_blocks.{*}.audio_attn*": "sound",
        "transformer_blocks.{*}.audio_ff*": "sound",
        "audio_proj*": "sound",
    }
    memory_streams = ("caption", "samples")
    encoders = ("vae", "audio_vae", "text_encoder", "tokenizer", "connectors")
    most_text_tokens = 1024
    widths = {"in_channels": "vae"}
    sizes = LatentSizes(128, ("vae.latent_channels",), patch=1, is_video=True, step=32, vae_class=LTX2_VAE)
    captions = CaptionRows((_TEXT, _AUDIO_TEXT, MASK), {_TEXT: MASK, _AUDIO_TEXT: MASK}, UNGUIDED)
    scale = BY_BUFFERS
    takes_tokens = True
    text_inputs = {
        "encoder_hidden_states": _TEXT,
        "audio_encoder_hidden_states": _AUDIO_TEXT,
        "encoder_attention_mask": MASK,
        "audio_encoder_attention_mask": MASK,
    }
    starts_with_frame = frozenset(_FROM_A_FRAME)
    zeros = ("keyframes_abs_pos_embedding",)
    reads_fps = True
    rate_argument = "frame_rate"
    # The rate is the pipelines' default, also for clips that say nothing of theirs; they guide by seven numbers, and
    # make 121 frames where no part of the folder predicts how many.
    uses = (ReleaseUse(fps=24.0, guidance={}, frames=121),)

    # --- the folder -------------------------------------------------------------------------------------------------

    @cached_property
    def geometry(self) -> MediaGeometry:
        """The transformer states the VAE's ratios."""
        temporal, spatial, _ = self.transformer_config.get("vae_scale_factors", (8, 32, 32))
        sizes = replace(self.sizes, ratios=lambda _: (int(spatial), int(temporal)))
        return sizes.geometry(self.component_config("vae"), self.transformer_config)

    @cached_property
    def sound(self) -> SoundGeometry | None:
        """Of the VAE of sound; None where pictures alone are learned."""
        if self.task in _PICTURES_ALONE:
            return None
        vae = self.component_config("audio_vae")
        return SoundGeometry(
            sampling_rate=int(vae.get("sample_rate", 16000)),
            channels=int(vae.get("in_channels", 2)),
            samples_per_position=_SOUND_RATIO * int(vae.get("mel_hop_length", 160)),
            latent_channels=int(vae.get("latent_channels", 8)),
            latent_bins=int(vae.get("mel_bins", 64)) // _SOUND_RATIO,
        )

    @property
    def media_roles(self) -> tuple[MediaRole, ...]:
        """The sound, where it is learned."""
        if self.sound is not None:
            return (SOUND,)
        return ()

    @property
    def further_latents(self) -> tuple[str, ...]:
        """Batch key of the sound's latents, where the sound is learned; otherwise empty."""
        if self.sound is not None:
            return (_AUDIO,)
        return ()

    def requirements(self) -> list[Requirement]:
        """Also channels of the sound's VAE, and the width of what the connectors make of captions."""
        audio = self.component_config("audio_vae")
        heard = audio and audio.get("latent_channels", 8) * (audio.get("mel_bins", 64) // _SOUND_RATIO)
        needs = super().requirements()
        needs.append(Requirement("audio_in_channels", heard or None, "audio_vae: latent_channels and mel_bins"))
        if self.transformer_config.get("use_prompt_embeddings", True):
            text = self.component_config("connectors").get("caption_channels")
            needs.append(Requirement("caption_channels", text, "connectors"))
        return needs

    # --- encoding ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """`prompt_embeds` (L, D) and `audio_prompt_embeds` (L, E): what the frozen connectors make of all layers of
        Gemma. Where they put learned registers in place of the padding, all of them are features."""
        embeds, mask, _, _ = pipeline.encode_prompt(
            list(captions), **self.captions.call, max_sequence_length=self.text_tokens
        )
        return self.captions.split(pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side))

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of both: as wide as the connectors', which in 2.3 is as wide as the transformer's streams."""
        config = self.transformer_config
        seen = heard = int(config.get("caption_channels", 3840))
        if not config.get("use_prompt_embeddings", True):
            seen, heard = (
                int(config[f"{stream}num_attention_heads"]) * int(config[f"{stream}attention_head_dim"])
                for stream in ("", "audio_")
            )
        return {_TEXT: (self.text_tokens, seen), _AUDIO_TEXT: (self.text_tokens, heard)}

    @cached_property
    def _connectors(self) -> Any:
        return load_component(self, "connectors").requires_grad_(False).eval()

    @torch.no_grad()
    def text_of_connectors(self, content: JsonMapping, where: str) -> TextFeatures:
        """As above: the files hold what the connectors are given. Real tokens stand behind the padding, some of which
        may have been left out of the file."""
        try:
            seen = content["video_prompt_embeds"] if "video_prompt_embeds" in content else content["prompt_embeds"]
            heard, mask = content.get("audio_prompt_embeds", seen), content["prompt_attention_mask"].bool()
            lacking = self.text_tokens - len(mask)
            mask = nn.functional.pad(mask, (lacking, 0))
            dtype = next(self._connectors.parameters()).dtype
            rows = [nn.functional.pad(each.to(dtype), (0, 0, lacking, 0))[None] for each in (seen, heard)]
            hidden = (mask.to(dtype) - 1)[None, None, None] * torch.finfo(dtype).max
            (video, left), (audio, _) = (
                connector(each, hidden)
                for connector, each in zip(
                    (self._connectors.video_connector, self._connectors.audio_connector), rows, strict=True
                )
            )
        except (KeyError, AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise DataError(f"these features of a caption do not fit the connectors: {error}", where=where) from error
        own = left.flatten(1) >= 0
        return {_TEXT: own_rows(video, own)[0], _AUDIO_TEXT: own_rows(audio, own)[0]}

    @torch.no_grad()
    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`audio_latents` (B, C, L, M): of the logarithmic spectrum, so many frames of it as L positions are made of,
        normalised by channel and bin."""
        if self.sound is None:
            return {}
        vae, wave = pipeline.audio_vae, media[SOUND.name].float()
        positions = wave.shape[-1] // self.sound.samples_per_position
        mel = log_mel(wave, self.sound.sampling_rate, vae.config.mel_hop_length, vae.config.mel_bins)
        # The VAE looks back only: the first frame is a position, each four that follow are one more.
        mel = mel[:, :, : _SOUND_RATIO * (positions - 1) + 1].to(vae.device, vae.dtype)
        latents = vae.encode(mel).latent_dist.mode()
        return {_AUDIO: _unpack_sound(standardised(_pack_sound(latents), **_statistics(vae)), latents.shape)}

    # --- training ---------------------------------------------------------------------------------------------------

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Tokens of pictures and of sound. With a first frame, pictures have a time for each token, 0 where the frame
        is given. Positions are in seconds, by the clip's own rate."""
        inputs, heard = super().inputs(noisy, sigma, batch, guidance), self._heard(noisy, batch)
        time = inputs["timestep"]
        frames, height, width = self.geometry.grid(tuple(noisy.shape))
        rates = [rate or self.usage.fps for rate in batch.get("fps", [0.0] * len(noisy))]
        return inputs | {
            "audio_hidden_states": _pack_sound(heard).transpose(1, 2),
            "timestep": self.token_times(time, tuple(noisy.shape)) if self.task in _FROM_A_FRAME else time,
            "audio_timestep": time,
            "sigma": time,
            "num_frames": frames,
            "height": height,
            "width": width,
            # diffusers divides positions (B, tokens, 2) by it: one number for each sample does as well
            "fps": torch.tensor(rates, dtype=torch.float32, device=noisy.device).view(-1, 1, 1),
            "audio_num_frames": heard.shape[2],
            "isolate_modalities": self.sound is None,
            "use_cross_timestep": True,
        }

    def predictions(self, output: TransformerOutput, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Of the sound, too: (B, L, C · M) → (B, C, L, M)."""
        found = super().predictions(output, shapes)
        return found | {key: _unpack_sound(output[1].transpose(1, 2), shapes[key]) for key in self.further_latents}

    def _heard(self, noisy: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The noisy latents of the sound; where none is learned, one position of silence, which nothing looks at."""
        if self.sound is not None:
            latents: torch.Tensor = batch[_AUDIO]
            return latents
        return noisy.new_zeros(len(noisy), int(self.transformer_config.get("audio_in_channels", 128)), 1, 1)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """The length of the sound follows from `fps`. A scale that is asked for is that of classifier-free guidance of
        both, and there is none of the pipeline's others."""
        arguments = self.guided(sampling, prompts, latents)
        if sampling.guidance_scale is None:
            return arguments
        return arguments | {
            "audio_guidance_scale": sampling.guidance_scale,
            "stg_scale": 0.0,
            "audio_stg_scale": 0.0,
            "modality_scale": 1.0,
            "audio_modality_scale": 1.0,
            "guidance_rescale": 0.0,
            "audio_guidance_rescale": 0.0,
        }

    @override
    def further_shapes(self, frames: int, fps: float) -> dict[str, tuple[int, ...]]:
        if self.sound is None:
            return {}
        return {_AUDIO: self.sound.latent_shape(self.sound.positions(frames, fps))}

    def starting_noise(self, pipeline: DiffusionPipeline, noise: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The pipeline normalises what it is given, noise too; a picture it encodes only where it draws the noise
        itself."""
        found: JsonObject = {LATENTS: None}
        if self.task not in _FROM_A_FRAME:
            found[LATENTS] = self.vae_latents(pipeline.vae, noise[LATENTS].to(pipeline.vae.device))
        if _AUDIO in noise:
            heard = noise[_AUDIO].to(pipeline.audio_vae.device)
            plain = unstandardised(_pack_sound(heard), **_statistics(pipeline.audio_vae))
            found[_AUDIO] = _unpack_sound(plain, heard.shape)
        return found


def _pack_sound(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, L, M) → (B, C · M, L)."""
    return latents.transpose(2, 3).flatten(1, 2)


def _unpack_sound(latents: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `_pack_sound`, to (B, C, L, M)."""
    B, C, L, M = shape
    return latents.reshape(B, C, M, L).transpose(2, 3)


def _statistics(vae: ModelMixin) -> dict[str, torch.Tensor]:
    """Return mean and standard deviation of each channel and bin, by the names that `standardised` takes."""
    return {"mean": vae.latents_mean, "std": vae.latents_std}


_WINDOW = 1024
"""Samples of a Fourier transform; in no configuration."""
_LEAST = 1e-5
"""What amplitudes are raised to before their logarithm is taken."""


def log_mel(wave: torch.Tensor, sampling_rate: int, hop: int, bins: int) -> torch.Tensor:
    """The logarithm of the amplitudes in bands of Slaney's mel scale, each normalised by its width.

    Args:
        wave: (..., samples) in -1..1.
        sampling_rate: Samples a second.
        hop: Samples from one frame to the next; frame k is centred on sample k · hop, the ends are mirrored.
        bins: Bands between 0 and half the sampling rate.

    Returns:
        (..., frames, bins) with samples // hop + 1 frames, in the type of the wave.
    """
    window = torch.hann_window(_WINDOW, dtype=wave.dtype, device=wave.device)
    spectrum = torch.stft(
        wave.flatten(0, -2), _WINDOW, hop, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    filters = torch.from_numpy(_filters(sampling_rate, bins)).to(wave.device)
    mel = spectrum.abs().double().transpose(1, 2) @ filters
    return mel.clamp(min=_LEAST).log().to(wave.dtype).unflatten(0, wave.shape[:-1])


def _filters(sampling_rate: int, bins: int) -> np.ndarray:
    from transformers.audio_utils import mel_filter_bank  # seconds to import

    half = sampling_rate / 2
    filters: np.ndarray = mel_filter_bank(
        _WINDOW // 2 + 1, bins, 0.0, half, sampling_rate, norm="slaney", mel_scale="slaney"
    )
    return filters
