"""PEFT's part: its layers are put into a model, by names as they are.

The trained adapter may lie over frozen ones: y = W·x + Σ scale_i · B_i·A_i·x + scale · B·A·x. Each of these keeps its
own rank, alpha and kind, as PEFT wrote them. They are in no checkpoint: a resumed run reads them from their folders
again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from safetensors import safe_open
from torch import nn

from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces
from mindspeed_mm.fsdp.models.lora.all_linear import takes_adapter
from mindspeed_mm.fsdp.models.lora.files import FROZEN_KEY, StoredAdapter, stored_adapters
from mindspeed_mm.fsdp.models.lora.names import ADAPTER, INITIAL, MAGNITUDE, AdaptedLinear, adapter_weight, moves_base
from mindspeed_mm.fsdp.models.lora.targets import LoraTargets
from mindspeed_mm.fsdp.params.lora_args import LoraArguments


def inject(model: nn.Module, lora: LoraArguments, targets: LoraTargets) -> None:
    """Put the trained adapter into a model; its parameters are on the meta device, everything else is frozen.

    Where the base will give away what the adapter starts with, the layer gets two buffers for it: a run that goes on
    takes it out again, and the adapter can be written as one of the untouched base.
    """
    ranks, alphas = {}, {}
    for end, strength in targets.strengths.items():
        ranks[end], alphas[end] = strength.rank, strength.alpha
    inject_adapter(
        model,
        ADAPTER,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_dora=lora.use_dora,
        target_modules=expression_of(targets.layers),
        target_parameters=targets.parameters or None,
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    if not moves_base(lora.init_lora_weights):
        return
    for name in targets.layers:
        layer = cast(AdaptedLinear, model.get_submodule(name))
        for buffer, side in zip(INITIAL, (layer.lora_A, layer.lora_B), strict=True):
            layer.register_buffer(buffer, torch.zeros(side[ADAPTER].weight.shape))


def inject_adapter(model: nn.Module, name: str, **settings: object) -> None:
    """Put an adapter into a model, beside those that are there: all of them are active.

    Args:
        model: Parameters on meta or real.
        name: Of the adapter.
        settings: Of PEFT's `LoraConfig`.
    """
    from peft import LoraConfig, inject_adapter_in_model  # half a second to import
    from peft.tuners.lora import LoraLayer

    with _names_as_they_are(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # of the adapters that lie under this one
        inject_adapter_in_model(LoraConfig(**settings), model, adapter_name=name, low_cpu_mem_usage=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(list(module.lora_A))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in parameter_name)


@contextmanager
def _names_as_they_are() -> Iterator[None]:
    """Inside, PEFT reads no names of older models into a configuration.

    For models with fused experts, PEFT 0.19 to 0.21 takes `gate_proj` and the like for the fused parameters, and of an
    expression only the last names that it matches: adapters on one layer would land on all of them. Which of the two is
    meant, `disable_peft_moe_conversion` has said already.
    """
    from peft.utils import transformers_weight_conversion as conversion

    replaced = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = replaced


def expression_of(names: Sequence[str]) -> str | list[str]:
    """What stands for just these modules: an expression, as in a list a name also stands for every name that ends in
    it."""
    if names:
        return "|".join(map(re.escape, names))
    return []


def peft_names(targets: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | str:
    """What stands for just these modules in a configuration of PEFT: the shortest ends of their names; an expression
    where a target's whole name is the end of another one.

    Args:
        targets: Names of modules.
        names: Those of all modules.
    """
    if not targets:
        return ()
    ends = shortest_ends(targets, names)
    if ends is not None:
        return ends
    return "|".join(map(re.escape, targets))


def _end_of(name: str, parts: int) -> str:
    """The last parts of a name; the whole name where it has no more."""
    return ".".join(name.split(".")[-parts:])


def shortest_ends(targets: Sequence[str], names: Sequence[str], least: int = 1) -> tuple[str, ...] | None:
    """Ends of names, of at least so many parts, that stand for the targets and for nothing else; None where a target's
    whole name is the end of another one."""
    longest = max(name.count(".") for name in targets) + 1
    for parts in range(least, longest + 1):
        ends = {_end_of(name, parts) for name in targets}
        depths = {end.count(".") + 1 for end in ends}  # a name of fewer parts is its own end
        named = {name for name in names if any(_end_of(name, depth) in ends for depth in depths)}
        if named == set(targets):
            return tuple(sorted(ends))
    return None


# --- adapters that lie frozen under the trained one -------------------------------------------------------------------


def inject_frozen(model: nn.Module, folders: Sequence[str]) -> tuple[str, ...]:
    """Put the frozen adapters into a model without weights; returns their folders.

    Raises:
        ModelFolderError: There are no adapters, or of a kind that can only be merged.
        ConfigError: They are of layers that the model does not have.
    """
    layers = {name: module for name, module in model.named_modules() if takes_adapter(module)}
    for index, adapter in enumerate(stored_adapters(folders)):
        _check_frozen(adapter, layers)
        inject_adapter(
            model,
            f"frozen_{index}",
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.use_rslora,
            use_dora=any(key.endswith(f"lora_{MAGNITUDE}") for key in adapter.keys),
            rank_pattern=dict(adapter.rank_pattern),
            alpha_pattern=dict(adapter.alpha_pattern),
            target_modules=expression_of(list(adapter.layers)),
        )
    return tuple(folders)


@torch.no_grad()
def load_frozen(model: nn.Module) -> None:
    """Fill the frozen adapters from their folders. Each rank reads its part.

    Raises:
        ModelFolderError: A file is of another shape than its settings say.
    """
    lora = facts_of(model).lora
    if lora is None:
        return
    own = dict(model.named_parameters())
    for index, adapter in enumerate(stored_adapters(lora.frozen)):
        with safe_open(adapter.weights, framework="pt") as reader:
            for layer, sides in adapter.layers.items():
                for side, key in sides.items():
                    target = own.get(adapter_weight(layer, side, f"frozen_{index}"))
                    if target is not None:  # of a pipeline, another rank may have the layer
                        _fill_frozen(target, adapter.stored(key, reader), str(adapter.weights), key)


def _fill_frozen(target: torch.Tensor, stored: Stored, file: str, key: str) -> None:
    if stored.shape != tuple(target.shape):
        raise ModelFolderError(
            f"{list(stored.shape)} in the file, {list(target.shape)} by its settings", where=file, key=key
        )
    for piece, region in local_pieces(target):
        stored.copy_to(piece, region)


def _check_frozen(adapter: StoredAdapter, layers: dict[str, nn.Module]) -> None:
    if adapter.fused or adapter.whole or adapter.tokens:
        what = "adapters on fused experts"
        if adapter.whole:
            what = f"'{adapter.whole[0]}', which was trained whole"
        elif adapter.tokens:
            what = "rows of added tokens, which were trained in full"
        raise ModelFolderError(
            f"holds {what}, which cannot lie under other adapters",
            where=str(adapter.weights),
            key=FROZEN_KEY,
            way_out="Merge it into the base first: mm merge BASE ADAPTER --out FOLDER.",
        )
    for name in adapter.layers:
        if name not in layers:
            raise ConfigError(
                f"'{adapter.weights}' is of other layers than this model has ({name} …)",
                key=FROZEN_KEY,
                way_out="Name adapters that were trained on this model.",
            )
