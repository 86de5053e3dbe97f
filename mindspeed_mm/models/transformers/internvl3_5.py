"""Another path of the class of InternVL 3.5."""

from mindspeed_mm.models.hf_src.internvl3_5 import InternVLChatModelGeneration

__all__ = ["InternVLChatModelGeneration"]
