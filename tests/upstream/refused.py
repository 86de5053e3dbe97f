"""Launches of MindSpeed-MM that are refused, and rightly: what they ask for is not built, or not this suite's."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLANNED = "the family is planned"


class Refused(NamedTuple):
    """One kind of launch that is refused."""

    script: str
    """Pattern of its path."""
    message: str
    """Pattern of what is said."""
    reason: str
    """Why it is right."""


REFUSED = (
    Refused("/mindspore/", "msrun starts it, which is MindSpore's", "MindSpore's: the suite runs on PyTorch"),
    Refused("/eval_.*i2v", "is scored by VBench's package vbench2_beta_i2v", "VBench has a package of its own for it"),
    Refused(
        "qwen2vl/finetune_qwen2vl_72b_dpo", "are not the numbers of layers of 4 stages",
        "model.json cuts the layers into 8 stages, and a comment of the script asks to change that",
    ),
    Refused("/opensora2.0/", "media of Open-Sora 2.0, which is not built", _PLANNED),
    Refused("/lumina/", "rows of tokens that Lumina-mGPT 2.0's own encoder made", _PLANNED),
    Refused("/qihoo_t2x/", "starts Qihoo-T2X, which is not built", _PLANNED),
    Refused("/vae/", "starts the training of autoencoders, which is not built", _PLANNED),
)  # fmt: skip
"""Checked in this order."""


def why_refused(script: str, message: str) -> str | None:
    """Why a launch is refused rightly; None where it should be accepted."""
    for row in REFUSED:
        if re.search(row.script, script) and re.search(row.message, message):
            return row.reason
    return None
