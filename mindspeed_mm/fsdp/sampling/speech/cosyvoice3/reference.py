"""What CosyVoice3 needs to copy a voice: a speaker vector, and the speech tokens and mel of a recording.

Two networks of the release compute vector and tokens: CAM++ and the speech tokenizer. Both are ONNX files that
onnxruntime runs. Saved voices need neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.checkpoint.cosyvoice3_release import CAMPPLUS, SAVED_VOICES, SPEECH_TOKENIZER
from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import DataError, MachineError, ModelFolderError
from mindspeed_mm.fsdp.data.datasets.qwen3tts.qwen3tts_dataset import speaker_mel
from mindspeed_mm.fsdp.models.cosyvoice3.flow import FlowSizes
from mindspeed_mm.fsdp.sampling.speech.voice import Reference

LONGEST_S = 30
"""Maximum length of a recording."""
_RATE = 16_000
"""Sampling rate of both networks."""
_BANDS_OF_TOKENIZER, _BANDS_OF_CAMPPLUS = 128, 80
_HOPS_OF_WINDOW = 4
_VECTOR, _VECTOR_ALONE = "flow_embedding", "embedding"
_TOKENS, _MEL, _WORDS = "flow_prompt_speech_token", "prompt_speech_feat", "prompt_text"
"""Keys of a saved voice, as CosyVoice's `add_zero_shot_spk` and `save_spkinfo` write them."""


@dataclass(frozen=True)
class Guide:
    """Inputs of the model that describe a voice."""

    vector_S: torch.Tensor
    tokens: Sequence[int] = ()
    """Speech tokens of a recording; empty without one."""
    mel_TM: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """Its mel, `token_mel_ratio` frames for each token."""
    prompt: Sequence[int] | None = None
    """Text tokens of the instruction and of the words of the recording; None: the words are unknown."""


