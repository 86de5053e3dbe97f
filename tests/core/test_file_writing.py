"""Places that a person names for an output: what cannot be written is refused, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.file_writing import check_output_place


@pytest.mark.parametrize("name", ["x.jsonl", "some/folder/x.jsonl"])
def test_a_place_is_tried_out(tmp_path: Path, name: str) -> None:
    check_output_place(tmp_path / name)
    check_output_place(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/proc", "/proc/x.jsonl", "/proc/self/some/folder/x.jsonl"])
def test_a_place_that_takes_no_file_is_refused(name: str) -> None:
    with pytest.raises(MachineError, match=r"--out.*cannot be written"):
        check_output_place(Path(name), "--out")
