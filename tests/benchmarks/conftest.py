"""torchvision is made importable, and torchao is left alone, before any benchmark imports transformers."""

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()
