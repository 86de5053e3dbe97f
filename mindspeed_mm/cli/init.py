"""The command `mm init`: writes the first YAML for a model and rows."""

from __future__ import annotations

from dataclasses import asdict

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import quoted, say, say_json
from mindspeed_mm.tasks.requests.init import InitRequest

EXAMPLES = """
\b
Examples:
  mm init --model models/Qwen3-VL-2B-Instruct --data data/rows.jsonl
  mm init --model models/Qwen3-VL-8B-Instruct --data data/rows.jsonl --gpu 24 --devices 8 --out run.yaml
  mm init --model models/FLUX.1-dev --data pictures --gpu 24
  mm init --model models/base --data data/rows.jsonl data.dataset_param.basic_parameters.template=default
"""


@click.command(epilog=EXAMPLES)
@takes(InitRequest)
def command(request: InitRequest) -> None:
    """Write a YAML that trains a model on rows and passes mm check, with a script that starts it.

    Whether all weights are trained or adapters, how many rows a device takes at a time, and whether blocks are computed
    again are chosen by the forecast of memory, for this machine or for the devices that are named. Nothing is trained.
    OVERRIDES are section.key=value, checked and written into the YAML.

    Where the model's folder has no chat template, a built-in one with the model's tokens is named in the YAML. Rows of
    plain text are trained on with stage: pretrain.
    """
    from mindspeed_mm.tasks.init import init  # torch: the help does without

    made = init.run(request, lambda line: say(line, err=True))
    if request.as_json:
        say_json(asdict(made))
        return
    say(f"{made.config}: {made.way}; {made.rows:,} rows")
    for note in made.notes:
        say(f"  {note}")
    say(f"next: mm data preview {quoted(made.config)}, then bash {quoted(made.script)}")
