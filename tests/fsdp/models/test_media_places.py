"""What towers make is put at the places of its tokens, one row for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.models.behaviour.shared_media import with_media
from tests.helpers.runs import mm
from tests.helpers.tiny_deepseek_vl2 import make_tiny_deepseek_vl2
from tests.helpers.tiny_run import make_rows, make_tiny_run

PLACES = torch.tensor([[False, True, False], [True, False, True]])


def test_rows_stand_at_the_places_in_order() -> None:
    seen = torch.arange(6.0).view(3, 2)
    made = with_media(torch.full((2, 3, 2), -1.0), PLACES, seen)
    assert made.tolist() == [[[-1, -1], [0, 1], [-1, -1]], [[2, 3], [-1, -1], [4, 5]]]


@pytest.mark.parametrize("rows", [2, 4])
def test_another_number_of_rows_is_refused(rows: int) -> None:
    with pytest.raises(DataError, match=rf"wrote 3 tokens .* makes {rows}"):
        with_media(torch.zeros(2, 3, 2), PLACES, torch.zeros(rows, 2))


@pytest.mark.parametrize("ratio", [1, 3])
def test_a_processor_of_another_model_is_refused_before_a_step(tmp_path: Path, ratio: int) -> None:
    """With 3 the processor writes fewer tokens than there are features, which torch takes without a word."""
    make_tiny_deepseek_vl2(tmp_path / "model", "tiny")
    file = tmp_path / "model" / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"downsample_ratio": ratio}))
    make_rows(tmp_path, images=(1,))
    yaml = make_tiny_run(tmp_path)
    for verb in ("check", "train"):
        said = mm(verb, yaml)
        assert said.code == 4, said.err
        told = said.out + said.err
        assert "of which the model makes" in told and "this is a bug" not in told
