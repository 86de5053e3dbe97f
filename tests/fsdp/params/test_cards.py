"""The cards of models: each has what all must have, and one that lacks it is named with the key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params import cards


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
