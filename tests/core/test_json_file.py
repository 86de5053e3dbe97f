"""JSON that others wrote: whatever it is, one error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.file_writing import first_line_has
from mindspeed_mm.core.json_file import parse_json, read_json_object

pytestmark = pytest.mark.edge("S13")

DEEP = b"[" * 100_000
BROKEN = {"deep": DEEP, "deep in an object": b'{"row": ' + DEEP, "binary": bytes(range(256)), "cut": b'{"row"'}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_json_is_a_value_error_and_one_line(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(content)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"config\.json.*is not valid JSON") as caught:
        read_json_object(tmp_path / "config.json", ModelFolderError)
    assert "\n" not in str(caught.value)
    assert not first_line_has("row")(content)
