"""What answers and pictures are worth. A plugin registers its own with `reward_register`."""

from mindspeed_mm.fsdp.posttrain_rewards.registry import reward_register

__all__ = ["reward_register"]
