"""The tensors of a model, under the hub's names, out of any folder that stores them.

The layouts of Megatron and of generators' authors are thirty modules: they are imported for folders that have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, step_in
from mindspeed_mm.checkpoint.dequantized import dequantized
from mindspeed_mm.checkpoint.layout import MANIFEST
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.checkpoint.safetensors_folder import holds_safetensors, open_weights, weight_files
from mindspeed_mm.core.errors import ModelFolderError, Problem, told_as
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import expert_folders

UNDER_ADAPTERS = "base_model.model.model."
"""What stands before the hub's names in a distributed checkpoint of weights that adapters stand on, as MindSpeed-MM
names them: PEFT's wrapper, and its own."""


@contextmanager
def open_stored(folder: Path, config: Mapping[str, object] | None) -> Iterator[Mapping[str, LazyTensor]]:
    """A folder's tensors by the hub's names, open for the length of the `with` block. Those that are kept in few bits
    are numbers here. Of a generator with two transformers, the names of each stand behind that of its folder.

    Args:
        folder: With safetensors, in Megatron's style, or a distributed checkpoint as `step_of_weights` has it.
        config: The model's config.json: a folder in Megatron's style does not say what language model it holds.

    Raises:
        MMError: As `open_weights`, `dequantized`, `hub_tensors`, `family_of` and `open_generator`.
    """
    if parts := expert_folders(folder):
        with ExitStack() as opened:
            found: dict[str, LazyTensor] = {}
            for part in parts:
                stored = opened.enter_context(open_stored(part, config))
                found |= {f"{part.name}.{key}": tensor for key, tensor in stored.items()}
            yield found
    elif is_megatron_folder(folder) and "model_type" in (config or {}):
        from mindspeed_mm.checkpoint.megatron.families import family_of
        from mindspeed_mm.checkpoint.megatron.folder import hub_tensors

        with told_as(partial(_in_folder, folder)):
            joined = hub_tensors(folder, family_of(config or {}), config or {})
        yield joined
    elif is_megatron_folder(folder):
        from mindspeed_mm.checkpoint.original.reading import open_generator

        with open_generator(folder) as weights:
            yield weights.under_diffusers_names()
    elif (step := step_of_weights(folder)) is not None:
        yield _of_step(step)
    else:
        with open_weights(folder) as stored:
            # The model does not know how its weights are stored: config.json beside them says it.
            path = folder / "config.json"
            yield dequantized(stored, read_json_object(path, ModelFolderError) if path.is_file() else {}, str(folder))


def step_of_weights(folder: Path) -> Path | None:
    """The step of a distributed checkpoint that holds weights by the hub's names, as conversions write it: a
    generator's, or a model's that adapters stand on. None of any other folder, and of a run: that is resumed."""
    if any(folder.glob("*.safetensors")):
        return None
    step = step_in(folder)
    if step is None or (step / MANIFEST).is_file() or is_megatron_folder(folder):
        return None
    from mindspeed_mm.checkpoint.original.families import recognise_generator

    names = DcpReader(step).model_tensors().keys()
    is_base = bool(names) and all(name.startswith(UNDER_ADAPTERS) for name in names)
    if is_base or recognise_generator(names) is not None:
        return step
    return None


def _of_step(step: Path) -> dict[str, LazyTensor]:
    from mindspeed_mm.checkpoint.original.families import recognise_generator
    from mindspeed_mm.checkpoint.original.reading import open_generator

    tensors = DcpReader(step).model_tensors()
    if recognise_generator(tensors) is None:
        return {name.removeprefix(UNDER_ADAPTERS): tensor for name, tensor in tensors.items()}
    with open_generator(step) as weights:
        return weights.under_diffusers_names()


def holds_weights(folder: Path) -> bool:
    """Whether there are weights in a model's folder, in any layout that `open_stored` takes."""
    if parts := expert_folders(folder):
        return all(map(holds_weights, parts))
    return holds_safetensors(folder) or is_megatron_folder(folder) or step_of_weights(folder) is not None


def stored_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, by name.

    Raises:
        MMError: As `weight_files` and `step_files`.
    """
    if parts := expert_folders(folder):
        found = []
        for part in parts:
            found += stored_files(part)
        return found
    if is_megatron_folder(folder):
        from mindspeed_mm.checkpoint.megatron.folder import step_files

        return step_files(folder)
    if (step := step_of_weights(folder)) is not None:
        return sorted(step.glob("*.distcp"))
    return weight_files(folder)


def _in_folder(folder: Path, problem: Problem) -> Problem:
    """With the folder in front of a place that is told within it."""
    inside = problem.where
    if str(folder) in inside:
        return problem
    return replace(problem, where=": ".join(filter(None, [str(folder), inside])))
