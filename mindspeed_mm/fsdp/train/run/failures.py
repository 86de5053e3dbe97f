"""Failures of libraries in a person's words: a rank that is gone, memory that does not suffice."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ExitCode, MachineError, MMError, StoppedAfterSave, StoppedUnsaved
from mindspeed_mm.core.os_errors import explained_os_error
from mindspeed_mm.fsdp import models
from mindspeed_mm.fsdp.utils.device import memory_in_use
from mindspeed_mm.fsdp.utils.plugins import place_in_plugin

_GLOO = re.compile(r"gloo/(?:gloo|transport)|gloo.*(?:closed|reset|timed? ?out)", re.IGNORECASE)
INTERRUPTED = 130


class ModelCodeError(MMError):
    """The code of the library that the model's class comes from failed, as a run's steps called it."""


class PeersLost(MachineError):
    """This rank could not reach the others: somebody else failed first."""


def has_lost_peers(error: BaseException) -> bool:
    """Whether an error, or the one that caused it, is a collective's that another rank did not come to."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeersLost | dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and _GLOO.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextmanager
def explained() -> Iterator[None]:
    """Turn what torch raises when a rank is gone, or memory is short before the first step, into errors of ours."""
    try:
        yield
    except MMError:
        raise
    except OSError as error:
        known = explained_os_error(error)
        if known is None:
            raise
        raise known from error
    except (RuntimeError, MemoryError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        if is_out_of_memory(error):
            raise MachineError(
                f"out of memory outside of the steps: {first_line}",
                way_out="Shard over more ranks, or set parallel.fsdp_plan.cpu_offload.",
            ) from error
        if has_lost_peers(error):
            raise PeersLost(
                f"lost the other ranks: {first_line}", way_out="See which rank failed first, and why."
            ) from error
        raise


Autopsy = Callable[[Batch], tuple[Sequence[str], Sequence[str]]]
"""A micro-batch → what used the memory, and what would use less, in lines."""

_LEVERS = (
    "Lower training.micro_batch_size (raise gradient_accumulation_steps to keep the global batch) or "
    "data.dataset_param.basic_parameters.cutoff_len, shard over more ranks, or set parallel.fsdp_plan.cpu_offload."
)


@contextmanager
def explained_step(batches: Sequence[Batch], step: int, rank: int, autopsy: Autopsy | None = None) -> Iterator[None]:
    """What fails in a step in a person's words: memory, or the code of the model's library. Arguments and errors as of
    `explained_out_of_memory` and `explained_model`."""
    with explained_out_of_memory(batches, step, rank, autopsy), explained_model(batches, f"step {step}", rank):
        yield


@contextmanager
def explained_out_of_memory(
    batches: Sequence[Batch], step: int, rank: int, autopsy: Autopsy | None = None
) -> Iterator[None]:
    """Turn the out-of-memory error of a step into one that says what used the memory, names the batch and the levers.

    Args:
        batches: The step's micro-batches, prepared.
        step: Its number.
        rank: This rank.
        autopsy: Asked about the largest of them. When it fails, the error says less.

    Raises:
        MachineError: In the place of the out-of-memory error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        held = memory_in_use()  # before anything is freed
        largest = max(batches, key=_numel)
        used, savings = _examined(autopsy, largest)
        headline = f"out of memory on rank {rank} in step {step}"
        if used:
            lines = [held] if held else []
            lines += [f"in work: {sizes_of_samples(largest)}", *used]
            if savings:
                lines += ["what would help most:", *(f"  {line}" for line in savings)]
            else:
                lines.append(_LEVERS)
            raise MachineError("\n  ".join([headline, *lines])) from error
        raise MachineError(
            f"{headline}, on batches {[_shapes(batch) for batch in batches]}",
            where=f"samples {shortened(sample_ids(batches))}",
            way_out=_LEVERS,
        ) from error


@contextmanager
def explained_model(batches: Sequence[Batch], when: str, rank: int) -> Iterator[None]:
    """Turn an exception out of the code of a model's library into one that says what the model was given, and what the
    library said where.

    Args:
        batches: The micro-batches that are computed, prepared.
        when: The step, in words.
        rank: This rank.

    Raises:
        ModelCodeError: In the place of the exception. What our own code outside of our models, a plugin's, or torch
            outside of a model raises passes through, as do errors of memory and of lost ranks.
    """
    try:
        yield
    except MMError:
        raise
    except Exception as error:
        library, place = _library_of(error)
        if not library or is_out_of_memory(error) or has_lost_peers(error):
            raise
        said = next(iter(str(error).splitlines()), "")
        elsewhere = "" if library == _OURS else f"try another release of {library}, and "
        given = "; ".join(f"{shortened(sample_ids([batch]))}: {_shapes(batch)}" for batch in batches[:_MOST_BATCHES])
        more = f" and {len(batches) - _MOST_BATCHES} more micro-batches" if len(batches) > _MOST_BATCHES else ""
        raise ModelCodeError(
            f"the model's own code, in {library}, failed on rank {rank} in {when}: {type(error).__name__}: {said} "
            f"({place})",
            where=f"samples {given}{more}",
            way_out="See what it is given by mm check and mm data preview. If one row alone fails too "
            "(training.micro_batch_size=1 training.gradient_accumulation_steps=1), or only some do, compare these "
            f"rows with the others. Otherwise {elsewhere}report it there with the "
            "traceback, which --traceback shows and log/train.log of the run folder keeps.",
        ) from error


_OURS = "mindspeed_mm"
_LIBRARIES = ("transformers", "diffusers", "transformers_modules")
"""Packages with classes of models; the last one holds code that came with a model's folder."""
_FAMILIES = Path(models.__file__).parent
"""Where our own classes of models lie: their code fails as a library's does on what does not fit a model."""
_STANDARD = sysconfig.get_path("stdlib")
"""Where Python's own modules lie; packages that are installed lie below it."""
_MOST_BATCHES = 4


def _library_of(error: BaseException) -> tuple[str, str]:
    """The library whose code raised an error, or called what of torch or Python raised it, with its line
    `file.py:12`; empty where it was other code."""
    if place_in_plugin(error):
        return "", ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parts = Path(frame.filename).parts
        if Path(frame.filename).is_relative_to(_FAMILIES) and Path(frame.filename).name.startswith("modeling_"):
            return _OURS, f"{frame.filename}:{frame.lineno}"
        for library in _LIBRARIES:
            if library in parts and "mindspeed_mm" not in parts:
                return library, f"{frame.filename}:{frame.lineno}"
        is_installed = "site-packages" in parts or "dist-packages" in parts
        is_pythons = frame.filename.startswith("<") or Path(frame.filename).is_relative_to(_STANDARD)
        if "torch" not in parts and (is_installed or not is_pythons):
            break
    return "", ""


def _examined(autopsy: Autopsy | None, batch: Batch) -> tuple[Sequence[str], Sequence[str]]:
    if autopsy is None:
        return (), ()
    try:
        return autopsy(batch)
    except Exception:  # noqa: BLE001 (whatever it is: the error being explained matters more)
        return (), ()


def _numel(batch: Batch) -> int:
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    """Shapes by key, without what an objective has prepared for itself."""
    named = {key: value for key, value in batch.items() if not key.startswith("_")}
    return {key: tuple(value.shape) for key, value in named.items() if isinstance(value, torch.Tensor) and value.ndim}


def sizes_of_samples(batch: Batch) -> str:
    """The samples of a micro-batch with their sizes: `a (412 tokens), b (96 tokens); pixel_values (1536, 1176)`."""
    ids = [str(each) for each in batch["sample_ids"]]
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and len(mask) == len(ids):
        ids = [f"{name} ({int(row.sum())} tokens)" for name, row in zip(ids, mask, strict=True)]
    media = ("pixel_values", "pixel_values_videos", "input_features", "latents", "pixels")
    words = [shortened(ids)]
    for key in media:
        if isinstance(batch.get(key), torch.Tensor):
            words.append(f"{key} {tuple(batch[key].shape)}")
    return "; ".join(words)


def ending_of(error: BaseException) -> tuple[str, int]:
    """Status and exit code that `run.json` records for a run that ended with an error."""
    if isinstance(error, StoppedAfterSave | StoppedUnsaved):
        return "stopped", int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return "stopped", INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.code, int):  # foreign code may end the process
        return "failed", error.code
    if isinstance(error, MMError):
        return "failed", int(error.exit_code)
    return "failed", int(ExitCode.BUG)


def sample_ids(batches: Sequence[Batch]) -> list[str]:
    """Ids of all samples of the batches."""
    ids: list[str] = []
    for batch in batches:
        ids += map(str, batch["sample_ids"])
    return ids


def shortened(ids: Sequence[str], most: int = 8) -> str:
    """The ids, or the first of many."""
    first = ", ".join(ids[:most])
    if len(ids) <= most:
        return first
    return f"{first} and {len(ids) - most} more"
