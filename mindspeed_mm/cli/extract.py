"""The command `mm extract`: encodes media and captions once, before a model that draws is trained."""

from __future__ import annotations

from dataclasses import asdict

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.cli.sharing import option_words
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.garbage import collecting_later
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.export import ExtractRequest

EXAMPLES = """
\b
Examples:
  mm extract examples/digits_flux/digits_flux_config.yaml
  mm extract run.yaml --nproc 8 --dtype bf16 --out /fast/features
"""


@click.command(epilog=EXAMPLES)
@takes(ExtractRequest)
@collecting_later()
def command(request: ExtractRequest) -> int:
    """Encode the media and captions of CONFIG, the YAML that mm train takes. OVERRIDES are section.key=value.

    Training then reads the features instead of running the encoders. Of rows of words and pictures (BAGEL), those
    pictures are encoded that have latents. Running the same command again continues: what is done is verified and kept,
    what is damaged is made again. Ctrl-C or SIGTERM stops after the current batch, with exit code 75. Rows that cannot
    be used are skipped and listed in skipped.jsonl; more than a tenth of them are an error, unless max_bad_fraction
    says otherwise.
    """
    from mindspeed_mm.fsdp.train.run.launched import starts_ranks
    from mindspeed_mm.tasks import train  # torch: the help does without
    from mindspeed_mm.tasks.extract import extract  # torch: the help does without

    config, overrides, out = request.config, request.overrides, request.out
    if starts_ranks(request.nproc):
        return extract.run_ranks(request.nproc, config, overrides, option_words(request), out)
    options = {name: getattr(request, name) for name in ("batch_size", "dtype", "overwrite", "verify")}
    try:
        outcomes = extract.run(config, overrides, out=out, progress_to_stderr=request.as_json, **options)
    except Exception as error:
        if train.tell_launcher(error) and isinstance(error, MMError):
            return int(error.exit_code)  # the launcher prints it, once for all ranks
        raise
    for outcome in outcomes:
        if request.as_json:
            say_json(asdict(outcome))
        else:
            say(outcome.sentence())
    return 0
