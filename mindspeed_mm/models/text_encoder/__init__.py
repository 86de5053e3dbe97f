"""`TextEncoder` and `Tokenizer`, as MindSpeed-MM's scripts build them from the section `text_encoder` of model.json and
`tokenizer_config` of data.json."""

from mindspeed_mm.models.text_encoder.text_encoder import TextEncoder
from mindspeed_mm.models.text_encoder.tokenizer import Tokenizer

__all__ = ["TextEncoder", "Tokenizer"]
