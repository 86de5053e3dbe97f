"""The command `mm`: a table of verbs, each imported only when it is called, and the border where errors become lines.

Anything that a person can act on is printed without a traceback, with the exit code of its class; anything else is a
bug and says so.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click
from typing_extensions import override

from mindspeed_mm.core.errors import ExitCode, MMError, Problem
from mindspeed_mm.core.os_errors import explained_os_error
from mindspeed_mm.core.redaction import without_secrets
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.terminal import say, say_failure, visible
from mindspeed_mm.core.version import __version__

VERBS = {
    "quickstart": "Train, evaluate and ask a first model on data of this package.",
    "route": "Tell which models and commands lead to what you want to do.",
    "models": "List the families of models and what is proven of each.",
    "init": "Write the first YAML for a model and rows.",
    "train": "Train a model from one YAML file.",
    "posttrain": "Train on preferences or rewards, and prepare it.",
    "check": "Find the mistakes in a YAML file before training.",
    "data": "Check, preview or describe the rows that a YAML file names.",
    "config": "Show the resolved configuration and where each value came from.",
    "schema": "Explain a key, or print the JSON schema.",
    "verify": "Verify that a parallel plan computes what one process computes.",
    "extract": "Encode media and captions once, before training a generator.",
    "export": "Export a run as a Hugging Face folder.",
    "convert": "Convert a checkpoint to another layout.",
    "merge": "Merge adapters into a model's weights.",
    "infer": "Generate answers or samples with a model.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Answer clients of OpenAI's interface over HTTP.",
    "evaluate": "Score a model on held-out rows.",
    "profile": "Show where the time of training steps goes, and what limits them.",
    "report": "Make one HTML page of a run.",
    "ui": "Show the runs of a folder in a browser, and make and start others.",
    "flops": "Count the FLOPs of a training step by module.",
    "doctor": "Look at the machine and its packages, and say how to mend what is wrong.",
    "download": "Download a model by the hub client that is installed.",
    "completion": "Print what makes a shell complete verbs and options.",
}
"""Verb → help line. `mindspeed_mm.cli.<verb>.command` is imported when the verb is called."""

EXAMPLES = """
\b
Examples:
  mm check run.yaml
  mm train run.yaml training.lr=2e-5 --nproc 8

Exit codes: 0 ok, 1 bug, 2 usage or configuration, 3 environment, 4 data, model folder or checkpoint, 5 diverged,
75 stopped after a saved checkpoint: run the same command again.
"""

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""


class LazyGroup(click.Group):
    """Verbs that are listed from a table and imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order of the table."""
        return list(VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"mindspeed_mm.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or say which one is near."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], VERBS)
            ctx.fail(f"unknown command '{args[0]}'. {hint}Commands: {', '.join(VERBS)}.")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mm")
@click.option("--traceback", "show_traceback", is_flag=True, help="Show the traceback of an error.")
def cli(show_traceback: bool) -> None:
    """Train, evaluate and export multimodal models from one YAML."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code not in (ExitCode.OK, ExitCode.RESUMABLE) and "RANK" in os.environ:
        _leave_peers(code)
    sys.exit(code)


def _leave_peers(code: int) -> NoReturn:
    """End a rank that failed without taking its interpreter down: collectives that are under way, of a save in the
    background for one, would be waited for there, and each rank that is left would wait for the others."""
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; errors are printed to stderr.

    Args:
        arguments: Words after `mm`. `--traceback` may stand anywhere.
    """
    words = without_traceback_word(arguments)

    def call() -> int:
        result = cli.main(words, prog_name="mm", standalone_mode=False)
        if isinstance(result, int):
            return result
        return ExitCode.OK

    return guarded(call, as_json="--json" in words)


def without_traceback_word(arguments: Sequence[str]) -> list[str]:
    """The other words; where `--traceback` is among them, this process and the ranks that it starts show tracebacks."""
    words = [word for word in arguments if word != "--traceback"]
    if len(words) < len(arguments):
        os.environ["MM_TRACEBACK"] = "1"
    return words


def guarded(call: Callable[[], int], *, as_json: bool = False) -> int:
    """Run a command and return its exit code; errors are printed to stderr, with where they came from if the variable
    MM_TRACEBACK is 1.

    Args:
        call: The command.
        as_json: Print an error on stdout, too, as JSON; of several ranks the first one does.
    """
    # Nothing is downloaded or reported unless asked; set here, before any verb imports a Hugging Face library.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    _quiet_libraries()
    warnings.formatwarning = _format_warning
    try:
        return call()
    except click.UsageError as error:
        return _report(_explain_usage(error), ExitCode.USAGE, as_json)
    except click.ClickException as error:
        return _report(error.format_message(), ExitCode.USAGE, as_json)
    except click.Abort:
        return _report("interrupted", INTERRUPTED, as_json)
    except MMError as error:
        return _report(str(error), error.exit_code, as_json, error.problems)
    except BrokenPipeError:
        # The reader of our output is gone (`mm config run.yaml | head`): not an error, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except OSError as error:
        known = explained_os_error(error)
        if known is None:
            return _report(_describe_bug(error), ExitCode.BUG, as_json)
        return _report(str(known), known.exit_code, as_json, known.problems)
    except Exception as error:  # noqa: BLE001 - the border of the process: what nobody foresaw is a bug, and says so
        return _report(_describe_bug(error), ExitCode.BUG, as_json)


def _quiet_libraries() -> None:
    """Libraries log errors only and draw no bars over our lines; what they would say is an error of ours, or nobody's
    business. Their own variables, where a person has set them, win."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' and diffusers' bars obey it too
    logging.getLogger("torchao").setLevel(logging.ERROR)


