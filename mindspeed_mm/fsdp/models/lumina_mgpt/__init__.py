"""Lumina-mGPT: Chameleon that answers in pictures, too. Importing this package registers it."""

from mindspeed_mm.fsdp.models.lumina_mgpt import modeling_lumina_mgpt as modeling_lumina_mgpt
