"""What must hold between `model.add_tokens`, `model.add_special_tokens` and all other keys."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments


def token_problems(arguments: Arguments) -> Iterator[Problem]:
    """What does not go with added tokens; nothing where none are added."""
    model, rollout = arguments.model, arguments.posttrain.rollout
    twice = sorted(set(model.add_tokens) & set(model.add_special_tokens))
    if twice:
        yield Problem(
            f"'{twice[0]}' is also listed in model.add_tokens",
            key="model.add_special_tokens",
            way_out="List it under one of the keys.",
        )
    if not (model.add_tokens or model.add_special_tokens):
        return
    added = "model.add_tokens" if model.add_tokens else "model.add_special_tokens"
    if arguments.posttrain.method and rollout.base_url:
        yield Problem(
            f"cannot be combined with {added}: the server's model has no rows for new tokens",
            key="posttrain.rollout.base_url",
            way_out="Train the tokens first, export the run, and start both from the exported folder.",
        )
    if model.mtp_num_layers:
        yield Problem(
            f"cannot be combined with {added}: the heads for further tokens have the folder's number of rows",
            key="model.mtp_num_layers",
            way_out="Set it to 0.",
        )
