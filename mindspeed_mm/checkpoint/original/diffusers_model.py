"""The model that a generator's weights are for: its config.json, and whether keys and shapes are that model's."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, Tensors
from mindspeed_mm.checkpoint.original.reading import GeneratorWeights, transformer_folder
from mindspeed_mm.core.errors import ModelFolderError, Problem, first_problems
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

_NAME_FOLDER = "Name a diffusers folder of the same model."
_IN_BLOCK = re.compile(r"(?P<stack>.*?blocks)\.(?P<number>\d+)\.(?P<name>.+)")


@dataclass(frozen=True)
class _GivenConfig:
    """A config.json of diffusers, and where it was read."""

    content: Json
    where: str


def fitting_config(
    hub: Tensors, weights: GeneratorWeights, hf_dir: Path | None = None, task: str | None = None
) -> Json:
    """The transformer's config.json: that of `hf_dir`, of a source that has diffusers', or what shapes tell. The
    weights are compared with the model that it describes: keys and shapes.

    Args:
        hub: The tensors by diffusers' names.
        weights: The source.
        hf_dir: A diffusers folder of the same model.
        task: `t2v` or `i2v`, where keys and shapes do not tell it.

    Raises:
        ModelFolderError: Keys are missing, surplus or of another shape, or the configuration is of another model.
    """
    family, given = weights.family, _given_config(weights, hf_dir)
    if given is None:
        with _keys_needed(family, hub) as asked:
            told = family.config(asked, {**weights.config, "task": task})
        config = {"_class_name": family.class_name, **told}
        _check(hub, family, _GivenConfig(config, str(weights.path)), [])
        return config
    _check(hub, family, given, _config_problems(hub, family, given, task))
    return given.content


def told_version(hub: Tensors, family: GeneratorLayouts) -> str:
    """Which model of the family these tensors are.

    Raises:
        ModelFolderError: Those that tell it are missing.
    """
    with _keys_needed(family, hub) as asked:
        return family.version(asked)


def check_diffusers_model(tensors: Tensors, config: Json, source: Path) -> None:
    """Compare tensors with the model that diffusers builds of a config.json: each once, in its shape, and no others.

    Args:
        tensors: By diffusers' names.
        config: With `_class_name`.
        source: What the tensors are made of, for errors.

    Raises:
        ModelFolderError: Tensors are missing or surplus, or have another shape; or diffusers has no class of the name
            that the configuration gives.
    """
    class_name = str(config.get("_class_name"))
    shapes = _shapes_in("diffusers", class_name, _GivenConfig(config, f"the configuration for {source}"))
    if shapes is None:
        raise ModelFolderError(
            f"diffusers has no model {class_name}, so nothing can be compared",
            where=f"the configuration for {source}",
            key="_class_name",
            way_out="Name a class of diffusers, or compare with a folder that holds weights: `check_same_tensors`.",
        )
    if problems := check_fits(tensors, shapes):
        raise ModelFolderError(
            f"{source} does not hold the model that its configuration describes, {class_name}. Check the rules of the "
            "key map and the configuration.",
            problems=first_problems(problems, most=10),
        )


def check_fits(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Compare with what a model wants.

    Args:
        tensors: By diffusers' names.
        shapes: The model's tensors.

    Returns:
        Keys that are missing, surplus or of another shape.
    """
    missing, reshaped = [], []
    for key, shape in shapes.items():
        if key not in tensors:
            missing.append(Problem("is missing", key=key))
        elif tensors[key].shape != shape:
            what = f"has shape {list(tensors[key].shape)}, the model wants {list(shape)}"
            reshaped.append(Problem(what, key=key))
    surplus = []
    for key in tensors:
        if key not in shapes:
            surplus.append(Problem("is not one of the model's", key=key))
    return missing + surplus + reshaped


