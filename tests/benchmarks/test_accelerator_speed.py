"""The accelerator's settings for speed on the CPU: every one of them trains, and is compared with the plain step."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accelerator import Session, figures, has_failed
from benchmarks.accelerator_speed import speed_figures, variants
from mindspeed_mm.fsdp.params.argument import Arguments


@pytest.mark.parametrize("tiny", [False, True])
def test_settings_are_those_of_a_configuration(tiny: bool) -> None:
    for sections in variants(tiny=tiny).values():
        Arguments.model_validate(sections)


def test_figures_are_ratios_to_the_plain_step() -> None:
    speed = {"plain": {"tokens_per_s": 10.0}, "fp8": {"tokens_per_s": 12.0}, "compiled": {"error": "…"}, "took_s": 3.0}
    assert {figure.name: figure.value for figure in speed_figures(speed)} == {
        "bf16 step, fp8, over plain": 1.2,
        "bf16 step, compiled, over plain": None,
    }


@pytest.mark.slow
def test_every_setting_trains(tmp_path: Path) -> None:
    found = Session(tmp_path, {"type": "cpu"}, tiny=True, parts=("speed",)).run()
    assert not has_failed(found["speed"]), found
    assert len(figures(found)) == 4
