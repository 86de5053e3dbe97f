"""The harnesses: how each is started beside a server, and where it writes what.

lmms-eval 0.7 (`lmms_eval/__main__.py`, `loggers/evaluation_tracker.py`): `<date>_results.json` holds, under `results`,
of each task `metric,filter` and `metric_stderr,filter`, and under `n-samples` how many questions; it ends with 0 also
where nothing was evaluated.
VLMEvalKit (`run.py`, `vlmeval/smp/status.py`): the folder of a run holds `status.json` with `datasets`, of each its
`metrics`, `primary_metric`, and `error_message` or `skip_reason`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.sampling.answers.scoring import Z_95
from mindspeed_mm.tasks.evaluate.harness.figures import Figure, TaskFigures, as_number
from mindspeed_mm.tasks.evaluate.harness.served import ServedModel
from mindspeed_mm.tasks.evaluate.outside import Call, OutsidePackage, Wanted

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
        counted = as_number((counts.get(name) or {}).get("effective"))
        n = None if counted is None else int(counted)
        tasks[name] = TaskFigures(_figures_of_lmms_task(found), n)
    return tasks


def _figures_of_lmms_task(found: Content) -> dict[str, Figure]:
    figures = {}
    for key, written in found.items():
        metric, comma, chosen = key.rpartition(",")
        value = as_number(written)
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
        error = as_number(found.get(f"{metric}_stderr{kind},{chosen}"))
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
        value = as_number(written)
        if value is not None:
            figures[name] = Figure(value)
    chief = found.get("primary_metric") or []
    if isinstance(chief, str):
        chief = [chief]
    trouble = str(found.get("error_message") or found.get("skip_reason") or "")
    return TaskFigures(figures, chief=[name for name in chief if name in figures], trouble=trouble)


HARNESSES = {
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
