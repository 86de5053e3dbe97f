"""Steps of post-training beside TRL's, in turns: the digits example's Qwen3-VL with random weights, in fp32."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.contenders import TIMEOUT_S, Report
from benchmarks.digits import SEED, prepare
from benchmarks.figures import Figure, of_spread
from benchmarks.processes import Finished
from benchmarks.turns import Contender, Turns

LEARNING_RATE = 1e-4
BETA = 0.1
GROUP, ANSWER_TOKENS = 8, 8
ROUNDS = 3

_CONFIG = """\
model: {{model_name_or_path: {model}}}
data:
  dataset_param:
    attr:
      {{messages: messages, role_tag: role, content_tag: content, user_tag: user, assistant_tag: assistant{ranking}}}
    basic_parameters: {{dataset: {rows}, dataset_dir: {folder}, stage: {stage}}}
  dataloader_param: {{num_workers: 2}}
training:
  {{lr: {lr}, lr_decay_style: constant, weight_decay: 0, micro_batch_size: {batch}, seed: {seed}, log_interval: 1}}
posttrain: {posttrain}
"""
_POSTTRAIN = {
    "dpo": {"method": "dpo", "dpo": {"beta": BETA}},
    "grpo": {
        "method": "grpo",
        "grpo": {"num_generations": GROUP},
        "rollout": {"max_completion_length": ANSWER_TOKENS},
        "rewards": [{"name": "exact_match"}],
    },
}


@dataclass(frozen=True)
class Method:
    """What is measured."""

    name: str
    """`dpo` or `grpo`."""
    batch: int
    """Pairs, or answers, of a step."""
    warm_up_steps: int
    measured_steps: int
    target: float

    @property
    def steps(self) -> int:
        """Of each run."""
        return self.warm_up_steps + self.measured_steps


def has_trl() -> bool:
    """Whether TRL can be measured; says so where not."""
    if importlib.util.find_spec("trl") is not None:
        return True
    print("  TRL is not installed, beside which this is measured: pip install --no-deps trl accelerate datasets")
    return False


def measured(method: Method, work: Path) -> dict[str, Any] | None:
    """The rounds of one method; None without TRL."""
    if not has_trl():
        return None
    rows = made_rows(prepare(work / "digits", 1).folder)
    turns = Turns(lambda: _of_trl(method, rows), {"mm train": lambda: _ours(method, rows)}, TIMEOUT_S)
    turns.measure(ROUNDS)
    summary, everyone = turns.summary(), turns.everyone()
    return {
        "model": "Qwen3-VL, 398,016 parameters, fp32",
        "batch": method.batch,
        "warm_up_steps": method.warm_up_steps,
        "measured_steps": method.measured_steps,
        "floor_is": f"TRL {metadata.version('trl')}",
        "unit": "ms a step",
        **summary,
        "figures": [figure.to_dict() for figure in _figures(method, summary, everyone, turns)],
    }


def made_rows(folder: Path) -> Path:
    """Pairs of a right answer and one with a wrong digit, whose pictures have whole paths; rewards read the right
    one."""
    import random

    draw, lines = random.Random(SEED), []
    for line in (folder / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["task"] != "reading":
            continue
        *messages, chosen = row["messages"]
        digits = chosen["content"].split()
        place = draw.randrange(len(digits))
        digits[place] = draw.choice([each for each in "0123456789" if each != digits[place]])
        images = [str(folder / "data" / name) for name in row["images"]]
        pair = {"chosen": chosen, "rejected": {**chosen, "content": " ".join(digits)}}
        lines.append(json.dumps({"id": row["id"], "messages": messages, "images": images, **pair}))
    file = folder / "pairs.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def _of_trl(method: Method, rows: Path) -> Contender:
    out = tempfile.mkdtemp(dir=rows.parent)
    words = [method.name, rows.parent / "model", rows, method.steps, method.batch, out]
    command = [sys.executable, "-m", "benchmarks.trl_trainers", *map(str, words)]
    return Contender(command, lambda finished: _kept(method, finished, finished.last_json()))


def _ours(method: Method, rows: Path) -> Contender:
    folder = Path(tempfile.mkdtemp(dir=rows.parent))
    pairs = method.name == "dpo"
    own = rows if pairs else _with_answers(rows)
    config = folder / "run.yaml"
    text = _CONFIG.format(
        model=rows.parent / "model",
        rows=own,
        folder=rows.parent,
        ranking=", ranking: true" if pairs else "",
        stage="rm" if pairs else "sft",
        lr=LEARNING_RATE,
        batch=method.batch,
        seed=SEED,
        posttrain=json.dumps(_POSTTRAIN[method.name]),
    )
    config.write_text(text, encoding="utf-8")
    words = [f"training.save={folder / 'run'}", f"training.train_iters={method.steps}", "training.save_interval=100000"]

    def finish(finished: Finished) -> dict[str, Any]:
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(folder)
        return _kept(method, finished, [{**line, "answer_tokens": line.get("completion_tokens")} for line in lines])

    return Contender([sys.executable, "-m", "mindspeed_mm", "train", str(config), *words], finish)


def _with_answers(rows: Path) -> Path:
    """The same rows as supervised training has them."""
    lines = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        lines.append(json.dumps({**row, "messages": [*row["messages"], row["chosen"]]}))
    file = rows.with_name("answers.jsonl")
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def _kept(method: Method, finished: Finished, report: Report) -> dict[str, Any]:
    """Mean over the steps after the warm-up, and memory."""
    if len(report) != method.steps:
        raise RuntimeError(f"{len(report)} steps instead of {method.steps}")
    first, last = report[method.warm_up_steps - 1], report[-1]
    measured_s = finished.ran_s(last["time"]) - finished.ran_s(first["time"])
    lengths = [step["answer_tokens"] for step in report[method.warm_up_steps :] if step["answer_tokens"] is not None]
    return {
        "value": 1000 * measured_s / method.measured_steps,
        "first_loss": report[0]["loss"],
        "last_loss": last["loss"],
        "answer_tokens": sum(lengths) / len(lengths) if lengths else None,
        "peak_rss_mb": finished.peak_rss_mb,
    }


def _figures(method: Method, summary: dict[str, Any], everyone: list[dict[str, Any]], turns: Turns) -> list[Figure]:
    name = method.name.upper()
    memory = [one["mm train"]["peak_rss_mb"] / one["floor"]["peak_rss_mb"] for one in turns.rounds]
    middle = sorted(memory)[len(memory) // 2]
    return [
        of_spread(f"mm train / TRL, {name} step", summary["ratio_to_floor"]["mm train"], "×", method.target),
        of_spread(f"mm train, {name} step", summary["contenders"]["mm train"], "ms"),
        of_spread(f"TRL, {name} step", summary["floor"], "ms"),
        Figure(f"mm train / TRL, {name}, peak memory", middle, "×", None, min(memory), max(memory)),
    ]
