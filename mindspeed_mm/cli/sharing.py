"""Commands whose work several processes share: the ranks are started with the words of the command line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.core.terminal import say

_INPUTS = frozenset(("data", "media_dir", "config", "plan", "against", "lora"))
"""Options that name what is read."""

Options = dict[str, Any]
"""Values of a command's options, by the names of its parameters; each has the type that the option declares."""


def chosen(options: Options, *names: str) -> Options:
    """Return only the options with these names, each of which must be there."""
    return {name: options[name] for name in names}


def given_of(options: Options, *names: str) -> Options:
    """Those of some options that have a value."""
    return {name: options[name] for name in names if options[name] is not None}


def is_given(context: click.Context, parameter: click.Parameter) -> bool:
    """Whether somebody has written the option."""
    return context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE


def of_checkpoint(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that takes MODEL the option `--checkpoint`: of a run, the command gets the folder of the
    checkpoint that is meant, and stderr says which."""

    @click.option(
        "--checkpoint",
        metavar="best|newest|STEP",
        help="Checkpoint of a run to use; default: the best one if the run keeps one, else the newest.",
    )
    @functools.wraps(command)
    def with_checkpoint(*arguments: Any, checkpoint: str | None, **options: Any) -> Any:
        named = options["model"]
        if not is_address(str(named)):
            from mindspeed_mm.checkpoint.choice import choose_checkpoint  # not for --help

            meant = choose_checkpoint(Path(named), checkpoint)
            if meant.why:
                say(f"{named}: {meant}", err=True)
            if meant.why and checkpoint is not None:
                options["model"] = type(named)(meant.folder)
                click.get_current_context().params["model"] = options["model"]
        elif checkpoint is not None:
            raise UsageError("a server has no checkpoints", key="--checkpoint", way_out="Leave it out.")
        return command(*arguments, **options)

    return with_checkpoint


def is_address(model: str) -> bool:
    """Whether what is named is a server, not a folder."""
    return model.lower().startswith(("http://", "https://"))


def check_inputs(context: click.Context) -> None:
    """Raise for a model folder, or the first option whose file or folder is not there, before torch is loaded.

    Raises:
        CheckpointError: There is no such model folder.
        DataError: There are no such rows or media.
        UsageError: Another path does not exist.
    """
    model = context.params.get("model")
    if isinstance(model, str | Path):
        from mindspeed_mm.checkpoint.recognise import check_folder_exists, is_gguf  # the help does without

        if not is_gguf(Path(model)):
            check_folder_exists(Path(model))
    for option in context.command.params:
        path = context.params[option.name or ""]
        if option.name in _INPUTS and isinstance(path, Path) and not path.exists():
            error = DataError if option.name in ("data", "media_dir") else UsageError
            what = "there is no such folder" if option.name == "media_dir" else "there is no such file or folder"
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise error(what, where=str(path), key=option.opts[0], way_out=way_out)


def words_of(context: click.Context) -> list[str]:
    """The command line again, for each rank: everything that was given but the number of ranks."""
    words = [str(context.params["model"])]
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name == "nproc" or not is_given(context, option):
            continue
        value = context.params[option.name or ""]
        if option.is_flag:
            words.append(option.opts[0])
        else:
            # Written as one word: a prompt may begin with a dash.
            items = value if option.multiple else [value]
            for item in items:
                words.append(f"{option.opts[0]}={item}")
    return words


def share(context: click.Context, verb: str, action: Callable[[], None], *, shares: bool = True) -> int:
    """Start the ranks that `--nproc` asks for, or do this rank's part; the exit code.

    Args:
        context: Of the command; its options have `nproc`.
        verb: The command's name.
        action: What a rank does.
        shares: Whether there is something to share; otherwise this process does all of it.
    """
    from mindspeed_mm.fsdp.train.run.launched import starts_ranks
    from mindspeed_mm.tasks import train  # torch: the help does without
    from mindspeed_mm.tasks.launch.launcher import launch

    if shares and starts_ranks(context.params["nproc"]):
        return launch(context.params["nproc"], [verb, *words_of(context)], None)
    try:
        action()
    except Exception as error:
        if train.tell_launcher(error) and isinstance(error, MMError):
            return int(error.exit_code)  # the launcher prints it, once for all ranks
        raise
    return 0


def speaks() -> bool:
    """Whether this process prints for the job: its first rank."""
    from mindspeed_mm.fsdp.distributed.job.launch import resolve_launch  # torch: the help does without

    return resolve_launch(os.environ).rank == 0
