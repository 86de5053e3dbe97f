"""Step-Video: transformer, VAE and text encoders of its own; importing this package registers it."""

from mindspeed_mm.fsdp.models.stepvideo import modeling_stepvideo as modeling_stepvideo
