"""The command `mm check`: finds mistakes in a YAML file before training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.errors import align, count_problems
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.check import check as task
from mindspeed_mm.tasks.requests.train import CheckRequest

EXAMPLES = """
\b
Examples:
  mm check run.yaml
  mm check run.yaml training.lr=2e-5 --config-only --nproc 8
"""


@click.command(epilog=EXAMPLES)
@takes(CheckRequest)
def command(request: CheckRequest) -> None:
    """Find what is wrong with CONFIG before training, and say how to fix it.

    Checked in this order: the configuration, plugins, paths, module patterns against the model (built without weights),
    the first samples, batch keys against the model's forward, and the memory that the first batch will take (on one of
    --nproc ranks). What the run would go on from is checked, too, under the options that mm train will be given.
    OVERRIDES are section.key=value, each parsed as YAML.
    """
    result = task.run(
        request.config,
        request.overrides,
        config_only=request.config_only,
        nproc=request.nproc,
        options=request.start,
    )
    if request.as_json:
        findings = [
            {"stage": f.stage, "exit_code": f.exit_code, "headline": f.headline, **asdict(f.problem)}
            for f in result.findings
        ]
        content = {**asdict(result), "path": str(result.path), "findings": findings, "exit_code": result.exit_code}
        say_json(content, indent=2)
    else:
        say(_as_text(result))
    click.get_current_context().exit(result.exit_code)


def _as_text(result: task.CheckResult) -> str:
    problems = result.problems
    lines = [f"{result.path}: ok"]
    if problems:
        lines = [count_problems(result.path, problems)]
        told = ""
        for finding, line in zip(result.findings, align(problems), strict=True):
            if finding.headline not in ("", told):
                lines.append(f"  {finding.headline}")
            told = finding.headline
            lines.append(f"  {line}")
    lines += _each("  warning: ", result.warnings)
    if result.unchecked:
        lines.append(f"  not checked, a plugin's own keys: {', '.join(result.unchecked)}")
    lines += _each("  ", result.speed)
    lines += _each("  ", result.memory)
    lines += _each("  note: ", result.notes)
    if result.passed:
        lines.append(f"  passed: {', '.join(result.passed)}")
    for cause in dict.fromkeys(result.skipped.values()):
        stages = [stage for stage, need in result.skipped.items() if need == cause]
        lines.append(f"  skipped until {cause} passes: {', '.join(stages)}")
    return "\n".join(lines)


def _each(start: str, texts: Iterable[str]) -> list[str]:
    return [start + text for text in texts]
