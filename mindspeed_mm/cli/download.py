"""The command `mm download`: fetches a model by the hub client that is installed."""

from __future__ import annotations

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.core.terminal import quoted, say, say_json
from mindspeed_mm.tasks import download
from mindspeed_mm.tasks.requests.measure import DownloadRequest

EXAMPLES = """
\b
Examples:
  mm download Qwen/Qwen3-VL-2B-Instruct
  mm download Qwen/Qwen3-VL-2B-Instruct --hub modelscope --out /data/models/qwen3vl
"""


@click.command(epilog=EXAMPLES)
@takes(DownloadRequest)
def command(request: DownloadRequest) -> None:
    """Download the model NAME, as OWNER/MODEL, by the client of its hub, and say what comes next.

    This is the only command that downloads anything. Logins, mirrors and proxies are those of the client.
    """
    folder = download.run(request)
    if request.as_json:
        say_json({"name": request.name, "folder": str(folder)})
        return
    say(f"{request.name}: {folder}")
    say(f"next: set model.model_name_or_path: {folder} in a YAML, or try it: mm chat {quoted(folder)}")
