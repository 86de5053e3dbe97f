"""`mm infer --speak`: a model that speaks says the prompt; one that answers as well says its answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_bytes, make_writable_folder
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.file_writing import check_medium_file
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.speech.voice import (
    AnsweringVoice,
    Reference,
    SpeechJob,
    Utterance,
    Voice,
    load_voice,
)
from mindspeed_mm.fsdp.utils.media_files import wave_bytes
from mindspeed_mm.tasks.answer.infer import media_items, sampling_of
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.infer import InferRequest


@dataclass(frozen=True)
class SpokenFile:
    """What a model said, and the file with its voice."""

    file: Path
    utterance: Utterance
    answer: Answer | None
    """Of a model that answers."""


def run(request: InferRequest) -> SpokenFile:
    """Speak the one prompt of a request, or the answer to it, into the WAV file that it names.

    Raises:
        MMError: The model does not speak or has no such voice, a medium cannot be read, or the file cannot be written.
    """
    assert request.speak is not None
    out = check_medium_file(request.speak, "WAV", [path for _, path in request.media], "--speak")
    source = resolve_model(request.model)
    voice = load_voice(source.folder, rows_view(source, request.config).of_people())
    answer: Answer | None = None
    if isinstance(voice, AnsweringVoice):
        # These options are for models that speak the prompt itself.
        for key, given in (("--audio-text", request.audio_text), ("--instructions", request.instructions)):
            if given is not None:
                what, way_out = "is for models that speak the prompt itself, and this one answers it", "Leave it out."
                raise UsageError(what, where=str(request.model), key=key, way_out=way_out)
        answer, said = voice.answer(request.prompt, media_items(request), sampling_of(request), request.speaker)
    else:
        said = voice.speak(_job(request, voice))
    make_writable_folder(out.parent)
    atomic_write_bytes(out, wave_bytes(said.sound))
    return SpokenFile(request.speak, said, answer)


def _job(request: InferRequest, voice: Voice) -> SpeechJob:
    """The prompt as something to say, by the voice of a recording where one is given.

    Raises:
        UsageError: Other media are given, several recordings, or beams.
        OSError: The recording cannot be read.
    """
    for kind, path in request.media:
        if kind != "audio" or len(request.media) > 1:
            what = "a model that speaks its prompt takes one recording of a voice, and nothing else"
            raise UsageError(what, where=str(path), key=f"--{kind}", way_out="Leave it out.")
    if (request.beams or 1) > 1:
        raise UsageError("speech is not searched by beams", key="--beams", way_out="Leave it out.")
    reference = None
    if request.audios:
        (path,) = request.audios
        reference = Reference(path.read_bytes(), str(path), request.audio_text)
    most = request.max_new_tokens or voice.usual_tokens
    sampling = Sampling(most, request.temperature, request.top_p, request.seed or 0, request.top_k)
    return SpeechJob(request.prompt, sampling, request.speaker, reference, request.instructions or "")
