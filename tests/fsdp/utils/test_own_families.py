"""Families that are written here: what a card promises of its module."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.utils import own_families


def test_a_module_that_tells_transformers_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ours"}')
    monkeypatch.setattr(own_families, "own_model_types", lambda: {"ours": ("mindspeed_mm.core.suggest",)})
    with pytest.raises(ConfigError, match=r"has no function tell_transformers\(\)") as caught:
        own_families.know_family_of(tmp_path)
    (problem,) = caught.value.problems
    assert (Path(problem.where).name, problem.key) == ("card.yaml", "model_types")
    assert "registers configuration, model, processor" in problem.way_out
