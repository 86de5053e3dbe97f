"""Scores answers to rows, or to a published set: `python evaluate_vlm.py --mm-model evaluate.json --load RUN`."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.sampling.answers.scored import Evaluation
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.evaluate.published import evaluate as published
from mindspeed_mm.tasks.evaluate.published.evaluate import PublishedResult
from mindspeed_mm.tasks.evaluate.published.sets import SETS
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest


def evaluate_rows() -> None:
    """Print the score of each task, and write `results.json` and `samples.jsonl` to `result_output_path`.

    Raises:
        ConfigError: There is no model, or no rows.
    """
    args = parse_args()
    translated = translate(args, for_training=False)
    section = JsonSection(translated.model_json)
    model = translated.arguments.training.load or translated.arguments.model.model_name_or_path
    if model is None:
        raise ConfigError("no model is named", key="--load", way_out="Give a model folder or a run.")
    where, rows = str(args.mm_model or "--mm-model"), section.get("dataset_path")
    if not rows:
        way_out = "Name a file of rows with answers: JSON, JSONL, CSV or parquet."
        raise ConfigError("is not given", where=where, key="dataset_path", way_out=way_out)
    name = section.get("evaluation_dataset")
    if name is not None and name not in SETS:
        known = f"{did_you_mean(name, SETS)}There are {', '.join(SETS)}; leave it out for rows of your own."
        raise ConfigError(
            f"no set '{name}' is known", where=str(args.mm_model), key="evaluation_dataset", way_out=known
        )
    if name is None and Path(rows).suffix == ".tsv":
        way_out = f"Name its set as evaluation_dataset: {', '.join(SETS)}."
        raise ConfigError(
            f"{rows} is the table of a set", where=str(args.mm_model), key="dataset_path", way_out=way_out
        )
    out = None
    if found := section.get("result_output_path"):
        out = Path(found)
    longest = section.get("generation_config", JsonSection()).get("max_new_tokens", 512)
    request = EvaluateRequest(model, data=Path(rows), benchmark=name, out=out, max_new_tokens=longest)
    scores: Evaluation | PublishedResult
    if name is None:
        scores = evaluate.run(request)
    else:
        scores = published.run(request)
    if not args.rank:  # all ranks have answered their share
        say("\n".join(scores.lines()))


def main() -> None:
    """Run `evaluate_rows` as a script: an error becomes a message and an exit code."""
    run_entry(evaluate_rows)


if __name__ == "__main__":
    main()
