"""The class of transformers that a Hugging Face folder names, built without weights: its names and shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_mm.checkpoint.dequantized import refuse_quantized
from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.keymap import check_used_once, in_natural_order, made_by
from mindspeed_mm.checkpoint.lazy_tensor import Agreeing, LazyTensor, Zeros
from mindspeed_mm.checkpoint.transformers_map import conversion_rules, loading_steps, saving_steps
from mindspeed_mm.core.errors import ModelFolderError, Problem, first_problems
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


NO_PLACE = "the model has no place for it"


class TransformersOutline:
    """A model's own names and the way from a folder's keys to them and back.

    Args:
        folder: With config.json. What of its weights has no place in the model is known after `own_tensors`.
        model: Of that configuration; it may lie on the meta device.
        described: What errors call the configuration; by default the folder's config.json.

    Raises:
        ModelFolderError: The configuration is none that transformers takes.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, described: str = "") -> None:
        self.folder, self.model = folder, model
        self._described = described or str(folder / "config.json")
        self._rules = conversion_rules(model)
        # keep_vars: the parameters themselves, no detached copies; only their shapes are of interest.
        own = model.state_dict(keep_vars=True)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        """Of parameters and persistent buffers, a tied one under each of its names."""
        self._floating = {name for name, tensor in own.items() if tensor.is_floating_point()}
        self.ties = _tied_names(model)
        """Further name of a tied parameter → its first name."""
        self.tied_keys: dict[str, str] = {}
        """A stored key that is a copy of a tied tensor → the tensor's name; known after `own_tensors`."""

    @classmethod
    def of(cls, folder: Path) -> TransformersOutline | None:
        """Of a folder; None where transformers has no class of the name that its config.json gives."""
        config = model_config(folder)
        return cls._built(config, folder, str(folder / "config.json"), lambda kind: kind.from_pretrained(folder))

    @classmethod
    def of_config(cls, config: JsonMapping, source: Path) -> TransformersOutline | None:
        """Of what a config.json will hold that is not written yet.

        Args:
            config: Its content.
            source: What the model's tensors are made of, for errors.
        """
        # A copy: transformers changes nested sections in place.
        content = deepcopy(dict(config))
        return cls._built(config, source, f"the configuration for {source}", lambda kind: kind.from_dict(content))

    @classmethod
    def _built(
        cls,
        config: JsonMapping,
        folder: Path,
        described: str,
        load: Callable[[type[PreTrainedConfig]], PreTrainedConfig],
    ) -> TransformersOutline | None:
        refuse_quantized(config, described)
        prepare_for_transformers()
        import transformers  # heavy

        names: list[str] = config.get("architectures") or []
        model_class = None
        for name in names:
            model_class = model_class or getattr(transformers, str(name), None)
        # `auto_map` names code in the folder, which is not run.
        if model_class is None or config.get("auto_map"):
            return None
        try:
            loaded = load(model_class.config_class)
            # Names and shapes, no memory: a model of any size is built at once.
            with torch.device("meta"):
                return cls(folder, model_class(loaded), described)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ModelFolderError(f"transformers cannot build {names[0]} from it: {error}", where=described) from error

    def own_tensors(
        self, stored: Mapping[str, LazyTensor], source: Path | None = None
    ) -> tuple[dict[str, LazyTensor], list[str]]:
        """A folder's tensors under the model's names, each once.

        Args:
            stored: By key.
            source: What they are made of, for errors, where that is not the folder.

        Returns:
            The tensors, and the stored keys that the model has no place for.

        Raises:
            ModelFolderError: Weights are missing, or have another shape.
        """
        steps = loading_steps(self.model, stored, set(self.shapes), self._rules)
        made: dict[str, LazyTensor] = {}
        surplus: list[str] = []
        homes: dict[str, str] = {}
        for step in steps:
            if not step.targets.keys() & self.shapes.keys():
                surplus += step.sources
                continue
            made |= step.targets
            if len(step.sources) == len(step.targets) == 1:
                (key,), (name,) = step.sources, step.targets
                # Only of tensors that were renamed at most: of a joined one no single key is its home.
                homes[name] = key
        for alias, name in self.ties.items():
            if alias not in made:
                continue
            # Some folders store a tied tensor under both names: reading compares the copies.
            copy = made.pop(alias)
            if name in made:
                self.tied_keys[homes[alias]] = name
            made[name] = Agreeing([made[name], copy], [name, alias]) if name in made else copy
        self._check(made, source or self.folder)
        return {name: made[name] for name in self.shapes if name in made}, surplus

    def unused(self, surplus: Iterable[str], *, where: Path, allowed: bool) -> dict[str, str]:
        """Stored keys that the model has no place for, each with the reason: to be left out, and named.

        Args:
            surplus: The keys.
            where: What holds them.
            allowed: Leave out what is not known to be unread, too.

        Raises:
            ModelFolderError: Keys that transformers' class does not list as unread, and `allowed` is false.
        """
        unread = [re.compile(regex) for regex in self.model._keys_to_ignore_on_load_unexpected or ()]
        reasons = {}
        problems = []
        for key in surplus:
            reasons[key] = NO_PLACE
            if any(regex.search(key) for regex in unread):
                reasons[key] = "transformers' model does not read it"
            elif not allowed:
                problems.append(Problem(NO_PLACE, key=key))
        if problems:
            tensors = "a stored tensor" if len(problems) == 1 else f"{len(problems)} stored tensors"
            raise ModelFolderError(
                f"{where}: {type(self.model).__name__} would lose {tensors}. Check config.json, or leave them out with "
                "--allow-unused.",
                problems=first_problems(problems),
            )
        return reasons

    def hub_tensors(self, own: Mapping[str, LazyTensor], source: Path) -> dict[str, LazyTensor]:
        """The model's tensors under the folder's keys: the way back of `own_tensors`, where it was called, else as
        transformers writes it now.

        Args:
            own: By the model's names.
            source: Where they are stored, for errors.

        Raises:
            ModelFolderError: Weights are missing or surplus, or have another shape.
        """
        held: dict[str, LazyTensor] = {}
        for name, tensor in own.items():
            first = self.ties.get(name, name)
            if name == first or first not in own:  # of two tied names the first
                held[first] = tensor
        self._check(held, source)
        steps = saving_steps(self.model, held, conversion_rules(self.model, legacy=False))
        made = made_by(steps)
        check_used_once(steps, held, made)
        return in_natural_order(made)

    def hub_shapes(self) -> dict[str, tuple[int, ...]]:
        """Key → shape of a folder as transformers writes it now, of a model that was not loaded from another."""
        own = {name: Zeros(shape, torch.float32) for name, shape in self.shapes.items() if name not in self.ties}
        steps = saving_steps(self.model, own, conversion_rules(self.model, legacy=False))
        return {key: tensor.shape for key, tensor in made_by(steps).items()}

    def _check(self, made: Mapping[str, LazyTensor], source: Path) -> None:
        missing, surplus, reshaped, codes = [], [], [], []
        for name in self.shapes:
            if name not in made and name not in self.ties:
                missing.append(Problem("is missing", key=name))
        for name, tensor in made.items():
            shape = self.shapes.get(name)
            if shape is None:
                surplus.append(Problem("has no place in the model", key=name))
            elif tensor.shape != shape:
                reshaped.append(Problem(f"is {list(tensor.shape)}, the model's {list(shape)}", key=name))
            elif name in self._floating and (tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point):
                # Without their scales they would be other numbers, of the right shape.
                what = f"is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised codes, not weights"
                codes.append(Problem(what, key=name, way_out="Apply their scales, or use the unquantised weights."))
        problems = first_problems(missing) + first_problems(surplus) + first_problems(reshaped) + first_problems(codes)
        if problems:
            name = type(self.model).__name__
            what = f"{source} does not hold the model that {self._described} describes, {name}"
            way_out = ". Name the folder of the model that was saved." if source != self.folder else ""
            raise ModelFolderError(what + way_out, problems=problems)


