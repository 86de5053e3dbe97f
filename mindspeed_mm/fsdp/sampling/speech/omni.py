"""The voice of Qwen3-Omni (arXiv:2509.17765): its talker and its speech decoder.

The words are those of an answer that is not spoken, or a text that is given. transformers' own `generate` of the whole
model is then held to them, and gives the voice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.rendering.tokens import Tokens
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.models.loading.folder import load_model_config, load_pretrained
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator, in_dtype_of, move_to
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.sampling.speech.voice import AnsweringVoice, SpeechJob, Utterance
from mindspeed_mm.fsdp.utils.device import current_device

_USUAL_NAME = "ethan"
"""That of transformers' `generate`."""
_LEAST = 2
"""Tokens that `generate` needs of each part: the codes of a frame are computed with the next one."""
_READ_ALOUD = "Read this text aloud, word by word: "


class OmniVoice(AnsweringVoice):
    """The whole of a model that thinks, talks and decodes speech.

    Args:
        folder: A Hugging Face folder.
        view: How questions were shown to it; None: as the folder says.

    Raises:
        ModelFolderError: Weights or configuration are missing or broken.
    """

    rate = 24_000
    """Of the speech decoder, as the model's authors publish it; the folder does not say."""
    usual_tokens = 512

    def __init__(self, folder: Path, view: RowsView | None = None) -> None:
        from transformers import Qwen3OmniMoeForConditionalGeneration  # seconds

        self._encoder = QuestionEncoder(folder, view)
        config = load_model_config(folder)
        model = load_pretrained(Qwen3OmniMoeForConditionalGeneration, folder, config)
        # transformers 5.23 lets the talker count the positions of sounds by a section that it lacks.
        model.talker.config.audio_config = config.thinker_config.audio_config
        self.model: Any = model.to(current_device())
        self.thinker = Generator(self.model.thinker, self._encoder)
        self.names = {name.lower(): name for name in config.talker_config.speaker_id}
        self.usual_name = self.names.get(_USUAL_NAME) or next(iter(self.names.values()), None)

    @classmethod
    @override
    def can_speak(cls, config: Mapping[str, object]) -> bool:
        return bool(config.get("enable_audio_output", True))

    @property
    @override
    def parts(self) -> Mapping[str, nn.Module]:
        return {"": self.model}

    @override
    def answer(
        self, prompt: str, media: Sequence[MediaItem], sampling: Sampling, name: str | None = None
    ) -> tuple[Answer, Utterance]:
        voice = self.name_of(name)
        loader = self._encoder.media(Path.cwd(), [Path(item.source).parent for item in media])
        question = self.thinker.encode(ask(prompt, media).sample, loader)
        (answer,) = self.thinker.answer_live([LiveAnswer(question, sampling)])
        samples = self._spoken(question, answer.token_ids, voice, sampling.seed)
        return answer, Utterance(self.sound_of(samples), voice, answer.finished)

    @override
    def _say(self, job: SpeechJob) -> tuple[np.ndarray, bool]:
        loader = self._encoder.media(Path.cwd())
        question = self.thinker.encode(ask(f"{_READ_ALOUD}{job.text}", ()).sample, loader)
        tokens = Tokens(self.thinker.tokenizer, of_processor=False)
        words, _ = tokens.encode(tokens.protect(job.text), ())
        is_whole = len(words) <= job.sampling.max_new_tokens
        ids = [*words[: job.sampling.max_new_tokens].tolist(), self.thinker.end_ids[0]]
        settings = _of_talker(job.sampling) | {
            "thinker_stopping_criteria": [_ended_by(job.is_given_up, len(question.input_ids) + _LEAST)],
            "talker_stopping_criteria": [_ended_by(job.is_given_up, _LEAST)],
        }
        samples = self._spoken(question, ids, job.name, job.sampling.seed, settings)
        return samples, is_whole and not job.is_given_up()

    def _spoken(
        self,
        question: EncodedQuestion,
        ids: Sequence[int],
        voice: str | None,
        seed: int | None,
        settings: Mapping[str, object] | None = None,
    ) -> np.ndarray:
        """Samples (N,) of an answer with these tokens; `settings`: further ones of `generate`."""
        inputs = in_dtype_of(self.model, move_to(self._encoder.collate([question]), self.model.device))
        asked = len(question.input_ids)

        def only_its_words(_row: int, ids_L: torch.Tensor) -> list[int]:
            # The only token that is allowed is the given one: `generate` cannot say anything else.
            return [ids[len(ids_L) - asked]]

        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            _, waves = self.model.generate(
                **inputs,
                speaker=voice,
                return_audio=True,
                thinker_do_sample=False,
                thinker_max_new_tokens=len(ids),
                thinker_eos_token_id=list(self.thinker.end_ids),
                thinker_prefix_allowed_tokens_fn=only_its_words,
                **(settings or {}),
            )
        samples: np.ndarray = waves.reshape(-1).float().cpu().numpy()
        return samples


def _ended_by(is_given_up: Callable[[], bool], least: int) -> Callable[..., torch.Tensor]:
    """A stopping criterion of transformers, asked after each token: ends at `least` tokens or more."""

    def ends(ids_BL: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        is_over = ids_BL.shape[1] >= least and is_given_up()
        return torch.full((len(ids_BL),), is_over, device=ids_BL.device)

    return ends


def _of_talker(sampling: Sampling) -> JsonObject:
    """What is set of a sampling, as transformers' `generate` takes it for the talker."""
    if sampling.temperature == 0:
        return {"talker_do_sample": False}
    asked = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return {f"talker_{name}": value for name, value in asked.items() if value is not None}
