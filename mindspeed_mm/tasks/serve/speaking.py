"""`/v1/audio/speech`, answered by a model that speaks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from anyio import to_thread
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mindspeed_mm.core.errors import MachineError, MMError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob
from mindspeed_mm.fsdp.utils.media_files import SoundKind, sound_bytes
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from mindspeed_mm.tasks.serve.fields import Names, RequestFields, read_fields, refuse_unsupported
from mindspeed_mm.tasks.serve.guard import failure_of
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.media_gate import MediaGate
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.serve.waiting import result_of, within_limit


class SpeechFields(RequestFields):
    """OpenAI's request for speech, and what models take beside it; a recording to copy is named as vLLM-Omni names
    it."""

    input: str
    voice: str | None = None
    instructions: str | None = None
    response_format: SoundKind = "mp3"
    speed: Annotated[float, Field(strict=False)] | None = None
    stream_format: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None


_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "speed": ((None, 1.0), "Leave it out: models speak at their own speed."),
    "stream_format": ((None, "audio"), "Leave it out: speech comes whole."),
}
_NO_NAME = ("", "default")
"""Clients that must send a voice send one of these to models without names."""
_FIELD_OF = {
    "--speaker": "voice",
    "--audio": "ref_audio",
    "--audio-text": "ref_text",
    "--instructions": "instructions",
    "--prompt": "input",
    "prompt": "input",
    "--temperature": "temperature",
}
"""Key of an error → the field of a request that says the same."""
_TYPES: Mapping[SoundKind, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


@dataclass(frozen=True)
class SpeechRoutes:
    """Answers requests with sound files."""

    engine: SpeechEngine
    gate: MediaGate
    limits: Limits
    names: Names
    metrics: Metrics

    async def speak(self, request: Request) -> Response:
        """A sound file. Raises `RefusedError` where the request is refused."""
        async with within_limit(self.limits):
            fields = read_fields(await request.body(), SpeechFields)
            refuse_unsupported(fields, _WITHOUT_EFFECT)
            self.names.check(fields.model)
            gone = threading.Event()
            job = await to_thread.run_sync(self._job, fields, gone)
            try:
                future = self.engine.submit(job)
            except RuntimeError as error:
                raise RefusedError(503, "the server is ending.", code="ending") from error
            try:
                said = await result_of(future, request, gone.set)
            except MMError as error:
                raise _refused(error) from error
            kind = fields.response_format
            try:
                file = await to_thread.run_sync(sound_bytes, said.sound, kind)
            except ValueError as error:
                message = f"'{kind}' cannot be written here: {error}. Ask for 'wav' or 'pcm'."
                raise RefusedError(400, message, param="response_format", code="unsupported_value") from error
        self.metrics.count("speech_seconds", "Seconds of speech made.", said.seconds)
        ending = "stop" if said.finished else "length"
        headers = {"X-Finish-Reason": ending, "X-Sample-Rate": str(said.sound.rate)}
        return Response(file, media_type=_TYPES[kind], headers=headers)

    def _job(self, fields: SpeechFields, gone: threading.Event) -> SpeechJob:
        """What is to be said.

        Raises:
            RefusedError: It is too long, or the model cannot say it so.
        """
        texts = (fields.input, fields.instructions, fields.ref_text)
        characters = sum(len(text or "") for text in texts)
        self.limits.check("max_characters", characters, f"the request has {characters:,} characters of text")
        asked = fields.max_new_tokens
        if asked is not None:
            self.limits.check("max_new_tokens", asked, f"speech of {asked:,} tokens is asked for")
        most = asked or min(self.engine.voice.usual_tokens, self.limits.max_new_tokens)
        if fields.ref_text is not None and fields.ref_audio is None:
            message = "there is no 'ref_audio' that it could be said in."
            raise RefusedError(400, message, param="ref_text", code="invalid_value")
        name = fields.voice
        if name in _NO_NAME:
            name = None
        try:
            sampling = Sampling(most, fields.temperature, fields.top_p, fields.seed, fields.top_k)
            reference = self._reference(fields)
            job = SpeechJob(fields.input, sampling, name, reference, fields.instructions or "", gone.is_set)
            self.engine.voice.checked(job)
        except MMError as error:
            raise _refused(error) from error
        return job

    def _reference(self, fields: SpeechFields) -> Reference | None:
        """The recording whose voice is copied, once it has passed.

        Raises:
            RefusedError: It may not be opened, or is too large or too long.
            DataError: It cannot be read.
        """
        if fields.ref_audio is None:
            return None
        (item,) = self.gate.admit([MediaItem("audio", fields.ref_audio)])
        if isinstance(item.source, bytes):
            return Reference(item.source, "ref_audio", fields.ref_text)
        with self.gate.loader.open(item.source) as file:
            return Reference(file.read(), "ref_audio", fields.ref_text)


def _refused(error: MMError) -> RefusedError:
    """The answer to a request that the model or the server cannot do; clients may know which voices there are."""
    problem = error.problems[0]
    param = _FIELD_OF.get(problem.key, problem.key)
    if isinstance(error, MachineError | ModelFolderError):
        return failure_of(error, param)
    message = problem.what.rstrip(".") + "."
    if param == "voice" and "--" not in problem.way_out:
        message = f"{message} {problem.way_out}"
    return RefusedError(400, message, param=param or None, code="invalid_value")