def check_whole_model(tensors: Mapping[str, LazyTensor], model: Path | JsonMapping, source: Path) -> None:
    """Compare tensors with the model that a config.json describes: each once, in its shape, and no others.

    Args:
        tensors: By the keys of a Hugging Face folder, in any form that transformers loads.
        model: A folder with config.json, which needs no weights; or what the config.json will hold.
        source: What the tensors are made of, for errors.

    Raises:
        ModelFolderError: Tensors are missing or surplus, or have another shape; or transformers has no class of the
            name that config.json gives.
    """
    if isinstance(model, Path):
        outline, where = TransformersOutline.of(model), str(model / "config.json")
    else:
        outline, where = TransformersOutline.of_config(model, source), f"the configuration for {source}"
    if outline is None:
        raise ModelFolderError(
            "transformers has no class for its architectures, so nothing can be compared",
            where=where,
            key="architectures",
            way_out="Compare with a folder that holds weights: `check_same_tensors`.",
        )
    _, surplus = outline.own_tensors(tensors, source)
    unread = outline.unused(surplus, where=source, allowed=True)
    problems = [Problem(why, key=key) for key, why in unread.items() if why == NO_PLACE]
    if problems:
        raise ModelFolderError(
            f"{source} holds more than {type(outline.model).__name__}. Check config.json, or name what is not to be "
            "written in `left_out` of Conversion.",
            problems=first_problems(problems),
        )


def _tied_names(model: nn.Module) -> dict[str, str]:
    firsts: dict[int, str] = {}
    ties = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        # By identity: tied parameters are one object, as `named_parameters` shows it without deduplication.
        first = firsts.setdefault(id(tensor), name)
        if first != name:
            ties[name] = first
    return ties
