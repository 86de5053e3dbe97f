"""`training.lora`: low-rank adapters instead of whole weights."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.fsdp.params.value_types import Flag, Names, Number, PathText, Positive, Section, fault, show

_INITIALISATIONS = ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal")


def _initialisation(value: Any) -> Any:
    if isinstance(value, bool) or value in _INITIALISATIONS:
        return value
    if isinstance(value, str) and re.fullmatch(r"pissa_niter_\d+", value):
        return value
    raise fault(f"{show(value)} is not one of true, false, {', '.join(_INITIALISATIONS)}, pissa_niter_N")


class LoraArguments(Section):
    """Low-rank adapters, as PEFT reads and writes them."""

    enable: Flag = False
    """Train adapters and freeze the rest."""
    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Annotated[Number, Field(gt=0)] = 16
    """Scale of the adapters: alpha / rank."""
    target_modules: Names = ("q_proj", "k_proj", "v_proj")
    """Module patterns; a bare last name is enough. Of a generator the default means its family's attention layers."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapters."""
    init_lora_weights: Annotated[bool | str, BeforeValidator(_initialisation)] = True
    """Initialisation: true, false, gaussian, eva, olora, pissa, pissa_niter_N, corda, loftq, orthogonal."""
    pretrained_lora_path: PathText | None = None
    """Adapters that are trained further: a folder as PEFT or diffusers writes it. Those of `frozen_adapters` stay as
    they are."""
    lora_target_modules_support: Any = None
    """Accepted from older files; the model's own modules are what counts."""
    disable_peft_moe_conversion: Flag = True
    """Names in `target_modules` are those of the model as it is: fused experts are `experts.gate_up_proj`,
    `experts.down_proj`, or `experts` for both. False: names of the layers of single experts (`gate_proj`, `up_proj`,
    `down_proj`) stand for the fused ones too, as PEFT reads them: gate and up together, with twice the rank."""
    modules_to_save: Names = ()
    """Module patterns: what is trained whole beside the adapters."""
    use_dora: Flag = False
    """Weight-decomposed adapters (DoRA): a trained length for each row of the weight, beside the adapter."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep the weights of the frozen linear layers in 4 or 8 bits (QLoRA)."""
    frozen_adapters: Names = ()
    """Ours: folders of adapters that are applied and stay frozen under the trained one. One of `pretrained_lora_path`
    is trained further."""
    init_batches: Positive = 16
    """Ours: micro-batches that `init_lora_weights: eva` and `corda` look at before the first step."""
