"""`mm check` of DeepSeek-V3 (671 B) on 256 ranks: processor time of the check and of the forecast in it.

The configuration is the shipped example's, with the released `config.json`, a small tokenizer and rows of text. What is
imported before costs nothing here. `python -m benchmarks.check FOLDER` is one check in a process of its own; with
`--whole`, every block is simulated. It prints one JSON line.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import processes
from benchmarks.figures import Figure, of_spread
from benchmarks.machine import ROOT
from benchmarks.rounds import spread

EXAMPLE = ROOT / "examples" / "deepseek_v3" / "deepseek_v3_671B_config.yaml"
RELEASED = ROOT / "tests" / "released" / "deepseek-v3.json"
RANKS = 256
RUNS = 3
CHECK_TARGET_S, FORECAST_TARGET_S = 8.0, 3.0
TIMEOUT_S = 300.0


def run(work: Path) -> dict[str, Any]:
    """Measure."""
    command = [sys.executable, "-m", "benchmarks.check", str(work)]
    found = [processes.run(command, timeout_s=TIMEOUT_S).last_json() for _ in range(RUNS)]
    whole = processes.run([*command, "--whole"], timeout_s=TIMEOUT_S).last_json()
    spreads = {name: spread([each[name] for each in found]) for name in ("check_s", "forecast_s")}
    figures = [
        of_spread("mm check of 671 B beyond its imports, processor time", spreads["check_s"], "s", CHECK_TARGET_S),
        of_spread("its memory forecast", spreads["forecast_s"], "s", FORECAST_TARGET_S),
        Figure("mm check with every block simulated", whole["check_s"], "s"),
        Figure("its memory forecast, every block simulated", whole["forecast_s"], "s"),
        Figure("bytes by which the two forecasts differ", abs(whole["peak"] - found[0]["peak"]), "B", 0),
    ]
    return {
        "model": "DeepSeek-V3, 61 layers",
        "ranks": RANKS,
        "unit": "s of processor time",
        "runs": found,
        "whole": whole,
        "figures": [figure.to_dict() for figure in figures],
    }


def one_check(work: Path, *, whole: bool) -> dict[str, Any]:
    """Check in this process."""
    from mindspeed_mm.fsdp.train.memory import forecast as forecasts
    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
    from mindspeed_mm.tasks.check import check

    prepare_for_transformers()
    for name in ("mindspeed_mm.tasks.check.memory", "transformers.models.deepseek_v3.modeling_deepseek_v3"):
        importlib.import_module(name)
    forecast_plan, peaks, spent = forecasts.forecast_plan, list[int](), list[float]()

    def timed(*args: Any) -> Any:
        before = time.process_time()
        prediction = forecast_plan(*args, whole=whole)
        spent.append(time.process_time() - before)
        peaks.append(prediction.peak)
        return prediction

    words = _prepared(work)
    started = time.process_time()
    with mock.patch.object(forecasts, "forecast_plan", timed):
        result = check.run(EXAMPLE, words, nproc=RANKS)
    if result.problems:
        raise SystemExit(f"the check failed: {result.problems}")
    return {"check_s": time.process_time() - started, "forecast_s": sum(spent), "peak": sum(peaks)}


def _prepared(work: Path) -> list[str]:
    """A folder of the model, and rows; the words that put them into the example."""
    from tests.helpers.tiny_models import build_tokenizer

    model, rows = work / "model", work / "rows.jsonl"
    if not rows.exists():
        model.mkdir(parents=True, exist_ok=True)
        build_tokenizer().save_pretrained(model)
        config = json.loads(RELEASED.read_text(encoding="utf-8"))["config"]
        config.pop("quantization_config", None)
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        answer = "zero one two three four five six seven eight nine ten " * 20
        turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": answer}]
        rows.write_text((json.dumps({"messages": turns}) + "\n") * 2000, encoding="utf-8")
    basic = "data.dataset_param.basic_parameters"
    return [
        f"model.model_name_or_path={model}",
        "model.train_from_scratch=true",
        f"{basic}.dataset={rows}",
        f"{basic}.dataset_dir={work}",
        "training.save=null",
    ]


if __name__ == "__main__":
    print(json.dumps(one_check(Path(sys.argv[1]), whole="--whole" in sys.argv)))
