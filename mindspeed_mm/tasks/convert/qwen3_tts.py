"""Qwen3-TTS ↔ DCP; a checkpoint may become a model of one voice, as the published fine-tuning writes it: the voice is
a row of the codes' table, `talker_config.spk_id` names the row, and the speaker encoder is left out (`sft_12hz.py` of
Qwen3-TTS)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.conversion.run import Converted, Verify
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter, HubFolder
from mindspeed_mm.checkpoint.hf_folder import MAX_SHARD_BYTES, model_config
from mindspeed_mm.checkpoint.lazy_tensor import Computed
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import read_audio
from mindspeed_mm.fsdp.data.datasets.qwen3tts.qwen3tts_dataset import RATE, speaker_mel
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

_FAMILY, _BASE = "qwen3_tts", "base"
_VOICES, _ENCODER = "talker.model.codec_embedding.weight", "speaker_encoder."
# the row that the published fine-tuning takes
_ROW = 3000
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class _Voice:
    name: str
    spectrum: torch.Tensor
    """(frames, mels)."""


class Qwen3TTSConverter(GenericDCPConverter):
    """Qwen3-TTS ↔ DCP, with a voice of its own in the folder."""

    _voice: _Voice | None = None

    def dcp_to_hf(  # type: ignore[override]
        self,
        load_dir: Path,
        save_dir: Path,
        model_assets_dir: Path,
        speaker_name: str | None = None,
        speaker_audio_path: Path | None = None,
        to_bf16: bool = False,
        overwrite: bool = False,
        verify: Verify = True,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> Converted:
        """Write a checkpoint as a folder of the model, or as a model of one voice.

        Args:
            load_dir: The folder with the tracker, its release/ or an iter_*/.
            save_dir: The folder to write.
            model_assets_dir: The model's own folder: configuration, tokenizers, processor.
            speaker_name: Name of the voice; it is asked for in lower case, and so it is written.
            speaker_audio_path: A recording of the voice.
            to_bf16: Write every tensor in bfloat16, instead of the dtype that the model's own folder has it in.
            overwrite: Replace what an earlier conversion wrote to save_dir.
            verify: Read everything back and compare.
            max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        """
        if (found := model_config(model_assets_dir).get("model_type")) != _FAMILY:
            raise UsageError(
                f"model_type is {found!r}, and this converter is for {_FAMILY}",
                where=str(model_assets_dir / "config.json"),
            )
        self._voice = _voice_of(speaker_name, speaker_audio_path, model_assets_dir)
        return super().dcp_to_hf(
            load_dir,
            save_dir,
            model_assets_dir,
            to_bf16=to_bf16,
            overwrite=overwrite,
            verify=verify,
            max_shard_bytes=max_shard_bytes,
        )

    def _finish(self, made: HubFolder, model_assets_dir: Path) -> None:
        if self._voice is not None:
            _give_voice(made, self._voice, model_assets_dir)


def _voice_of(name: str | None, sound: Path | None, assets: Path) -> _Voice | None:
    if name is None and sound is None:
        return None
    if name is None or sound is None:
        missing = "speaker_name" if name is None else "speaker_audio_path"
        raise UsageError("a name and a recording go together", key=f"--{missing}", way_out="Give both, or neither.")
    kind = model_config(assets).get("tts_model_type", _BASE)
    if kind != _BASE:
        way_out = "Name the folder of a Base model."
        what = f"a {kind} model has no speaker encoder"
        raise UsageError(what, where=str(assets), key="--speaker_audio_path", way_out=way_out)
    if not sound.is_file():
        raise UsageError("does not exist", where=str(sound), key="--speaker_audio_path")
    with sound.open("rb") as file:
        clip = read_audio(file, RATE, str(sound))
    if clip.seconds < _LEAST_SECONDS:
        what = f"lasts {clip.seconds:.3f} s, too short to be a voice"
        way_out = "Give some seconds of speech."
        raise UsageError(what, where=str(sound), key="--speaker_audio_path", way_out=way_out)
    bands = _settings(assets).speaker_encoder_config.mel_dim
    return _Voice(name.lower(), torch.from_numpy(speaker_mel(clip.samples, bands)))


def _give_voice(made: HubFolder, voice: _Voice, assets: Path) -> None:
    """Put the voice into the table and its name into the configuration; take the encoder out."""
    encoder = {key.removeprefix(_ENCODER): tensor for key, tensor in made.tensors.items() if key.startswith(_ENCODER)}
    table = made.tensors.get(_VOICES)
    if not encoder or table is None or table.shape[0] <= _ROW:
        what = f"has no {_ENCODER.rstrip('.')}" if not encoder else f"has no row {_ROW} of {_VOICES}"
        way_out = "Leave out --speaker_name and --speaker_audio_path."
        raise ModelFolderError(f"{what}, which a voice needs", where=str(assets), way_out=way_out)

    def with_voice(read: list[torch.Tensor]) -> torch.Tensor:
        voices = read[0].clone()
        voices[_ROW] = _embedded(dict(zip(encoder, read[1:], strict=True)), voice.spectrum, _settings(assets))
        return voices

    made.tensors[_VOICES] = Computed([table, *encoder.values()], with_voice, table.shape, table.dtype)
    for key in encoder:
        del made.tensors[_ENCODER + key]
    text = made.texts.get("config.json")
    config = model_config(assets) if text is None else parse_json(text)
    config["tts_model_type"] = "custom_voice"
    config.setdefault("talker_config", {}).update(spk_id={voice.name: _ROW}, spk_is_dialect={voice.name: False})
    made.texts["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _settings(assets: Path) -> Any:
    """The folder's configuration with the published defaults."""
    prepare_for_transformers()
    from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig  # transformers: seconds

    return Qwen3TTSConfig(**model_config(assets))


def _embedded(weights: dict[str, torch.Tensor], spectrum: torch.Tensor, settings: Any) -> torch.Tensor:
    """What the encoder makes of a voice, (D,), in single precision."""
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet  # seconds

    # the same network as in Qwen2.5-Omni, which transformers has
    encoder = ECAPA_TimeDelayNet(settings.speaker_encoder_config).float().eval()
    encoder.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    with torch.no_grad():
        embedded: torch.Tensor = encoder(spectrum[None])
    return embedded.flatten()
