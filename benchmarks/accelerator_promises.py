"""What is fast by default against what it replaced, in turns in one process: A B A B … on the same inputs.

`python -m benchmarks.accelerator_promises FOLDER SECONDS [--tiny]` writes `FOLDER/promises.json` anew after each: the
times of both, their ratio and its bar, whether it held, and how far results differ; one that could not run says why. On
a CPU the same code runs at tiny sizes, where no ratio means anything.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402

from benchmarks import accelerator_promised_plans as plans  # noqa: E402
from benchmarks import accelerator_promised_steps as steps  # noqa: E402
from benchmarks import accelerator_promised_work as work  # noqa: E402
from benchmarks.accelerator_engine import enter, leave  # noqa: E402
from mindspeed_mm.fsdp.params.argument import Arguments  # noqa: E402
from mindspeed_mm.fsdp.utils.device import synchronize  # noqa: E402

WRITTEN = "promises.json"
ROUNDS = 6
LEAST_ROUNDS = 2
WARM_UP = 2


@dataclass(frozen=True)
class Promise:
    """One of them.

    Args:
        make: Gives both ways, for a device, sizes and a folder.
        bar: Most of our time over the other's.
        replaced: What the other is.
        most_memory: Of our peak over the other's; None: no question.
        most_ms: Of our shortest time; None: the ratio says it.
        tolerance: On the difference of results; None: they are not to be equal.
        published: What others reach with the like.
    """

    make: Callable[[torch.device, bool, Path], work.Ways]
    bar: float
    replaced: str
    most_memory: float | None = None
    most_ms: float | None = None
    tolerance: float | None = None
    published: str = ""


PROMISES: dict[str, Promise] = {  # whole steps, which take longest, come last
    "towers take all pictures at once": Promise(
        work.towers, 1.0, "attention picture by picture", tolerance=2e-2, published="the towers of transformers by SDPA"
    ),
    "packed rows by the kernel that was chosen": Promise(
        work.packed_attention, 1.0, "document by document", tolerance=2e-2, published="FastVideo: FA3 1.59 × FA2"
    ),
    "windows": Promise(work.windows, 1.0, "a full layer", most_memory=2.0),
    "windows with sinks": Promise(work.windows_with_sinks, 1.0, "a full layer with sinks", most_memory=2.0),
    "rows of experts change places": Promise(
        work.experts, 1.0, "plain indexing, whose gradient adds up", tolerance=2e-2
    ),
    "the plan of copies of busy experts": Promise(
        plans.copies, 1.0, "the table of all ranks", most_ms=2.0, tolerance=0.0
    ),
    "packed steps are planned ahead": Promise(plans.ahead, 1.0, "plans made by the trainer's thread"),
    "best fit where patches bind": Promise(plans.best_fit, 2.0, "best fit where tokens bind"),
    "the forecast looks at a block of each kind": Promise(plans.forecast, 1.0, "every block simulated", tolerance=0.0),
    "a checkpoint, hashed": Promise(work.saving, 1.3, "cp, fsync and the hash, one after the other"),
    "pixels travel as bytes": Promise(work.pixels, 1.0, "as the numbers of a processor", tolerance=0.0),
    "fused kernels and compiled blocks by default": Promise(
        steps.by_default, 1.0, "neither of them", tolerance=5e-2, published="torchtitan: compiling + 16 %"
    ),
    "steps do not wait for their numbers": Promise(
        steps.without_waits, 1.0, "numbers read in their own step", tolerance=1e-3
    ),
    "fp8": Promise(steps.fp8, 1.0, "bf16, compiled alike", tolerance=0.2, published="torchtitan: float8 + 48 % in all"),
}


def main(folder: Path, limit_s: float, *, tiny: bool) -> None:
    """Measure what the time allows, and print."""
    deadline = time.monotonic() + limit_s
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {name: {"error": "not begun"} for name in PROMISES}
    device = enter(Arguments())
    for number, (name, promise) in enumerate(PROMISES.items()):
        share = (deadline - time.monotonic()) / (len(PROMISES) - number)
        found[name] = {"error": "begun, and not ended"}
        write(folder, found)
        found[name] = judged(promise, device, folder / str(number), share, tiny=tiny)
        write(folder, found)
        print(f"    {name}: {found[name].get('ratio', found[name].get('error'))}", file=sys.stderr, flush=True)
    leave()


def write(folder: Path, found: dict[str, dict[str, Any]]) -> None:
    """What is known so far, in place of what was."""
    (folder / "new").write_text(json.dumps(found), encoding="utf-8")
    (folder / "new").replace(folder / WRITTEN)


def judged(promise: Promise, device: torch.device, folder: Path, limit_s: float, *, tiny: bool) -> dict[str, Any]:
    """The verdict on one; an error is a verdict too."""
    said = {"replaced": promise.replaced, "bar": promise.bar, "published": promise.published}
    if limit_s < 1.0:
        return said | {"error": "not begun: the time was used up"}
    folder.mkdir(parents=True)
    try:
        measured = in_turns(promise.make(device, tiny, folder), time.monotonic() + limit_s, device)
    except Exception as error:  # noqa: BLE001  one that fails must not hide the others
        return said | {"error": f"{type(error).__name__}: {error}"[-400:]}
    finally:
        torch.compiler.reset()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    reasons = []
    if measured["ratio"] > promise.bar:
        reasons.append(f"{measured['ratio']:.3f} × as long, at most {promise.bar:g}")
    if promise.most_memory is not None and measured.get("memory_ratio", 0.0) > promise.most_memory:
        reasons.append(f"{measured['memory_ratio']:.2f} × the memory, at most {promise.most_memory:g}")
    if promise.most_ms is not None and min(measured["ours_ms"]) > promise.most_ms:
        reasons.append(f"{min(measured['ours_ms']):.3g} ms, at most {promise.most_ms:g}")
    if promise.tolerance is None:
        del measured["difference"]  # of other work
    elif not measured["difference"] <= promise.tolerance:
        reasons.append(f"results differ by {measured['difference']:.2g}, at most {promise.tolerance:g}")
    return said | measured | {"held": not reasons, "why_not": "; ".join(reasons)}


def in_turns(ways: work.Ways, deadline: float, device: torch.device) -> dict[str, Any]:
    """Times of both, one after the other, each round in the other order than the round before."""
    results, times, peaks = {}, {"ours": list[float](), "other": list[float]()}, dict[str, float]()
    calls = {"ours": ways.ours, "other": ways.other}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            results[name] = call()
        with peak_memory(device, peaks, name):
            call()
    while len(times["ours"]) < ROUNDS:
        if len(times["ours"]) >= LEAST_ROUNDS and time.monotonic() > deadline:
            break
        order = list(calls) if len(times["ours"]) % 2 == 0 else list(reversed(calls))
        for name in order:
            synchronize()
            began = time.perf_counter()
            calls[name]()
            synchronize()
            times[name].append(time.perf_counter() - began)
    ratios = [ours / other for ours, other in zip(times["ours"], times["other"], strict=True)]
    found = {
        **{f"{name}_ms": [round(1000 * each, 4) for each in laps] for name, laps in times.items()},
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "difference": difference(results["ours"], results["other"]),
        "note": ways.note,
    }
    if peaks:
        found |= {"memory_mb": peaks, "memory_ratio": peaks["ours"] / max(peaks["other"], 1e-3)}
    return found


@contextmanager
def peak_memory(device: torch.device, peaks: dict[str, float], name: str) -> Iterator[None]:
    """Note what is added at the highest; nothing where no allocator tells."""
    if device.type != "cuda":
        yield
        return
    synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    yield
    synchronize()
    peaks[name] = (torch.accelerator.max_memory_allocated() - before) / 1e6


def difference(ours: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest norm of a difference over the norm; what is no number stays one."""
    found = [torch.zeros((), dtype=torch.float64)]
    for one, two in zip(ours, other, strict=True):
        expected = two.detach().double().cpu()
        found.append((one.detach().double().cpu() - expected).norm() / expected.norm().clamp_min(1e-30))
    return float(torch.stack(found).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), tiny="--tiny" in sys.argv)
