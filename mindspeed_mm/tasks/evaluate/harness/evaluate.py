"""`mm evaluate --harness`: serves the model, runs the harness beside it, and reads the harness's figures back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.file_writing import check_output_file, is_object_of
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.tasks.evaluate.folder import Facts
from mindspeed_mm.tasks.evaluate.harness.figures import TaskFigures, read_newest, snapshot
from mindspeed_mm.tasks.evaluate.harness.harnesses import HARNESSES, HarnessCall
from mindspeed_mm.tasks.evaluate.harness.served import Folder, ServedModel, served
from mindspeed_mm.tasks.evaluate.outside import OutsidePackage, find_outside
from mindspeed_mm.tasks.model_kind import kind_of_path

RESULTS = "harness.json"
FILES = "files"
"""Folder of what the harness itself has written."""
_is_results = is_object_of(("harness", "tasks", "model", "options", "seconds"), (), "harness", ("name", "version"))


@dataclass(frozen=True)
class HarnessRequest:
    """What is asked for.

    Args:
        model: A model that a server answers for, or a folder to serve.
        harness: A name of `HARNESSES`.
        tasks: Names of tasks or sets as the harness has them.
        out: Where `harness.json` and the harness's files go.
        python: Of the environment that the harness is installed in; None: this one.
        max_new_tokens: Longest answer; None: what the harness asks for.
        options: Further words of the harness's command line.
    """

    model: ServedModel | Folder
    harness: str
    tasks: Sequence[str]
    out: Path
    python: Path | None = None
    max_new_tokens: int | None = None
    options: Sequence[str] = ()


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


def run(request: HarnessRequest) -> HarnessResult:
    """Let the harness ask the model, and write `harness.json`.

    Raises:
        UsageError: The model is a generator, or the folder for the results holds files of others.
        MachineError: The harness is not installed, the model cannot be served, or the harness found nothing.
    """
    harness = HARNESSES[request.harness]
    _check_can_answer(request.model)
    check_output_file(request.out / RESULTS, _is_results, "--out")
    package = find_outside(harness.wanted, request.python)
    files = (request.out / FILES).absolute()
    make_writable_folder(files)
    began = time.monotonic()
    with _asked_model(request.model) as model:
        asked = HarnessCall(model, request.tasks, files, request.max_new_tokens, request.options)
        call = harness.call(package, asked)
        before = snapshot(files, harness.results)
        code = package.run(call)
    tasks = harness.read(read_newest(files, harness.results, before))
    if not any(found.figures for found in tasks.values()):
        raise _nothing_found(package, code, tasks)
    result = HarnessResult(tasks, _facts(request, package, time.monotonic() - began))
    atomic_write_text(request.out / RESULTS, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    return result


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


def _facts(request: HarnessRequest, package: OutsidePackage, seconds: float) -> Facts:
    model = request.model
    told = f"{model.name} at {model.address}" if isinstance(model, ServedModel) else str(model.model.absolute())
    return {
        "harness": {"name": package.wanted.title, "version": package.version},
        "model": told,
        "options": list(request.options),
        "seconds": round(seconds, 3),
    }
