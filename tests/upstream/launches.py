"""Every launch of a checkout of MindSpeed-MM, through the flags door and by a second reading of its own.

`MINDSPEED_MM_CHECKOUT=… python -m tests.upstream.launches` prints the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.upstream.checkout import VARIABLE, checkout
from tests.upstream.refused import why_refused
from tests.upstream.second_reading import differences, second_reading
from tests.upstream.shell import Started, started_by
from tests.upstream.workplace import REPOSITORY, link_entries

_FOLDERS = ("examples", "tests/st")
_KEPT = (".sh", ".json", ".yaml", ".yml")
_NOT_OURS = ("diffusers", "diffsynth", "verl_examples", "self_forcing")
"""Folders of scripts that start other projects' programs."""
_BY_YAML = ("trainer.py", "train.py")
"""Entries of `mm train`'s door, which take a YAML and no flags."""
_HELPERS = ("examples/cosyvoice3/preprocess/", "soragrpo/preprocess/", "test_tools/")
"""Where scripts lie that prepare rows and train nothing."""


@dataclass
class Outcome:
    """What became of one launch."""

    script: str
    refused: str = ""
    """What was said."""
    reason: str = ""
    """Why that is right; empty where it is not."""
    wrong: list[str] = field(default_factory=list)
    """Keys that the second reading has otherwise, and words that a shell hands over otherwise."""
    notes: Sequence[str] = ()
    """What was said to have no effect."""

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.refused:
            return VERDICTS[1] if self.reason else VERDICTS[2]
        return VERDICTS[3] if self.wrong else VERDICTS[0]


VERDICTS = ("accepted", "refused rightly", "refused wrongly", "accepted wrongly")


def make_root(root: Path, scripts: Path) -> None:
    """A working directory as somebody has it who copies launch folders into this repository.

    Args:
        root: New folder, with this repository's entries and package, and copies of the launches.
        scripts: The checkout.
    """
    link_entries(root)
    for folder in _FOLDERS:
        for path in sorted((scripts / folder).rglob("*")):
            if path.suffix in _KEPT and path.is_file():
                copy = root / path.relative_to(scripts)
                copy.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8")
                copy.write_text(_filled(text) if path.suffix == ".sh" else text, encoding="utf-8")


_PLACEHOLDER = re.compile(r'^(\w*PATH)="(path to [^"\n]*)"', re.MULTILINE)


def _filled(text: str) -> str:
    """A script with paths in place of `"path to …"`, which a person fills in, and a shell would take for words."""
    return _PLACEHOLDER.sub(lambda found: f'{found[1]}="{found[2].replace(" ", "_")}"', text)


def launches(root: Path, scratch: Path) -> dict[str, Started]:
    """Path of each launch script → what it starts."""
    found = {}
    for path in sorted(_scripts(root)):
        script = path.relative_to(root)
        if set(script.parts) & set(_NOT_OURS):
            continue
        started = started_by(script, root, scratch)
        has_flags = started is not None and any(word.startswith("--") for word in started.own)
        if (
            started is None
            or not has_flags
            or started.entry.endswith(_BY_YAML)
            or any(part in started.entry for part in _HELPERS)
        ):
            continue
        found[str(script)] = started
    return found


def _scripts(root: Path) -> Iterable[Path]:
    """Every shell script, but none behind a link."""
    for folder in sorted(path for path in root.iterdir() if not path.is_symlink() and path.is_dir()):
        yield from folder.rglob("*.sh")
    yield from root.glob("*.sh")


def through_the_door(found: Mapping[str, Started], root: Path) -> dict[str, dict[str, Any]]:
    """Path of each launch script → what the door answers, in one process that no conftest prepares."""
    tasks = [
        {"script": script, "entry": started.entry, "own": started.own, "variables": started.variables}
        for script, started in found.items()
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    answered = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("door.py"))],
        cwd=root,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        input="".join(f"{json.dumps(task)}\n" for task in tasks),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    answers = [json.loads(line) for line in answered.stdout.splitlines()]
    if len(answers) != len(tasks):
        raise AssertionError(answered.stderr[-4000:])
    return dict(zip(found, answers, strict=True))


def judge(script: str, started: Started, answer: Mapping[str, Any], root: Path) -> Outcome:
    """Compare what the door answers with what a shell hands over and with the second reading."""
    outcome = Outcome(script, notes=answer.get("notes", ()))
    if "error" in answer:
        outcome.refused = answer["error"]
        outcome.reason = why_refused(script, outcome.refused) or ""
        return outcome
    own = started.own[1:] if started.own and started.own[0].endswith(".yaml") else started.own
    if answer["flags"][len(answer["flags"]) - len(own) :] != own:
        outcome.wrong.append(f"read as {answer['flags']}, and a shell hands over {own}")
    outcome.wrong += differences(answer["config"], second_reading(started.entry, started.words, root))
    if answer["torch"]:
        outcome.wrong.append("torch was imported to read it")
    return outcome


def outcomes(scripts: Path, scratch: Path) -> list[Outcome]:
    """What becomes of every launch of a checkout.

    Args:
        scripts: The checkout.
        scratch: An empty folder.
    """
    root = scratch / "root"
    make_root(root, scripts)
    found = launches(root, scratch)
    answers = through_the_door(found, root)
    return [judge(script, started, answers[script], root) for script, started in found.items()]


def table(found: Sequence[Outcome]) -> str:
    """The counts, then each launch that is not simply accepted, then what has no effect and in how many launches."""
    lines = []
    own = [each for each in found if "/mindspore/" not in each.script]
    for name, group in (("MindSpeed-MM's own", own), ("MindSpore's", [each for each in found if each not in own])):
        counts = Counter(each.verdict for each in group)
        lines.append(f"{name}: {len(group)} launches: " + ", ".join(f"{counts[each]} {each}" for each in VERDICTS))
    for verdict in VERDICTS[1:]:
        for each in own:
            if each.verdict == verdict:
                said = " ".join((each.refused or "; ".join(each.wrong)).split())
                lines.append(f"{verdict}: {each.script}: {f'[{each.reason}] ' if each.reason else ''}{said}")
    without = Counter(note for each in own if not each.refused for note in each.notes)
    lines += [f"without effect in {count}: {note}" for note, count in without.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    folder = checkout()
    if folder is None:
        sys.exit(f"{VARIABLE} names no checkout of MindSpeed-MM")
    with tempfile.TemporaryDirectory() as temporary:
        print(table(outcomes(folder, Path(temporary))))
