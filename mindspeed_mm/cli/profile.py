"""The command `mm profile`: shows where the time of training steps goes."""

from __future__ import annotations

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.measure import ProfilingRequest

EXAMPLES = """
\b
Examples:
  mm profile run.yaml --steps 3:6 --nproc 2
  mm profile runs/mine/profiling --top 20

\b
`python -m mindspeed_mm.fsdp.tools.profiler analyse TRACE` does the same with a trace.
"""


@click.command(epilog=EXAMPLES)
@takes(ProfilingRequest)
def command(request: ProfilingRequest) -> int:
    """Show where the time of training steps goes, and what limits them.

    TARGET is a YAML, which is trained for a few steps that are recorded on every rank, saving nothing; or a trace, or a
    folder with a trace of each rank. OVERRIDES are section.key=value; tools.profile.static_param.level=2 also records
    modules.
    """
    from mindspeed_mm.fsdp.tools.trace_report import bottleneck, summary_lines  # numpy: the help does without
    from mindspeed_mm.tasks import profile as task

    if request.target.suffix.lower() in task.SUFFIXES:
        done = task.run_config(request)
    elif request.overrides or request.steps or request.nproc or request.out:
        raise click.UsageError(
            "OVERRIDES, --steps, --nproc and --out need a YAML; a trace does not accept them.",
            ctx=click.get_current_context(),
        )
    else:
        done = task.run_trace(request.target)
    if done.analysis is None:
        return done.exit_code
    if request.as_json:
        found = bottleneck(done.analysis)
        facts = {"bottleneck": vars(found), "traces": [str(path) for path in done.traces]}
        say_json(facts | done.analysis.to_dict(request.top), indent=2)
    else:
        say("\n".join([*summary_lines(done.analysis, request.top), f"traces: {', '.join(map(str, done.traces))}"]))
    return done.exit_code
