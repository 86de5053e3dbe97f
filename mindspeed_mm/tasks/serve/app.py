"""The routes of the server, around the engine of one model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.speech_engine import SpeechEngine
from mindspeed_mm.tasks.draw.engine import DrawEngine
from mindspeed_mm.tasks.requests.serve import Access
from mindspeed_mm.tasks.serve.backend import Backend
from mindspeed_mm.tasks.serve.chat import ChatRoutes
from mindspeed_mm.tasks.serve.drawing import DrawRoutes
from mindspeed_mm.tasks.serve.fields import Names
from mindspeed_mm.tasks.serve.guard import Guard, guarded, page_headers
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.media_gate import MediaGate
from mindspeed_mm.tasks.serve.metrics import CONTENT_TYPE, Metrics
from mindspeed_mm.tasks.serve.passing_on import PassingRoutes
from mindspeed_mm.tasks.serve.speaking import SpeechRoutes

_PAGE = Path(__file__).with_name("page.html")
Engine = AnswerEngine | DrawEngine | SpeechEngine | Backend


def build_app(engine: Engine, name: str, limits: Limits, access: Access) -> Guard:
    """The server as an ASGI application; when it ends, the engine finishes what is there.

    Args:
        engine: Of a model that understands, of a generator or of a voice; or another server.
        name: That requests call the model by.
        limits: How much a request may have.
        access: Who may ask.
    """
    adapters = engine.generator.adapters if isinstance(engine, AnswerEngine) else ()
    answered: tuple[str, ...] = ("chat", "completions", "transcriptions")
    if isinstance(engine, DrawEngine):
        answered = ("images", "videos")
    elif isinstance(engine, AnswerEngine) and not engine.generator.encoder.hears:
        answered = ("chat", "completions")
    elif isinstance(engine, AnswerEngine) and engine.transcribes:
        answered = ("chat", "transcriptions")
    speech = _speech_of(engine)
    if speech is not None:
        answered = ("speech",) if speech is engine else (*answered, "speech")
    voices = tuple(speech.voice.names.values()) if speech is not None else ()
    metrics, names = Metrics(), Names(name, adapters, answered, voices)
    routes = routes_of(engine, names, limits, access, metrics)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if not isinstance(engine, Backend):
            engine.close(limits.max_seconds)

    return guarded(Starlette(routes=routes, lifespan=lifespan), limits, access, metrics)


def _speech_of(engine: Engine) -> SpeechEngine | None:
    """The part of an engine that speaks; None: it has none."""
    if isinstance(engine, SpeechEngine):
        return engine
    if isinstance(engine, AnswerEngine):
        return engine.speech
    return None


def routes_of(engine: Engine, names: Names, limits: Limits, access: Access, metrics: Metrics) -> list[BaseRoute]:
    """Return all routes of the server: those of every engine, and those of this engine's kind."""
    own = _model_routes(engine, names, limits, access, metrics)
    answered = {route.path for route in own}
    lacking = [path for path in _UNSUPPORTED if path not in answered]
    unsupported = [Route(path, _unsupported, methods=["POST"], name="unsupported") for path in lacking]
    return [*_common_routes(engine, names, metrics), *unsupported, *own]


def _common_routes(engine: Engine, names: Names, metrics: Metrics) -> list[BaseRoute]:
    page = _PAGE.read_text(encoding="utf-8")
    headers = page_headers(page)

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": names.listed()})

    async def model(request: Request) -> Response:
        asked = request.path_params["name"]
        names.check(asked)
        return JSONResponse(next(listed for listed in names.listed() if listed["id"] == asked))

    async def counts(_: Request) -> Response:
        if isinstance(engine, Backend):
            return PlainTextResponse(metrics.text({}), media_type=CONTENT_TYPE)
        done = engine.counts
        gauges = {
            "waiting": ("Questions or samples that wait.", float(engine.waiting)),
            "running": ("Questions or samples in the batch at work.", float(done.running)),
            "batches": ("Batches done.", float(done.batches)),
            "batched": ("Questions or samples in them.", float(done.jobs)),
            "busy_seconds": ("Time that the model has worked.", done.busy_s),
        }
        return PlainTextResponse(metrics.text(gauges), media_type=CONTENT_TYPE)

    return [
        Route("/", show_page, name="page"),
        Route("/health", health, name="health"),
        Route("/metrics", counts, name="metrics"),
        Route("/v1/models", models, name="models"),
        Route("/v1/models/{name:path}", model, name="models"),
    ]


def _model_routes(engine: Engine, names: Names, limits: Limits, access: Access, metrics: Metrics) -> list[Route]:
    post, speaking = ["POST"], []
    speech = _speech_of(engine)
    if speech is not None:
        gate = MediaGate(limits, MediaLimits(), access.media_folder, access.remote_hosts)
        speak = SpeechRoutes(speech, gate, limits, names, metrics).speak
        speaking = [Route("/v1/audio/speech", speak, methods=post, name="speech")]
    if isinstance(engine, SpeechEngine):
        return speaking
    if isinstance(engine, DrawEngine):
        draw = DrawRoutes(engine, limits, names, metrics)
        return [
            Route("/v1/images/generations", draw.images, methods=post, name="images"),
            Route("/v1/videos/generations", draw.videos, methods=post, name="videos"),
        ]
    taken = MediaLimits() if isinstance(engine, Backend) else engine.generator.encoder.media(Path()).limits
    gate = MediaGate(limits, taken, access.media_folder, access.remote_hosts)
    chat: ChatRoutes | PassingRoutes
    if isinstance(engine, Backend):
        chat = PassingRoutes(engine, gate, limits, names)
    else:
        chat = ChatRoutes(engine, gate, limits, names, metrics)
    return [
        *speaking,
        Route("/v1/chat/completions", chat.complete, methods=post, name="chat"),
        Route("/v1/completions", chat.complete_text, methods=post, name="completions"),
        Route("/v1/audio/transcriptions", chat.transcribe, methods=post, name="transcriptions"),
    ]


_UNSUPPORTED = {
    "/v1/responses": "ask /v1/chat/completions",
    "/v1/embeddings": "models that embed are served by vLLM or text-embeddings-inference",
    "/v1/images/edits": "mm infer edits pictures",
    "/v1/images/variations": "mm infer edits pictures",
    "/v1/audio/speech": "this model does not speak, or not as it is served here",
    "/v1/audio/translations": "ask /v1/audio/transcriptions, in the language of the sound",
    "/v1/moderations": "no model is served for it",
}
"""Routes of OpenAI's interface that are not built, and what to do instead."""


async def _unsupported(request: Request) -> Response:
    path = request.url.path
    raise RefusedError(400, f"'{path}' is not supported: {_UNSUPPORTED[path]}.", param=path, code="unsupported_route")
