"""The command `mm extract`: encodes media and captions once, before a generator is trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.terminal import say, say_json

EXAMPLES = """
\b
Examples:
  mm extract examples/digits_flux/digits_flux_config.yaml
  mm extract run.yaml --nproc 8 --dtype bf16 --out /fast/features
"""


@click.command(epilog=EXAMPLES)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write; default: basic_parameters.features_dir.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Number of samples encoded at a time; default: chosen by the number of pixels.",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), default=1, help="Number of ranks on this host; more than 1 starts torchrun."
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]), help="Type that the encoders compute in; default: the stored one."
)
@click.option("--overwrite", is_flag=True, help="Delete the existing features and start again.")
@click.option(
    "--verify",
    type=click.Choice(["hash", "size"]),
    default="hash",
    show_default=True,
    help="How existing features are verified: every byte, or headers and sizes only.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def command(
    config: Path,
    overrides: tuple[str, ...],
    out: Path | None,
    batch_size: int | None,
    nproc: int,
    dtype: str | None,
    overwrite: bool,
    verify: str,
    as_json: bool,
) -> int:
    """Encode the media and captions of CONFIG, the YAML that mm train takes. OVERRIDES are section.key=value.

    Training then reads the features instead of running the encoders. Running the same command again continues: what is
    done is verified and kept, what is damaged is made again. Ctrl-C or SIGTERM stops after the current batch, with exit
    code 75. Rows that cannot be used are skipped and listed in skipped.jsonl; more than a tenth of them are an error,
    unless max_bad_fraction says otherwise.
    """
    from mindspeed_mm.fsdp.train.run.launched import starts_ranks
    from mindspeed_mm.tasks import train  # torch: the help does without
    from mindspeed_mm.tasks.extract import extract  # torch: the help does without

    if starts_ranks(nproc):
        given = {"--out": out, "--batch-size": batch_size, "--dtype": dtype, "--verify": verify}
        words: list[str] = []
        for name, value in given.items():
            if value is not None:
                words += [name, str(value)]
        words += ["--overwrite"] * overwrite + ["--json"] * as_json
        return extract.run_ranks(nproc, config, overrides, words, out)
    options = {"batch_size": batch_size, "dtype": dtype, "overwrite": overwrite, "verify": verify}
    try:
        outcomes = extract.run(config, overrides, out=out, progress_to_stderr=as_json, **options)
    except Exception as error:
        if train.tell_launcher(error) and isinstance(error, MMError):
            return int(error.exit_code)  # the launcher prints it, once for all ranks
        raise
    for outcome in outcomes:
        if as_json:
            say_json(asdict(outcome))
        else:
            say(outcome.sentence())
    return 0
