"""Pictures that come patch by patch are embedded by a matrix product instead of a convolution.

Where a convolution's kernel covers its whole input, each output is one sum over a patch, as in a product of matrices:
the same numbers times the same weights, added up in another order. Kernels of convolutions are made for inputs with
many places.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward


def multiply_patches(model: nn.Module) -> int:
    """Let convolutions whose step is their kernel compute single patches by a matrix product, in place.

    The weight keeps its name and its shape. Inputs with room for more than one kernel go through the convolution.

    Args:
        model: Built, parameters on meta or real; call it before sharding.

    Returns:
        How many convolutions were changed.
    """
    found = [module for module in model.modules() if _steps_by_its_kernel(module) and "forward" not in vars(module)]
    for module in found:
        replace_forward(module, ForwardKind.KERNEL, MethodType(_embed_patches, module))
    return len(found)


def _steps_by_its_kernel(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    if math.prod(module.kernel_size) == 1 or module.groups != 1:
        return False
    is_padded = module.padding not in ("valid", (0,) * len(module.kernel_size))
    return module.stride == module.kernel_size and not is_padded and set(module.dilation) == {1}


def _embed_patches(self: Any, patches: torch.Tensor) -> torch.Tensor:
    """(N, features, 1, …) of (N, channels, *kernel); what a convolution gives of larger inputs."""
    if tuple(patches.shape[2:]) != self.kernel_size:
        output: torch.Tensor = type(self).forward(self, patches)
        return output
    features = F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
    return features.view(*features.shape, *(1 for _ in self.kernel_size))
