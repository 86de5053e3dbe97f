"""Open-Sora Plan: transformers, VAE and pipelines of its own; importing this package registers it."""

from mindspeed_mm.fsdp.models.opensoraplan import modeling_opensoraplan as modeling_opensoraplan
