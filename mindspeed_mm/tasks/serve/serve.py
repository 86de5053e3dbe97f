"""`mm serve`: loads a model, listens, and ends when it is told to, once everything that runs is answered."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.speech.voice import AnsweringVoice, Voice, load_voice, voice_class
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.answer.continuous import ContinuousWorker
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.draw.engine import DrawEngine
from mindspeed_mm.tasks.draw.generate import load_generator as load_drawing
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters
from mindspeed_mm.tasks.requests.access import Access
from mindspeed_mm.tasks.requests.serve import BATCHES, CONTINUOUS, OWN, ServeRequest
from mindspeed_mm.tasks.serve.app import Engine, build_app
from mindspeed_mm.tasks.serve.backend import LONGEST_START_S, Served, running
from mindspeed_mm.tasks.serve.listening import build_server, listen, shown_host
from mindspeed_mm.tasks.serve.shared import SharedModel, load_shared

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


def _end_loading(number: int, _frame: Any) -> None:
    """A process that loads in our name ends with us."""
    raise SystemExit(128 + number)
