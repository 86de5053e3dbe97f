"""`mm evaluate --harness`: serves the model, runs the harness beside it, and reads the harness's figures back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import DataError, MachineError, UsageError
from mindspeed_mm.core.file_writing import check_output_file, is_object_of
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.fsdp.sampling.answers.scoring import Z_95
from mindspeed_mm.tasks.answer.remote import RemoteModel
from mindspeed_mm.tasks.evaluate.folder import Facts, results_folder
from mindspeed_mm.tasks.evaluate.harness.served import BATCH_SIZE, Folder, ServedModel, served
from mindspeed_mm.tasks.evaluate.outside import Call, OutsidePackage, Wanted, find_outside
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest, names_of
from mindspeed_mm.tasks.requests.shared import is_address, read_key

RESULTS = "harness.json"
FILES = "files"
"""Folder of what the harness itself has written."""
_is_results = is_object_of(("harness", "tasks", "model", "options", "seconds"), (), "harness", ("name", "version"))


@dataclass(frozen=True)
class HarnessResult:
    """Holds the figures that a harness measured for each task, and facts about the evaluation."""

    tasks: dict[str, TaskFigures]
    facts: Facts

    def to_dict(self) -> dict[str, object]:
        """Return the content of `harness.json`: the facts, and the figures of each task."""
        return {**self.facts, "tasks": {name: found.to_dict() for name, found in self.tasks.items()}}

    def lines(self) -> list[str]:
        """Return lines of text with each task's figures, headed by the harness and its version."""
        harness = self.facts["harness"]
        title = f"{harness['name']} {harness['version']}"
        lines = []
        for name, found in self.tasks.items():
            lines += [f"{title}, {line}" for line in found.lines(name)]
        return lines


