"""A generator's transformer as one file under its authors' names, for ComfyUI and `from_single_file` of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_mm.checkpoint.hf_folder import DtypeRule
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.original.families import GENERATORS
from mindspeed_mm.checkpoint.original.generator import Naming, from_diffusers
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.checkpoint.diffusers_folder import of_part
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

SAME_NAMES = ("QwenImageTransformer2DModel",)
"""Classes whose authors name the weights as diffusers does."""
FILE = "diffusion_pytorch_model.safetensors"
"""Where the authors have no name of their own for the file."""
FILES_OF_TWO = {"transformer": "high_noise_model.safetensors", "transformer_2": "low_noise_model.safetensors"}
"""Of Wan2.2 A14B."""


@dataclass(frozen=True)
class AuthorsFile:
    """A file that will be written."""

    name: str
    tensors: Mapping[str, LazyTensor]
    """By the authors' keys."""
    rule: DtypeRule
    """The dtype of each."""


def authors_files(tensors: Mapping[str, LazyTensor], rule: DtypeRule, adapter: DiffusionAdapter) -> list[AuthorsFile]:
    """One file for each transformer.

    Args:
        tensors: By diffusers' keys; of two transformers with their names before.
        rule: The dtype of each.
        adapter: Of the model.

    Raises:
        UsageError: The authors' names are not known here.
        ModelFolderError: The keys are not those of the model's family.
    """
    if len(adapter.transformers) == 1:
        return [_renamed(tensors, rule, adapter.transformer_class)]
    files = []
    for name in adapter.transformers:
        part = of_part(tensors, rule, f"{name}.")
        file = _renamed(*part, adapter.transformer_class)
        files.append(replace(file, name=FILES_OF_TWO[name]))
    return files


def _renamed(tensors: Mapping[str, LazyTensor], rule: DtypeRule, class_name: str) -> AuthorsFile:
    if class_name in SAME_NAMES:
        return AuthorsFile(FILE, tensors, rule)
    families = {family.class_name: family for family in GENERATORS}
    family = families.get(class_name)
    if family is None:
        raise UsageError(
            f"the authors' names of {class_name} are not known here; those of "
            f"{', '.join(sorted({*SAME_NAMES, *families}))} are",
            key="--single-file",
            way_out="Leave it out.",
        )
    made = from_diffusers(tensors, family, Naming.ORIGINAL)
    dtypes = {}
    for step in family.rules(Naming.ORIGINAL).inverse.steps(tensors):
        for key, tensor in step.targets.items():
            dtypes[family.original_prefix + key] = rule(step.sources[0], tensor.dtype)
    return AuthorsFile(family.original_file or FILE, made, DtypeRule(dtypes, rule.default))
