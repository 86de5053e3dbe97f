"""Profilers that could record nothing are found without a model."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section


@pytest.mark.parametrize(
    ("tools", "key"),
    [
        ({"profile": {"ranks": []}}, "tools.profile.ranks"),
        ({"profile": {"ranks": [-1, 0]}}, "tools.profile.ranks"),
        ({"profile": {"profile_type": "dynamic"}}, "tools.profile.dynamic_param.config_path"),
        ({"profile": {"static_param": {"start_step": 0, "end_step": 1}}}, "tools.profile.static_param.end_step"),
        ({"memory_profile": {"dump_ranks": [-3]}}, "tools.memory_profile.dump_ranks"),
        ({"memory_profile": {"start_step": 4, "end_step": 4}}, "tools.memory_profile.end_step"),
    ],
)
def test_what_could_record_nothing_is_one_problem(tools: dict[str, Any], key: str) -> None:
    (section,) = tools
    tools[section]["enable"] = True
    (problem,) = check_cross_section(Arguments.model_validate({"tools": tools}))
    assert problem.key == key
    tools[section]["enable"] = False
    assert check_cross_section(Arguments.model_validate({"tools": tools})) == []
