"""`mm infer --speak`: an answer that is spoken as well, by the talker and the speech decoder of a Qwen3-Omni folder.

The words are those of an answer that is not spoken. transformers' own `generate` of the whole model is then held to
them, and gives the voice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mindspeed_mm.core.artifacts import atomic_write_bytes
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.file_writing import check_output_place
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded, load_model_config
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator, in_dtype_of, move_to
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.sampling.finite import not_finite
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.media_files import SoundTrack, wave_bytes
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.tasks.answer.infer import media_items, sampling_of
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.infer import InferRequest

MODEL_TYPE = "qwen3_omni_moe"
SAMPLES_PER_S = 24_000
"""Of the speech decoder, as the model's authors publish it; the folder does not say."""
USUAL_VOICE = "Ethan"
"""That of transformers' `generate`."""


@dataclass(frozen=True)
class VoicedAnswer:
    """What a model said, and the file with its voice."""

    answer: Answer
    file: Path
    seconds: float
    speaker: str


class Speaker:
    """The whole of a model that thinks, talks and decodes speech.

    Args:
        folder: A Hugging Face folder.
        encoder: Shows it questions as training did.

    Raises:
        UsageError: It does not speak.
        ModelFolderError: Weights or configuration are missing or broken.
    """

    def __init__(self, folder: Path, encoder: QuestionEncoder) -> None:
        config = load_model_config(folder)
        if config.model_type != MODEL_TYPE or not config.enable_audio_output:
            way_out = "Speech is made of folders of Qwen3-Omni with their talker; leave it out for others."
            raise UsageError("the model does not speak", where=str(folder), key="--speak", way_out=way_out)
        from transformers import Qwen3OmniMoeForConditionalGeneration  # seconds

        try:
            with quiet("transformers"):
                model, report = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
                    folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
                )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            what, way_out = f"the model cannot be loaded: {first_line}", "Take the folder as it was published."
            raise ModelFolderError(what, where=str(folder), way_out=way_out) from error
        check_all_loaded(report, folder)
        # transformers 5.23 lets the talker count the positions of sounds by a section that it lacks.
        model.talker.config.audio_config = config.thinker_config.audio_config
        self.model = model.eval().to(current_device())
        self._thinker = Generator(self.model.thinker, encoder)
        self._encoder = encoder
        self.voices = {name.lower(): name for name in config.talker_config.speaker_id}

    def voice(self, asked: str) -> str:
        """The name of a voice, whatever its case.

        Raises:
            UsageError: The model has no such voice.
        """
        if asked.lower() not in self.voices:
            known = ", ".join(self.voices.values())
            raise UsageError(f"there is no voice '{asked}'", key="--speaker", way_out=f"Choose one of {known}.")
        return self.voices[asked.lower()]

    def speak(
        self, prompt: str, media: Sequence[MediaItem], sampling: Sampling, voice: str
    ) -> tuple[Answer, SoundTrack]:
        """The answer to a prompt about some media, and its sound.

        Args:
            prompt: What is asked.
            media: What it shows.
            sampling: How the tokens of the text are chosen. Its seed is the voice's, too, which is always sampled.
            voice: One of `voices`.

        Raises:
            NotFiniteError: The scores or the sound are not finite.
            MMError: A medium cannot be read, or the model takes none of its kind.
        """
        loader = self._encoder.media(Path.cwd(), [Path(item.source).parent for item in media])
        question = self._thinker.encode(ask(prompt, media).sample, loader)
        (answer,) = self._thinker.answer_live([LiveAnswer(question, sampling)])
        inputs = in_dtype_of(self.model, move_to(self._encoder.collate([question]), self.model.device))
        asked = len(question.input_ids)

        def only_its_words(_row: int, ids_L: torch.Tensor) -> list[int]:
            return [answer.token_ids[len(ids_L) - asked]]

        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(sampling.seed or 0)
            _, waves = self.model.generate(
                **inputs,
                speaker=voice,
                return_audio=True,
                thinker_do_sample=False,
                thinker_max_new_tokens=len(answer.token_ids),
                thinker_eos_token_id=list(self._thinker.end_ids),
                thinker_prefix_allowed_tokens_fn=only_its_words,
            )
        samples = waves.reshape(1, -1).float().cpu().numpy()
        if not np.isfinite(samples).all():
            raise not_finite("the samples of the voice", {"": self.model})
        return answer, SoundTrack(samples, SAMPLES_PER_S)


def run(request: InferRequest) -> VoicedAnswer:
    """Answer the one prompt of a request in words and, in the WAV file that it names, aloud.

    Raises:
        MMError: The model does not speak or has no such voice, a medium cannot be read, or the file cannot be written.
    """
    assert request.speak is not None
    out = resolve_output(request.speak)
    check_output_place(out, "--speak")
    source = resolve_model(request.model)
    spoken = Speaker(source.folder, QuestionEncoder(source.folder, rows_view(source, request.config).of_people()))
    voice = spoken.voice(request.speaker or USUAL_VOICE)
    answer, sound = spoken.speak(request.prompt, media_items(request), sampling_of(request), voice)
    atomic_write_bytes(out, wave_bytes(sound))
    return VoicedAnswer(answer, request.speak, sound.samples.shape[1] / sound.rate, voice)
