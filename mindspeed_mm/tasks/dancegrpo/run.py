"""DanceGRPO by MindSpeed-MM's flags: the YAML that they make, and the run."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

from mindspeed_mm.core.artifacts import atomic_write_text, read_jsonl
from mindspeed_mm.core.file_writing import check_output_file
from mindspeed_mm.core.terminal import say
from mindspeed_mm.tasks.dancegrpo.flags import configuration, notes_on_data, read_flags

CONFIGURATION = "dancegrpo.yaml"


def run(words: Sequence[str]) -> Path:
    """Train as the flags say; `dancegrpo.yaml` beside the run's folder trains the same by `mm train`.

    Args:
        words: The command line's.

    Returns:
        The run's folder.

    Raises:
        MMError: Anything that a person can act on.
    """
    flags = read_flags(words)
    options = flags.options
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        for note in (*flags.notes, *notes_on_data(options.mm_data)):
            say(f"note: {note}", err=True)
    if options.hps_reward_save is not None:
        check_output_file(options.hps_reward_save, _is_rewards, "--hps_reward_save")
    text = io.StringIO()
    YAML().dump(configuration(options), text)
    options.save.absolute().parent.mkdir(parents=True, exist_ok=True)
    path = options.save.with_name(f"{options.save.name}.{CONFIGURATION}")
    atomic_write_text(path, text.getvalue())  # every rank the same
    from mindspeed_mm.tasks import train  # torch: not for --help

    train.run(path, flags.overrides)
    if options.hps_reward_save is not None and is_first:
        write_rewards(options.save, options.hps_reward_save)
    return Path(options.save)


def _is_rewards(head: bytes) -> bool:
    """Whether a file begins with a number on a line, as `write_rewards` writes them."""
    try:
        float(head.split(b"\n", 1)[0])
    except ValueError:
        return False
    return True


def write_rewards(run_folder: Path, path: Path) -> None:
    """The mean reward of each step that the log has, a line each, as the script writes it."""
    rewards = [line["reward"] for line in read_jsonl(run_folder / "metrics.jsonl") if "reward" in line]
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, "".join(f"{reward}\n" for reward in rewards))
