"""JSON that others wrote: whatever it is, one error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.file_writing import first_line_has
from mindspeed_mm.core.json_file import parse_json, read_json_object

pytestmark = pytest.mark.edge("S13", "BS13")

DEEP = b"[" * 100_000
BROKEN = {
    "deep": DEEP,
    "deep in an object": b'{"row": ' + DEEP,
    "binary": bytes(range(256)),
    "cut": b'{"row"',
    "400 digits": b'{"row": ' + b"9" * 400 + b"}",
    "5,000 digits": b'{"row": -' + b"9" * 5000 + b"}",
    "no float": b'{"row": 1e400}',
    "half a character": b'{"row": "\\ud800"}',
    "its bytes": b'{"row": "\xed\xa0\x80"}',
    "its bytes in UTF-16": '{"row": "a"}'.encode("utf-16-le").replace(b"a\0", b"\0\xd8"),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_json_is_a_value_error_and_one_line(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(content)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"config\.json.*is not valid JSON") as caught:
        read_json_object(tmp_path / "config.json", ModelFolderError)
    assert "\n" not in str(caught.value)
    assert not first_line_has("row")(content)


def test_a_text_with_half_a_character_is_a_value_error() -> None:
    """As `os.fsdecode` makes one of a byte that is no UTF-8."""
    with pytest.raises(ValueError, match="half a character"):
        parse_json('{"row": "\udcff"}')


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_encodings_of_json_are_read(encoding: str) -> None:
    assert parse_json('{"row": "é \U0001f600"}'.encode(encoding)) == {"row": "é \U0001f600"}


@pytest.mark.parametrize("content", ["NaN", "[-Infinity]"])
def test_numbers_that_are_not_finite_are_refused_on_request(content: str) -> None:
    parse_json(content)
    with pytest.raises(ValueError, match="is not finite"):
        parse_json(content, finite=True)


def test_sound_numbers_and_characters_stay_as_they_are() -> None:
    largest = 2**64 - 1
    assert parse_json(f'[{largest}, -{largest}, 1e308, "\\ud83d\\ude00", "\\\\ud800"]') == [
        largest, -largest, 1e308, "\U0001f600", "\\ud800",
    ]  # fmt: skip
