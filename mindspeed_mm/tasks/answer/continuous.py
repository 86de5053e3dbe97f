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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.joint_work import WorkCounts
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.choosing import Chooser, RequestChoices, RowChoices, Sampling, TokenChoice
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError

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
            _try_out(generator, self._added)
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


# --- what fits --------------------------------------------------------------------------------------------------------
# Whether continuous batching gives a model's own answers: what can be seen of it, and a trial.

_NEEDS_TRANSFORMERS = "5.23"
"""Earlier ones name its settings otherwise, and their paged attention refuses the plain pass of `_try_out`."""
_HONOURED = frozenset(
    ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "bos_token_id",
     "pad_token_id", "max_length", "max_new_tokens", "transformers_version", "use_cache", "_from_model_config")
)  # fmt: skip
"""Fields of a generation configuration that are heeded here, or that change nothing."""
_PROBES = ((5, 3), (11, 7))
"""Length and first token of the questions by which a model is tried."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_SHORT_TOLERANCE = 0.05
"""How far scores may differ from those of a plain pass, as a share of their range: types of 16 bits round more."""


def is_new_enough() -> bool:
    """Whether the installed transformers is one whose continuous batching is used here."""
    return TorchVersion(version("transformers")) >= _NEEDS_TRANSFORMERS


def unfit(reason: str) -> UsageError:
    """The error of a model that is not answered so."""
    what = f"this model is not answered by continuous batching: {reason.rstrip('.')}"
    return UsageError(what, key="--engine", way_out="Leave it out, or choose batches.")


def why_not(generator: Generator) -> str | None:
    """What keeps a model from being answered so; None: nothing that can be seen without trying."""
    model = generator.model
    if not is_new_enough():
        return f"that needs transformers {_NEEDS_TRANSFORMERS}, and {version('transformers')} is installed"
    if generator.adapters:
        return "rows choose among adapters by name"
    if generator.encoder.processor is not generator.encoder.tokenizer:
        return "the model takes pictures, videos or sounds"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is '{model.config._attn_implementation}', and no other than sdpa is left as it is"
    border = generator.longest_alike
    if border is not None and (generator.longest is None or generator.longest > border):
        return f"its rotary frequencies follow the longest row of a pass, behind {border:,} tokens"
    settings = model.generation_config.to_diff_dict()
    others = sorted(key for key in set(settings) - _HONOURED if settings[key] not in (None, False))
    if others:
        return f"its generation configuration has {', '.join(others)}"
    return None


def _try_out(generator: Generator, ask: Callable[[LiveAnswer, Callable[[], Chooser | None]], Future[Answer]]) -> None:
    """Have two questions answered at a time, and compare the scores with those of a plain pass: nothing else tells
    whether all layers of a model read the paged cache, the positions and the masks that they are handed.

    Args:
        generator: The model, which nobody else uses.
        ask: Has a question answered by continuous batching, its tokens chosen by what the second argument makes.

    Raises:
        NotFiniteError: The model's scores are not finite.
        UsageError: The model fails, or its scores are others.
    """
    vocabulary = generator.model.get_input_embeddings().num_embeddings
    asked = []
    for length, first in _PROBES:
        ids, scores = (first + 7 * np.arange(length)) % vocabulary, _Scores()
        row = LiveAnswer(EncodedQuestion(ids, []), Sampling(3, temperature=0))
        asked.append((ids.tolist(), scores, ask(row, scores.chooser)))
    try:
        said = [future.result().token_ids for _, _, future in asked]
    except NotFiniteError:
        raise
    except Exception as error:  # whatever a model raises that cannot be answered so
        raise unfit(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]) from error
    # Only now: for the length of a pass, transformers 5.23 writes whether it is causal into the model's configuration,
    # where a pass of another thread reads it.
    for (ids, scores, _), tokens in zip(asked, said, strict=True):
        _check_scores(generator.model, torch.cat(scores.seen), [*ids, *tokens], len(ids))


def _check_scores(model: Any, paged_NV: torch.Tensor, ids: Sequence[int], asked: int) -> None:
    """Raise `UsageError` unless a plain pass gives these scores of the tokens behind the question."""
    with torch.no_grad():
        plain_LV = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float()
    plain_NV = plain_LV[asked - 1 : -1]
    share = (plain_NV - paged_NV[: len(plain_NV)]).abs().max() / (plain_NV.max() - plain_NV.min())
    if not share <= _TOLERANCE.get(model.dtype, _SHORT_TOLERANCE):
        raise unfit("its scores are not those of a plain pass through the model")


class _Scores:
    """Takes the likeliest token, and keeps what it was chosen by."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def chooser(self) -> Chooser:
        """This one, also for an answer that begins again."""
        return self

    def __call__(self, _ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores_1V.clone())
        return scores_1V
