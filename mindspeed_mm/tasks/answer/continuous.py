"""Answers by transformers' continuous batching: a question joins those that are being answered with their next token,
and whoever is done makes room at once. For models of text alone: transformers' scheduler takes nothing but token ids.

Tokens are chosen as `Generator` chooses them, each row by settings of its own, so that both ways give the same answers.

Rows of a pass share one attention, in which NaN of one spreads to all. So rows whose scores are not finite are answered
again, each alone, and only those fail that are no better alone.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_mm.core.joint_work import WorkCounts
from mindspeed_mm.fsdp.sampling.answers.choosing import Chooser, RequestChoices, RowChoices, TokenChoice
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.tasks.answer.continuous_fit import try_out, unfit, why_not

STEP_TOKENS = 512
"""Tokens of one pass through the model: longer questions are read in several. The mask is this × all cached tokens."""
_PAGE_TOKENS = 256
_LOOK_S = 0.1


@dataclass(eq=False)
class _AnswerInWork:
    """A row that is answered, and who waits for it."""

    row: LiveAnswer
    chooser: Callable[[], Chooser | None]
    """Makes what chooses its tokens, the same each time."""
    future: Future[Answer] = field(default_factory=Future)
    has_begun: bool = False
    is_alone: bool = False
    """Nothing else is answered meanwhile."""


class ContinuousWorker:
    """Answers what is submitted, as a `JointWorker` around `Generator.answer_live` does.

    Args:
        generator: The model. While this works, nobody else may use it.
        most_rows: Answers at a time.
        most_tokens: Tokens that are kept of all of them, questions and answers; no question may have more.

    Raises:
        UsageError: The model's answers would not be those of `generate`, or its memory does not suffice.
    """

    def __init__(self, generator: Generator, *, most_rows: int = 32, most_tokens: int = 2**17) -> None:
        if (reason := why_not(generator)) is not None:
            raise unfit(reason)
        self._generator, self._most_rows = generator, most_rows
        longest = generator.longest or most_tokens
        # A row fills its last page only in part.
        self._pages = math.ceil(min(most_tokens, most_rows * longest) / _PAGE_TOKENS) + most_rows
        ends = generator.end_ids
        self._chooser, self._counts, self._busy_since_s = RequestChoices(ends[0] if ends else None), WorkCounts(), 0.0
        self._places: dict[str, _AnswerInWork] = {}
        """What transformers has, by the names of its requests."""
        self._suspects: deque[_AnswerInWork] = deque()
        """To be answered again, alone: their scores were not finite beside others."""
        self._held: deque[_AnswerInWork] = deque()
        """They have come meanwhile."""
        self._numbers = itertools.count()
        self._lock, self._ended, self._closed = threading.RLock(), threading.Event(), False
        try:
            self._manager = self._started()
        except Exception as error:  # whatever transformers raises for a model that it does not take so
            raise unfit((str(error).splitlines() or [type(error).__name__])[0]) from error
        self._thread = threading.Thread(target=self._listen, name="continuous", daemon=True)
        self._thread.start()
        try:
            try_out(generator, self._added)
        except BaseException:
            self.close(0)
            raise
        self._counts = WorkCounts()
        self._chooser.passes = 0

    @property
    def counts(self) -> WorkCounts:
        """What was done so far; a batch is a pass through the model."""
        running = sum(place.has_begun for place in list(self._places.values()))
        return WorkCounts(self._chooser.passes, self._counts.jobs, self._counts.busy_s, running)

    @property
    def waiting(self) -> int:
        """Number of rows, at work or held back, whose first token has not come."""
        return sum(not place.has_begun for place in (*self._places.values(), *self._held))

    def submit(self, row: LiveAnswer) -> Future[Answer]:
        """Have a question answered. Until its first token, cancelling the future gives its place up.

        Raises:
            RuntimeError: The worker is closed, or a part of the answer has been told.
        """
        choice = TokenChoice.of(row.sampling, self._generator.model.generation_config)
        if choice.is_plain:
            return self._added(row, lambda: None)
        start = self._generator.start(row, len(row.question.input_ids))
        if choice.seed is None:  # asked again, it draws the same
            choice = replace(choice, seed=secrets.randbits(63))
        device, grammars = self._generator.model.device, self._generator.grammars
        return self._added(row, lambda: RowChoices([choice], [start], device, grammars))

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, finish what is there, and end the threads; what is not done in time fails."""
        with self._lock:
            self._closed = True
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (self._held or self._suspects) and self._thread.is_alive() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        if self._manager.is_running() and timeout_s != 0:
            self._manager.stop(timeout=timeout_s)
        if self._manager.is_running():
            self._manager.stop(hard_stop=True)
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _started(self) -> Any:
        """A manager of transformers that waits for requests."""
        from transformers import ContinuousBatchingConfig, GenerationConfig  # seconds

        greedy = GenerationConfig(do_sample=False, eos_token_id=self._generator.end_ids or -1)
        settings = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=self._pages,
            max_batch_tokens=max(STEP_TOKENS, self._most_rows),
            max_requests_per_batch=self._most_rows,
            allow_block_sharing=False,  # blocks are told apart by Python's hash, for which others can find equals
            use_async_batching=False,  # else a token is chosen before the one in front of it is known
            use_cuda_graph=False,
            auto_switch_to_flash=False,  # which loads kernels from a hub
        )
        manager = self._generator.model.init_continuous_batching(greedy, settings)
        manager.logit_processor = self._chooser
        manager.warmup()  # builds the cache here, where its errors are heard
        manager.start()
        return manager

    def _added(self, row: LiveAnswer, chooser: Callable[[], Chooser | None]) -> Future[Answer]:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if not self._manager.is_running():  # it has failed: what it had is told so
                self._fail_all()
                self._manager.stop()
                self._manager = self._started()
            self._generator.begin(row)
            place = _AnswerInWork(row, chooser)
            place.future.add_done_callback(lambda future: self._give_up(place) if future.cancelled() else None)
            self._held.append(place)
            self._send()
        return place.future

    def _send(self) -> None:
        """Hand transformers what waits: suspects one by one, and only then the others."""
        if any(place.is_alone for place in self._places.values()):
            return
        if self._suspects:
            if not self._places:
                place = self._suspects.popleft()
                place.is_alone = True
                self._ask(place)
            return
        while self._held:
            self._ask(self._held.popleft())

    def _ask(self, place: _AnswerInWork) -> None:
        name, row, choose = str(next(self._numbers)), place.row, place.chooser()
        if not self._places:
            self._busy_since_s = time.monotonic()
        self._places[name] = place
        if choose is not None:
            self._chooser.of[name] = choose
        self._manager.add_request(
            row.question.input_ids.tolist(),
            name,
            row.most_tokens,
            True,
            eos_token_id=row.ends(self._generator.end_ids) or -1,
        )

    def _listen(self) -> None:
        """Hear every token of every request. Requests of which the manager says nothing before it ends have failed."""
        while True:
            manager = self._manager
            is_over, was_running = self._ended.is_set(), manager.is_running()
            output = manager.get_result(timeout=_LOOK_S)
            if output is not None:
                with self._lock:
                    self._hear(manager, output)
            elif not was_running:
                with self._lock:
                    if manager is self._manager:
                        self._fail_all()
                if is_over:
                    return
                self._ended.wait(_LOOK_S)

    def _hear(self, manager: Any, output: Any) -> None:
        place = self._places.get(output.request_id)
        if place is None:  # given up, or from a manager that has failed
            if not output.is_finished():
                manager.cancel_request(output.request_id)
            return
        row, future = place.row, place.future
        if not place.has_begun:
            if not future.set_running_or_notify_cancel():
                return  # and `_leave` has been called
            place.has_begun = True
        try:
            if output.error is not None:
                raise RuntimeError(output.error)
            answer = self._taken(output.request_id, row, output.generated_tokens)
            if row.ending == "failed" and place.is_alone:
                raise self._generator.fail([row])
        except Exception as error:  # noqa: BLE001 - the border of the thread: whoever waits is told
            self._leave(output.request_id)
            future.set_exception(error)
            self._send()
            return
        if row.ending == "failed":
            self._leave(output.request_id, is_done=output.is_finished())
            row.ending = None
            self._suspects.append(place)
            self._send()
        elif answer is not None:
            self._leave(output.request_id, is_done=output.is_finished())
            self._counts.jobs += 1
            future.set_result(answer)
            self._send()

    def _taken(self, name: str, row: LiveAnswer, tokens: list[int]) -> Answer | None:
        """The answer, once its tokens end it; a token that was chosen by scores that are not finite fails the row."""
        ends = row.ends(self._generator.end_ids)
        for token in tokens[len(row.token_ids) :]:
            if (token in ends or not ends) and not self._chooser.was_finite(name, len(row.token_ids)):
                row.fail()
                return None
            if row.take(token, ends):
                chooser = self._chooser.of.get(name)
                if isinstance(chooser, RowChoices):
                    row.log_probs = chooser.log_probs(0, len(row.token_ids))
                return self._generator.end(row)
        return None

    def _give_up(self, place: _AnswerInWork) -> None:
        """Free the place of somebody who waits no longer."""
        with self._lock:
            for waiting in (self._held, self._suspects):
                if place in waiting:
                    waiting.remove(place)
            for name in [name for name, each in self._places.items() if each is place]:
                self._leave(name)
            self._send()

    def _leave(self, name: str, *, is_done: bool = False) -> None:
        """Free the place of a request, and cancel the request unless `is_done`; does nothing for an unknown name."""
        with self._lock:
            if self._places.pop(name, None) is None:
                return
            self._chooser.forget(name)
            if not self._places:
                self._counts.busy_s += time.monotonic() - self._busy_since_s
        if not is_done:
            self._manager.cancel_request(name)

    def _fail_all(self) -> None:
        cause = self._manager.background_thread_status.fatal_error
        error = RuntimeError("the manager has ended") if cause is None else cause
        failed = [*self._places.values(), *self._suspects, *self._held]
        self._suspects.clear()
        self._held.clear()
        for name in list(self._places):
            self._leave(name, is_done=True)
        for place in failed:
            if place.has_begun or place.future.set_running_or_notify_cancel():
                place.future.set_exception(error)
