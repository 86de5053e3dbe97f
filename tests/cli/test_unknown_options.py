"""Every command refuses an option that it does not know, by name."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from mindspeed_mm.cli.main import cli
from tests.helpers.runs import mm

UNKNOWN = "--no-such-option"


def commands(group: click.Command, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    if not isinstance(group, click.Group):
        yield words
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from commands(found, *words, name)


@pytest.mark.edge("BR17b")
def test_every_command_names_an_option_that_it_does_not_know() -> None:
    known = list(commands(cli))
    assert len(known) > 15
    wrong = {}
    for words in known:
        for place in ((UNKNOWN,), ("x", UNKNOWN), ("x", f"{UNKNOWN}=1")):
            said = mm(*words, *place)
            if said.code != 2 or UNKNOWN not in said.err or "Traceback" in said.err:
                wrong[(*words, *place)] = said
    assert wrong == {}
