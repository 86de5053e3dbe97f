"""The text decoder of a model: how the engine finds it."""

from mindspeed_mm.fsdp.models.behaviour.multi_token import LayeredDecoder, find_layered_decoder
from mindspeed_mm.fsdp.utils.model_parts import decoder_of

__all__ = ["LayeredDecoder", "decoder_of", "find_layered_decoder"]
