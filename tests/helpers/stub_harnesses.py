"""Stand-ins for lmms-eval and VLMEvalKit: the same command lines, the same files of results, one question each.

What they write is laid out as by lmms-eval 0.7.3 (`loggers/evaluation_tracker.py`) and VLMEvalKit (`run.py`,
`vlmeval/smp/status.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

_ASK = """
import json, os, urllib.request

def ask(base, key, name, text):
    turn = {"role": "user", "content": [{"type": "text", "text": text}]}
    body = {"model": name, "messages": [turn], "max_tokens": 4, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base}/chat/completions", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
_LMMS_EVAL = """
import argparse, pathlib, sys, time
from lmms_eval.asking import ask, json, os

parser = argparse.ArgumentParser()
for name in ("model", "model_args", "tasks", "batch_size", "output_path", "gen_kwargs"):
    parser.add_argument(f"--{name}")
parser.add_argument("--limit", type=float)
parser.add_argument("--log_samples", action="store_true")
args = parser.parse_args()
print("evaluating", args.tasks)
assert args.model == "async_openai" and args.log_samples and "secret" not in " ".join(sys.argv)
settings = dict(pair.split("=", 1) for pair in args.model_args.split(","))
if args.tasks == "unknown":
    print("Tasks not found: unknown")  # and ends with 0, as lmms-eval does
    sys.exit(0)
said = ask(os.environ["OPENAI_API_BASE"], os.environ["OPENAI_API_KEY"], settings["model"], "what?")
folder = pathlib.Path(args.output_path) / settings["model"]
folder.mkdir(parents=True, exist_ok=True)
results = {
    task: {
        "alias": task, "submission,none": None,
        "exact_match,none": 0.75, "exact_match_stderr,none": 0.1, "exact_match_stderr_clustered,none": 0.125,
        "exact_match,flexible-extract": 0.8, "exact_match_stderr_clustered,flexible-extract": "N/A",
    }
    for task in args.tasks.split(",")
}
counts = {task: {"original": 12, "effective": int(args.limit or 12)} for task in results}
content = {"results": results, "n-samples": counts, "configs": {}, "said": said, "gen_kwargs": args.gen_kwargs}
(folder / f"{time.strftime('%Y%m%d_%H%M%S')}_results.json").write_text(json.dumps(content))
"""
_VLMEVALKIT = """
import argparse, pathlib
from vlmeval.asking import ask, json, os

parser = argparse.ArgumentParser()
parser.add_argument("--data", nargs="+")
parser.add_argument("--model", nargs="+")
for name in ("--work-dir", "--base-url", "--judge", "--key", "--max-tokens"):
    parser.add_argument(name)
args = parser.parse_args()
(model,) = args.model
said = ask(args.base_url, os.environ["LMDEPLOY_API_KEY"], model, "what?")
run = pathlib.Path(args.work_dir) / model / "T20261126-101112"
run.mkdir(parents=True, exist_ok=True)
datasets = {}
for name in args.data:
    if name == "MathVista_MINI":
        datasets[name] = {"status": "done", "error_message": "a judge is needed"}
        continue
    metrics = {f"split=none|{subject}": 0.1 * place for place, subject in enumerate("abcdefgh")} | {"Overall": "0.5"}
    datasets[name] = {"status": "done", "metrics": metrics, "primary_metric": "Overall"}
status = {"schema_version": "1.0", "model_name": model, "datasets": datasets, "said": said, "judge": args.judge}
(run / "status.json").write_text(json.dumps(status))
link = run.parent / "status.json"
link.unlink(missing_ok=True)
link.symlink_to(pathlib.Path(run.name) / "status.json")
"""


def install_stubs(environment: Path) -> Path:
    """An environment with `lmms_eval` and, as a checkout that is installed in place, `vlmeval` beside its `run.py`;
    returns its Python."""
    site = environment / "site"
    for name in ("lmms_eval", "vlmeval"):
        package = site / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "asking.py").write_text(_ASK)
    (site / "lmms_eval" / "__main__.py").write_text(_LMMS_EVAL)
    (site / "run.py").write_text(_VLMEVALKIT)
    python = environment / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python