def run(request: EvaluateRequest) -> HarnessResult:
    """Let the harness ask the model, and write `harness.json`.

    Raises:
        UsageError: The model is a generator, or the folder for the results holds files of others.
        MachineError: The harness is not installed, the model cannot be served, or the harness found nothing.
    """
    assert request.harness is not None
    harness, (asked, place) = _HARNESSES[request.harness], _model_of(request)
    if isinstance(asked, Folder) and kind_of_path(asked.model) is GENERATOR:
        what = "is a generator, and harnesses ask models that answer"
        way_out = "Measure what it draws: mm evaluate SAMPLES --generated."
        raise UsageError(what, where=str(asked.model), key="--harness", way_out=way_out)
    out = request.out or place / request.harness
    check_output_file(out / RESULTS, _is_results, "--out")
    package = find_outside(harness.wanted, request.harness_python)
    files = (out / FILES).absolute()
    make_writable_folder(files)
    began = time.monotonic()
    with _asked_model(asked) as model:
        tasks_asked = names_of(request.tasks)
        call = harness.call(
            package, HarnessCall(model, tasks_asked, files, request.max_new_tokens, request.harness_options)
        )
        before = snapshot(files, harness.results)
        code = package.run(call)
    tasks = harness.read(_read_newest(files, harness.results, before))
    if not any(found.figures for found in tasks.values()):
        raise _nothing_found(package, code, tasks)
    result = HarnessResult(tasks, _facts(request, asked, package, time.monotonic() - began))
    atomic_write_text(out / RESULTS, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    return result


def _model_of(request: EvaluateRequest) -> tuple[ServedModel | Folder, Path]:
    """What the harness asks, and the folder in which results of it have theirs.

    Raises:
        UsageError: An option is for the address of a server, and a folder is named, or the other way round.
    """
    if is_address(request.model):
        others = ("lora", "config", "plan", "batch_size")
        request.refuse(others, "is for models that are loaded here, and a server has loaded its own")
        server = RemoteModel.at(request.model, request.name or "", key := read_key(request.key_file))
        return ServedModel(server.address, server.name, key), results_folder(None, Path(server.name))
    request.refuse(("name", "key_file"), "is for the address of a server")
    size = request.batch_size or BATCH_SIZE
    asked = Folder(
        request.folder, size, request.lora, request.config, request.plan, request.nproc, plugins=request.plugins
    )
    source = resolve_model(asked.model)
    return asked, results_folder(source.run, source.folder)


@contextmanager
def _asked_model(model: ServedModel | Folder) -> Iterator[ServedModel]:
    if isinstance(model, ServedModel):
        yield model
        return
    with served(model) as asked:
        yield asked


def _nothing_found(package: OutsidePackage, code: int, tasks: dict[str, TaskFigures]) -> MachineError:
    troubles = []
    for name, found in tasks.items():
        if found.trouble:
            troubles.append(f"{name}: {found.trouble}")
    what = f"{package.wanted.title} ended with exit code {code} and has written no figures"
    if troubles:
        what += f" ({'; '.join(troubles)})"
    return MachineError(what, key="--harness", way_out="What it printed above says why.")


def _facts(request: EvaluateRequest, model: ServedModel | Folder, package: OutsidePackage, seconds: float) -> Facts:
    told = f"{model.name} at {model.address}" if isinstance(model, ServedModel) else str(model.model.absolute())
    return {
        "harness": {"name": package.wanted.title, "version": package.version},
        "model": told,
        "options": list(request.harness_options),
        "seconds": round(seconds, 3),
    }


# --- harnesses --------------------------------------------------------------------------------------------------------
# How each is started beside a server, and where it writes what:
# - lmms-eval 0.7 (`lmms_eval/__main__.py`, `loggers/evaluation_tracker.py`): `<date>_results.json` contains, under
#   `results`, `metric,filter` and `metric_stderr,filter` of each task, and the number of questions under `n-samples`.
#   It exits with 0 even if nothing was evaluated.
# - VLMEvalKit (`run.py`, `vlmeval/smp/status.py`): `status.json` in the folder of a run lists `datasets` with their
#   `metrics`, `primary_metric`, and `error_message` or `skip_reason`.

_USUAL_LENGTH = 2048
"""Tokens of an answer that VLMEvalKit asks for; its own default, 32768, is more than many models have positions."""
_KEY = "--harness-python"

Content = Mapping[str, Any]
"""Of a file that a harness wrote, or a table in it."""


@dataclass(frozen=True)
class HarnessCall:
    """What a harness is to do.

    Args:
        model: The model behind a server.
        tasks: Names as the harness has them.
        folder: Where it writes its files.
        max_new_tokens: Longest answer; None: what the harness asks for.
        options: Further words of its command line.
    """

    model: ServedModel
    tasks: Sequence[str]
    folder: Path
    max_new_tokens: int | None = None
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Harness:
    """Describes an evaluation harness: which package it is, how to call it and how to read its figures."""

    wanted: Wanted
    call: Callable[[OutsidePackage, HarnessCall], Call]
    results: str
    """Pattern of the file that its figures stand in."""
    read: Callable[[Content], dict[str, TaskFigures]]
    """Content of that file → task → figures."""


def _call_lmms_eval(_: OutsidePackage, asked: HarnessCall) -> Call:
    words = ["--model", "async_openai", "--model_args", f"model={asked.model.name}"]
    words += ["--tasks", ",".join(asked.tasks), "--batch_size", "1"]
    words += ["--output_path", str(asked.folder), "--log_samples"]
    if asked.max_new_tokens is not None:
        words += ["--gen_kwargs", f"max_new_tokens={asked.max_new_tokens}"]
    environment = {"OPENAI_API_BASE": asked.model.address, "OPENAI_API_KEY": asked.model.key or "none"}
    return Call("lmms_eval", [*words, *asked.options], environment)


def _read_lmms_eval(content: Content) -> dict[str, TaskFigures]:
    results, counts = content.get("results") or {}, content.get("n-samples") or {}
    tasks = {}
    for name, found in results.items():
        counted = _as_number((counts.get(name) or {}).get("effective"))
        n = None if counted is None else int(counted)
        tasks[name] = TaskFigures(_figures_of_lmms_task(found), n)
    return tasks


def _figures_of_lmms_task(found: Content) -> dict[str, Figure]:
    figures = {}
    for key, written in found.items():
        metric, comma, chosen = key.rpartition(",")
        value = _as_number(written)
        if not comma or value is None or "_stderr" in metric:
            continue
        error = _standard_error(found, metric, chosen)
        name = metric if chosen == "none" else f"{metric} ({chosen})"
        figures[name] = Figure(value)
        if error:  # of 0 answers have all fared alike, which does not make the figure certain
            figures[name] = Figure(value, value - Z_95 * error, value + Z_95 * error)
    return figures


def _standard_error(found: Content, metric: str, chosen: str) -> float | None:
    """Of a figure. Questions about one picture hang together: where the harness knows which, its clustered error is
    right."""
    for kind in ("_clustered", "_clt", ""):
        error = _as_number(found.get(f"{metric}_stderr{kind},{chosen}"))
        if error is not None:
            return error
    return None


def _call_vlmevalkit(package: OutsidePackage, asked: HarnessCall) -> Call:
    script = package.folder.parent / "run.py"
    if not script.is_file() or "--base-url" not in script.read_text(encoding="utf-8", errors="replace"):
        what = "has no run.py beside it that takes --base-url"
        way_out = "Install a newer checkout of VLMEvalKit, in place: pip install -e VLMEvalKit."
        raise MachineError(what, where=str(package.folder), key=_KEY, way_out=way_out)
    words = ["--data", *asked.tasks, "--model", asked.model.name, "--base-url", asked.model.address]
    words += ["--work-dir", str(asked.folder), "--judge", "exact_matching"]
    words += ["--max-tokens", str(asked.max_new_tokens or _USUAL_LENGTH)]
    return Call(script, [*words, *asked.options], {"LMDEPLOY_API_KEY": asked.model.key or "none"})


def _read_vlmevalkit(content: Content) -> dict[str, TaskFigures]:
    return {name: _of_vlmevalkit_set(found) for name, found in (content.get("datasets") or {}).items()}


def _of_vlmevalkit_set(found: Content) -> TaskFigures:
    figures = {}
    for name, written in (found.get("metrics") or {}).items():
        value = _as_number(written)
        if value is not None:
            figures[name] = Figure(value)
    chief = found.get("primary_metric") or []
    if isinstance(chief, str):
        chief = [chief]
    trouble = str(found.get("error_message") or found.get("skip_reason") or "")
    return TaskFigures(figures, chief=[name for name in chief if name in figures], trouble=trouble)


_HARNESSES = {
    "lmms-eval": Harness(
        Wanted("lmms-eval", "lmms_eval", _KEY, "pip install lmms-eval"),
        _call_lmms_eval,
        "*_results.json",
        _read_lmms_eval,
    ),
    "vlmevalkit": Harness(
        Wanted("VLMEvalKit", "vlmeval", _KEY, "pip install -e of its checkout"),
        _call_vlmevalkit,
        "status.json",
        _read_vlmevalkit,
    ),
}


# --- figures ----------------------------------------------------------------------------------------------------------
# The same form whichever harness found them.

_MOST_TOLD = 8


@dataclass(frozen=True)
class Figure:
    """One number in the harness's own unit, with a 95 % interval where the harness gives a standard error."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} (95 % interval {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class TaskFigures:
    """What was found on one task."""

    figures: Mapping[str, Figure]
    n: int | None = None
    """Questions, where the harness says how many."""
    chief: Sequence[str] = ()
    """Names of the figures that the harness puts first; none: all are alike."""
    trouble: str = ""
    """Why there are no figures."""

    def to_dict(self) -> JsonObject:
        """What `harness.json` holds of a task."""
        figures = {name: asdict(figure) for name, figure in self.figures.items()}
        return {"figures": figures, "n": self.n, "chief": list(self.chief), "trouble": self.trouble}

    def lines(self, task: str) -> list[str]:
        """For people: a line a figure, of many figures only the chief ones."""
        if not self.figures:
            return [f"{task}: no figures: {self.trouble or 'the harness has written none'}"]
        names = list(self.figures)
        if self.chief and len(names) > _MOST_TOLD:
            names = list(self.chief)
        counted = ""
        if self.n is not None:
            counted = f", n={self.n}"
        return [f"{task}, {name}: {self.figures[name]}{counted}" for name in names]


def _as_number(value: object) -> float | None:
    """A number that a harness has written, also as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if math.isfinite(number):
        return number
    return None


_Snapshot = Mapping[Path, int]
"""File → when it was changed."""


def snapshot(folder: Path, pattern: str) -> _Snapshot:
    """Files below a folder, by the name that they really have."""
    return {path.resolve(): path.stat().st_mtime_ns for path in folder.rglob(pattern) if path.is_file()}


def _read_newest(folder: Path, pattern: str, before: _Snapshot) -> JsonObject:
    """The newest object that was written or changed since a snapshot; empty where there is none.

    Raises:
        DataError: It is not an object of JSON.
    """
    now = snapshot(folder, pattern)
    changed = [path for path, time_ns in now.items() if before.get(path) != time_ns]
    if not changed:
        return {}
    return read_json_object(max(changed, key=now.__getitem__), DataError)
