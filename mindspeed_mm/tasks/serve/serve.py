"""`mm serve`: loads a model, listens, and ends when it is told to, once everything that runs is answered."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import uvicorn

from mindspeed_mm.core.errors import MachineError, MMError, UsageError
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.speech.voice import AnsweringVoice, Voice, load_voice, voice_class
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.answer.continuous import ContinuousWorker
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator, load_on_ranks
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.draw.engine import DrawEngine
from mindspeed_mm.tasks.draw.generate import load_generator as load_drawing
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters
from mindspeed_mm.tasks.requests.serve import BATCHES, CONTINUOUS, OWN, Access, ServeRequest
from mindspeed_mm.tasks.serve.app import Engine, build_app
from mindspeed_mm.tasks.serve.backend import LONGEST_START_S, Served, running
from mindspeed_mm.tasks.serve.listening import build_server, listen, shown_host

_CACHED_TOKENS = 2**17
"""Of all questions that are answered at a time by continuous batching, unless one may have more."""
_LOOK_S = 0.2
"""How often is looked whether a server of ranks is to end."""


def run(request: ServeRequest, access: Access, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. With a plan every rank of the job calls it, and the first one listens.

    Args:
        request: What and how.
        access: Who may ask, as `check_request` found it.
        say: Is told the address.

    Raises:
        UsageError: What is served cannot be spread over ranks.
        MachineError: The address is taken, or is none of this machine's.
        MMError: The folder is not a model.
    """
    if request.plan is None:
        _listen(request, access, say, engine_of(request))
        return
    with joined_ranks(LONGEST_START_S) as ranks:
        if ranks.is_first:
            stop = StopSignal(LaunchFolder.of_this_rank())
            _listen(request, access, say, _leading(request, request.plan, ranks), lambda: stop.requested)
        else:
            _shared(request, request.plan, ranks).follow()


