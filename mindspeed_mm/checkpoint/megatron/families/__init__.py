"""One description of Megatron-style names, merges, cuts and stages for each family of models."""
