"""What an accelerator gives: what is fast by default against what it replaced, in turns; bf16 training steps of a
language model at 0.5 to 2 B parameters and of a Wan2.1-shaped video generator at 1.3 B, parity with the CPU, mechanisms
of parallel plans on one device, the digits job, answers of models of those sizes, and what compiling, fused kernels and
8-bit products add.

Each part is a process of its own with a time limit: one that fails is written down as failed, and the others go on.
`benchmarks/accelerator.sh` starts it where the project is not installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.accelerator_page import page_of, promise_figures
from benchmarks.accelerator_sizes import ATTEMPTS, CLIPS, TINY, TINY_CLIPS, Attempt, Clip
from benchmarks.accelerator_speed import Sections, kernel_figures, offloads, speed_figures, variants
from benchmarks.digits import Workload, prepare
from benchmarks.figures import Figure, table
from benchmarks.machine import RESULTS, ROOT, write_result

LIMIT_S = 560.0
PROMISES_S = 200.0
PARTS = ("promises", "step", "generator", "parity", "mechanisms", "job", "answers", "speed", "offload", "kernels")
"""The ones that say most come first."""
SPARE_S = 60.0
"""Beyond the time of the promises, for the one that is at work when it ends."""
LEAST_S = 25.0
"""A part is not begun with less time left."""

PROBE = """
import importlib.util, json, torch
there = torch.accelerator.is_available()
found = {"type": torch.accelerator.current_accelerator().type if there else "cpu"}
if there:
    module = torch.get_device_module(found["type"])
    found |= {"count": torch.accelerator.device_count(), "torch": torch.__version__}
    if hasattr(module, "get_device_properties"):  # a simulated device has none
        found |= {"memory_gib": module.get_device_properties(0).total_memory / 2**30, "name": module.get_device_name(0)}
    found |= {"has_diffusers": importlib.util.find_spec("diffusers") is not None}