def check_blocks(tensors: Tensors) -> list[Problem]:
    """Compare the blocks of each stack with its second one, as far as that goes without the model: the first may hold
    more than the others.

    Args:
        tensors: By diffusers' names.

    Returns:
        Blocks and keys that are missing, and shapes that differ.
    """
    stacks: dict[str, dict[int, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
    for key, tensor in tensors.items():
        if match := _IN_BLOCK.fullmatch(key):
            stacks[match["stack"]][int(match["number"])][match["name"]] = tensor.shape
    problems = []
    for stack, blocks in stacks.items():
        wanted = blocks.get(1, blocks[min(blocks)])
        for number in range(max(blocks) + 1):
            found = blocks.get(number, {})
            # The first block may hold more, such as a projection of inputs; what others have, it has too.
            shapes = wanted if number else {**found, **wanted}
            problems += _block_problems(f"{stack}.{number}.", found, shapes)
    return problems


def _block_problems(at: str, found: Mapping[str, object], wanted: Mapping[str, object]) -> list[Problem]:
    missing, reshaped = [], []
    for name, shape in wanted.items():
        if name not in found:
            missing.append(Problem("is missing, and other blocks have it", key=at + name))
        elif found[name] != shape:
            reshaped.append(Problem(f"has shape {found[name]}, in other blocks {shape}", key=at + name))
    surplus = []
    for name in found:
        if name not in wanted:
            surplus.append(Problem("is in this block alone", key=at + name))
    return missing + surplus + reshaped


def _given_config(weights: GeneratorWeights, hf_dir: Path | None) -> _GivenConfig | None:
    """What is said about the model; the authors' own config.json has other names, and is no such thing."""
    if hf_dir is not None:
        folder = transformer_folder(hf_dir)
        given = _GivenConfig(model_config(folder, _NAME_FOLDER), str(folder / "config.json"))
        if "_class_name" not in given.content:
            raise ModelFolderError(
                "is missing: it is not a configuration of diffusers",
                where=given.where,
                key="_class_name",
                way_out=_NAME_FOLDER,
            )
        return given
    if weights.naming is Naming.ORIGINAL or not weights.config:
        return None
    return _GivenConfig(dict(weights.config), str(weights.path))


def _config_problems(hub: Tensors, family: GeneratorLayouts, given: _GivenConfig, task: str | None) -> list[Problem]:
    """Numbers of the configuration that are not those of the weights, where these tell them."""
    config = given.content
    try:
        with _keys_needed(family, hub) as asked:
            # Heads as the configuration has them: a width that is no released size would be refused.
            told = family.config(asked, {"num_heads": config.get("num_attention_heads", 1), "task": task})
    except ModelFolderError:
        return []  # what is missing is told by the comparison with the model
    differences = []
    for key, value in told.items():
        said = config.get(key)
        # Weights tell the product of heads and their width alone.
        if type(value) is int and type(said) is int and said != value and "head" not in key:
            differences.append(Problem(f"is {said}, and the weights have {value}", given.where, key))
    return differences


def _check(hub: Tensors, family: GeneratorLayouts, given: _GivenConfig, differences: list[Problem]) -> None:
    class_name = str(given.content.get("_class_name", family.class_name))
    shapes = _shapes_in(family.home, class_name, given)
    if shapes is None:
        problems = check_blocks(hub)
    else:
        problems = check_fits(hub, shapes)
    # Where all keys and shapes fit the model, a number that differs has no say in them.
    if shapes is None or problems:
        problems = differences + problems
    if not problems:
        return
    raise ModelFolderError(
        f"the weights are {family.name}, and do not fit {class_name} as {given.where} describes it. {_NAME_FOLDER}",
        problems=first_problems(problems, most=10),
    )


def _shapes_in(home: str, class_name: str, given: _GivenConfig) -> dict[str, tuple[int, ...]] | None:
    """Of the parameters and persistent buffers, without memory; None where diffusers, or its class of that
    name, is not there."""
    prepare_for_transformers()
    try:
        import diffusers  # an extra, and seconds to import
    except ImportError:
        return None
    model_class: Any = getattr(importlib.import_module(home), class_name, None)
    is_model = isinstance(model_class, type) and issubclass(model_class, diffusers.ModelMixin)
    if not is_model:
        return None
    try:
        with torch.device("meta"):
            model = model_class.from_config(dict(given.content))
    except (ValueError, TypeError, KeyError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ModelFolderError(
            f"diffusers cannot build {class_name} from it: {error}", where=given.where, way_out=_NAME_FOLDER
        ) from error
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


class _Asked(Mapping[str, LazyTensor]):
    """Tensors, and the key that was asked for last."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self.last = tensors, ""

    def __getitem__(self, key: str) -> LazyTensor:
        self.last = key
        return self._tensors[key]

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextmanager
def _keys_needed(family: GeneratorLayouts, hub: Tensors) -> Iterator[Tensors]:
    """A family's facts are read from certain tensors, which may be missing or have too few dimensions."""
    asked = _Asked(hub)
    try:
        yield asked
    except KeyError as error:
        raise ModelFolderError(f"is missing, and every {family.name} has it", key=str(error.args[0])) from error
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        shape = list(hub[asked.last].shape) if asked.last in hub else None
        what = f"has shape {shape}, which is not one of {family.name}'s: {error}"
        raise ModelFolderError(what, key=asked.last, way_out="Copy the weights again, or name other ones.") from error
