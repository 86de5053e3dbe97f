"""What talkers have in common: they read frames of speech as sums of the embeddings of their codes, and predict the
first code of each frame; from the hidden state in front of a frame, a code predictor predicts the frame's other codes
one after the other (arXiv:2601.15621, arXiv:2509.17765).

Shapes: B rows of L places, T places of all rows, N frames among them, G codebooks, D the talker's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.fsdp.ops.linear_cross_entropy import wide_dtype
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

CODE_LOSS_FACTOR = 0.3
"""Of the code predictor's loss, beside that of the talker, as in the published fine-tuning of Qwen3-TTS."""


@dataclass
class SpokenOutput(CausalLMOutputWithPast):
    """Logits of the first codebook in `logits`, (B, L, rows); those of the others beside them."""

    code_logits: torch.Tensor | None = None
    """(N, G − 1, rows)."""
    code_targets: torch.Tensor | None = None
    """(N, G − 1) codes that are to be predicted."""


class SpokenFrames:
    """The codes of a batch under the tables of a talker and its code predictor.

    Args:
        codec_ids: (B, L, G) codes; the first of a place may be a mark, or negative where there is none. A place has the
            others where it is a frame.
        frame_places: (N,) places of the frames in the flattened rows. No row begins with one.
        table: Embeddings of the first codebook and of marks.
        predictor: Of the other codebooks: `model` with `codec_embedding`, a table for each, and `lm_head`, a head for
            each; where it is of another width, `small_to_mtp_projection`.
    """

    def __init__(self, codec_ids: torch.Tensor, frame_places: torch.Tensor, table: nn.Module, predictor: Any) -> None:
        self._places, self._predictor = frame_places, predictor
        self._codes_NG = codec_ids.flatten(0, 1).index_select(0, frame_places)
        first_T, others_NG = codec_ids[..., 0].flatten(), self._codes_NG[:, 1:]
        self._marked_TD = (first_T >= 0)[:, None] * table(first_T.clamp(min=0))
        tables = predictor.model.codec_embedding
        self._others_NGD = torch.stack([each(others_NG[:, n]) for n, each in enumerate(tables)], dim=1)

    def added_to(self, embeds_TD: torch.Tensor) -> torch.Tensor:
        """What each place stands for: its text, and the sum over its codes."""
        return (embeds_TD + self._marked_TD).index_add(0, self._places, self._others_NGD.sum(dim=1))

    def output(self, hidden_BLD: torch.Tensor, head: nn.Module, labels: torch.Tensor | None = None) -> SpokenOutput:
        """Logits of every codebook.

        Args:
            hidden_BLD: Of the talker.
            head: Of the first codebook.
            labels: (B, L) of it, not shifted; for the model's own loss.
        """
        telling_ND = hidden_BLD.flatten(0, 1).index_select(0, self._places - 1)
        first_ND = self._marked_TD.index_select(0, self._places)
        logits = self._other_logits(telling_ND, first_ND)
        output = SpokenOutput(logits=head(hidden_BLD), code_logits=logits, code_targets=self._codes_NG[:, 1:])
        if labels is not None:
            output.loss = own_loss(output, labels)
        return output

    def _other_logits(self, telling_ND: torch.Tensor, first_ND: torch.Tensor) -> torch.Tensor:
        """(N, G − 1, rows) logits of each further codebook, from those before it and the state that gave the first."""
        # (N, G, D): the state, the first code, the others but the last one.
        read = torch.cat([telling_ND[:, None], first_ND[:, None], self._others_NGD[:, :-1]], dim=1)
        project = attribute_at(self._predictor, "small_to_mtp_projection")
        if project is not None:
            read = project(read)
        # Place n + 1 has read codebooks 0 … n, and predicts the next one.
        made = self._predictor.model(inputs_embeds=read, use_cache=False).last_hidden_state
        return torch.stack([head(made[:, n + 1]) for n, head in enumerate(self._predictor.lm_head)], dim=1)


def own_loss(output: SpokenOutput, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the first codebook, and `CODE_LOSS_FACTOR` of the mean over the others."""
    assert output.logits is not None and output.code_logits is not None and output.code_targets is not None
    wide = wide_dtype(output.logits.dtype)
    first_NV, others_NV = output.logits[:, :-1].flatten(0, 1), output.code_logits.flatten(0, 1)
    first = F.cross_entropy(first_NV.to(wide), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
    others = F.cross_entropy(others_NV.to(wide), output.code_targets.flatten())
    return first + CODE_LOSS_FACTOR * others
