"""Stands in for `megatron.core.enums`: `ModelType` with its members, which decide nothing here."""

from __future__ import annotations

from enum import Enum


class ModelType(Enum):
    """What Megatron asks of a model; nothing is decided by it here."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4
