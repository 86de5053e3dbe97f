"""The configuration: a frozen, typed tree read from one YAML. Nothing here imports torch."""
