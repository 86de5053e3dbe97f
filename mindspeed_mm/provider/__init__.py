"""The second front door's flags and files: Megatron-style flags, model.json, data.json, tools.json and
fsdp2_config.yaml become the configuration that a YAML gives. Nothing here imports torch."""
