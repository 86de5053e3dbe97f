"""Whether a tokenizer or processor and a model belong together."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEDIA = ("image", "video", "audio")
_SIZES = (
    ("vision_config", "patch_size", "image_processor", "patch_size"),
    ("vision_config", "spatial_merge_size", "image_processor", "merge_size"),
    ("vision_config", "temporal_patch_size", "image_processor", "temporal_patch_size"),
    ("audio_config", "num_mel_bins", "feature_extractor", "feature_size"),
    ("", "num_mel_bins", "feature_extractor", "feature_size"),
)
"""Section and key of a model's configuration → part and attribute of its processor that must say the same."""
_WIDTHS = (("vision_config", "out_hidden_size"), ("audio_config", "output_dim"))
"""What a tower hands to the decoder as it is; the decoder's `hidden_size` must be the same."""

_MOST_ROUNDED = 2
"""Times as many rows as tokens: no model rounds up so far."""


def check_processor(model: nn.Module, processor: Any) -> None:
    """Raise `ModelFolderError` when rows made by this processor do not fit the model: its tokenizer makes ids that the
    embedding has no row for, it marks media by other tokens than those that the model looks for or cuts them into other
    pieces; or when a tower of the model does not fit the decoder.

    Args:
        model: Whole, not sharded.
        processor: Processor or tokenizer; None says nothing.
    """
    config = getattr(model, "config", None)
    _check_widths(config)
    if processor is None:
        return
    where = str(tokenizer_of(processor).name_or_path)
    check_vocabulary(model, tokenizer_of(processor), where=where)
    _check_sizes(config, processor, where)
    for kind in _MEDIA:
        own = getattr(processor, f"{kind}_token_id", None)
        # Gemma 3's own mark stands in the text before a picture is filled in; the model looks for what it becomes.
        filled_in = getattr(processor, f"{kind}_token_ids", None) or ()
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            sought = getattr(config, key, None)
            if isinstance(own, int) and isinstance(sought, int) and sought not in (own, *filled_in):
                raise ModelFolderError(
                    f"the model looks for {kind}s at token {sought}, the processor marks them by {own}",
                    where=where,
                    key=key,
                    way_out="Take configuration and processor of one model.",
                )


def _check_sizes(config: Any, processor: Any, where: str) -> None:
    for section, key, part, attribute in _SIZES:
        wanted = getattr(getattr(config, section, None) if section else config, key, None)
        tool = getattr(processor, part, None)
        if hasattr(tool, f"vision_{attribute}"):  # Step-3.7 calls the crops that it cuts patches, too
            attribute = f"vision_{attribute}"
        made = getattr(tool, attribute, None)
        if isinstance(wanted, int) and isinstance(made, int) and wanted != made:
            raise ModelFolderError(
                f"is {wanted}, the {part.replace('_', ' ')}'s {attribute} is {made}",
                where=where,
                key=f"{section}.{key}".lstrip("."),
                way_out="Take configuration and processor of one model.",
            )


def _check_widths(config: Any) -> None:
    decoder = getattr(getattr(config, "text_config", config), "hidden_size", None)
    for section, key in _WIDTHS:
        width = getattr(getattr(config, section, None), key, None)
        feeds_decoder = section == "vision_config" or "omni" in str(getattr(config, "model_type", ""))
        if feeds_decoder and isinstance(width, int) and isinstance(decoder, int) and width != decoder:
            raise ModelFolderError(
                f"is {width}, but the decoder's hidden_size is {decoder}",
                where=str(getattr(config, "name_or_path", "") or "config.json"),
                key=f"{section}.{key}",
                way_out="Give both the same width, as the model was trained with.",
            )


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, where: str) -> None:
    """Raise `ModelFolderError` when the tokenizer makes ids that the embedding has no row for.

    A larger embedding is fine: models round it up. One of twice as many rows is told: the tokenizer may be another
    model's, and the model would give ids that mean nothing to it.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(getattr(embedding, "weight", None), "shape", [len(tokenizer)])[0]
    if len(tokenizer) > rows:
        raise ModelFolderError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows",
            where=where,
            key="vocab_size",
            way_out="Compare vocab_size of config.json with the original model's; if that is right, take this model's "
            "tokenizer, or remove the tokens that were added to it.",
        )
    if rows > _MOST_ROUNDED * len(tokenizer):
        warnings.warn(
            f"{where}: the tokenizer has {len(tokenizer):,} tokens, the model's embedding {rows:,} rows: it may be "
            "another model's",
            stacklevel=2,
        )
