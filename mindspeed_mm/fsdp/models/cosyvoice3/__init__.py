"""CosyVoice3: the language model from text to speech tokens, the flow to mel frames and the vocoder to sound. Importing
this package registers the first."""

from mindspeed_mm.fsdp.models.cosyvoice3 import modeling_cosyvoice3 as modeling_cosyvoice3
