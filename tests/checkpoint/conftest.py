"""torchvision is made importable before any test imports transformers."""

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()
