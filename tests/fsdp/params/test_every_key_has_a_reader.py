"""No key is accepted and ignored: for each one there is code that reads it, or a reason why there is none.

A reader is an attribute of the key's name, read in a file that has to do with the key's section: it names the section's
class, or reads the section itself. What is read in the configuration layer alone counts only where that layer is the
whole effect (`parallel_sizes`, renamed keys).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import mindspeed_mm
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.unbuilt import BUILT_VALUES, unbuilt_features
from mindspeed_mm.fsdp.params.schema_walk import section_of, walk_fields
from mindspeed_mm.fsdp.params.value_types import Section

PACKAGE = Path(mindspeed_mm.__file__).parent
ONLY_DEFINE = ("_args.py", "argument.py", "unbuilt.py", "schema.py", "schema_walk.py")
"""Files of the configuration layer that act on nothing."""

WITHOUT_EFFECT = {
    "training.init_model_with_meta_device": "models are always built without storage first",
    "training.lora.lora_target_modules_support": "the model's own modules are what counts",
    "parallel.recompute": "moved to features.recompute when the file is read",
    "parallel.recompute_plan": "moved to features.recompute_plan when the file is read",
    "data.dataset_param.preprocess_parameters.image_resolution": "accepted from older files, and meant nothing there",
    "data.dataset_param.preprocess_parameters.video_resolution": "accepted from older files, and meant nothing there",
    "data.dataloader_param.collate_param.ignore_pad_token_for_loss": "padding is never trained, whatever it says",
    "data.dataset_param.basic_parameters.tool_format": "the chat template says how tools are written",
    "parallel.ep_plan.use_npu_fused_ops": "the permutation of tokens is the same for every device",
    "inference.init_model_with_meta_device": "models are always built without storage first",
}
"""Key → why nothing reads it. The key's help says so too."""

REFUSED = {key for key, values in BUILT_VALUES.items() if len(values) == 1}
"""Keys that take their default alone: any other value is refused by name."""

OF_METHODS = {"dpo": "dpo reference", "grpo": "grpo rollout rewards", "nft": "nft flow", "dmd": "dmd reference"}
"""Method → sections of `posttrain` that are read when it is built."""
OF_UNBUILT_METHODS = tuple(
    f"posttrain.{section}."
    for method, sections in OF_METHODS.items()
    if method not in BUILT_VALUES.get("posttrain.method", OF_METHODS)
    for section in sections.split()
)

BY_ROLE = "_tag"
"""Ends of keys that are read by a role's name."""


class File(NamedTuple):
    """What a source file reads."""

    attributes: frozenset[str]
    words: frozenset[str]
    """Names and words of strings."""


@cache
def files() -> list[File]:
    return [read(path) for path in sorted(PACKAGE.rglob("*.py")) if not path.name.endswith(ONLY_DEFINE)]


def read(path: Path) -> File:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # `getattr(section, "key")` and tables of keys read them too; prose and help do not.
    spelt = {word for text in strings if " " not in text for word in text.split(".")}
    return File(frozenset(attributes | spelt), frozenset(names | attributes | spelt))


def keys() -> Iterator[tuple[str, type[Section]]]:
    """Every key that is not a section, with the class of its section."""
    classes: dict[str, type[Section]] = {"": Arguments}
    for key, info in walk_fields():
        inner = section_of(info.annotation)
        if inner is not None:
            classes[key] = inner
        elif not key.startswith("data.val_dataset_param."):  # as of `dataset_param`
            yield key, classes[key.rpartition(".")[0]]


def has_reader(key: str, section: type[Section], sources: list[File]) -> bool:
    parent, _, name = key.rpartition(".")
    marks = {section.__name__, parent.rpartition(".")[2]}
    return any(name in source.attributes and marks & source.words for source in sources)


@pytest.mark.edge("R15")
def test_every_key_is_read_or_says_why_not() -> None:
    excused = WITHOUT_EFFECT.keys() | REFUSED
    asked = [(key, s) for key, s in keys() if key not in excused and not (key.endswith(BY_ROLE) and ".attr." in key)]
    asked = [(key, section) for key, section in asked if not key.startswith(OF_UNBUILT_METHODS)]
    assert len(asked) > 250
    unread = [key for key, section in asked if not has_reader(key, section, files())]
    assert unread == [], "these are accepted, and nothing reads them"


@pytest.mark.edge("R15")
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"seed": 7}, "inference.seed"),
        ({"plugin": ["mine"]}, "inference.plugin"),
        ({"generation": {"temperature": 0.5}}, "inference.generation.temperature"),
        ({"generation": {"max_new_tokens": 4}}, "inference.generation.max_new_tokens"),
    ],
)
def test_keys_of_inference_that_nothing_reads_are_refused_with_what_counts_instead(
    section: dict[str, object], key: str
) -> None:
    (problem,) = unbuilt_features(Arguments.model_validate({"inference": section}))
    assert problem.key == key
    assert len(problem.way_out.split(". ")) > 1


@pytest.mark.edge("R15")
def test_a_section_of_defaults_is_accepted() -> None:
    defaults = Arguments().inference.to_dict()
    assert unbuilt_features(Arguments.model_validate({"inference": defaults})) == []


def test_reasons_are_for_keys_that_exist() -> None:
    assert set(WITHOUT_EFFECT) <= {key for key, _ in keys()} | {"parallel.recompute_plan"}


def test_a_key_that_nobody_reads_is_found() -> None:
    class Added(Section):
        """A section with a key that no code knows."""

        never_read_anywhere: int = 0

    assert not has_reader("training.never_read_anywhere", Added, files())
