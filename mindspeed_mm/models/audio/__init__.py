"""The audio tower of a model: how the engine finds it."""

from torch import nn

from mindspeed_mm.fsdp.models.structure.towers import Tower, find_towers

__all__ = ["Tower", "find_audio_tower"]


def find_audio_tower(model: nn.Module) -> nn.Module | None:
    """The module of a model that hears; None where it has none. `find_towers` describes it, and the other towers."""
    for tower in find_towers(model):
        if tower.name == "audio":
            return model.get_submodule(tower.module)
    return None
