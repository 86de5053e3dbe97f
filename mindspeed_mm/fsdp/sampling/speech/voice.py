"""What every model that speaks offers, and which class speaks for a model folder.

`mm infer --speak`, `/v1/audio/speech` and `mm evaluate` ask a `Voice` and know no family. A family names its class in
its card: `voices: {<model type in config.json>: <module in this folder>.<class>}`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from torch import nn

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import read_audio
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.models.loading.folder import read_config
from mindspeed_mm.fsdp.params.cards import voices
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.finite import not_finite
from mindspeed_mm.fsdp.utils.media_files import SoundTrack
from mindspeed_mm.fsdp.utils.model_parts import longest_of
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

_ROOM = __name__.rpartition(".")[0]
SHORTEST_REFERENCE_S = 0.1


@dataclass(frozen=True)
class Reference:
    """A recording whose voice is copied."""

    file: bytes = field(repr=False)
    """A sound file, or a video with sound, in any format that rows may have."""
    file_name: str
    words: str | None = None
    """What is said in it; None: unknown."""

    def at(self, rate: int) -> np.ndarray:
        """Its samples (N,) float32 as one channel, `rate` a second.

        Raises:
            DataError: It cannot be read, or is shorter than `SHORTEST_REFERENCE_S`.
        """
        clip = read_audio(BytesIO(self.file), rate, self.file_name)
        if clip.seconds < SHORTEST_REFERENCE_S:
            what = f"lasts {clip.seconds:.3f} s, too short to be a voice"
            raise DataError(what, where=self.file_name, key="--audio", way_out="Give some seconds of speech.")
        return clip.samples


@dataclass(frozen=True)
class SpeechJob:
    """Something to say, and how."""

    text: str
    sampling: Sampling
    """How its tokens are chosen. What is None is as the model's generation configuration says."""
    name: str | None = None
    """One of `Voice.names`, in any case; None: the usual one."""
    reference: Reference | None = None
    instructions: str = ""
    """How to say it, in words."""
    is_given_up: Callable[[], bool] = lambda: False
    """Asked between tokens; once it is true, what was said so far is returned."""


@dataclass(frozen=True)
class Utterance:
    """Speech that a model made."""

    sound: SoundTrack
    name: str | None
    """Of the voice; None: that of the reference, or the model has no names."""
    finished: bool
    """False when `max_new_tokens` cut it off."""

    @property
    def seconds(self) -> float:
        """How long the sound lasts."""
        return self.sound.samples.shape[1] / self.sound.rate


def room_for(config: object, length: int, most: int) -> int:
    """How many tokens of speech there is room for behind a prompt: `most`, or fewer.

    Args:
        config: Of the model that says them.
        length: Tokens of the prompt.
        most: That are wanted.

    Raises:
        DataError: None.
    """
    longest = longest_of(config)
    room = most if longest is None else min(most, longest - length)
    if room < 1:
        what = f"the text and all that goes with it have {length} tokens, and the model takes {longest}"
        raise DataError(what, key="prompt", way_out="Say it in parts.")
    return room


