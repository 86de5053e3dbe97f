"""What the server behind `run_ranks` imports once, so that every rank starts with it."""

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: E402

__all__ = ["torch", "transformers"]
