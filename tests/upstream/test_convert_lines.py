"""Every `mm-convert` line that a checkout of MindSpeed-MM documents: which parse, which are refused, and why.

Nothing is converted.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindspeed_mm.cli import mm_convert
from mindspeed_mm.core.errors import ConfigError, MMError
from tests.upstream.checkout import OF_CHECKOUT, checkout

CHECKOUT = checkout() or Path()
pytestmark = OF_CHECKOUT
_CONTINUED = re.compile(r"\\[ \t]*(?:#.*)?$")
"""A backslash at a line's end; some pages put a comment behind it."""
_COMMAND = re.compile(r"\s*(?:\[[^\]]*\]#\s*|\$\s*)?mm-convert\s+(?!=)(?P<words>.*)")
_EXPORT = re.compile(r"\s*export\s+((?:MM_CONVERT|JSONARGPARSE)\w*)=(.*)")
_OPEN = re.compile(r"<[^<>]*>")
_FILLED = {"version": "t2v", "tp_size": "1", "pp_layers": "[1]"}
"""What stands for an open value of these flags; a path for all others."""


@dataclass(frozen=True)
class Line:
    """A documented command, the page and line where it begins, and what the page exports for it."""

    place: str
    text: str
    exports: dict[str, str]

    def words(self) -> list[str]:
        text = self.text.replace("`", " ")
        filled: list[str] = []
        for part in re.split(r"(\s+)", _OPEN.sub(lambda found: re.sub(r"\s", "_", found[0]), text)):
            flag = re.split(r"[.\s=-]+", (filled[-2] if len(filled) > 1 else "").strip())[-1]
            name = part.partition("=")[0].rpartition(".")[2] if "=" in part else flag
            filled.append(_OPEN.sub(_FILLED.get(name, "place"), part))
        return shlex.split(re.sub(r"\s>\s*\S+$", "", "".join(filled)), comments=True)


def lines_of(page: Path) -> Iterator[Line]:
    exports: dict[str, str] = {}
    texts = page.read_text(encoding="utf-8", errors="replace").splitlines()
    number = 0
    while number < len(texts):
        start, joined = number, ""
        while number < len(texts) - 1 and _CONTINUED.search(texts[number]):
            joined += _CONTINUED.sub(" ", texts[number])
            number += 1
        joined += texts[number]
        number += 1
        if match := _EXPORT.match(joined):
            exports[match[1]] = " ".join(shlex.split(match[2]))
        if match := _COMMAND.match(joined):
            yield Line(f"{page.relative_to(CHECKOUT)}:{start + 1}", match["words"], dict(exports))


def outcome(line: Line) -> tuple[str, str]:
    """`parsed`, `refused rightly` or `refused wrongly`, and why."""
    try:
        mm_convert.run(line.words())
    except ConfigError as error:
        if error.problems and all(problem.what.startswith("is needed") for problem in error.problems):
            return "refused rightly", f"leaves out {', '.join(problem.key for problem in error.problems)}"
        return "refused wrongly", str(error)
    except MMError as error:
        is_planned = "is planned" in str(error)
        return ("refused rightly" if is_planned else "refused wrongly"), str(error)
    return "parsed", ""


@pytest.fixture
def nothing_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each subcommand takes its flags and does nothing; the folders of the pages need not be there."""
    monkeypatch.setattr(mm_convert, "_check_inputs", lambda _subcommand, _values: None)
    for name in mm_convert.CONVERTERS:
        converter = mm_convert._converter(name)
        for subcommand, method in converter.subcommands().items():

            def nothing(self: object, **flags: object) -> None:
                del self, flags

            monkeypatch.setattr(converter, subcommand, functools.wraps(method)(nothing))


@pytest.mark.usefixtures("nothing_is_converted")
def test_every_documented_line_parses_or_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf_to_mm.yaml").write_text("cfg:\n  mm_dir: mm\n  hf_config:\n    hf_dir: hf\n")
    pages = sorted(path for path in CHECKOUT.rglob("*") if path.suffix in (".md", ".sh"))
    lines = [line for page in pages for line in lines_of(page)]
    counts: Counter[str] = Counter()
    told: list[str] = []
    for line in lines:
        with monkeypatch.context() as environment:
            for name, value in line.exports.items():
                environment.setenv(name, value)
            what, why = outcome(line)
        counts[what] += 1
        if why:
            told.append(f"{what}: {line.place}: {' '.join(line.text.split())}\n    {why}")
    with capsys.disabled():
        print(f"\n{CHECKOUT}: {len(lines)} lines: {dict(counts)}")
        print("\n".join(told))
    assert lines
    assert not counts["refused wrongly"]
