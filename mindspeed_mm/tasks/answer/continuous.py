"""Answers by transformers' continuous batching: a question joins those that are being answered with their next token,
and whoever is done makes room at once. For models of text alone: transformers' scheduler takes nothing but token ids.

Tokens are chosen as `Generator` chooses them, each row by settings of its own, so that both ways give the same answers.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
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
    future: Future[Answer] = field(default_factory=Future)
    has_begun: bool = False


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
        self._chooser, self._counts, self._busy_since_s = RequestChoices(), WorkCounts(), 0.0
        self._places: dict[str, _AnswerInWork] = {}
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
        """Rows without a token."""
        return sum(not place.has_begun for place in list(self._places.values()))

    def submit(self, row: LiveAnswer) -> Future[Answer]:
        """Have a question answered. Until its first token, cancelling the future gives its place up.

        Raises:
            RuntimeError: The worker is closed, or a part of the answer has been told.
        """
        choice = TokenChoice.of(row.sampling, self._generator.model.generation_config)
        is_plain = not choice.temperature and choice.repetition_penalty == 1
        return self._added(row, None if is_plain else RowChoices([choice], [0], self._generator.model.device))

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, finish what is there, and end the threads; what is not done in time fails."""
        with self._lock:
            self._closed = True
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

    def _added(self, row: LiveAnswer, choose: Chooser | None) -> Future[Answer]:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if not self._manager.is_running():  # it has failed: what it had is told so
                self._fail_all()
                self._manager.stop()
                self._manager = self._started()
            self._generator.begin(row)
            name, place = str(next(self._numbers)), _AnswerInWork(row)
            if not self._places:
                self._busy_since_s = time.monotonic()
            self._places[name] = place
            if choose is not None:
                self._chooser.of[name] = choose
            place.future.add_done_callback(lambda future: self._leave(name) if future.cancelled() else None)
            self._manager.add_request(
                row.question.input_ids.tolist(), name, row.most_tokens, True, eos_token_id=self._generator.end_ids or -1
            )
        return place.future

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
            ends = self._generator.end_ids
            is_over = any(row.take(token, ends) for token in output.generated_tokens[len(row.token_ids) :])
            answer = self._generator.end(row) if is_over else None
        except Exception as error:  # noqa: BLE001 - the border of the thread: whoever waits is told
            self._leave(output.request_id)
            future.set_exception(error)
            return
        if answer is not None:
            self._leave(output.request_id, is_done=output.is_finished())
            self._counts.jobs += 1
            future.set_result(answer)

    def _leave(self, name: str, *, is_done: bool = False) -> None:
        """Free a place."""
        with self._lock:
            if self._places.pop(name, None) is None:
                return
            self._chooser.of.pop(name, None)
            if not self._places:
                self._counts.busy_s += time.monotonic() - self._busy_since_s
        if not is_done:
            self._manager.cancel_request(name)

    def _fail_all(self) -> None:
        cause = self._manager.background_thread_status.fatal_error
        error = RuntimeError("the manager has ended") if cause is None else cause
        for name, place in list(self._places.items()):
            self._leave(name, is_done=True)
            if place.has_begun or place.future.set_running_or_notify_cancel():
                place.future.set_exception(error)
