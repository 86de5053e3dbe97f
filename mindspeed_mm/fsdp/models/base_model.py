"""What a model plugin may derive from when transformers has no class for it.

A plain `nn.Module` can be registered as well; these classes name the hooks that are asked for. Beyond them a model may
have `fully_shard(fsdp_plan) -> bool` (and `shards_itself() -> bool`, asked before it, where a base class brings it),
`set_modules_to_prefetch(fsdp_plan, ep_plan) -> bool`, `overwrite_transformer_config(config, model_args, feature_args)`,
`ep_forward(...)` on an expert module, `get_rope_index`, `get_output_embeddings`, `get_towers`, `_no_split_modules`
(class names of the blocks to shard one by one) and `_can_record_outputs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from mindspeed_mm.checkpoint.keymap import KeyMap
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


class WeightInitMixin:
    """Gives a module transformers' convention for weights from scratch: `_init_weights(module)` sets one module."""

    def _init_weights(self, module: nn.Module) -> None:
        """Set the parameters that `module` itself holds. torch's own `reset_parameters()` unless overridden.

        A model that defines `init_weights()` instead is initialised in one go, as full tensors on every rank: fine for
        a small model only.
        """
        reset = attribute_at(module, "reset_parameters")
        if reset is not None:
            reset()


class BaseModel(WeightInitMixin, nn.Module):
    """A model of one's own. `forward(**batch)` returns an object or dict with `logits`, or with its own `loss`."""

    _no_split_modules: ClassVar[list[str]] = []
    key_map: ClassVar[KeyMap | None] = None
    """How a stored folder's keys become the model's; the same names when None."""

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Self:
        """Build the model; parameters go to the meta device.

        Args:
            config: The folder's transformers configuration; its config.json as an object with attributes when
                transformers does not know the model type; the `model` section of the YAML when there is no folder.
            kwargs: `dtype` and `attn_implementation`, as transformers' classes take them.
        """
        return cls(config)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, config: Any, **kwargs: Any) -> Self:
        """Override to load the weights by code of one's own: every rank then holds the whole model for a moment.

        Left alone, weights stream from the folder's safetensors into the shards.
        """
        raise NotImplementedError