class Listener:
    """Analyses recordings, and loads saved voices.

    Args:
        folder: The model folder. Its ONNX files are opened with the first recording.
        sizes: Sizes of the flow.
        rate: Sampling rate of the mel.
        hop: Samples per mel frame.
    """

    def __init__(self, folder: Path, sizes: FlowSizes, rate: int, hop: int) -> None:
        self._folder, self._sizes, self._rate, self._hop = folder, sizes, rate, hop

    def hear(self, reference: Reference) -> Guide:
        """The voice of a recording, without its words.

        Raises:
            DataError: It cannot be read, or is too short or too long.
            MachineError: onnxruntime is not installed.
            ModelFolderError: The folder lacks an ONNX file, or has another one.
        """
        heard = reference.at(_RATE)
        if len(heard) > LONGEST_S * _RATE:
            what = f"lasts {len(heard) / _RATE:.1f} s, and the model hears up to {LONGEST_S} s"
            raise DataError(what, where=reference.file_name, key="--audio", way_out="Cut it.")
        mel_TM = torch.from_numpy(
            speaker_mel(reference.at(self._rate), self._sizes.mel_dim, _HOPS_OF_WINDOW * self._hop, self._hop)
        )
        tokens, ratio = self._tokens(heard), self._sizes.token_mel_ratio
        # The two networks round a recording's end differently: both are cut to what they have in common.
        count = min(len(mel_TM) // ratio, len(tokens))
        tokens, mel_TM = tokens[:count], mel_TM[: ratio * count]
        guide = Guide(self._vector(heard), tokens, mel_TM)
        _check(guide, self._sizes, str(self._folder / SPEECH_TOKENIZER), "Use the ONNX files of the model's release.")
        return guide

    def _vector(self, heard: np.ndarray) -> torch.Tensor:
        spectrum = campplus_spectrum(heard)
        (made, *_) = self._run(CAMPPLUS, self._campplus, [spectrum[None]])
        return torch.from_numpy(np.array(made, dtype=np.float32).reshape(-1))

    def _tokens(self, heard: np.ndarray) -> list[int]:
        spectrum = tokenizer_spectrum(heard)
        frames = np.array([spectrum.shape[-1]], dtype=np.int32)
        (made, *_) = self._run(SPEECH_TOKENIZER, self._tokenizer, [spectrum[None], frames])
        return [int(token) for token in np.asarray(made).reshape(-1)]

    def _run(self, name: str, session: Any, inputs: Sequence[np.ndarray]) -> Sequence[object]:
        names = [each.name for each in session.get_inputs()]
        try:
            outputs: Sequence[Any] = session.run(None, dict(zip(names, inputs, strict=True)))
        except Exception as error:  # onnxruntime raises classes without a common base
            raise self._bad_file(name, error) from error
        return outputs

    @cached_property
    def _campplus(self) -> object:
        return self._session(CAMPPLUS)

    @cached_property
    def _tokenizer(self) -> Any:
        return self._session(SPEECH_TOKENIZER)

    def _session(self, name: str) -> object:
        try:
            import onnxruntime  # an extra
        except ImportError as error:
            way_out = "Install the extra: pip install 'mindspeed-mm[speech]'. A saved voice needs no recording."
            raise MachineError("the package onnxruntime is not installed", key="--audio", way_out=way_out) from error
        path = self._folder / name
        if not path.is_file():
            way_out = "Copy it from the model's release. A saved voice needs no recording."
            raise ModelFolderError(f"has no file {name}", where=str(self._folder), key="--audio", way_out=way_out)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        try:
            return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # as above
            raise self._bad_file(name, error) from error

    def _bad_file(self, name: str, error: Exception) -> ModelFolderError:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        what, way_out = f"{name} cannot be run: {first_line:.200}", "Copy it from the model's release again."
        return ModelFolderError(what, where=str(self._folder), key="--audio", way_out=way_out)

    def saved(self) -> dict[str, Guide]:
        """The voices of `spk2info.pt`, by name; none where the folder has no such file.

        Raises:
            CheckpointError: The file is broken.
            ModelFolderError: A voice lacks its vector, or does not fit the model.
        """
        path = self._folder / SAVED_VOICES
        if not path.is_file():
            return {}
        content = load_weights(path)
        if not isinstance(content, dict):
            what = "holds no voices by name"
            raise ModelFolderError(what, where=str(path), way_out="Save them again, or remove the file.")
        voices = {}
        for name, stored in content.items():
            where = f"{path}: {name}"
            vector = _tensor(stored, _VECTOR, where)
            if vector is None:
                vector = _tensor(stored, _VECTOR_ALONE, where)
            if vector is None:
                what, way_out = f"has neither {_VECTOR} nor {_VECTOR_ALONE}", "Save the voice again."
                raise ModelFolderError(what, where=where, way_out=way_out)
            tokens, mel, words = (_tensor(stored, key, where) for key in (_TOKENS, _MEL, _WORDS))
            guide = Guide(vector.float().flatten(), mel_TM=torch.zeros(0, self._sizes.mel_dim))
            if tokens is not None:
                guide = replace(guide, tokens=tokens.flatten().tolist())
            if mel is not None:  # (1, T, M) as the release saves it
                guide = replace(guide, mel_TM=mel.float().flatten(0, -2))
            if words is not None and words.numel():
                guide = replace(guide, prompt=words.flatten().tolist())
            _check(guide, self._sizes, where, "Save the voice again, with this model.")
            voices[str(name)] = guide
        return voices


def _tensor(stored: object, key: str, where: str) -> torch.Tensor | None:
    found = None
    if isinstance(stored, Mapping):
        found = stored.get(key)
    if found is not None and not isinstance(found, torch.Tensor):
        raise ModelFolderError(f"{key} is no tensor", where=where, way_out="Save the voice again.")
    return found


def _check(guide: Guide, sizes: FlowSizes, where: str, way_out: str) -> None:
    what = ""
    if guide.vector_S.shape != (sizes.spk_embed_dim,):
        what = f"a speaker vector has {guide.vector_S.numel()} numbers, and the model takes {sizes.spk_embed_dim}"
    elif not guide.vector_S.isfinite().all() or not guide.mel_TM.isfinite().all():
        what = "the speaker vector or the mel holds NaN or infinity"
    elif any(not 0 <= token < sizes.vocab_size for token in guide.tokens):
        what = f"a speech token is not from 0 to {sizes.vocab_size - 1}"
    elif guide.mel_TM.shape != (sizes.token_mel_ratio * len(guide.tokens), sizes.mel_dim):
        what = (
            f"a mel of shape {tuple(guide.mel_TM.shape)} does not fit {len(guide.tokens)} speech tokens, which have "
            f"{sizes.token_mel_ratio} frames of {sizes.mel_dim} bins each"
        )
    if what:
        raise ModelFolderError(what, where=where, way_out=way_out)


def campplus_spectrum(samples: np.ndarray) -> np.ndarray:
    """Kaldi's log mel filter bank without its mean, (frames, 80) float32, of samples (N,) at 16 kHz."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function  # seconds

    bands = mel_filter_bank(
        257, _BANDS_OF_CAMPPLUS, 20, _RATE / 2, _RATE, mel_scale="kaldi", triangularize_in_mel_space=True
    )
    made: np.ndarray = spectrogram(
        samples,
        window_function(400, "povey", periodic=False),
        frame_length=400,
        hop_length=160,
        fft_length=512,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=bands,
        mel_floor=float(np.finfo(np.float32).eps),
        log_mel="log",
        remove_dc_offset=True,
    ).T
    # The mean over time of each band.
    return (made - made.mean(axis=0, keepdims=True)).astype(np.float32)


def tokenizer_spectrum(samples: np.ndarray) -> np.ndarray:
    """Whisper's log mel spectrum, (128, frames) float32, of samples (N,) at 16 kHz, without padding."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function  # seconds

    bands = mel_filter_bank(201, _BANDS_OF_TOKENIZER, 0.0, _RATE / 2, _RATE, norm="slaney", mel_scale="slaney")
    made: np.ndarray = spectrogram(
        samples,
        window_function(400, "hann"),
        frame_length=400,
        hop_length=160,
        power=2.0,
        mel_filters=bands,
        log_mel="log10",
    )[:, :-1]
    # Whisper's own scaling: 80 dB below the loudest is the floor.
    return ((np.maximum(made, made.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
