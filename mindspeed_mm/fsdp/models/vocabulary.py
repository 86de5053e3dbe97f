"""Whether a tokenizer or processor and a model belong together."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, embedding_of, has_all, weight_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

_MEDIA = ("image", "video", "audio")
_SIZES = (
    ("vision_config.patch_size", "image_processor", "patch_size"),
    ("vision_config.spatial_merge_size", "image_processor", "merge_size"),
    ("vision_config.temporal_patch_size", "image_processor", "temporal_patch_size"),
    ("audio_config.num_mel_bins", "feature_extractor", "feature_size"),
    ("num_mel_bins", "feature_extractor", "feature_size"),
)
"""Key of a model's configuration → part and attribute of its processor that must say the same."""
_WIDTHS = ("vision_config.out_hidden_size", "audio_config.output_dim")
"""What a tower hands to the decoder as it is; the decoder's `hidden_size` must be the same."""

_MOST_ROUNDED = 2
"""Times as many rows as tokens: no model rounds up so far."""


def check_processor(model: nn.Module, processor: ProcessorMixin | PreTrainedTokenizerBase | None) -> None:
    """Raise `ModelFolderError` when rows made by this processor do not fit the model: its tokenizer makes ids that the
    embedding has no row for, it marks media by other tokens than those that the model looks for or cuts them into other
    pieces; or when a tower of the model does not fit the decoder.

    Args:
        model: Whole, not sharded.
        processor: Processor or tokenizer; without one, only the model's own parts are compared.
    """
    config = attribute_at(model, "config")
    _check_widths(config)
    if processor is None:
        return
    tokenizer = tokenizer_of(processor)
    where = str(tokenizer.name_or_path)
    check_vocabulary(model, tokenizer, where=where)
    _check_added_tokens(model, tokenizer, where)
    _check_sizes(config, processor, where)
    _check_media_tokens(config, processor, where)


def _check_added_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Tokens that are added have the same numbers for the rows as for the model, whose folder may be another one."""
    added = facts_of(model).added_tokens
    if added is None:
        return
    for token, number in added.ids.items():
        own = tokenizer.convert_tokens_to_ids(token)
        if own != number:
            raise ModelFolderError(
                f"the tokenizer gives '{token}' the number {own}, that of the model's folder {number}",
                where=where,
                key="model.add_tokens",
                way_out="Take the processor of the model's folder, or one with the same tokens.",
            )


def _check_media_tokens(
    config: PreTrainedConfig | None, processor: ProcessorMixin | PreTrainedTokenizerBase, where: str
) -> None:
    of_pictures = {attribute_at(config, f"image_token_{what}") for what in ("id", "index")}
    for kind in _MEDIA:
        own = attribute_at(processor, f"{kind}_token_id")
        # Gemma 3's own mark stands in the text before a picture is filled in; the model looks for what it becomes.
        filled_in = attribute_at(processor, f"{kind}_token_ids", ())
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            sought = attribute_at(config, key)
            if not isinstance(own, int) or not isinstance(sought, int) or sought in (own, *filled_in):
                continue
            # Molmo2 looks for frames by the token of pictures, which its processor fills in for both.
            if not ((kind == "image" or sought in of_pictures) and _fills_in(processor, sought)):
                raise ModelFolderError(
                    f"the model looks for {kind}s at token {sought}, the processor marks them by {own}",
                    where=where,
                    key=key,
                    way_out="Take configuration and processor of one model.",
                )


def _fills_in(processor: Any, token_id: int) -> bool:
    """Whether a processor writes this token where its own mark of a picture stood, as Ovis2's does."""
    try:
        made = processor(text=[str(processor.image_token)], images=[Image.new("RGB", (64, 64))], return_tensors="pt")
    except (AttributeError, RuntimeError, TypeError, ValueError):  # foreign code: it does not show what it writes
        return False
    return token_id in made["input_ids"][0].tolist()


def _check_sizes(
    config: PreTrainedConfig | None, processor: ProcessorMixin | PreTrainedTokenizerBase, where: str
) -> None:
    for key, part, attribute in _SIZES:
        wanted = attribute_at(config, key)
        tool = attribute_at(processor, part)
        if has_all(tool, f"vision_{attribute}"):  # Step-3.7 calls the crops that it cuts patches, too
            attribute = f"vision_{attribute}"
        made = attribute_at(tool, attribute)
        if isinstance(wanted, int) and isinstance(made, int) and wanted != made:
            raise ModelFolderError(
                f"is {wanted}, the {part.replace('_', ' ')}'s {attribute} is {made}",
                where=where,
                key=key,
                way_out="Take configuration and processor of one model.",
            )


def _check_widths(config: PreTrainedConfig | None) -> None:
    decoder = attribute_at(attribute_at(config, "text_config", config), "hidden_size")
    if attribute_at(config, "projects_towers", False):  # layers of the model's own stand between them
        return
    for key in _WIDTHS:
        width = attribute_at(config, key)
        feeds_decoder = key.startswith("vision_config") or "omni" in attribute_at(config, "model_type", "")
        if feeds_decoder and isinstance(width, int) and isinstance(decoder, int) and width != decoder:
            raise ModelFolderError(
                f"is {width}, but the decoder's hidden_size is {decoder}",
                where=str(attribute_at(config, "name_or_path") or "config.json"),
                key=key,
                way_out="Give both the same width, as the model was trained with.",
            )


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, where: str) -> None:
    """Raise `ModelFolderError` when the tokenizer makes ids that the embedding has no row for.

    A larger embedding is fine: models round it up. One of more than twice as many rows is warned of: the tokenizer may
    be another model's, and the model would give ids that mean nothing to it.
    """
    embedding = embedding_of(model)
    if embedding is None or not has_all(embedding, "weight"):
        return
    rows = len(weight_of(embedding))
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
