"""Rules between the keys of the loss and others."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section

FIXED, DYNAMIC = "features.enable_chunk_loss", "features.enable_dynamic_chunk_loss"
TYPE, Z_LOSS = "features.loss_cfg.loss_type", "features.loss_cfg.z_loss_coef"
COEFFICIENT, OFFLOAD = "features.loss_cfg.router_aux_loss_coef", "features.loss_cfg.router_aux_loss_offload"
OUTPUT = "parallel.fsdp_plan.output_dtype"


def broken(values: dict[str, Any]) -> list[str]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return [problem.key for problem in check_cross_section(Arguments.model_validate(tree))]


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({FIXED: True, TYPE: "raw"}, [FIXED]),
        ({FIXED: True, DYNAMIC: True, Z_LOSS: 1e-4, TYPE: "raw"}, [FIXED, DYNAMIC, Z_LOSS]),
        ({FIXED: True, OUTPUT: "bf16"}, [OUTPUT]),
        ({OFFLOAD: True}, [OFFLOAD]),
        ({FIXED: True, DYNAMIC: True, Z_LOSS: 1e-4, TYPE: "per_sample_loss", OUTPUT: "fp32"}, []),
        ({OFFLOAD: True, COEFFICIENT: 0.01}, []),
        ({OUTPUT: "bf16", TYPE: "raw"}, []),
        ({TYPE: "per_micro_batch_loss", "data.dataset_param.basic_parameters.packing": True}, [TYPE]),
        ({TYPE: "per_micro_batch_loss", "data.dataset_param.basic_parameters.neat_packing": True}, [TYPE]),
        ({TYPE: "per_micro_batch_loss"}, []),
    ],
)
def test_rules(values: dict[str, Any], keys: list[str]) -> None:
    assert broken(values) == keys
