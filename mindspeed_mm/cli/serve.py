"""The command `mm serve`: answers clients of OpenAI's interface over HTTP."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from mindspeed_mm.cli.infer import read_adapters
from mindspeed_mm.cli.sharing import check_inputs, of_checkpoint, share
from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.serve.limits import Limits, option_of
from mindspeed_mm.tasks.serve.request import ServeRequest, check_request

EXAMPLES = """
\b
Examples:
  mm serve runs/mine
  mm serve runs/mine --port 9000 --key-file key.txt --media-folder data/images
  mm serve models/FLUX.1-dev --batch-size 2
  mm serve models/large --nproc 8 --plan examples/qwen3vl/qwen3vl_8B_config.yaml
"""
_NEEDED = ("starlette", "uvicorn", "werkzeug")
_SHORTEST_KEY = 8


def limit_options(command: Callable[..., int]) -> Callable[..., int]:
    """An option for each limit."""
    for limit in reversed(fields(Limits)):
        kind: Any = click.IntRange(min=1) if isinstance(limit.default, int) else click.FloatRange(min=0, min_open=True)
        told = limit.metadata["help"]
        option = click.option(option_of(limit.name), type=kind, default=limit.default, show_default=True, help=told)
        command = option(command)
    return command


@click.command(epilog=EXAMPLES)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen on; 0: any free one."
)
@click.option("--name", default="", help="Model name that requests use; default: the name of its folder.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the API key that requests must send.")
@click.option(
    "--media-folder", type=click.Path(path_type=Path), help="Folder from which requests may read media files."
)
@click.option(
    "--allow-remote-media",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Host from which requests may fetch media; may be repeated.",
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ADDRESS",
    help="Address of web pages that may use the server, besides its own page, such as https://models.example.org if a "
    "proxy stands before it; may be repeated.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Number of answers generated at a time.",
)
@click.option("--lora", type=click.Path(path_type=Path), help="Folder of adapters to apply to the weights.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Adapters that requests select by their model name.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML whose data section sets the chat template and media sizes; default: the run's.",
)
@click.option(
    "--engine",
    type=click.Choice(["own", "batches", "continuous", "vllm", "sglang"]),
    default="own",
    show_default=True,
    help="Engine that answers. own: this package, by continuous batching where a text-only model runs on an "
    "accelerator, else by batches, which take every model and are faster on a CPU; batches, continuous: always this "
    "way; vllm and sglang must be installed.",
)
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    help="YAML whose 'parallel' section spreads a model that is too large for one device over the processes.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    help="Number of processes on this host that the model is spread over.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
@limit_options
@of_checkpoint
@click.pass_context
def command(
    context: click.Context,
    /,
    model: Path,
    host: str,
    port: int,
    name: str,
    key_file: Path | None,
    media_folder: Path | None,
    hosts: tuple[str, ...],
    origins: tuple[str, ...],
    batch_size: int,
    lora: Path | None,
    config: Path | None,
    adapters: tuple[str, ...],
    engine: str,
    plan: Path | None,
    nproc: int,
    as_json: bool,
    **limits: Any,
) -> int:
    """Serve MODEL, a Hugging Face folder, a generator's folder or a run, to clients of OpenAI's interface.

    A page to try it stands at the address itself; /v1 is the base address for clients. SIGTERM or Ctrl-C ends it once
    everything that runs is answered.
    """
    if lacking := [package for package in _NEEDED if importlib.util.find_spec(package) is None]:
        way_out = "Install the extra: pip install 'mindspeed-mm[serve]'."
        raise MachineError(f"{' and '.join(lacking)} not installed", way_out=way_out)
    key = read_key(key_file)
    if nproc > 1 and plan is None:
        way_out = "Add --plan CONFIG, whose section 'parallel' spreads the model."
        raise UsageError("one process serves a model that is not spread", key="--nproc", way_out=way_out)
    remote_hosts = frozenset(host.lower() for host in hosts)
    request = ServeRequest(
        model,
        host,
        port,
        name,
        key,
        media_folder,
        remote_hosts,
        frozenset(origin.lower().rstrip("/") for origin in origins),
        Limits(**limits),
        batch_size,
        lora,
        config,
        read_adapters(adapters),
        engine,
        plan,
    )
    check_inputs(context)
    check_request(request)
    from mindspeed_mm.tasks.serve import serve  # torch and the web server: the help does without

    def announce(address: str) -> None:
        told = {"model": request.shown_name, "address": address}
        if as_json:
            say_json(told)
        else:
            say(f"Serving {model} at {address}")

    return share(context, "serve", lambda: serve.run(request, announce))


def read_key(path: Path | None) -> str | None:
    """The key in a file, without blanks around it; None where no file is named.

    Raises:
        UsageError: There is none, or it is short.
    """
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what, way_out = "the key cannot be read", "Write one: openssl rand -hex 32 > key.txt"
        raise UsageError(what, where=str(path), key="--key-file", way_out=way_out) from error
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable():
        what = f"a key has {_SHORTEST_KEY} characters or more, all of them printable ASCII"
        way_out = "Write one: openssl rand -hex 32 > key.txt"
        raise UsageError(what, where=str(path), key="--key-file", way_out=way_out)
    return key
