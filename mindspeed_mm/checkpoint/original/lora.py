"""Merges a LoRA into the generator that it was trained on: W + alpha / rank * B A, computed in fp32."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Region
from mindspeed_mm.checkpoint.original.generator import (
    GeneratorLayouts,
    Naming,
    from_diffusers,
    to_diffusers,
    without_wrappers,
)
from mindspeed_mm.core.errors import ModelFolderError, Problem, UsageError
from mindspeed_mm.core.json_file import parse_json

_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
"""What stands before the names in files of PEFT, diffusers and ComfyUI."""
_KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight")
_PART = {"lora_down": "lora_A", "lora_up": "lora_B"}
ADAPTER_CONFIG = "adapter_config.json"
"""File with the rank and alpha of the adapters beside it, by PEFT's names."""


class LowRankSum(LazyTensor):
    """A linear layer's weight with an adapter merged, any region at a time."""

    def __init__(self, base: LazyTensor, down: LazyTensor, up: LazyTensor, scaling: float) -> None:
        if len(base.shape) != 2 or (up.shape[0], down.shape[1]) != base.shape or up.shape[1] != down.shape[0]:
            raise ValueError(f"A {down.shape} and B {up.shape} do not fit a weight of {base.shape}")
        super().__init__(base.shape, base.dtype, [base, down, up])
        self.base, self.down, self.up, self.scaling = base, down, up, scaling

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        rows, columns = region
        rank = self.down.shape[0]
        summed = torch.empty(rows[1], columns[1], dtype=torch.float32)
        down = torch.empty(rank, columns[1], dtype=torch.float32)
        up = torch.empty(rows[1], rank, dtype=torch.float32)
        self.base.copy_to(summed, region)
        self.down.copy_to(down, ((0, rank), columns))
        self.up.copy_to(up, (rows, (0, rank)))
        summed += (up @ down) * self.scaling
        out.copy_(summed)


@dataclass(frozen=True)
class LoraScaling:
    """What a person says about an adapter whose file does not: `lora_alpha` and `lora_rank`."""

    alpha: float | None = None
    rank: int | None = None


def merge_lora(
    base: Mapping[str, LazyTensor],
    family: GeneratorLayouts,
    lora: Mapping[str, LazyTensor],
    alphas: Mapping[str, float],
) -> dict[str, LazyTensor]:
    """The base's tensors with an adapter merged.

    Args:
        base: By diffusers' names.
        family: Of the model.
        lora: The adapter's A and B, by the names in its file: those of any layout of the family.
        alphas: Module, as `lora_modules` names it → alpha.

    Raises:
        ModelFolderError: The adapter holds more than A and B of linear layers, or belongs to another model.
    """
    adapters = lora_modules(lora)
    naming = _naming_of(adapters, base, family)
    named = from_diffusers(base, family, naming)
    full_name = {without_wrappers(key): key for key in named}
    for module, (down, up) in adapters.items():
        key = full_name[f"{module}.weight"]
        try:
            named[key] = LowRankSum(named[key], down, up, alphas[module] / down.shape[0])
        except ValueError as error:
            raise ModelFolderError(str(error), key=module) from error
    return to_diffusers(named, family, naming)


def lora_modules(lora: Mapping[str, LazyTensor]) -> dict[str, tuple[LazyTensor, LazyTensor]]:
    """Module → its A and B.

    Raises:
        ModelFolderError: A key is neither, or one of a pair is missing.
    """
    found: dict[str, dict[str, LazyTensor]] = {}
    problems: list[Problem] = []
    for key, tensor in lora.items():
        match = _KEY.fullmatch(key)
        if match is None:
            problems.append(Problem("is neither A nor B of a linear layer's adapter, and cannot be merged", key=key))
            continue
        found.setdefault(bare_module(match["module"]), {})[_PART.get(match["part"], match["part"])] = tensor
    for module, parts in found.items():
        if len(parts) != 2:
            problems.append(Problem("has A or B, not both", key=module))
    if problems:
        raise ModelFolderError("the adapter cannot be merged", problems=problems[:10])
    return {module: (parts["lora_A"], parts["lora_B"]) for module, parts in found.items()}


