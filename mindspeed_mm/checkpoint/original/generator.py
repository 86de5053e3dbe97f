"""What a family of generators looks like in each of its layouts, as data, and which family and layout a set of keys is.

The middle of every conversion is diffusers' own names; a family says how each of its other layouts leads to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mindspeed_mm.checkpoint.key_ops import Split
from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule, check_used_once, made_by, names_behind, renamings
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import ModelFolderError

Tensors = Mapping[str, LazyTensor]
Json = dict[str, Any]
"""What a config.json holds."""

WRAPPERS = ("model.diffusion_model.", "module.", "predictor.")
"""What stands before every name in some files, and tells nothing."""


class Naming(StrEnum):
    """Whose names a model's tensors bear."""

    DIFFUSERS = "diffusers"
    ORIGINAL = "original"
    """The names of the authors' repository."""
    MM = "mm"
    """The names of MindSpeed-MM's own models."""


@dataclass(frozen=True)
class GeneratorLayouts:
    """A family, one class of diffusers."""

    name: str
    """As people write it: `HunyuanVideo 1.5`."""
    class_name: str
    """The class of its transformer, in diffusers' layout."""
    marks: Mapping[Naming, tuple[str, ...]]
    """Keys that all stand in a layout of this family, and all in no other that is asked later."""
    original: tuple[KeyRule, ...]
    """The authors' name → diffusers' name. Every rule has a way back."""
    config: Callable[[Tensors, Json], Json] = field(repr=False)
    """(tensors by diffusers' names, the source's config.json, with `task` where a person said it) → diffusers'
    config.json, without the class's name."""
    version: Callable[[Tensors], str] = field(repr=False)
    """Which model of the family these tensors are, by diffusers' names, as far as keys and shapes tell."""
    home: str = "diffusers"
    """The module that has the class."""
    mm: tuple[KeyRule, ...] = ()
    """MindSpeed-MM's name → diffusers' name; empty where MindSpeed-MM trains diffusers' own model."""
    original_prefix: str = ""
    """What the authors' files put before every name."""
    original_config: Callable[[Tensors, Json], Json] | None = field(default=None, repr=False)
    """(tensors by diffusers' names, diffusers' config.json) → the authors' config.json; None: they have none."""
    original_file: str | None = None
    """The authors' file that holds the transformer; None: diffusers' file names, in shards where it is large."""
    original_texts: Mapping[str, str] = field(default_factory=dict)
    """Small files beside it, by name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names, without the prefix, that are no part of the transformer → why they are left out."""

    def rules(self, naming: Naming) -> KeyMap:
        """The map from this layout's names, without prefix, to diffusers'.

        Raises:
            ModelFolderError: MindSpeed-MM has no names of its own for the family.
        """
        if naming is Naming.DIFFUSERS:
            # Any name, into itself; the second rule is for names without a dot.
            return KeyMap([KeyRule("{name*}", "{name*}"), KeyRule("{name}", "{name}")])
        if naming is Naming.MM and not self.mm:
            raise ModelFolderError(
                f"MindSpeed-MM trains {self.name} as diffusers' own model, under diffusers' names",
                way_out="Convert to diffusers instead.",
            )
        if naming is Naming.MM:
            return KeyMap(self.mm)
        return KeyMap(self.original)

    def why_left_out(self, key: str) -> str | None:
        """Why a stored key is no part of the transformer; None: it is one."""
        name = without_wrappers(key)
        for start, why in self.left_out.items():
            if name.startswith(start):
                return why
        return None


def to_diffusers(tensors: Tensors, family: GeneratorLayouts, naming: Naming) -> dict[str, LazyTensor]:
    """The tensors under diffusers' names.

    Args:
        tensors: Under a layout's names; what the family leaves out may be among them.
        family: Of the model.
        naming: Of the layout.

    Raises:
        ModelFolderError: A key belongs to no rule, or one that a rule needs is missing; the keys are named.
    """
    stripped: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        if naming is Naming.DIFFUSERS:
            stripped[key] = tensor
        # MindSpeed-MM's `left_out` is said by whoever read the ranks' files.
        elif naming is Naming.MM or family.why_left_out(key) is None:
            stripped[without_wrappers(key)] = tensor
    return _applied(family.rules(naming), stripped, family)


def from_diffusers(tensors: Tensors, family: GeneratorLayouts, naming: Naming) -> dict[str, LazyTensor]:
    """Tensors with diffusers' names under a layout's.

    Raises:
        ModelFolderError: As `to_diffusers`.
    """
    prefix = family.original_prefix if naming is Naming.ORIGINAL else ""
    made = _applied(family.rules(naming).inverse, tensors, family)
    return {prefix + key: tensor for key, tensor in made.items()}


def without_wrappers(key: str) -> str:
    """A key without what stands before every name in some files."""
    for wrapper in WRAPPERS:
        key = key.removeprefix(wrapper)
    return key


def modules(names: Mapping[str, str], at: str = "", becomes: str | None = None) -> list[KeyRule]:
    """Rules for modules that keep their weight and bias under another name.

    Args:
        names: Source → target.
        at: Stands before every source.
        becomes: Stands before every target; None: as `at`.
    """
    return renamings(names, at, at if becomes is None else becomes, ".{part}")


def fused(source: str, targets: Iterable[str], ratio: tuple[int, ...] = (1, 1, 1), at: str = "") -> KeyRule:
    """A rule for one linear layer that holds several, one after another; `at` stands before every target."""
    return KeyRule(f"{source}.{{part}}", [f"{at}{target}.{{part}}" for target in targets], (Split(0, ratio=ratio),))


def count(tensors: Tensors, start: str) -> int:
    """Layers of a stack whose names begin so, before the number."""
    return len(names_behind(tensors, start))


def _applied(rules: KeyMap, tensors: Tensors, family: GeneratorLayouts) -> dict[str, LazyTensor]:
    steps = rules.steps(tensors)
    made = made_by(steps)
    try:
        check_used_once(steps, tensors, made)
    except ModelFolderError as error:
        raise ModelFolderError(f"the names do not fit {family.name}", problems=error.problems) from error
    return made
