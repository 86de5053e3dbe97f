"""How a model computes: attention, kernels, experts, packed rows, heads for several tokens, quantized layers."""
