"""Token embeddings: how the engine finds those of a model, and gives them rows for added tokens."""

from torch.nn import Embedding

from mindspeed_mm.fsdp.models.added_tokens import AddedTokens, with_new_rows
from mindspeed_mm.fsdp.utils.model_parts import embedding_of, head_of

__all__ = ["AddedTokens", "Embedding", "embedding_of", "head_of", "with_new_rows"]