def bare_module(name: str) -> str:
    """A module's name without what stands before all names in some files."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return without_wrappers(name)


def _naming_of(modules: Mapping[str, object], base: Mapping[str, LazyTensor], family: GeneratorLayouts) -> Naming:
    best: tuple[int, Naming, list[str]] | None = None
    for naming in Naming:
        if naming is Naming.MM and not family.mm:
            continue
        known = set(map(without_wrappers, from_diffusers(base, family, naming)))
        unknown = [module for module in modules if f"{module}.weight" not in known]
        if not unknown:
            return naming
        if best is None or len(unknown) < best[0]:
            best = (len(unknown), naming, unknown)
    assert best is not None
    raise ModelFolderError(
        f"the adapter is for layers that this {family.name} does not have",
        problems=[Problem("is not a layer of the base", key=module) for module in best[2][:10]],
    )


def alphas_of(
    lora: dict[str, LazyTensor], metadata: Mapping[str, str], path: Path, said: LoraScaling, *, needed: bool = True
) -> dict[str, float]:
    """Alpha of every module; the tensors that hold alphas are taken out of `lora`.

    It is the one that the file holds for the module; else what its metadata (as diffusers saves it) or the
    adapter_config.json beside it says; else what a person said.

    Args:
        lora: By the names in the file.
        metadata: Text in the file's header.
        path: The file, or the folder of a checkpoint.
        said: `lora_alpha` and `lora_rank`.
        needed: It is an error that nobody says it; else such modules have none in the result.

    Raises:
        UsageError: Nobody says it, or what was said is not what the file holds.
        ModelFolderError: The file says something that is no number.
    """
    stored = {bare_module(key.removesuffix(".alpha")): key for key in list(lora) if key.endswith(".alpha")}
    own = {module: _number(lora.pop(key), key, path) for module, key in stored.items()}
    config = _config(metadata, path)
    of_others = config if config is not None else said.alpha
    alphas: dict[str, float] = {}
    for module, (down, _) in lora_modules(lora).items():
        if said.rank is not None and down.shape[0] != said.rank:
            raise UsageError(f"is {said.rank}, and the adapter's {module} has rank {down.shape[0]}", key="lora_rank")
        alpha = own.get(module, of_others)
        if alpha is None and not needed:
            continue
        if alpha is None:
            raise UsageError("the file does not say the adapter's alpha", where=str(path), way_out="Give --lora_alpha.")
        if said.alpha is not None and alpha != said.alpha:
            raise UsageError(
                f"is {said.alpha:g}, and the adapter was saved with {alpha:g}", where=str(path), key="lora_alpha"
            )
        alphas[module] = alpha
    return alphas


def _config(metadata: Mapping[str, str], path: Path) -> float | None:
    beside = (path if path.is_dir() else path.parent) / ADAPTER_CONFIG
    text = metadata.get("lora_adapter_metadata") or (beside.read_text() if beside.is_file() else "{}")
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ModelFolderError(f"what it says about itself is not valid JSON: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise ModelFolderError("what it says about itself is not a table of values", where=str(path))
    if values.get("use_dora") or values.get("transformer.use_dora"):
        raise UsageError("is an adapter of DoRA, which is not merged here", where=str(path))
    if values.get("alpha_pattern") or values.get("transformer.alpha_pattern") or values.get("use_rslora"):
        raise UsageError("has alphas by pattern or by the root of the rank, which are not merged here", where=str(path))
    alpha = values.get("lora_alpha", values.get("transformer.lora_alpha"))
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise ModelFolderError(f"is {alpha!r}, no number", where=str(path), key="lora_alpha")
    if alpha is None:
        return None
    return float(alpha)


def _number(stored: LazyTensor, key: str, path: Path) -> float:
    if math.prod(stored.shape) != 1:
        raise ModelFolderError(f"is not a single number, its shape is {list(stored.shape)}", where=str(path), key=key)
    return float(stored.read())
