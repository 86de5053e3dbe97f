"""The command `mm doctor`: looks at the machine and its packages."""

from __future__ import annotations

from dataclasses import asdict

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.measure import DoctorRequest

EXAMPLES = """
\b
Examples:
  mm doctor
  mm doctor --nproc 2
  mm doctor --json
"""


@click.command(epilog=EXAMPLES)
@takes(DoctorRequest)
def command(request: DoctorRequest) -> int:
    """Look at Python, packages, device, disk, memory, ports and clock, and say how to mend what is wrong.

    Each line is ok, a warning or a problem; the exit code is 3 where there is a problem. Nothing is installed or
    changed, and nothing is asked of the network.
    """
    from mindspeed_mm.tasks.doctor import doctor  # torch: the help does without

    findings = doctor.run(request.nproc)
    count = sum(finding.level == "problem" for finding in findings)
    if request.as_json:
        say_json({"problems": count, "findings": [asdict(finding) for finding in findings]}, indent=2)
    else:
        for finding in findings:
            say(finding.line())
        say("no problems" if not count else f"{count} problem{'s' if count > 1 else ''}")
    if count:
        return ExitCode.ENVIRONMENT
    return ExitCode.OK
