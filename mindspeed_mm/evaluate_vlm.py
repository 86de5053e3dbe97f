"""Scores answers to the rows that model.json names: `python evaluate_vlm.py --mm-model evaluate.json --load RUN`."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.evaluate import evaluate


def evaluate_rows() -> None:
    """Print the score of each task, and write `results.json` and `samples.jsonl` to `result_output_path`.

    Raises:
        ConfigError: There is no model, or no rows.
    """
    args = parse_args()
    if args.rank:
        return  # one rank answers
    translated = translate(args, for_training=False)
    section = JsonSection(translated.model_json)
    model = translated.arguments.training.load or translated.arguments.model.model_name_or_path
    if model is None:
        raise ConfigError("no model is named", key="--load", way_out="Give a model folder or a run.")
    rows = section.get("dataset_path")
    if not rows:
        way_out = "Name a file of rows with answers: JSON, JSONL, CSV or parquet."
        raise ConfigError("is not given", where=str(args.mm_model or "--mm-model"), key="dataset_path", way_out=way_out)
    if Path(rows).suffix == ".tsv":
        way_out = "Write its rows as conversations (docs/data.md), the answer as the assistant's turn."
        raise ConfigError(
            f"{rows} is a benchmark's table", where=str(args.mm_model), key="dataset_path", way_out=way_out
        )
    out = section.get("result_output_path")
    longest = section.get("generation_config", JsonSection()).get("max_new_tokens", 512)
    scores = evaluate.run(Path(model), Path(rows), out=Path(out) if out else None, max_new_tokens=longest)
    print("\n".join(scores.lines()), flush=True)


def main() -> None:
    """Evaluate."""
    run_entry(evaluate_rows)


if __name__ == "__main__":
    main()
