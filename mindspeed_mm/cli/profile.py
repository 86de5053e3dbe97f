"""The command `mm profile`: shows where the time of training steps goes."""

from __future__ import annotations

import re
from pathlib import Path

import click
from typing_extensions import override

from mindspeed_mm.core.terminal import say, say_json

EXAMPLES = """
\b
Examples:
  mm profile run.yaml --steps 3:6 --nproc 2
  mm profile runs/mine/profiling --top 20

\b
`python -m mindspeed_mm.fsdp.tools.profiler analyse TRACE` does the same with a trace.
"""


class Steps(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on alone
    """`A:B`, steps A to B - 1."""

    name = "A:B"

    @override
    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+):(\d+)", value)
        if found is None or not 1 <= int(found[1]) < int(found[2]):
            self.fail(f"'{value}' is not A:B with 1 <= A < B: steps A to B - 1.", param, ctx)
        return int(found[1]), int(found[2])


@click.command(epilog=EXAMPLES)
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--steps", type=Steps(), help="With a YAML: record steps A to B - 1, then end training.  [default: 3:6]")
@click.option("--nproc", type=click.IntRange(min=1), help="With a YAML: number of ranks on this host.  [default: 1]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="With a YAML: folder for traces; default: under profiling/."
)
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Number of rows in each table.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    target: Path,
    overrides: tuple[str, ...],
    steps: tuple[int, int] | None,
    nproc: int | None,
    out: Path | None,
    top: int,
    as_json: bool,
) -> int:
    """Show where the time of training steps goes, and what limits them.

    TARGET is a YAML, which is trained for a few steps that are recorded on every rank, saving nothing; or a trace, or a
    folder with a trace of each rank. OVERRIDES are section.key=value; tools.profile.static_param.level=2 also records
    modules.
    """
    from mindspeed_mm.fsdp.tools.trace_report import bottleneck, summary_lines  # numpy: the help does without
    from mindspeed_mm.tasks import profile as task

    if target.suffix.lower() in task.SUFFIXES:
        done = task.run_config(target, overrides, steps=steps or (3, 6), nproc=nproc or 1, out=out)
    elif overrides or steps or nproc or out:
        raise click.UsageError(
            "OVERRIDES, --steps, --nproc and --out need a YAML; a trace does not accept them.", ctx=ctx
        )
    else:
        done = task.run_trace(target)
    if done.analysis is None:
        return done.exit_code
    if as_json:
        found = bottleneck(done.analysis)
        facts = {"bottleneck": vars(found), "traces": [str(path) for path in done.traces]}
        say_json(facts | done.analysis.to_dict(top), indent=2)
    else:
        say("\n".join([*summary_lines(done.analysis, top), f"traces: {', '.join(map(str, done.traces))}"]))
    return done.exit_code
