"""Megatron-style flags, model.json, data.json, tools.json and fsdp2_config.yaml as the configuration that a YAML gives.
Nothing here imports torch.
"""
