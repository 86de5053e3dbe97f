"""The command `mm posttrain` with its subcommands: trains on preferences or rewards, and prepares such training."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.cli.train import SETTINGS, start
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.fsdp.train.run.launched import starts_ranks
from mindspeed_mm.tasks.posttrain import reference as task
from mindspeed_mm.tasks.posttrain import rollouts as rollouts_task
from mindspeed_mm.tasks.posttrain import score as score_task
from mindspeed_mm.tasks.requests.train import ReferenceRequest, RolloutsRequest, ScoreRequest, TrainRequest

EXAMPLES = """
\b
Examples:
  mm posttrain dpo examples/digits_dpo/digits_dpo_config.yaml
  mm posttrain grpo run.yaml training.lr=1e-5
  mm posttrain rollouts runs/reader --number 20 --json
  mm posttrain score run.yaml samples/samples.jsonl --out scores.jsonl --histogram histogram.json
  mm posttrain reference run.yaml --nproc 8
  mm train run.yaml posttrain.reference.kind=stored
"""


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Train on preferences or rewards, as the section posttrain of a YAML says."""


@command.command("dpo", context_settings=SETTINGS)
@takes(TrainRequest)
def dpo(request: TrainRequest) -> int:
    """Train on preference pairs: mm train with posttrain.method=dpo."""
    return _trained("dpo", request)


@command.command("grpo", context_settings=SETTINGS)
@takes(TrainRequest)
def grpo(request: TrainRequest) -> int:
    """Train on the model's own answers and their rewards: mm train with posttrain.method=grpo."""
    return _trained("grpo", request)


@command.command("nft", context_settings=SETTINGS)
@takes(TrainRequest)
def nft(request: TrainRequest) -> int:
    """Train a generator on its own samples and their rewards: mm train with posttrain.method=nft."""
    return _trained("nft", request)


@command.command("dmd", context_settings=SETTINGS)
@takes(TrainRequest)
def dmd(request: TrainRequest) -> int:
    """Distil a generator into one of few steps: mm train with posttrain.method=dmd."""
    return _trained("dmd", request)


def _trained(method: str, request: TrainRequest) -> int:
    return start(replace(request, overrides=(*request.overrides, f"posttrain.method={method}")))


@command.command("rollouts")
@takes(RolloutsRequest)
def rollouts(request: RolloutsRequest) -> int:
    """Show what RUN, the folder of a run with posttrain.method grpo or nft, has sampled.

    Each prompt is followed by its samples, the best one first: reward, advantage, and the text or, of a picture or
    clip, the name.
    """
    view = rollouts_task.run(request.run, request.number, request.prompts)
    if request.as_json:
        say_json(asdict(view))
        return 0
    say(f"rollout {view.number}")
    for line in view.lines():
        say(line)
    return 0


@command.command("score")
@takes(ScoreRequest)
def score(request: ScoreRequest) -> int:
    """Score the samples of ROWS by posttrain.rewards of CONFIG. OVERRIDES are section.key=value.

    A row has a prompt (or caption) and a picture in 'file', which lies beside ROWS, or a text in 'completion'. It is
    written as it is with 'score' and 'scores'; a picture in 'file_rejected' gets 'score_rejected'.
    """
    outcome = score_task.run(request)
    if request.as_json:
        say_json(asdict(outcome))
        return 0
    for name, mean in outcome.means.items():
        told = "null" if mean is None else f"{mean:.4g}"
        say(f"{name}: {told}")
    say(f"{outcome.rows:,} rows: {outcome.path}")
    return 0


@command.command("reference")
@takes(ReferenceRequest)
def reference(request: ReferenceRequest) -> int:
    """Compute what training asks of the reference of CONFIG once. OVERRIDES are section.key=value.

    Log-probabilities of all pairs are written to posttrain.reference.path, or reference.safetensors in training.save;
    training with posttrain.reference.kind: stored reads them and needs no second model. Pipelines need it. With
    posttrain.dmd.objective: ode_regression it draws the teacher's trajectories into a folder, and goes on where it
    stopped.
    """
    if starts_ranks(request.nproc):
        return task.run_ranks(request)
    outcome = task.run(request)
    if os.environ.get("RANK", "0") == "0":
        held = f"{outcome.trajectories:,} trajectories" if outcome.trajectories else f"{outcome.pairs:,} pairs"
        line = f"{held}: {outcome.path}"
        if request.as_json:
            say_json(vars(outcome))
        else:
            say(line)
    return 0
