"""The voice of Qwen3-TTS (arXiv:2601.15621): its talker, and the 12 Hz codec in `speech_tokenizer/`.

What generation goes on from is laid out as training lays out its rows, all text before all speech; the published
inference calls this its mode without streaming. Defaults of sampling are the published ones, where the folder's
generation_config.json has no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.batch import SPEAKER_CODE
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.data.data_utils.rendering.tokens import Tokens
from mindspeed_mm.fsdp.data.datasets.qwen3tts.qwen3tts_dataset import RATE, sequence_of, speaker_mel
from mindspeed_mm.fsdp.models.behaviour.spoken_frames import SpokenFrames
from mindspeed_mm.fsdp.models.loading.folder import load_model_config, load_pretrained
from mindspeed_mm.fsdp.models.qwen3tts.modeling_qwen3tts import Qwen3TTSForConditionalGeneration
from mindspeed_mm.fsdp.models.qwen3tts.speech_codec import SpeechCodec
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import TokenChoice
from mindspeed_mm.fsdp.sampling.speech.talking import FrameChoice, talk
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, Voice, room_for
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of

_ROLE, _INSTRUCTIONS = "<|im_start|>assistant\n", ("<|im_start|>user\n", "<|im_end|>\n")
_USUAL: JsonObject = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "do_sample": True}
_OF_PREDICTOR = "subtalker_"
_USUAL_TOKENS = 2048
_SMALL = "0b6"
"""The size whose voices follow no instructions."""


class Qwen3TTSVoice(Voice):
    """A talker with its codec. A `base` model takes the voice of a recording, the others know voices by name, or
    design one by instructions.

    Args:
        folder: The model's, with `speech_tokenizer/`.
        view: Of families that answer.

    Raises:
        ModelFolderError: Weights, configuration or codec are missing or broken.
    """

    def __init__(self, folder: Path, view: RowsView | None = None) -> None:
        config = load_model_config(folder)
        self._codec = SpeechCodec(folder)
        self._tokenizer: Any = tokenizer_of(load_processor(folder))
        self._tokens = Tokens(self._tokenizer, of_processor=False)
        self.model: Any = load_pretrained(Qwen3TTSForConditionalGeneration, folder, config).to(current_device())
        self._codec.decoder.to(current_device())
        talker, decoder = config.talker_config, self._codec.decoder.config
        if decoder.num_quantizers != talker.num_code_groups:
            what = f"the codec has {decoder.num_quantizers} codebooks, the talker {talker.num_code_groups}"
            raise ModelFolderError(what, where=str(folder), way_out="Copy the codec that the model was released with.")
        known: Mapping[str, int] = getattr(talker, "spk_id", None) or {}
        self.names = {name.lower(): name for name in known}
        self.usual_name = next(iter(self.names.values()), None)
        self.rate = self._codec.rate
        self.copies = self.reads_reference = config.tts_model_type == "base"
        self.follows_instructions = not self.copies and getattr(config, "tts_model_size", None) != _SMALL
        settings = folder / "generation_config.json"
        given = read_json_object(settings, ModelFolderError) if settings.is_file() else {}
        self._first = SimpleNamespace(**_USUAL | given)
        self._others = SimpleNamespace(**_USUAL | {"repetition_penalty": 1.0} | _of_predictor(given))
        self.usual_tokens = int(given.get("max_new_tokens") or _USUAL_TOKENS)

    @property
    @override
    def parts(self) -> Mapping[str, nn.Module]:
        return {"": self.model, "speech_tokenizer.decoder.": self._codec.decoder}

    @override
    def _say(self, job: SpeechJob) -> tuple[np.ndarray, bool]:
        heard = self._codes_of(job.reference)
        prompt = self._prompt(job, heard)
        choice = FrameChoice(
            TokenChoice.of(job.sampling, self._first),
            TokenChoice.of(replace(job.sampling, repetition_penalty=None), self._others),
            self._codec.decoder.config.codebook_size,
            room_for(self.model.config, len(prompt), job.sampling.max_new_tokens),
            job.is_given_up,
        )
        codes, finished = talk(self.model, prompt, choice)
        with torch.inference_mode():
            whole = torch.cat([torch.from_numpy(heard).to(codes), codes])  # what was heard leads into what is said
            samples_1T = self._codec.decoder.decode(whole.T[None]) if len(whole) else codes.new_zeros((1, 0)).float()
        told = samples_1T[0, len(heard) * self._codec.decoder.frame_samples :]
        return told.float().cpu().numpy(), finished

    def _codes_of(self, reference: Reference | None) -> np.ndarray:
        """(N, G) int64 codes of a recording whose words are known; none otherwise."""
        if reference is None or reference.words is None:
            return np.zeros((0, self.model.config.talker_config.num_code_groups), dtype=np.int64)
        samples = torch.from_numpy(reference.at(self._codec.hearing_rate))
        with torch.inference_mode():
            codes: np.ndarray = self._codec.encode(samples).cpu().numpy()
        return codes

    @torch.inference_mode()
    def _prompt(self, job: SpeechJob, heard: np.ndarray) -> torch.Tensor:
        """(L, D) embeddings of all that speech goes on from."""
        config, device = self.model.config, self.model.device
        role, text = self._ids(_ROLE), self._words(job.text)
        if job.instructions:
            before, after = _INSTRUCTIONS
            role = [*self._ids(before), *self._words(job.instructions), *self._ids(after), *role]
        if len(heard) and job.reference is not None:
            text = [*self._words(job.reference.words or ""), *text]
        made = sequence_of(config, role, text, heard, self._voice(job), self._dialect(job.name))
        words, codes = torch.from_numpy(made.input_ids[:-1]), torch.from_numpy(made.codec_ids[:-1])
        frames = torch.arange(len(words) - len(heard), len(words), device=device)
        talker = self.model.talker
        spoken = SpokenFrames(codes[None].to(device), frames, talker.model.codec_embedding, talker.code_predictor)
        embeds_LD = spoken.added_to(self.model.text_at(words.to(device)))
        if job.reference is not None:
            mel = speaker_mel(job.reference.at(RATE), config.speaker_encoder_config.mel_dim)
            voice_1D = self.model.hear(torch.from_numpy(mel).to(device), [len(mel)])
            embeds_LD[(codes[:, 0] == SPEAKER_CODE).to(device)] += voice_1D.to(embeds_LD.dtype)
        return embeds_LD

    def _voice(self, job: SpeechJob) -> list[int]:
        """What stands for the voice."""
        if job.reference is not None:
            return [SPEAKER_CODE]
        if job.name is None:
            return []
        return [int(self.model.config.talker_config.spk_id[job.name])]

    def _dialect(self, name: str | None) -> int | None:
        """The language of a voice that speaks a dialect, which is told to the model; None: it hears it in the text."""
        talker = self.model.config.talker_config
        dialect = (getattr(talker, "spk_is_dialect", None) or {}).get(name)
        if dialect:
            return int(talker.codec_language_id[dialect])
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _words(self, text: str) -> list[int]:
        """Tokens of what people write: special tokens in it are text."""
        ids, _ = self._tokens.encode(self._tokens.protect(text.strip()), ())
        return ids.tolist()  # type: ignore[no-any-return]


def _of_predictor(given: Mapping[str, object]) -> JsonObject:
    """What a generation configuration says of the code predictor, by the names that it has for the talker."""
    own = {key.removeprefix(_OF_PREDICTOR): value for key, value in given.items() if key.startswith(_OF_PREDICTOR)}
    if "dosample" in own:
        own["do_sample"] = own.pop("dosample")
    return own
