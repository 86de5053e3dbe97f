"""Which parameters Muon takes as matrices."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, first_of

_GATE_AND_UP = "gate_up_proj"


def matrices(model: nn.Module, trainable: Collection[str]) -> dict[str, int]:
    """Matrices among the trainable parameters → how many each one is; per expert where experts are fused.

    They are the 2-D weights of the model's repeated blocks, routers among them (as in Moonlight, arXiv:2502.16982), and
    fused experts (E, …). All else is AdamW's: embeddings, the output head, what stands before, between and behind the
    blocks, norms, biases, convolutions, tables, and adapters, whose factors are not a map of hidden features.

    Experts' fused gate and up projections are two matrices, one above the other, as they are apart in dense models; in
    models that interleave their columns they are taken as one.

    Raises:
        ConfigError: There are none.
    """
    blocks = tuple(f"{name}." for name in find_blocks(model))
    found: dict[str, int] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            is_hidden = full_name.startswith(blocks) and not is_adapter_weight(full_name)
            if full_name in trainable and is_hidden and (count := _count(module, name, parameter)):
                found[full_name] = count
    if not found:
        raise ConfigError(
            f"'muon' finds no matrix to train in the blocks of {type(model).__name__}",
            key="training.optimizer",
            way_out="Set adamw: adapters, embeddings and heads are AdamW's anyway.",
        )
    return found


def _count(module: nn.Module, name: str, parameter: nn.Parameter) -> int:
    """How many matrices a parameter is, or each of its experts; 0 for what is not a matrix."""
    if parameter.ndim == 3 and first_of(module, "is_transposed", "ep_forward"):
        has_gate_above_up = name == _GATE_AND_UP and not attribute_at(module, "is_transposed", True)
        return 2 if has_gate_above_up else 1
    is_matrix = parameter.ndim == 2 and name == "weight" and not isinstance(module, nn.Embedding)
    return int(is_matrix)
