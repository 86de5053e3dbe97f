"""Runs `mm train` in this process, and reads what a run leaves."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.train.train_engine import TrainEngine


class Said(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def mm(*words: object) -> Said:
    """`mm WORDS`, with its output kept."""
    return kept(lambda: run([str(word) for word in words]))


def kept(command: Callable[[], int]) -> Said:
    """How a command of this process ends, with its output kept."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = command()
    return Said(code, out.getvalue(), err.getvalue())


def train(yaml: Path | str, save: Path | str | None, *words: object) -> str:
    """`mm train` that must succeed; returns what it printed."""
    said = mm("train", yaml, "-v", *([f"training.save={save}"] if save else []), *words)
    assert said.code == 0, said.err
    return said.out


def newest(save: Path) -> int:
    """The newest committed step: a committed folder has its final name."""
    return max((int(p.name.removeprefix("iter_")) for p in save.glob("iter_*")), default=0)


def tensors(save: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, model and optimizer; of the newest one when no step is named."""
    path = save / f"iter_{newest(save) if step is None else step:07d}"
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tree: dict[str, Any] = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
    dcp.load(tree, checkpoint_id=path, no_dist=True)
    return tree


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not the same to the bit."""
    names = left.keys() | right.keys()
    return sorted(n for n in names if n not in left or n not in right or not torch.equal(left[n], right[n]))


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(save: Path) -> dict[int, float]:
    """Step → training loss; what was done again replaces what was done before."""
    return {line["step"]: line["loss"] for line in lines(save / "metrics.jsonl") if "loss" in line}


def kinds(save: Path) -> list[str]:
    """Kinds of all events but notes, in order."""
    return [event["kind"] for event in lines(save / "events.jsonl") if event["kind"] != "note"]


@contextlib.contextmanager
def watched_steps(before: Callable[[TrainEngine, list[Batch]], None] | None = None) -> Iterator[list[list[str]]]:
    """The sample ids of each training step on this rank; `before` is called before each step."""
    seen: list[list[str]] = []
    real = TrainEngine.train_step

    def watched(engine: TrainEngine, batches: list[Batch], *args: Any, **kwargs: Any) -> Any:
        seen.append([sample for batch in batches for sample in batch["sample_ids"]])
        if before is not None:
            before(engine, batches)
        return real(engine, batches, *args, **kwargs)

    with mock.patch.object(TrainEngine, "train_step", watched):
        yield seen