def _listen(
    request: ServeRequest,
    access: Access,
    say: Callable[[str], None],
    loading: AbstractContextManager[Engine],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    # before the model is loaded: an address that is taken is told at once
    listening = listen(request.host, request.port)
    signal.signal(signal.SIGTERM, _end_loading)
    try:
        with loading as engine:
            app = build_app(engine, request.shown_name, request.limits, access)
            # uvicorn raises the signal that ended it once more, for whoever was there before.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            say(f"http://{shown_host(request.host)}:{listening.getsockname()[1]}/v1")
            server = build_server(app, request.limits)
            with ended_by(is_over, server):
                server.run(sockets=[listening])
    finally:
        listening.close()


@contextmanager
def ended_by(is_over: Callable[[], bool], server: uvicorn.Server) -> Iterator[None]:
    """Inside, a server ends once `is_over` says so: ranks hear of a signal through a file of their launcher's."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            server.should_exit = server.should_exit or is_over()

    threading.Thread(target=watch, name="end", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _shared(request: ServeRequest, plan: Path, ranks: Ranks) -> SharedModel:
    """This rank's part of the model."""
    source = ranks.first("reading the model", lambda: with_adapters(resolve_model(request.model), request.lora))
    _check_speaking(request, source)
    return load_shared(source, rows_view(source, request.config).of_people(), plan, ranks)


@contextmanager
def _leading(request: ServeRequest, plan: Path, ranks: Ranks) -> Iterator[Engine]:
    """A model that all ranks share, for the first of them."""
    shared = _shared(request, plan, ranks)
    try:
        yield AnswerEngine(shared.generator, most_rows=request.batch_size, answer=shared.answer)
    finally:
        # also where the server failed: the other ranks wait in a collective without a limit
        shared.end()
    if shared.failure is not None:
        raise shared.failure


@contextmanager
def engine_of(request: ServeRequest) -> Iterator[Engine]:
    """The model in this process, or behind another engine, of a request that was checked.

    Raises:
        UsageError: Continuous batching is asked for, and not for this model.
        MachineError: The other engine is not installed, or did not start.
        MMError: The folder is not a model.
    """
    if kind_of_path(request.model) is GENERATOR:
        sampler, defaults = load_drawing(request.model, lora=request.lora, config=request.config)
        yield DrawEngine(sampler, defaults, most_samples=request.batch_size)
        return
    source = with_adapters(resolve_model(request.model), request.lora)
    view = rows_view(source, request.config).of_people()
    speaks = _check_speaking(request, source)
    if request.is_own:
        if speaks:
            engine = _speaking(request, load_voice(source.folder, view))
        else:
            engine = _answering(request, load_generator(source.folder, source.lora, view, request.adapter_folders))
        try:
            with passed_over_by_collection():
                yield engine
        finally:
            engine.close(0)
        return
    with running(request.engine, Served(source.folder, request.shown_name, view, source.lora)) as backend:
        yield backend


def _answering(request: ServeRequest, generator: Generator) -> AnswerEngine:
    """What answers: continuous batching, or batches of `generate`. Left to choose, a CPU takes batches, where they are
    faster, and so does a model that continuous batching is not for.

    Raises:
        UsageError: Continuous batching is asked for, and not for this model.
    """
    if request.engine == CONTINUOUS or (request.engine == OWN and get_device_type() != "cpu"):
        longest = request.limits.max_prompt_tokens + request.limits.max_new_tokens
        try:
            worker = ContinuousWorker(generator, most_rows=request.batch_size, most_tokens=max(_CACHED_TOKENS, longest))
            return AnswerEngine(generator, worker=worker)
        except UsageError:
            if request.engine == CONTINUOUS:
                raise
    return AnswerEngine(generator, most_rows=request.batch_size)


def _check_speaking(request: ServeRequest, source: ModelSource) -> bool:
    """Whether a model is loaded with its voice. One that also answers is loaded without, where its voice does not go
    with what is asked.

    Raises:
        UsageError: It does nothing but speak, and not so.
    """
    kind = voice_class(source.folder)
    if kind is None:
        return False
    answers = issubclass(kind, AnsweringVoice)
    engines = (OWN, BATCHES) if answers else (OWN,)
    unfit = {
        "--plan": request.plan is not None,
        "--lora": source.lora is not None,
        "--adapter": bool(request.adapters),
        "--engine": request.engine not in engines,
    }
    key = next((key for key, is_unfit in unfit.items() if is_unfit), None)
    if key is None or answers:
        return key is None
    what = "a model that speaks is served whole, by one process of this package"
    way_out = "Merge the adapters first: mm merge." if key == "--lora" else "Leave it out."
    raise UsageError(what, where=str(source.folder), key=key, way_out=way_out)


def _speaking(request: ServeRequest, voice: Voice) -> AnswerEngine | SpeechEngine:
    """A model that speaks; where it answers as well, one thing at a time, as both change the state of its parts."""
    if not isinstance(voice, AnsweringVoice):
        return SpeechEngine(voice)
    alone, thinker = threading.Lock(), voice.thinker

    def answer(rows: Sequence[LiveAnswer]) -> list[Answer]:
        with alone:
            return thinker.answer_live(rows)

    speech = SpeechEngine(voice, alone)
    return AnswerEngine(thinker, most_rows=request.batch_size, answer=answer, speech=speech)


def _end_loading(number: int, _frame: object) -> None:
    """A process that loads in our name ends with us."""
    raise SystemExit(128 + number)


# --- served by all ranks ----------------------------------------------------------------------------------------------
# A server whose model does not fit one device: it is spread over the ranks of a job by the plan of a YAML. The first
# rank hears the clients, and sends each batch to the others, which compute it together with it.

_BETWEEN_REQUESTS = timedelta(days=365)
"""Ranks wait for the next batch as long as nobody asks. One whose peers are gone hears of it at once."""
LONE_FAILURE_S = 60.0
"""What fails on one rank alone leaves the others within a collective that never ends. Ranks finish a batch within
moments of one another: after so long, a rank knows that the others will not come."""
_LONGEST_MESSAGE = 300
_START_AGAIN = "See what the ranks printed, and start the server again."
_Sent = list[tuple[EncodedQuestion, Sampling]]


class SharedModel:
    """A model whose parts lie on all ranks of a job, so that all of them answer each batch.

    Args:
        generator: This rank's part.
        ranks: All of them; every rank makes this object.
    """

    def __init__(self, generator: Generator, ranks: Ranks) -> None:
        self.generator, self._ranks = generator, ranks
        self._calls = dist.new_group(backend="gloo", timeout=_BETWEEN_REQUESTS)
        self._outcomes = Ranks(LONE_FAILURE_S)
        self.failure: MachineError | None = None
        """Set once ranks have lost one another: nothing can be answered any more."""

    def answer(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        """Answer a batch, as `Generator.answer_live` does, on all ranks. Called by the first one.

        Raises:
            MMError: Some rank failed.
        """
        if self.failure is not None:
            raise self.failure
        for row in rows:
            row.check_untold()  # the others begin with what they are sent, and cannot be called back
        try:
            self._call([(row.question, row.sampling) for row in rows])
            return self._answer(rows)
        except (MachineError, RuntimeError) as error:
            if isinstance(error, MachineError):
                self.failure = error
            else:
                self.failure = MachineError(f"ranks are gone: {error}", way_out=_START_AGAIN)
            os.kill(os.getpid(), signal.SIGTERM)  # the server ends, and this error is told
            raise

    def follow(self) -> None:
        """Take part in every batch until the first rank ends. Called by the others.

        Raises:
            MachineError: Ranks have lost one another.
        """
        while (batch := self._call(None)) is not None:
            try:
                self._answer([LiveAnswer(question, sampling) for question, sampling in batch])
            except MachineError:
                raise
            except MMError:
                pass  # all ranks have failed alike: the first one tells whoever asked

    def end(self) -> None:
        """Let the other ranks end. Called by the first one."""
        if self.failure is None:
            self._call(None)

    def _call(self, batch: _Sent | None) -> _Sent | None:
        """What the first rank calls the others to do; None: to end."""
        called: list[Any] = [batch]
        # on gloo: an NCCL collective that waits would keep the device busy
        dist.broadcast_object_list(called, group=self._calls, group_src=0)
        found: _Sent | None = called[0]
        return found

    def _answer(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        """The answers; the same error on all ranks where some failed.

        Raises:
            MachineError: This rank failed, and others compute on; or others are gone.
        """
        own_failures: list[Exception] = []

        def answer() -> list[Answer]:
            try:
                return self.generator.answer_live(rows)
            except Exception as error:
                own_failures.append(error)
                raise

        try:
            return self._outcomes.together("answering", answer)
        except MachineError as error:
            if not own_failures:
                raise
            (failure,) = own_failures
            first_line = (str(failure).splitlines() or [""])[0][:_LONGEST_MESSAGE]
            what = f"rank {self._ranks.rank} failed to answer: {type(failure).__name__}: {first_line}"
            raise MachineError(what, way_out=_START_AGAIN) from error


def load_shared(source: ModelSource, view: RowsView, plan: Path, ranks: Ranks) -> SharedModel:
    """This rank's part of a model. Every rank calls it.

    Raises:
        UsageError: The model searches beams, which ranks that share it do not.
        MMError: As `load_on_ranks`.
    """
    generator = load_on_ranks(source, view, plan, ranks)
    beams = getattr(generator.model.generation_config, "num_beams", None) or 1
    if beams > 1:
        raise UsageError(
            f"the model's generation configuration asks for {beams} beams, which are not searched by a model that is "
            "spread over ranks",
            where=str(source.folder / "generation_config.json"),
            key="num_beams",
            way_out="Set it to 1, or leave --plan out.",
        )
    return SharedModel(generator, ranks)
