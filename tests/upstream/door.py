"""Takes launches through `mm config --from-flags` as a process of its own does, without the tests' conftest: a line of
JSON in for each launch, one out. Run as a script, with the repository's root in PYTHONPATH."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MMError, UsageError
from mindspeed_mm.fsdp.params.loader import load_config, resolved_dict
from mindspeed_mm.provider.launch import read_launch
from mindspeed_mm.tasks.config import run_flags
from mindspeed_mm.tasks.dancegrpo import run as dancegrpo
from mindspeed_mm.tasks.ming_t2i import run as ming_t2i

_READ_THEIR_FLAGS: dict[str, Any] = {"posttrain_flux_dancegrpo.py": dancegrpo, "finetune_t2i.py": ming_t2i}
"""Entry that reads its flags itself → what reads them."""
_WANTED = re.compile(r"Set it before the command: (\w+)=")
"""What a launch asks for that only a shell knows: a person sets it, and so does the test."""


def read(script: str, entry: str, own: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """The configuration of a launch, its flags and its notes; or the error that refuses it.

    Args:
        script: Path of the launch script.
        entry: Path of the Python script that it starts, and whether it is here decides whether it can.
        own: The words that a shell hands to the entry.
        variables: Values of the script's variables, of which those are taken that the reader asks for.
    """
    environment: dict[str, str] = {}
    try:
        if (reader := _READ_THEIR_FLAGS.get(Path(entry).name)) is not None:
            flags = reader.read_flags(own)
            Path("own_flags.yaml").write_text(json.dumps(reader.configuration(flags.options)))
            config = load_config(Path("own_flags.yaml"), flags.overrides)
            return {"config": resolved_dict(config), "flags": own, "notes": flags.notes}
        while True:
            try:
                launch = read_launch([script], environment)
                translated = run_flags([script], environment)
                break
            except UsageError as error:
                wanted = _WANTED.search(str(error))
                if wanted is None or wanted[1] in environment or wanted[1] not in variables:
                    raise
                environment[wanted[1]] = variables[wanted[1]]
        if not launch.path.is_file() and not Path(launch.entry).is_file():
            raise UsageError("there is no such entry", where=entry)
    except MMError as error:
        return {"error": str(error)}
    return {"config": resolved_dict(translated.config), "flags": launch.flags, "notes": translated.notes}


for line in sys.stdin:
    answer = read(**json.loads(line))
    print(json.dumps({**answer, "torch": "torch" in sys.modules}, default=str), flush=True)
