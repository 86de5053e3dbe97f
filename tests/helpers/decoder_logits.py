"""Logits of a decoder of transformers with experts, on stored tensors put in by hand."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def decoder_logits(decoder: Any, weights: Weights, prefix: str, embeddings: torch.Tensor) -> torch.Tensor:
    """(1, L, H) → (L, vocabulary), in fp64.

    Args:
        decoder: Built, of any values.
        weights: Among them `<prefix>model.*`, with each expert by itself, and `<prefix>lm_head.weight`.
        prefix: In front of the names of a text model.
        embeddings: What the tokens are.
    """
    start = f"{prefix}model."
    state, experts = {}, defaultdict[str, dict[str, dict[int, torch.Tensor]]](lambda: defaultdict(dict))
    for name, tensor in weights.items():
        if not name.startswith(start):
            continue
        name = name.removeprefix(start)
        found = re.fullmatch(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name)
        if found is None:
            state[name] = tensor
        else:
            experts[found[1]][found[3]][int(found[2])] = tensor
    for name, parts in experts.items():
        gate, up, down = (torch.stack([parts[part][e] for e in sorted(parts[part])]) for part in ("gate", "up", "down"))
        state |= {f"{name}gate_up_proj": torch.cat([gate, up], dim=1), f"{name}down_proj": down}
    for parameter in decoder.parameters():  # angles stay in fp32, as in every model of transformers
        parameter.data = parameter.data.double()
    decoder.eval()
    decoder.set_experts_implementation("eager")
    decoder.load_state_dict(state)
    hidden = decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    return (hidden @ weights[f"{prefix}lm_head.weight"].T)[0]
