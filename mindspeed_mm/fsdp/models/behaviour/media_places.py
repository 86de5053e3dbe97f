"""Puts what a tower made of media at the places of their tokens."""

from __future__ import annotations

import torch

from mindspeed_mm.core.errors import DataError


def with_media(embeds_BLD: torch.Tensor, places_BL: torch.Tensor, seen_D: torch.Tensor) -> torch.Tensor:
    """Embeddings whose tokens of media are replaced, in order.

    Args:
        embeds_BLD: Embeddings of all tokens.
        places_BL: Which tokens stand for parts of media.
        seen_D: (…, D), one row for each of them.

    Raises:
        DataError: There are more or fewer rows than places. torch alone would take the first of too many, and shift the
            rest.
    """
    places, rows = int(places_BL.sum()), seen_D.shape[:-1].numel()
    if places != rows:
        raise DataError(
            f"the processor wrote {places:,} tokens for the media of a batch, of which the model makes {rows:,}",
            key="model.model_name_or_path",
            way_out="Take configuration and processor of one model: compare patch sizes, tiles and the ratio of "
            "patches to tokens.",
        )
    return embeds_BLD.masked_scatter(places_BL[..., None], seen_D.to(embeds_BLD.dtype))
