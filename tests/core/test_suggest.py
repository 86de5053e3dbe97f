"""Suggestions for mistyped words."""

from mindspeed_mm.core.suggest import did_you_mean, nearest


def test_nearest_word_is_suggested() -> None:
    assert did_you_mean("traim", ["train", "check"]) == "Did you mean 'train'? "


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["train"]) == ""


def test_likeness_can_be_asked_for() -> None:
    assert nearest("holderr", ["holder"], likeness=0.8) == ["holder"]
    assert nearest("holderr", ["mode"], likeness=0.8) == []
