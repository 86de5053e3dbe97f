"""What the server behind `run_ranks` imports once, so that every rank starts with it: most ranks train a tiny model,
which takes less time than these imports."""

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()
import diffusers  # noqa: E402
import diffusers.models.transformers.transformer_flux  # noqa: E402
import diffusers.models.transformers.transformer_wan  # noqa: E402
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import mindspeed_mm.cli.train  # noqa: E402
import mindspeed_mm.fsdp.data.datasets.huggingface  # noqa: E402
import mindspeed_mm.fsdp.train.generator_family  # noqa: E402
import mindspeed_mm.fsdp.train.memory.forecast  # noqa: E402
import mindspeed_mm.fsdp.train.step.pipeline  # noqa: E402
import mindspeed_mm.fsdp.train.trainer  # noqa: E402
import mindspeed_mm.tasks.export  # noqa: E402
import mindspeed_mm.tasks.verify.run  # noqa: E402
import tests.helpers.plan_matrix  # noqa: E402
from mindspeed_mm.fsdp.params.loader import load_config  # noqa: E402

__all__ = ["diffusers", "mindspeed_mm", "tests", "torch", "transformers"]

# What is made once in a process, at the first configuration and at the first model.
load_config({})
get_checkpoint_conversion_mapping("qwen3_vl")
