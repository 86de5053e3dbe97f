"""The base of every converter. A subclass is a command: what it defines is what `mm-convert` offers.

    class MyConverter(Converter):
        \"\"\"My model.\"\"\"

        def hf_to_mm(self, cfg: ConvertMMConfig) -> None:
            \"\"\"Divide a Hugging Face folder among ranks.\"\"\"

A parameter with a plain type becomes the flag `--name`, one whose type is a pydantic model the flags `--name.field`.
A package of somebody's own is named with `--plugin`, as `training.plugin` does in a YAML file: importing it is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from mindspeed_mm.checkpoint.conversion.run import Examine

SUBCOMMANDS = {
    "hf_to_mm": "Divide a Hugging Face folder among the ranks of a Megatron-style checkpoint (hf2mg).",
    "mm_to_hf": "Join a Megatron-style checkpoint to a Hugging Face folder (mg2hf).",
    "resplit": "Divide a Megatron-style checkpoint anew.",
    "hf_to_dcp": "Write a Hugging Face folder as a distributed checkpoint that trains.",
    "dcp_to_hf": "Write a distributed checkpoint as a Hugging Face folder.",
    "lora_hf_to_dcp": "Write adapters of PEFT as a distributed checkpoint.",
    "merge_lora_to_base": "Add adapters to a model's weights.",
    "merge_mm_lora_dcp_weight_to_base_hf": "Add the adapters of a distributed checkpoint to a model's weights.",
    "source_to_mm": "Rename the weights of an original repository.",
    "layerzero_to_mm": "Write the weights of a run as a Megatron-style checkpoint.",
    "mm_to_dcp": "Write a Megatron-style checkpoint as a distributed one that trains.",
    "lora_hf_to_mm": "Write adapters as a Megatron-style checkpoint.",
}
"""The documents' subcommands → help line."""
ALIASES = {"hf2mg": "hf_to_mm", "mg2hf": "mm_to_hf"}
"""Older names of subcommands."""
_FOLDERS_READ = {
    *("hf_dir", "load_dir", "model_assets_dir", "base_hf_dir", "lora_dcp_dir", "source_dir", "llm_hf_dir", "lora_dir"),
    *("source_path", "lora_path"),
}
"""Last parts of the flags that name an input in every subcommand that has them."""
MAY_BE_FILES = {"source_path", "lora_path", "lora_dir"}
"""Those of them that a file may be named in."""


def reads(subcommand: str, flag: str) -> bool:
    """Whether a flag names an input of a subcommand, by the documents' names: `mm_dir` is one of `mm_to_hf`."""
    name = flag.rpartition(".")[2]
    if name in ("mm_dir", "dcp_dir"):
        return f"{name.removesuffix('_dir')}_to_" in subcommand
    return name in _FOLDERS_READ


class Converter:
    """Converts the checkpoints of some models. Its docstring's first line is the help line of the command."""

    registry: ClassVar[dict[str, type[Converter]]] = {}
    """Every subclass that was imported, by name; those that begin with _ are for others to derive from."""
    other_flags: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Subcommand → another name of one of its flags → the flag."""
    examine: Examine | None = None
    """Looks at what was written, before it gets its name; the commands set the comparison of logits."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if not cls.__name__.startswith("_"):
            Converter.registry[cls.__name__] = cls

    @classmethod
    def subcommands(cls) -> dict[str, Callable[..., object]]:
        """Public methods that the subclass, or one between it and this class, defines; by name."""
        found: dict[str, Callable[..., Any]] = {}
        for ancestor in reversed(cls.__mro__[: cls.__mro__.index(Converter)]):
            for name, value in vars(ancestor).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    found[name] = value
        return found
