"""The command `mm train`: trains a model from one YAML file."""

from __future__ import annotations

import os

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.cli.sharing import option_words
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.terminal import say_json
from mindspeed_mm.fsdp.train.run.launched import starts_ranks
from mindspeed_mm.tasks import train
from mindspeed_mm.tasks.requests.train import TrainRequest

EXAMPLES = """
\b
Examples:
  mm train examples/digits/digits_tiny_config.yaml
  mm train run.yaml --nproc 8 training.lr=2e-5 parallel.fsdp_plan.param_dtype=bf16
  torchrun --nproc-per-node 8 -m mindspeed_mm train run.yaml
"""


SETTINGS = {"help_option_names": ["-h", "--help"]}
"""Of commands that train, also where they are made apart from the program."""


@click.command(epilog=EXAMPLES, context_settings=SETTINGS)
@takes(TrainRequest)
def command(request: TrainRequest) -> int:
    """Train the model of CONFIG. OVERRIDES are section.key=value, each parsed as YAML.

    Running the same command again continues from the newest checkpoint. Ctrl-C or SIGTERM saves one and ends with exit
    code 75; a second one stops at once.
    """
    return start(request)


def start(request: TrainRequest) -> int:
    """Train in this process or in many, print the outcome where JSON is asked for, and return the exit code.

    Raises:
        MMError: As `tasks.train.run` and `run_ranks`.
    """
    if starts_ranks(request.nproc):
        return train.run_ranks(request.nproc, request.config, request.overrides, option_words(request))
    options = vars(request.options) | {"progress_to_stderr": request.as_json}
    try:
        outcome = train.run(request.config, request.overrides, **options)
    except Exception as error:
        if train.tell_launcher(error) and isinstance(error, MMError):
            return int(error.exit_code)  # the launcher prints it, once for all ranks
        raise
    if request.as_json and os.environ.get("RANK", "0") == "0":
        say_json(vars(outcome))
    return outcome.exit_code