print(json.dumps(found))
"""


@dataclass
class Session:
    """One run of all parts.

    Args:
        work: Scratch folder.
        device: What `PROBE` found.
        tiny: Sizes for a quick look on a CPU.
        peak_tflops: Peak of the accelerator in bf16, where its name says too little.
        parts: What to run.
        limit_s: Of all; the limits of parts grow and shrink with it.
    """

    work: Path
    device: dict[str, Any]
    tiny: bool = False
    peak_tflops: float | None = None
    parts: Sequence[str] = PARTS
    limit_s: float = LIMIT_S

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.limit_s

    def run(self) -> dict[str, Any]:
        """All parts that are asked for."""
        results = {}
        for name in self.parts:
            began = time.monotonic()
            print(f"  {name} …", flush=True)
            results[name] = self._guarded(getattr(self, name)) | {"took_s": round(time.monotonic() - began, 1)}
        return {"device": self.device, "tiny": self.tiny, **results}

    def promises(self) -> dict[str, Any]:
        """What is fast by default against what it replaced; those that were measured before the process failed stay."""
        folder, seconds = self.work / "promises", min(PROMISES_S * self.limit_s / LIMIT_S, self._left_s() - LEAST_S)
        words = [str(folder), str(seconds), *(["--tiny"] if self.tiny else [])]
        ended = self._guarded(partial(self._ended, words, PROMISES_S + SPARE_S))
        written = folder / "promises.json"
        return ended | (json.loads(written.read_text(encoding="utf-8")) if written.exists() else {})

    def _ended(self, words: list[str], limit_s: float) -> dict[str, Any]:
        self._module("benchmarks.accelerator_promises", *words, limit_s=limit_s)
        return {}

    def step(self) -> dict[str, Any]:
        """The largest size that fits: each that runs out of memory is noted, and the next is tried."""
        failures: list[dict[str, str]] = []
        for attempt in self._attempts():
            words = [attempt.to_json(), str(self.work / attempt.name), str(self.peak_tflops or "")]
            try:
                measured = self._module("benchmarks.accelerator_step", *words, limit_s=240).last_json()
                peer = self._guarded(partial(self._peer, attempt))
                packed = self._guarded(partial(self._packed, attempt))
                return measured | {"transformers_trainer": peer, "packed": packed, "attempts_before": failures}
            except processes.ProcessFailed as error:
                failures.append({"attempt": attempt.name, "error": _shortened(error)})
                if self._left_s() < LEAST_S:
                    break
        return {"error": "no size ran", "attempts_before": failures}

    def _peer(self, attempt: Attempt) -> dict[str, Any]:
        """The same model and tokens by transformers' Trainer."""
        words = [attempt.to_json(), str(self.work / f"{attempt.name}-peer"), str(self.peak_tflops or "")]
        return self._module("benchmarks.accelerator_peer", *words, limit_s=150).last_json()

    def _packed(self, attempt: Attempt) -> dict[str, Any]:
        """Eight documents in a row's tokens: ours in packed rows, the Trainer's each in a row of its own."""
        shorter = attempt.packed(8)
        words = [shorter.to_json(), str(self.work / shorter.name), str(self.peak_tflops or "")]
        ours = self._module("benchmarks.accelerator_step", *words, limit_s=150).last_json()
        return ours | {"transformers_trainer": self._guarded(partial(self._peer, shorter))}

    def speed(self) -> dict[str, Any]:
        """The smallest size with each of the settings that make a step faster."""
        return self._compared(variants(tiny=self.tiny))

    def offload(self) -> dict[str, Any]:
        """The smallest size with each thing that may live on the host."""
        return self._compared(offloads())

    def kernels(self) -> dict[str, Any]:
        """Grouped products in each type, and packed attention with keys as they are and repeated."""
        return self._module(
            "benchmarks.accelerator_kernels", *(["--tiny"] if self.tiny else []), limit_s=60
        ).last_json()

    def _compared(self, ways: dict[str, Sections]) -> dict[str, Any]:
        """Steps of the smallest size, with sections added."""
        attempt = self._attempts()[-1]

        def step(name: str, sections: Sections) -> dict[str, Any]:
            folder = self.work / f"speed-{name.replace(' ', '-')}"
            words = [attempt.to_json(), str(folder), str(self.peak_tflops or ""), json.dumps(sections)]
            return self._module("benchmarks.accelerator_step", *words, limit_s=150).last_json()

        return {name: self._guarded(partial(step, name, sections)) for name, sections in ways.items()}

    def generator(self) -> dict[str, Any]:
        """A Wan2.1-shaped step with and without recompute, each beside a bare diffusers loop on the same clip."""
        if not self.device.get("has_diffusers", True):
            return {"error": "diffusers is not installed: the head of benchmarks/accelerator.sh says how to bring it"}
        attempts = TINY_CLIPS if self.tiny else CLIPS
        return {name: self._clip(clips) for name, clips in attempts.items()}

    def _clip(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """The longest clip that fits our engine, then the bare loop on it."""
        failures: list[dict[str, str]] = []
        for clip in [clip for clip in clips if clip.needs_gib <= self.device.get("memory_gib", 0)] or clips[-1:]:
            measured = self._guarded(lambda clip=clip: self._clip_step("ours", clip))
            if "error" not in measured:
                bare = self._guarded(lambda clip=clip: self._clip_step("bare", clip))
                return measured | {"bare_diffusers_loop": bare, "attempts_before": failures}
            failures.append({"attempt": clip.name, "error": measured["error"]})
        return {"error": "no clip ran", "attempts_before": failures}

    def _clip_step(self, who: str, clip: Clip) -> dict[str, Any]:
        words = [who, clip.to_json(), str(self.work / f"wan-{clip.name}"), str(self.peak_tflops or "")]
        return self._module("benchmarks.accelerator_generator", *words, limit_s=150).last_json()

    def parity(self) -> dict[str, Any]:
        """Loss and gradients of one step, here and by plain transformers on the CPU."""
        workload = self._workload()
        words = [str(workload.model), str(workload.batches)]
        found = self._module("benchmarks.accelerator_parity", *words, limit_s=120).last_json()
        return found if found["agrees"] else found | {"error": "this device and the CPU differ"}

    def mechanisms(self) -> dict[str, Any]:
        """What of each parallel plan can run on one device, against plain computation on the CPU."""
        found = self._module("benchmarks.accelerator_mechanisms", limit_s=150).last_json()
        return found if found["agrees"] else found | {"error": "a mechanism and plain computation differ"}

    def job(self) -> dict[str, Any]:
        """The digits example, shortened: train from scratch, then answer held-out questions."""
        folder = self._workload().folder
        run, data = self.work / "run", folder / "data"
        steps = 6 if self.tiny else 600
        basic = "data.dataset_param.basic_parameters"
        overrides = [
            f"model.model_name_or_path={folder / 'model'}",
            f"{basic}.dataset={data / 'train.jsonl'}",
            f"{basic}.dataset_dir={data}",
            f"{basic}.val_dataset=null",
            f"training.train_iters={steps}",
            f"training.save={run}",
            "training.val_interval=0",
            "training.log_interval=1",
        ]
        config = ROOT / "examples" / "digits" / "digits_tiny_config.yaml"
        trained = self._module("mindspeed_mm", "train", str(config), *overrides, limit_s=180)
        result = {"steps": steps, "train_s": trained.wall_s, **_metrics(run)}
        answers = self._guarded(lambda: self._accuracy(run, data))
        return result | ({"error": answers["error"]} if "error" in answers else {"accuracy": answers})

    def _accuracy(self, run: Path, data: Path) -> dict[str, Any]:
        rows = data / "some.jsonl"
        lines = (data / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        rows.write_text("".join(lines[:24] if self.tiny else lines), encoding="utf-8")
        words = ["evaluate", str(run), "--data", str(rows), "--max-new-tokens", "16", "--batch-size", "256", "--json"]
        return self._module("mindspeed_mm", *words, limit_s=120).last_json()["tasks"]

    def answers(self) -> dict[str, Any]:
        """Answers in batches by the sizes at both ends, each beside transformers' `generate` on the same inputs."""
        sizes = self._attempts()
        rows, tokens = ("4", "4") if self.tiny else ("32", "128")

        def answered(attempt: Attempt) -> dict[str, Any]:
            words = [attempt.to_json(), str(self._workload().folder), rows, tokens]
            return self._module("benchmarks.accelerator_answers", *words, limit_s=120).last_json()

        return {attempt.name: self._guarded(partial(answered, attempt)) for attempt in {sizes[0]: 0, sizes[-1]: 0}}

    def _workload(self) -> Workload:
        return prepare(self.work / "digits", steps=2)

    def _attempts(self) -> list[Attempt]:
        if self.tiny:
            return [TINY]
        return [attempt for attempt in ATTEMPTS if attempt.needs_gib <= self.device.get("memory_gib", 0)] or ATTEMPTS[
            -1:
        ]

    def _module(self, module: str, *words: str, limit_s: float) -> processes.Finished:
        limit = min(limit_s * self.limit_s / LIMIT_S, self._left_s())
        hidden = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""} if self.device["type"] == "cpu" else {}
        return processes.run([sys.executable, "-m", module, *words], timeout_s=limit, extra_env=hidden)

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _guarded(self, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._left_s() < LEAST_S:
            return {"error": "not begun: the time was used up"}
        try:
            return part()
        except (processes.ProcessFailed, ValueError, KeyError, OSError) as error:
            print(f"    failed: {_shortened(error)}", flush=True)
            return {"error": _shortened(error)}


def _metrics(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    half = lines[len(lines) // 2 :]
    return {
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "step_ms": statistics.median(line["step_ms"] for line in half),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in half),
        "peak_memory_gib": max(line["memory_gib"] for line in lines),
    }


def _shortened(error: Exception) -> str:
    """The last lines of an error, without the paths of this machine."""
    text = "\n".join(str(error).strip().splitlines()[-3:])
    for folder in (str(ROOT), sys.prefix, tempfile.gettempdir()):
        text = text.replace(folder, "…")
    return text[-600:]


def figures(result: dict[str, Any]) -> list[Figure]:
    """What the printed table shows of the parts that ran."""
    shown: dict[str, Callable[[dict[str, Any]], list[Figure]]] = {
        "promises": promise_figures,
        "step": step_figures,
        "generator": clip_figures,
        "parity": parity_figures,
        "mechanisms": mechanism_figures,
        "job": job_figures,
        "answers": answer_figures,
        "speed": speed_figures,
        "offload": speed_figures,
        "kernels": kernel_figures,
    }
    return [figure for part, of_part in shown.items() if part in result for figure in of_part(result[part])]


def step_figures(step: dict[str, Any]) -> list[Figure]:
    """Of the language model's step."""
    found = []
    for name, ours in (("bf16 step", step), ("bf16 step, packed", step.get("packed", {}))):
        mfu, rate, peer = ours.get("mfu"), ours.get("tokens_per_s"), ours.get("transformers_trainer", {})
        theirs = peer.get("tokens_per_s")
        found += [
            Figure(name, rate, "tokens/s"),
            Figure(f"{name}, MFU", mfu and 100 * mfu, "%"),
            Figure(f"{name}, peak memory", ours.get("peak_memory_gib"), "GiB"),
            Figure(f"{name}, over transformers' Trainer", rate / theirs if rate and theirs else None, "×"),
            Figure(f"{name}, Trainer's peak memory", peer.get("peak_memory_gib"), "GiB"),
        ]
    return found


def parity_figures(parity: dict[str, Any]) -> list[Figure]:
    """Of the comparison with the CPU."""
    return [Figure("parity with the CPU, worst gradient", parity.get("worst_gradient"), "of its tolerance", 1.0)]


def mechanism_figures(mechanisms: dict[str, Any]) -> list[Figure]:
    """Of each mechanism; a fault that nobody would notice is a miss too."""
    return [
        Figure(f"{name}, worst gradient", check.get("worst"), "of its tolerance", 1.0)
        for name, check in mechanisms.get("checks", {}).items()
    ]


def job_figures(job: dict[str, Any]) -> list[Figure]:
    """Of the digits job."""
    naming = job.get("accuracy", {}).get("naming", {})
    return [
        Figure("digits job, step", job.get("step_ms"), "ms"),
        Figure("digits job, naming", naming.get("accuracy") and 100 * naming["accuracy"], "%"),
    ]


def answer_figures(answers: dict[str, Any]) -> list[Figure]:
    """Of answers in batches, by size."""
    shown = []
    for name, found in answers.items():
        if not isinstance(found, dict):
            continue  # the seconds that the part took
        ours, bare = found.get("tokens_per_s"), found.get("bare_tokens_per_s")
        shown += [
            Figure(f"answers, {name}", ours, "tokens/s"),
            Figure(f"answers, {name}, over bare generate", ours / bare if ours and bare else None, "×"),
        ]
    return shown


def clip_figures(generator: dict[str, Any]) -> list[Figure]:
    """Of the generator's step, with and without recompute."""
    shown = []
    for name in CLIPS:
        ours: dict[str, Any] = generator.get(name, {})
        bare, mfu = ours.get("bare_diffusers_loop", {}), ours.get("mfu")
        ratio = ours["step_s"] / bare["step_s"] if "step_s" in ours and "step_s" in bare else None
        step = f"Wan-shaped step {ours.get('model', '')}, {name}"
        shown += [
            Figure(step, ours.get("tokens_per_s"), "tokens/s"),
            Figure(f"{step}, MFU (non-causal)", mfu and 100 * mfu, "%"),
            Figure(f"{step}, peak memory", ours.get("peak_memory_gib"), "GiB"),
            Figure(f"{step}, over a bare diffusers loop", ratio, "×"),
        ]
    return shown


def find_device() -> dict[str, Any]:
    """The accelerator, or `{"type": "cpu"}`."""
    return processes.run([sys.executable, "-c", PROBE], timeout_s=120).last_json()


def run(work: Path) -> dict[str, Any] | None:
    """As one of `python -m benchmarks`; None where there is no accelerator."""
    device = find_device()
    if device["type"] == "cpu":
        print("no accelerator here: nothing to measure")
        return None
    result = Session(work / "accelerator", device).run()
    shown = figures(result)
    page = page_of(result, table([("accelerator", figure) for figure in shown]))
    (RESULTS / "accelerator.txt").write_text(page, encoding="utf-8")
    return result | {"figures": [figure.to_dict() for figure in shown]}


def main() -> int:
    """The command line of `accelerator.sh`."""
    parser = argparse.ArgumentParser(prog="benchmarks/accelerator.sh", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="cpu: the same code on the CPU")
    parser.add_argument("--tiny", action="store_true", help="sizes for a quick look on a CPU")
    parser.add_argument("--out", type=Path, help="the JSON; default: benchmarks/results/accelerator.json")
    parser.add_argument("--peak-tflops", type=float, help="peak of the accelerator in bf16, for the MFU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run; default: all")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of all; more for a slow machine")
    options = parser.parse_args()
    device = find_device() if options.device == "auto" else {"type": "cpu"}
    if device["type"] == "cpu" and options.device == "auto":
        print("no accelerator here: nothing to measure")
        return 0
    with tempfile.TemporaryDirectory(prefix="mm-accelerator-") as work:
        result = Session(Path(work), device, options.tiny, options.peak_tflops, options.parts, options.limit_s).run()
    shown = figures(result)
    result["figures"] = [figure.to_dict() for figure in shown]
    asked = "" if tuple(options.parts) == PARTS else f" --parts {' '.join(options.parts)}"
    written = write_result("accelerator", f"benchmarks/accelerator.sh{asked}", result, options.out)
    page = page_of(result, table([("accelerator", figure) for figure in shown]))
    written.with_suffix(".txt").write_text(page, encoding="utf-8")
    print(page)
    return int(any(has_failed(result[part]) for part in options.parts))


def has_failed(part: Any) -> bool:
    """Whether a part, or a part of it, ended with an error."""
    return isinstance(part, dict) and ("error" in part or any(map(has_failed, part.values())))


if __name__ == "__main__":
    sys.exit(main())
