"""Speech for requests that arrive one by one: a model says them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.joint_work import JointWorker, WorkCounts
from mindspeed_mm.fsdp.sampling.speech.voice import SpeechJob, Utterance, Voice

_NOTHING = nullcontext()


class SpeechEngine:
    """A model that speaks, on a thread of its own.

    Args:
        voice: The model.
        alone: Held while it speaks, where another engine answers with the same weights.
    """

    def __init__(self, voice: Voice, alone: AbstractContextManager[object] = _NOTHING) -> None:
        self.voice, self._alone = voice, alone
        self._worker: JointWorker[SpeechJob, Utterance] = JointWorker(
            self._speak, lambda _batch, _job: False, 1, "speech"
        )

    @property
    def counts(self) -> WorkCounts:
        """What was done so far."""
        return self._worker.counts

    @property
    def waiting(self) -> int:
        """Texts whose speech has not begun."""
        return self._worker.waiting

    def submit(self, job: SpeechJob) -> Future[Utterance]:
        """Have a text said. Cancelling the future takes it out of the queue; `is_given_up` of the job ends it. The
        future raises what `Voice.speak` raises."""
        return self._worker.submit(job)

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, and finish what is there."""
        self._worker.close(timeout_s)

    def _speak(self, jobs: Sequence[SpeechJob]) -> list[Utterance | Exception]:
        (job,) = jobs
        try:
            with self._alone:
                return [self.voice.speak(job)]
        except MMError as error:
            return [error]
