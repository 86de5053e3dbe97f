"""`mm evaluate --harness`: serves the model, runs the harness beside it, and reads the harness's figures back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.file_writing import check_output_file, is_object_of
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.tasks.answer.remote import RemoteModel
from mindspeed_mm.tasks.evaluate.folder import Facts, results_folder
from mindspeed_mm.tasks.evaluate.harness.figures import TaskFigures, read_newest, snapshot
from mindspeed_mm.tasks.evaluate.harness.harnesses import HARNESSES, HarnessCall
from mindspeed_mm.tasks.evaluate.harness.served import BATCH_SIZE, Folder, ServedModel, served
from mindspeed_mm.tasks.evaluate.outside import OutsidePackage, find_outside
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
    harness, (asked, place) = HARNESSES[request.harness], _model_of(request)
    _check_can_answer(asked)
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
    tasks = harness.read(read_newest(files, harness.results, before))
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


def _check_can_answer(model: ServedModel | Folder) -> None:
    if isinstance(model, Folder) and kind_of_path(model.model) is GENERATOR:
        what = "is a generator, and harnesses ask models that answer"
        way_out = "Measure what it draws: mm evaluate SAMPLES --generated."
        raise UsageError(what, where=str(model.model), key="--harness", way_out=way_out)


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
