"""What is done differently for a kind of model stands in tables, each with a row for every kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from torch import nn

from mindspeed_mm.cli.infer import COMMANDS
from mindspeed_mm.core.model_kinds import GENERATOR, KINDS, LANGUAGE, ModelKind
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.modelhub import BUILDERS
from mindspeed_mm.fsdp.plan.resolve import LOSS_CHECKS
from mindspeed_mm.fsdp.train.family import FAMILIES
from mindspeed_mm.fsdp.train.rollouts.build import MADE_BY_KINDS, PROMPTS_OF_KINDS
from mindspeed_mm.tasks.export.contents import WHOLE_CONTENTS
from mindspeed_mm.tasks.given.models import ANSWERS

TABLES: Mapping[str, Collection[ModelKind]] = {
    "ANSWERS": ANSWERS,
    "BUILDERS": BUILDERS,
    "COMMANDS": COMMANDS,
    "FAMILIES": FAMILIES,
    "LOSS_CHECKS": LOSS_CHECKS,
    "MADE_BY_KINDS": MADE_BY_KINDS,
    "PROMPTS_OF_KINDS": PROMPTS_OF_KINDS,
    "WHOLE_CONTENTS": WHOLE_CONTENTS,
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_has_a_row_for_every_kind(name: str) -> None:
    assert set(TABLES[name]) == set(KINDS)


def test_a_model_is_a_language_model_until_it_has_the_adapter_of_a_generator() -> None:
    model = nn.Linear(1, 1)
    assert facts_of(model).kind is LANGUAGE
    facts_of(model).adapter = object()
    assert facts_of(model).kind is GENERATOR
