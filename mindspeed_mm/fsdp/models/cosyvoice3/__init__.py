"""The language model of CosyVoice3: text to speech tokens. Importing this package registers it."""

from mindspeed_mm.fsdp.models.cosyvoice3 import modeling_cosyvoice3 as modeling_cosyvoice3
