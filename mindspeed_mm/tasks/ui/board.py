"""`mm ui`: listens, and ends when it is told to. Servers that it has started end with it; runs go on."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from anyio import to_thread
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.os_errors import explained_os_error
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from mindspeed_mm.tasks.report.charts import SERIES
from mindspeed_mm.tasks.report.data import ReportedRun, read_run
from mindspeed_mm.tasks.report.report import page_environment, render_body
from mindspeed_mm.tasks.requests.serve import Access, UiRequest
from mindspeed_mm.tasks.serve.guard import Guard, guarded, page_headers
from mindspeed_mm.tasks.serve.limits import RefusedError
from mindspeed_mm.tasks.serve.listening import build_server, listen, shown_host
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.ui import configs, form
from mindspeed_mm.tasks.ui.files import inside, plain_files, shown_name
from mindspeed_mm.tasks.ui.jobs import Jobs, check_whole, look
from mindspeed_mm.tasks.ui.listing import Board


def run(request: UiRequest, access: Access, say: Callable[[str], None]) -> None:
    """Show a folder until a signal ends it.

    Args:
        request: What is shown, and where.
        access: Who may look, as `check_ui_request` found it.
        say: Is told the address.

    Raises:
        MachineError: The address is taken, or is none of this machine's.
    """
    listening = listen(request.host, request.port)
    jobs = Jobs(request.folder.resolve())
    try:
        ensure_torchvision()
        server = build_server(build_app(request, access, jobs), request.limits)
        # uvicorn raises the signal that ended it once more, for whoever was there before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        say(f"http://{shown_host(request.host)}:{listening.getsockname()[1]}/")
        server.run(sockets=[listening])
    finally:
        jobs.end()
        listening.close()


# --- routes, behind the guard of `mm serve` ---------------------------------------------------------------------------

TEMPLATE = "ui/board.html.j2"
_SCRIPTS = ("board.js", "making.js")
_MOST_ROWS, _MOST_RANKS = 50, 1024

Record = dict[str, Any]
Result = TypeVar("Result")
Answer = Callable[[Request], Awaitable[Response]]


def build_app(request: UiRequest, access: Access, jobs: Jobs) -> Guard:
    """The board as an ASGI application.

    Args:
        request: What is shown.
        access: Who may look.
        jobs: The processes that are started from it.
    """
    board = Board(request.folder)
    also = [folder.resolve() for folder in request.also]
    looking = LookingRoutes(board, Showing(board.root), jobs, request.read_only)
    routes = looking.routes()
    if not request.read_only:
        routes += MakingRoutes(board, jobs, also).routes()
    return guarded(Starlette(routes=routes), request.limits, access, Metrics())


def _board_page() -> str:
    """The page, with its scripts and styles inside: it fetches nothing but what it shows."""
    folder = Path(__file__).parent
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return page_environment().get_template(TEMPLATE).render(script=Markup(script), version=__version__)  # our own


class LookingRoutes:
    """What changes nothing: the list of runs, one of them, several beside one another."""

    def __init__(self, board: Board, showing: Showing, jobs: Jobs, read_only: bool) -> None:
        self._board, self._showing, self._jobs, self._read_only = board, showing, jobs, read_only
        self._page = _board_page()
        self._headers = page_headers(self._page)

    def routes(self) -> list[Route]:
        """Return the routes for whoever may look."""
        return [
            Route("/", self._show_page, name="page"),
            Route("/health", self._health, name="health"),
            Route("/api/runs", self._runs, name="runs"),
            Route("/api/show", self._show, methods=["POST"], name="show"),
        ]

    async def _show_page(self, _: Request) -> Response:
        return HTMLResponse(self._page, headers=self._headers)

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _runs(self, _: Request) -> Response:
        found = await in_thread(self._board.look)
        return _json_answer(
            {
                "folder": str(self._board.root),
                "read_only": self._read_only,
                "runs": [run.to_dict() for run in found.runs],
                "configs": found.configs,
                "notes": found.notes,
                "jobs": self._jobs.listed(),
            }
        )

    async def _show(self, request: Request) -> Response:
        asked = await body_of(request, runs=list, stamp=str)
        if not all(isinstance(run, str) for run in asked["runs"]):
            raise RefusedError(400, "runs are asked for by their ids.", param="runs", code="invalid_value")
        paths = [run_path(self._board, run) for run in asked["runs"]]
        stamp, html = await in_thread(self._showing.show, paths, asked["stamp"])
        return _json_answer({"stamp": stamp, "html": html})


class MakingRoutes:
    """What makes and checks configurations, shows their rows, and starts and stops runs."""

    def __init__(self, board: Board, jobs: Jobs, also: list[Path]) -> None:
        self._board, self._jobs, self._also = board, jobs, also
        self._root = board.root

    def routes(self) -> list[Route]:
        """Return the routes that a board for reading only does not have."""
        posts: dict[str, Answer] = {
            "configs/read": self._read,
            "configs/of-run": self._read_of_run,
            "configs/compose": self._compose,
            "configs/check": self._check,
            "configs/save": self._save,
            "configs/check-whole": self._check_whole,
            "preview": self._preview,
            "jobs/train": self._train,
            "jobs/serve": self._serve,
            "jobs/stop": self._stop,
        }
        made = [Route(f"/api/{path}", answer, methods=["POST"], name=path) for path, answer in posts.items()]
        return [Route("/api/fields", self._fields, name="fields"), *made]

    async def _fields(self, _: Request) -> Response:
        return _json_answer({"fields": await in_thread(form.fields), "first": len(form.FIRST)})

    async def _read(self, request: Request) -> Response:
        asked = await body_of(request, name=str)
        return _json_answer({"text": await in_thread(configs.read, self._root, asked["name"])})

    async def _read_of_run(self, request: Request) -> Response:
        asked = await body_of(request, run=str)
        return _json_answer({"text": await in_thread(configs.read_of_run, run_path(self._board, asked["run"]))})

    async def _compose(self, request: Request) -> Response:
        asked = await body_of(request, text=str, values=dict)
        values = {str(key): str(value) for key, value in asked["values"].items()}
        return _json_answer({"text": await in_thread(form.compose, asked["text"], values)})

    async def _check(self, request: Request) -> Response:
        asked = await body_of(request, text=str, name=str)
        name = asked["name"] if asked["name"].isprintable() else ""
        return _json_answer({"findings": await in_thread(configs.check_text, asked["text"], name or "the YAML")})

    async def _save(self, request: Request) -> Response:
        asked = await body_of(request, name=str, text=str, replace=bool)
        save = partial(configs.save, replace=asked["replace"])
        path = await in_thread(save, self._root, asked["name"], asked["text"])
        return _json_answer({"name": str(path.relative_to(self._root))})

    async def _check_whole(self, request: Request) -> Response:
        asked = await body_of(request, name=str)
        path = await in_thread(inside, self._root, asked["name"])
        return _json_answer(await in_thread(check_whole, self._root, path))

    async def _preview(self, request: Request) -> Response:
        asked = await body_of(request, name=str, count=int)
        path = await in_thread(inside, self._root, asked["name"])
        count = min(max(asked["count"], 1), _MOST_ROWS)
        return _json_answer({"html": await in_thread(self._preview_page, path, count)})

    def _preview_page(self, path: Path, count: int) -> str:
        configs.check_shows_inside(self._root, path, self._also)
        with TemporaryDirectory(prefix="mm-ui-") as folder:
            page = Path(folder) / "preview.html"
            words = ["data", "preview", str(path), f"--count={count}", f"--html={page}"]
            code, _, told = look(self._root, words)
            if code:
                raise RefusedError(400, told.strip() or f"the preview ended with exit code {code}.", code="preview")
            return page.read_text(encoding="utf-8")

    async def _train(self, request: Request) -> Response:
        asked = await body_of(request, name=str, nproc=int)
        if not 1 <= asked["nproc"] <= _MOST_RANKS:
            raise RefusedError(400, f"a host has 1 to {_MOST_RANKS} ranks.", param="nproc", code="invalid_value")
        path = await in_thread(inside, self._root, asked["name"])
        await in_thread(configs.check_stays_inside, self._root, path)
        job = await in_thread(self._jobs.train, path, asked["name"], asked["nproc"])
        return _json_answer(job.to_dict())

    async def _serve(self, request: Request) -> Response:
        asked = await body_of(request, run=str)
        path = run_path(self._board, asked["run"])
        job = await in_thread(self._jobs.serve, path, str(path.relative_to(self._root)))
        return _json_answer(job.to_dict())

    async def _stop(self, request: Request) -> Response:
        asked = await body_of(request, job=int)
        await in_thread(self._jobs.stop, asked["job"])
        return _json_answer({"jobs": self._jobs.listed()})


def run_path(board: Board, run: str) -> Path:
    """The folder of a run that was listed.

    Raises:
        RefusedError: No run of this id was listed, or it is gone.
    """
    path = board.path_of(run)
    if path is None or path.is_symlink() or not path.resolve().is_relative_to(board.root):
        raise RefusedError(404, "this run is not there any more.", param="run", code="run_not_found")
    return path


async def in_thread(do: Callable[..., Result], *given: object) -> Result:
    """Do something with files away from the event loop.

    Raises:
        RefusedError: What a person can act on, with the way out.
    """
    try:
        return await to_thread.run_sync(do, *given)
    except MMError as error:
        raise RefusedError(400, str(error), param=error.problems[0].key or None, code="invalid_value") from error
    except OSError as error:
        known = explained_os_error(error)
        if known is None:
            raise
        raise RefusedError(409, str(known), code="files") from error


async def body_of(request: Request, **kinds: type) -> Record:
    """The fields of a request.

    Raises:
        RefusedError: It is no JSON object with these fields of these kinds, and no others.
    """
    try:
        given = parse_json(await request.body(), finite=True)
    except ValueError as error:
        raise RefusedError(400, f"the request is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict) or given.keys() != kinds.keys():
        raise RefusedError(400, f"the request has the fields {', '.join(kinds)}.", code="invalid_fields")
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            raise RefusedError(400, f"'{name}' has another type.", param=name, code="invalid_value")
    return given


def _json_answer(content: Record) -> Response:
    """A JSON answer; half characters of file names are escapes in it."""
    return Response(json.dumps(content, default=str), media_type="application/json")


# --- runs that are shown ----------------------------------------------------------------------------------------------

_KEPT = 8
"""Rendered runs and comparisons that are kept until their files change."""


class Showing:
    """Renders runs, each again only when its files have changed.

    Args:
        root: The board's folder, without links; pictures are shown from below it alone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rendered: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def show(self, runs: Sequence[Path], stamp: str = "") -> tuple[str, str | None]:
        """HTML of runs for a page with the report's style sheet.

        Args:
            runs: Their folders, the one that others are compared with first.
            stamp: What the client has; empty: nothing.

        Returns:
            The stamp of what there is now, and the HTML; None where the client has it.

        Raises:
            UsageError: There are more runs than colours.
            DataError: A run is gone, holds links, or its files are not those of a run.
        """
        if not 0 < len(runs) <= len(SERIES):
            raise UsageError(f"{len(runs)} runs cannot be compared", way_out=f"Choose one to {len(SERIES)}.")
        now = self._stamp(runs)
        if now == stamp:
            return now, None
        with self._lock:  # matplotlib draws one picture at a time
            if now not in self._rendered:
                self._rendered[now] = self._render(runs)
            self._rendered.move_to_end(now)
            while len(self._rendered) > _KEPT:
                self._rendered.popitem(last=False)
            return now, self._rendered[now]

    def _stamp(self, runs: Sequence[Path]) -> str:
        """A digest of the names, sizes and times of all files that a report reads."""
        found = hashlib.sha256()
        for path in runs:
            run = RunFolder(path)
            bulky = [each.name for each in (run.tensorboard, run.log, run.lock_file)]
            try:
                names = [each.name for each in path.iterdir()]
                bulky += [name for name in names if name.startswith("iter_") or name in _UNREAD]
                for name, stamp in plain_files(path, bulky):
                    found.update(f"{path}\0{name}\0{stamp}\n".encode("utf-8", "surrogateescape"))
            except OSError as error:
                raise DataError("is gone, or cannot be read", where=path.name, way_out="Look at another.") from error
        return found.hexdigest()[:32]

    def _render(self, runs: Sequence[Path]) -> str:
        try:
            return render_body([self._inside(read_run(path)) for path in runs])
        except MMError:
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            what = f"holds files that no run of this version writes ({type(error).__name__}: {error})"
            raise DataError(what, where=", ".join(path.name for path in runs)) from error

    def _inside(self, run: ReportedRun) -> ReportedRun:
        """The run under the name that the board lists; pictures that it would fetch from elsewhere are looked for in
        its own folder."""
        named = replace(run, name=shown_name(run.path, self._root))
        folder = run.results.get("media_dir")
        if folder is None:
            return named
        where = Path(str(folder))
        is_inside = where.is_absolute() and where.resolve().is_relative_to(self._root)
        if is_inside:
            return named
        return replace(named, results={**run.results, "media_dir": str(run.path)})


_UNREAD = frozenset({"model", "rows", "rollouts", "hf", "exported"})
"""Folders of a run that no report reads."""
