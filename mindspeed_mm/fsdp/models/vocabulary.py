"""Whether a tokenizer or processor and a model belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEDIA = ("image", "video", "audio")


def check_processor(model: nn.Module, processor: Any) -> None:
    """Raise `ModelFolderError` when rows made by this processor do not fit the model: its tokenizer makes ids that the
    embedding has no row for, or marks media by other tokens than those that the model looks for.

    Args:
        model: Whole, not sharded.
        processor: Processor or tokenizer; None says nothing.
    """
    if processor is None:
        return
    where = str(tokenizer_of(processor).name_or_path)
    check_vocabulary(model, tokenizer_of(processor), where=where)
    config = getattr(model, "config", None)
    for kind in _MEDIA:
        own = getattr(processor, f"{kind}_token_id", None)
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            sought = getattr(config, key, None)
            if isinstance(own, int) and isinstance(sought, int) and own != sought:
                raise ModelFolderError(
                    f"the model looks for {kind}s at token {sought}, the processor marks them by {own}",
                    where=where,
                    key=key,
                    way_out="Take configuration and processor of one model.",
                )


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