_PACKAGE = Path(__file__).parents[1]
_python_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings as a line, of the first rank alone; those of libraries as Python prints them, but for what they
    tell programmers about later versions."""
    if issubclass(category, FutureWarning | DeprecationWarning) and not sys.warnoptions:
        return ""
    if category is not UserWarning or not Path(filename).is_relative_to(_PACKAGE):
        return _python_format(message, category, filename, lineno, line)
    if os.environ.get("RANK", "0") == "0":
        return f"warning: {visible(without_secrets(str(message)))}\n"
    return ""


def _report(message: str, code: int, as_json: bool, problems: Sequence[Problem] = ()) -> int:
    """Print an error, each line marked with the rank when it is not the first."""
    text = message
    if os.environ.get("MM_TRACEBACK") == "1":
        text = f"{traceback.format_exc()}\n{message}"
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    sys.stdout.flush()
    say(without_secrets("\n".join(prefix + line for line in text.split("\n"))), err=True)
    if as_json and rank == "0" and not _has_launcher():
        say_failure(without_secrets(message), code, [_hidden(problem) for problem in problems])
    return int(code)


def _hidden(problem: Problem) -> Problem:
    """The same without secrets in its texts."""
    what, where, key, way_out = map(without_secrets, (problem.what, problem.where, problem.key, problem.way_out))
    return Problem(what, where, key, way_out, problem.count)


def _has_launcher() -> bool:
    """Whether this is a rank whose failure its launcher prints."""
    from mindspeed_mm.fsdp.train.run.launched import LaunchFolder  # not for a command that succeeds

    return LaunchFolder.of_this_rank() is not None


def _explain_usage(error: click.UsageError) -> str:
    message = error.format_message()
    option = getattr(error, "option_name", None)
    if isinstance(error, click.NoSuchOption) and option and "." in option:
        message += f" Overrides take no dashes: {option.lstrip('-')}=VALUE."
    elif isinstance(error, click.NoSuchOption) and option and (told := _in_our_words(error, option.lstrip("-"))):
        message = told
    usage = f"See {error.ctx.command_path} --help." if error.ctx else "See mm --help."
    return f"{message} {usage}"


def _in_our_words(error: click.NoSuchOption, word: str) -> str:
    """What to write for an option of another tool, or for a key with dashes; empty for any other."""
    from mindspeed_mm.fsdp.params.other_tools import (  # pydantic: not for a command that is right
        key_for,
        suggested_sentences,
    )

    takes_keys = error.ctx is not None and any(each.name == "overrides" for each in error.ctx.command.params)
    name = word.replace("-", "_")
    key = key_for(name)
    if key is None and name in suggested_sentences():
        return f"No such option '--{word}': {suggested_sentences()[name]}."
    if key is None or not takes_keys:
        return ""
    return f"No such option '--{word}'. Write {key}=VALUE, without dashes."


def _describe_bug(error: Exception) -> str:
    plugins = sys.modules.get("mindspeed_mm.fsdp.utils.plugins")  # where none was imported, none failed
    if plugins is not None and (place := plugins.place_in_plugin(error)):
        return (
            f"the plugin's code fails: {type(error).__name__}: {error} ({place})\n"
            "Run the command again with --traceback to see how it was called."
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"this is a bug: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})\n"
        "Run the command again with --traceback and report what it prints."
    )


if __name__ == "__main__":
    main()
