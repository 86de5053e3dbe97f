"""FLOPs of a training step by module, MFU and HFU: counted from the built model, without running it."""

from mindspeed_mm.fsdp.tools.flops_tool.count import ByConvention, FlopCount, Flops
from mindspeed_mm.fsdp.tools.flops_tool.reading import count_flops

__all__ = ["ByConvention", "FlopCount", "Flops", "count_flops"]
