"""Train multimodal models from one YAML. This module holds the version only; importing it does nothing."""

__version__ = "0.1.0"
