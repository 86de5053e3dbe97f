"""What a shell makes of a launch script: the words of the command that it starts. Nothing else of the script happens:
no program is found, and files that it writes lie in a folder of the test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_STUBS = r"""
_started() {
    [ -s "$LAUNCH_WORDS" ] && return 0
    case "$*" in *.py*) ;; *) return 0 ;; esac
    printf '%s\0' "$@" > "$LAUNCH_WORDS"
    local name
    for name in $(compgen -v); do printf '%s=%s\0' "$name" "${!name}"; done > "$LAUNCH_VARIABLES"
}
for name in torchrun python python3 accelerate msrun deepspeed; do
    eval "$name() { _started $name \"\$@\"; }"
done
exec() { [ $# -eq 0 ] || "$@"; }
nohup() { "$@"; }
exit() { :; }
source() { :; }
wc() { printf '2\n'; }
dirname() { printf '%s\n' "${1%/*}"; }
command_not_found_handle() { return 0; }
"""
"""Functions in place of the programs that start a launch, and of what would end a script before it does; a list of
hosts, whose lines scripts count, has two."""


@dataclass(frozen=True)
class Started:
    """A command that a script starts."""

    words: list[str]
    """The launcher, its own words, the entry and its flags, as the shell hands them over."""
    variables: dict[str, str]
    """Every variable of the script at that moment."""

    @property
    def launcher(self) -> str:
        """`torchrun`, `python` or `msrun`."""
        return self.words[0]

    @property
    def entry(self) -> str:
        """Path of the Python script that is started."""
        return next(word for word in self.words if word.endswith(".py"))

    @property
    def own(self) -> list[str]:
        """The entry's words, those of the launcher left out."""
        return self.words[self.words.index(self.entry) + 1 :]


def started_by(script: Path, root: Path, scratch: Path) -> Started | None:
    """Run a script in bash, and return the first command with a Python script that it starts; None without one.

    Args:
        script: Path of the script, relative to `root`.
        root: The working directory; what the script writes lies there.
        scratch: Folder for what is recorded.
    """
    stubs, words, variables = (scratch / name for name in ("stubs.sh", "words", "variables"))
    stubs.write_text(_STUBS)
    for path in (words, variables):
        path.write_bytes(b"")
    environment = {
        "PATH": "/nonexistent",
        "BASH_ENV": str(stubs),
        "LAUNCH_WORDS": str(words),
        "LAUNCH_VARIABLES": str(variables),
    }
    subprocess.run(
        ["/bin/bash", str(script)],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
    )
    found = words.read_text().split("\0")[:-1]
    if not any(word.endswith(".py") for word in found):
        return None
    pairs = (entry.partition("=") for entry in variables.read_text().split("\0")[:-1])
    return Started(found, {name: value for name, _, value in pairs})
