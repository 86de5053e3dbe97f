"""InternVL as OpenGVLab releases it first, under the names of its own code; importing this package registers it."""

from mindspeed_mm.fsdp.models.internvl_chat import modeling_internvl_chat as modeling_internvl_chat
