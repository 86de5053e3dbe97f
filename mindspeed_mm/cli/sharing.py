"""Commands whose work several processes share: the ranks are started with the words of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.core.request import Request, all_fields, words_of
from mindspeed_mm.core.terminal import say
from mindspeed_mm.tasks.requests.shared import is_address

_INPUTS = frozenset(("data", "media_dir", "config", "plan", "against", "lora"))
"""Fields of requests that name what is read."""


def at_checkpoint(request: Any) -> Any:
    """The same request of the checkpoint that it means, if its model is a run that keeps several; stderr says which.

    Args:
        request: A request with the fields `model` and `checkpoint`.

    Raises:
        UsageError: A checkpoint of a server is named.
        MMError: The run has no such checkpoint.
    """
    named, checkpoint = request.model, request.checkpoint
    if is_address(str(named)):
        if checkpoint is not None:
            raise UsageError("a server has no checkpoints", key="--checkpoint", way_out="Leave it out.")
        return request
    from mindspeed_mm.checkpoint.choice import choose_checkpoint  # not for --help

    meant = choose_checkpoint(Path(named), checkpoint)
    if meant.why:
        say(f"{named}: {meant}", err=True)
    if not meant.why or checkpoint is None:
        return request
    return replace(request, model=type(named)(meant.folder))


def check_inputs(request: Any) -> None:
    """Check that the model and every other file and folder that a request reads are there, before torch is loaded.

    Raises:
        CheckpointError: There is no such model folder.
        DataError: There are no such rows or media.
        UsageError: Another path does not exist.
    """
    from mindspeed_mm.checkpoint.recognise import check_folder_exists, is_gguf  # the help does without

    if not is_gguf(Path(request.model)):
        check_folder_exists(Path(request.model))
    for each in all_fields(type(request)):
        path = getattr(request, each.name, None)
        if each.name in _INPUTS and isinstance(path, Path) and not path.exists():
            error = DataError if each.name in ("data", "media_dir") else UsageError
            what = "there is no such folder" if each.name == "media_dir" else "there is no such file or folder"
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise error(what, where=str(path), key=each.flag, way_out=way_out)


def share(verb: str, request: Any, action: Callable[[], None], *, shares: bool = True) -> int:
    """Start the ranks that a request asks for, or do this rank's part; the exit code.

    Args:
        verb: The command's name.
        request: What it is asked, with the field `nproc`.
        action: What a rank does.
        shares: Whether there is something to share; otherwise this process does all of it.
    """
    from mindspeed_mm.fsdp.train.run.launched import starts_ranks
    from mindspeed_mm.tasks import train  # torch: the help does without
    from mindspeed_mm.tasks.launch.launcher import launch

    if shares and starts_ranks(request.nproc):
        return launch(request.nproc, [verb, *rank_words(request)], None)
    try:
        action()
    except Exception as error:
        if train.tell_launcher(error) and isinstance(error, MMError):
            return int(error.exit_code)  # the launcher prints it, once for all ranks
        raise
    return 0


def import_plugins(names: Sequence[str]) -> None:
    """Import the packages that `--plugin` names; without any, nothing heavy.

    Raises:
        ConfigError: One of them cannot be imported.
    """
    if names:
        from mindspeed_mm.fsdp.utils.register import import_plugin  # transformers may come with it

        import_plugin(names, key="--plugin")


def rank_words(request: Any) -> list[str]:
    """The command line again, for each rank: everything but the number of ranks."""
    alone: Request = replace(request, nproc=1)
    return words_of(alone)


def option_words(request: Any) -> list[str]:
    """The options of the command line again, for each rank, without its arguments and the number of ranks."""
    alone: Request = replace(request, nproc=1)
    return words_of(alone, with_arguments=False)


def speaks() -> bool:
    """Whether this process prints for the job: its first rank."""
    from mindspeed_mm.fsdp.distributed.job.launch import resolve_launch  # torch: the help does without

    return resolve_launch(os.environ).rank == 0
