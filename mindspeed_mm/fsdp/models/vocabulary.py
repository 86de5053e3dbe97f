"""Whether a tokenizer and a model belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from mindspeed_mm.core.errors import ModelFolderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, where: str) -> None:
    """Raise `ModelFolderError` when the tokenizer makes ids that the embedding has no row for.

    A larger embedding is fine: models round it up.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(getattr(embedding, "weight", None), "shape", [len(tokenizer)])[0]
    if len(tokenizer) > rows:
        raise ModelFolderError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows",
            where=where,
            key="vocab_size",
            way_out="Take the tokenizer of this model, or remove the tokens that were added to it.",
        )
