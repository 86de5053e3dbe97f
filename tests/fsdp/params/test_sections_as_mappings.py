"""Plugins written for dicts read a section as one; it stays typed and frozen."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from mindspeed_mm.core.redaction import REDACTED
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam
from mindspeed_mm.fsdp.params.value_types import OpenSection, Section

pytestmark = pytest.mark.edge("R12")


def section() -> BasicParameters:
    return BasicParameters.model_validate({"dataset": "rows.jsonl", "media_roots": ["a"], "items": {"size": 3}})


def test_reading() -> None:
    basic = section()
    assert basic["dataset"] == basic.dataset == "rows.jsonl"
    assert (basic.get("cutoff_len"), basic.get("none"), basic.get("none", 5)) == (1024, None, 5)
    assert "dataset" in basic and "items" in basic and "none" not in basic and 3 not in basic
    with pytest.raises(KeyError, match="none"):
        basic["none"]


def test_walking() -> None:
    basic = section()
    assert list(basic) == [*BasicParameters.model_fields, "items"]
    assert len(basic) == len(list(basic))
    assert dict(basic) == {**basic} == dict(basic.items())
    assert list(basic.values()) == [basic[key] for key in basic.keys()]  # noqa: SIM118  (what a mapping has)
    assert basic["items"] == {"size": 3}  # a plugin's own key, whatever methods there are


def test_sections_inside_stay_sections_and_to_dict_is_plain() -> None:
    param = DatasetParam.model_validate({"basic_parameters": {"dataset": "rows.jsonl", "media_roots": ["a"]}})
    assert param["basic_parameters"]["dataset"] == "rows.jsonl"
    plain = param.to_dict()
    assert plain["basic_parameters"]["media_roots"] == ["a"]
    assert json.loads(json.dumps(plain)) == plain
    plain["basic_parameters"]["dataset"] = "other"
    assert param["basic_parameters"]["dataset"] == "rows.jsonl"


def test_writing_is_refused() -> None:
    basic = section()
    with pytest.raises(ValidationError, match="frozen"):
        basic.dataset = "other"
    with pytest.raises(TypeError):
        basic["dataset"] = "other"  # type: ignore[index]


class Innermost(OpenSection):
    api_key: str = "abcdef"
    size: int = 3


class Inner(Section):
    innermost: Innermost = Innermost()
    steps: list[Innermost] = [Innermost()]


class Outer(Section):
    inner: Inner = Inner()
    headers: Inner = Inner()
    """Everything below is secret, whatever it is called."""


def test_secrets_are_hidden_at_every_depth() -> None:
    section = Outer(inner=Inner(innermost=Innermost.model_validate({"more": {"token": "ghijkl", "of": ["a"]}})))
    open_, whole = {"api_key": REDACTED, "size": 3}, {"api_key": REDACTED, "size": REDACTED}
    for dumped in (section.model_dump(), json.loads(section.model_dump_json())):
        assert dumped["inner"]["innermost"] == open_ | {"more": {"token": REDACTED, "of": ["a"]}}
        assert dumped["inner"]["steps"] == [open_]
        assert dumped["headers"] == {"innermost": whole, "steps": [whole]}
    assert section.to_dict()["headers"]["innermost"] == {"api_key": "abcdef", "size": 3}
