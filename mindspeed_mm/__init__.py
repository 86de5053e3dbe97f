"""Train multimodal models from one YAML. Importing this module does nothing."""

from mindspeed_mm.core.version import __version__

__all__ = ["__version__"]
