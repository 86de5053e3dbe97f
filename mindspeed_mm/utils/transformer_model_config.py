"""`get_model_config`, which scripts of MindSpeed-MM call for each part of model.json."""

from __future__ import annotations

from typing import TypeVar

Config = TypeVar("Config")


def get_model_config(config: Config) -> Config:
    """The part as it is: flags are not mixed into it, as the model's folder says its sizes."""
    return config
