"""torchvision is made importable before any test imports transformers."""

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()
