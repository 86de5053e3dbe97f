"""Entries of MindSpeed-MM's Megatron-Core back end, at the paths that launch scripts name."""
