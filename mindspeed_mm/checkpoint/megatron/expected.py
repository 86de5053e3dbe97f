"""Which whole tensors a model has, and in which shapes: asked of transformers' class, else of the model's own folder,
else as far as the layers show it to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Zeros
from mindspeed_mm.checkpoint.megatron.family import EXPERT, Config, MegatronFamily, MegatronModel
from mindspeed_mm.checkpoint.megatron.folder import megatron_tensors
from mindspeed_mm.checkpoint.safetensors_folder import find_entries
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import CheckpointError, Problem, first_problems

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(
    home: Path, family: MegatronFamily, config: Config, *, canonical: bool, weights: bool = True
) -> Shapes | None:
    """The whole Megatron tensors of a model.

    Args:
        home: The model's folder: config.json, and perhaps weights, of which the headers are read.
        family: Of the model.
        config: Its config.json.
        canonical: Projections are stored apart.
        weights: Ask the folder's weights where there is no class; not of those that are to be checked.

    Returns:
        Shapes by name; None where transformers has no such class and the folder has no weights.

    Raises:
        ModelFolderError: transformers cannot build the model, or the folder's weights are none of this family.
    """
    outline = TransformersOutline.of(home)
    if outline is not None:
        import transformers  # heavy

        hub = {key: _shaped(shape) for key, shape in outline.hub_shapes().items()}
        config = {**config, "transformers_version": transformers.__version__}  # which writes experts its own way round
    elif weights and any(home.glob("*.safetensors")):
        hub = {key: _shaped(entry.shape) for key, entry in find_entries(home).items()}
    else:
        return None
    # Zeros through the same key map as weights: shapes come out, nothing is read.
    whole = megatron_tensors(hub, family.model(config, canonical=canonical))
    return {name: tensor.shape for name, tensor in whole.items()}


def _shaped(shape: tuple[int, ...]) -> LazyTensor:
    return Zeros(shape, torch.float32)


def check_whole(
    whole: Mapping[str, LazyTensor],
    expected: Mapping[str, tuple[int, ...]] | None,
    model: MegatronModel,
    where: Path,
    home: Path,
) -> None:
    """Compare tensors with a model.

    Args:
        whole: Whole Megatron tensors.
        expected: As `expected_shapes` gives them; None: compare layers with one another.
        model: Towers and depths.
        where: What the tensors are of.
        home: The model's folder, whose config.json `expected` and `model` come from.

    Raises:
        CheckpointError: Some are missing or surplus, or have another shape.
    """
    head, embedding = model.head, model.embedding
    if expected is not None and head in whole and head not in expected and not model.tied_head:
        # Where config.json does not say whether the head is tied, transformers' default may be that it is; a head that
        # is stored beside the embedding is read all the same.
        expected = {**expected, head: expected[embedding]}
    if expected is None:
        problems = [
            *_lacking_ends(whole, model),
            *first_problems(_unlike_layers(whole, model)),
            *first_problems(_wrong_experts(whole, model)),
        ]
    else:
        missing, surplus, reshaped = [], [], []
        for name, shape in expected.items():
            if name not in whole:
                missing.append(Problem("is missing", key=name))
            elif whole[name].shape != tuple(shape):
                what = f"has shape {list(whole[name].shape)}, in the model {list(shape)}"
                reshaped.append(Problem(what, key=name))
        for name in whole:
            if name not in expected:
                surplus.append(Problem("has no place in the model", key=name))
        problems = first_problems(missing) + first_problems(surplus) + first_problems(reshaped)
    if problems:
        way_out = ". Name the folder of the model that was divided." if where != home else ""
        what = f"{where} does not hold the model that {home / 'config.json'} describes{way_out}"
        raise CheckpointError(what, problems=problems)


def _lacking_ends(whole: Mapping[str, LazyTensor], model: MegatronModel) -> Iterator[Problem]:
    if "text" in model.depths:
        names = [model.embedding, model.final_norm]
        if model.in_place_of_head is not None:
            names += model.in_place_of_head
        elif not model.tied_head:
            names.append(model.head)
        for name in names:
            if name not in whole:
                yield Problem("is missing", key=name)


def _unlike_layers(whole: Mapping[str, LazyTensor], model: MegatronModel) -> Iterator[Problem]:
    """What one layer of a tower has, all have, in the same shape."""
    for tower in model.towers:
        found: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
        for name in whole:
            if name.startswith(tower.layers):
                number, _, part = name.removeprefix(tower.layers).partition(".")
                found[part][number] = whole[name].shape
        for part, shapes in found.items():
            layers: Iterable[int] = range(model.depths[tower.name])
            for start, some_layers in model.parts_of_layers.items():
                if part.startswith(start):
                    layers = some_layers
                    break
            wanted = set(map(str, layers))
            first, shape = next(iter(shapes.items()))
            # Of either side: missing there, or there without being wanted.
            for number in sorted(wanted ^ shapes.keys(), key=str):
                what = "is surplus there" if number in shapes else f"is missing, and there in layer {first}"
                yield Problem(what, key=f"{tower.layers}{number}.{part}")
            for number, other in shapes.items():
                if other != shape:
                    what = f"has shape {list(other)}, in layer {first} {list(shape)}"
                    yield Problem(what, key=f"{tower.layers}{number}.{part}")


def _wrong_experts(whole: Mapping[str, LazyTensor], model: MegatronModel) -> Iterator[Problem]:
    numbers: defaultdict[str, set[str]] = defaultdict(set)
    for name in whole:
        if found := EXPERT.fullmatch(name):
            numbers[found["before"]].add(found["number"])
    for before, seen in numbers.items():
        for number in sorted(set(map(str, range(model.experts))) ^ seen, key=str):
            what = f"config.json has {model.experts} experts" if number in seen else "is missing"
            yield Problem(what, key=f"{before}{number}")