class Voice(ABC):
    """A loaded model that speaks. A subclass loads itself from `(folder, view)` and fills in `_say`.

    Attributes:
        rate: Samples a second of what it says.
        usual_tokens: `max_new_tokens` where the caller does not say.
        names: Name in lower case → its voices; empty where it has none by name.
        usual_name: The voice of a job that names none and has no reference; None: it needs no name.
        copies: Whether it takes on the voice of a recording.
        reads_reference: Whether it also takes the words of that recording.
        follows_instructions: Whether words say how it speaks.
    """

    rate: int
    usual_tokens: int
    names: Mapping[str, str]
    usual_name: str | None = None
    copies: bool = False
    reads_reference: bool = False
    follows_instructions: bool = False

    @abstractmethod
    def __init__(self, folder: Path, view: RowsView | None = None) -> None:
        """Load a model folder.

        Args:
            folder: With weights, configuration and all parts that make sound.
            view: How rows were shown to the model, for families that answer; None: as the folder says.

        Raises:
            ModelFolderError: Weights or configuration are missing or broken.
        """

    @classmethod
    def can_speak(cls, config: Mapping[str, object]) -> bool:
        """Whether a model of this family speaks, by its config.json: a family may be released without its speech."""
        return True

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, nn.Module]:
        """Modules of all that computes, to look for broken weights in, by what stands before the names of their
        weights."""

    @abstractmethod
    def _say(self, job: SpeechJob) -> tuple[np.ndarray, bool]:
        """The samples (N,) float of a job that was checked, and whether it is whole. `job.name` is a value of `names`
        or None."""

    def speak(self, job: SpeechJob) -> Utterance:
        """Say a text.

        Raises:
            UsageError: The model has no such voice, copies none, or takes no instructions; the text is empty.
            NotFiniteError: Scores or samples are not finite.
            DataError: The reference is too short, or the text is longer than the model takes.
        """
        job = self.checked(job)
        samples, finished = self._say(job)
        return Utterance(self.sound_of(samples), job.name, finished)

    def checked(self, job: SpeechJob) -> SpeechJob:
        """The job with the name of its voice as `names` spells it.

        Raises:
            UsageError: It asks for something that the model does not have.
        """
        if not job.text.strip():
            raise UsageError("there is nothing to say", key="--prompt", way_out="Give a text.")
        if job.reference is not None:
            self._check_reference(job.reference, job.name)
        if job.instructions and not self.follows_instructions:
            raise UsageError("the model takes no instructions", key="--instructions", way_out="Leave them out.")
        return replace(job, name=self.name_of(job.name) if job.reference is None else None)

    def name_of(self, asked: str | None) -> str | None:
        """A voice as `names` spells it.

        Raises:
            UsageError: There is none of that name.
        """
        asked = asked or self.usual_name
        if asked is None:
            return None
        if (name := self.names.get(asked.lower())) is not None:
            return name
        way_out = f"Choose one of {', '.join(self.names.values())}." if self.names else "Leave it out."
        if not self.names and self.copies:
            way_out = "Leave it out, or give a recording of a voice: --audio."
        raise UsageError(f"there is no voice '{asked}'", key="--speaker", way_out=way_out)

    def _check_reference(self, reference: Reference, name: str | None) -> None:
        if not self.copies:
            known = ", ".join(self.names.values())
            way_out = f"Choose one of its own: {known}." if known else "Leave it out."
            raise UsageError("the model does not copy voices", key="--audio", way_out=way_out)
        if name is not None:
            way_out = "Leave out --speaker or --audio."
            raise UsageError("a voice is named and a recording given", key="--speaker", way_out=way_out)
        if reference.words is not None and not self.reads_reference:
            way_out = "Leave them out: it needs the recording alone."
            what = "the model does not read the words of a recording"
            raise UsageError(what, key="--audio-text", way_out=way_out)

    def sound_of(self, samples: np.ndarray) -> SoundTrack:
        """Samples (N,) as a sound of one channel.

        Raises:
            NotFiniteError: Some are not finite.
        """
        if not np.isfinite(samples).all():
            raise not_finite("the samples of the voice", self.parts)
        return SoundTrack(samples.reshape(1, -1).astype(np.float32), self.rate)


class AnsweringVoice(Voice):
    """A model that answers questions and speaks its answers. A plain job is spoken as if the text were its answer.

    Attributes:
        thinker: Answers in text alone, with the same weights: not while it speaks.
    """

    thinker: Generator

    @abstractmethod
    def answer(
        self, prompt: str, media: Sequence[MediaItem], sampling: Sampling, name: str | None = None
    ) -> tuple[Answer, Utterance]:
        """The answer to a prompt about some media, and its sound.

        Args:
            prompt: What is asked.
            media: What it shows.
            sampling: How the tokens of the answer are chosen. Its seed is the voice's, too.
            name: One of `names`, in any case; None: the usual one.

        Raises:
            UsageError: There is no such voice.
            NotFiniteError: Scores or samples are not finite.
            MMError: A medium cannot be read, or the model takes none of its kind.
        """


def voice_class(folder: Path) -> type[Voice] | None:
    """What speaks for a model folder; None: it does not speak.

    Raises:
        ModelFolderError: Its config.json cannot be read.
    """
    config = read_config(folder)
    named = voices().get(str(config.get("model_type")))
    if named is None:
        return None
    module, _, name = named.rpartition(".")
    prepare_for_transformers()  # before a family's module imports transformers
    found: type[Voice] = getattr(importlib.import_module(f"{_ROOM}.{module}"), name)
    if found.can_speak(config):
        return found
    return None


def is_speaker(folder: Path) -> bool:
    """Whether a model folder's model does nothing but speak.

    Raises:
        ModelFolderError: Its config.json cannot be read.
    """
    found = voice_class(folder)
    return found is not None and not issubclass(found, AnsweringVoice)


def load_voice(folder: Path, view: RowsView | None = None, key: str = "--speak") -> Voice:
    """The model of a folder that speaks, on this process's device.

    Args:
        folder: A model folder.
        view: How rows were shown to it, where it answers.
        key: What asks for speech, for messages.

    Raises:
        UsageError: It does not speak.
        ModelFolderError: Weights or configuration are missing or broken.
    """
    found = voice_class(folder)
    if found is None:
        what = "the model answers in words, and does not speak"
        way_out = f"Leave out {key}, or name a folder of a family that speaks (`mm models` lists them)."
        raise UsageError(what, where=str(folder), key=key, way_out=way_out)
    return found(folder, view)
