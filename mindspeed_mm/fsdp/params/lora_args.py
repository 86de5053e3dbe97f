"""`training.lora`: low-rank adapters instead of whole weights."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.fsdp.params.value_types import (
    PATTERNS,
    Flag,
    Names,
    Number,
    PathText,
    Patterns,
    Positive,
    Section,
    fault,
    names_of,
    show,
)

_INITIALISATIONS = ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal")


def _initialisation(value: object) -> object:
    if isinstance(value, bool) or value in _INITIALISATIONS:
        return value
    if isinstance(value, str) and re.fullmatch(r"pissa_niter_\d+", value):
        return value
    raise fault(f"{show(value)} is not one of true, false, {', '.join(_INITIALISATIONS)}, pissa_niter_N")


OLDER_DEFAULT = ("q_proj", "k_proj", "v_proj")
"""What `target_modules` was in runs of older versions that did not set it."""


def _targets(value: object) -> object:
    if value is None:
        return None
    return names_of(value)


Targets = Annotated[tuple[str, ...] | None, BeforeValidator(_targets), PATTERNS]
"""Patterns, or null."""


class LoraArguments(Section):
    """Low-rank adapters, as PEFT reads and writes them."""

    enable: Flag = False
    """Train adapters and freeze all other weights."""
    rank: Positive = 8
    """Rank of the adapter matrices."""
    alpha: Annotated[Number, Field(gt=0)] = 16
    """Numerator of the adapters' scale, which is alpha / rank."""
    target_modules: Targets = None
    """Patterns of the modules that get adapters; the last part of a name is enough. The word `all-linear` (or `all`)
    means every linear layer of the language model, for a model of text as in PEFT, without the output head and
    routers; patterns beside it add to it, such as `model.visual.*` for a vision tower. Fused experts are named. Not
    given: the layers in `pretrained_lora_path`; else `all-linear`, and for a generator the layers of diffusers' LoRA
    script for its family."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the input of the adapters."""
    init_lora_weights: Annotated[bool | str, BeforeValidator(_initialisation)] = True
    """Initialisation of the adapters: true, false, gaussian, eva, olora, pissa, pissa_niter_N, corda, loftq or
    orthogonal."""
    pretrained_lora_path: PathText | None = None
    """Folder of adapters to continue training, as PEFT or diffusers writes it. The adapters of `frozen_adapters` stay
    frozen."""
    lora_target_modules_support: Any = None
    """Accepted from older files and ignored; the modules of the model itself are checked instead."""
    disable_peft_moe_conversion: Flag = True
    """Read the names in `target_modules` as the model's own: fused experts are `experts.gate_up_proj`,
    `experts.down_proj`, or `experts` for both. False: names of the layers of single experts (`gate_proj`, `up_proj`,
    `down_proj`) also stand for the fused ones, as PEFT reads them: gate and up together, with twice the rank."""
    modules_to_save: Patterns = ()
    """Patterns of the modules that are fully trained beside the adapters."""
    use_dora: Flag = False
    """Use weight-decomposed adapters (DoRA), which also train the norm of each row of the weight."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep the weights of the frozen linear layers in 4 or 8 bits (QLoRA)."""
    frozen_adapters: Names = ()
    """Folders of adapters that are applied and stay frozen under the trained one; `pretrained_lora_path` names the one
    to continue training. This key is an addition of this package."""
    init_batches: Positive = 16
    """Number of micro-batches that `init_lora_weights: eva` and `corda` look at before the first step. This key is an
    addition of this package."""
