"""The cards of models: each has what all must have, and one that lacks it is named with the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params import cards
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with one model, whose card is empty."""
    (tmp_path / "models" / "ours").mkdir(parents=True)
    monkeypatch.setattr(cards, "_ENGINE", tmp_path)
    cards._cards.cache_clear()
    cards.families.cache_clear()
    yield tmp_path / "models" / "ours" / "card.yaml"
    cards._cards.cache_clear()
    cards.families.cache_clear()


def test_a_card_says_which_key_it_lacks(room: Path) -> None:
    written = "ids: [ours]\n"
    further = ("title: Ours", "class: diffusers.Ours", "modalities: [text]", "task: draw", "released: {}", "proven: {}")
    for line in further:
        room.write_text(written)
        with pytest.raises(ConfigError) as caught:
            cards.families()
        (problem,) = caught.value.problems
        assert (problem.where, problem.key) == (str(room), line.partition(":")[0])
        assert "holds ids, title, class" in problem.way_out
        written += f"{line}\n"
        cards._cards.cache_clear()
    room.write_text(written)
    assert [card.title for card in cards.families()] == ["Ours"]


def test_cards_are_read_as_other_files_are() -> None:
    """libyaml takes some words otherwise, such as `on` and `1e-3`: no card has one of them."""
    paths = list(cards._ENGINE.glob("**/card.yaml"))
    assert len(paths) > 60
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert repr(cards._plain_card(text, str(path))) == repr(plain(parse_yaml(text, str(path)).root)), path


def test_what_is_no_yaml_is_said_with_its_place(room: Path) -> None:
    room.write_text("ids: [ours\ntitle: Ours\n")
    with pytest.raises(ConfigError, match=r"card\.yaml:2:\d+"):
        cards.families()
