"""Paths in a configuration have one base: the working directory, or the YAML's folder where that is what makes its
inputs exist. Paths given on the command line start at the working directory, as with every command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.core.os_errors import with_home
from mindspeed_mm.fsdp.params.yaml.tree import (
    MappingEntry,
    Node,
    SourcePosition,
    find,
    merge,
    nest,
    text_at,
    value_at_key,
)

_INPUTS_OF_DATA = (
    "basic_parameters.dataset",
    "basic_parameters.dataset_dir",
    "basic_parameters.val_dataset",
    "basic_parameters.chat_template",
    "basic_parameters.media_roots",
    "basic_parameters.data_folder",
    "basic_parameters.features_dir",
    "basic_parameters.val_features_dir",
    "preprocess_parameters.model_name_or_path",
)
_OUTPUTS_OF_DATA = (
    "basic_parameters.features_dir",
    "basic_parameters.val_features_dir",
    "basic_parameters.cache_dir",
)
TOKEN_FILES = ("model.add_tokens", "model.add_special_tokens")
"""Keys whose single text is a file; a list holds the tokens themselves."""
INPUT_PATHS = (
    *TOKEN_FILES,
    "model.model_name_or_path",
    "model.checkpoint_path",
    "model.text_encoder_path",
    *map("data.dataset_param.{}".format, _INPUTS_OF_DATA),
    *map("data.val_dataset_param.{}".format, _INPUTS_OF_DATA),
    "training.load",
    "training.lora.pretrained_lora_path",
    "training.lora.frozen_adapters",
    "training.sampling.prompts_file",
    "inference.sampling.prompts_file",
    "inference.load",
    "inference.adapter",
    "inference.processor_path",
    "inference.data_path",
)
"""Keys whose paths exist already, or may (features are written and read under the same key)."""
OUTPUT_PATHS = (
    "training.save",
    *map("data.dataset_param.{}".format, _OUTPUTS_OF_DATA),
    *map("data.val_dataset_param.{}".format, _OUTPUTS_OF_DATA),
)
"""Keys whose paths are written to, and need not exist."""


_OF_PROCESSOR = ("model_name_or_path", "add_tokens", "add_special_tokens")
_OF_GENERATORS = ("model_id", "transformer", "task")
_MODEL_KEYS = dict.fromkeys(("generation", "ltx2_precomputed", "ltx2_3_precomputed"), _OF_GENERATORS) | {
    "cosyvoice": ("mix_ratio",)
}
"""Dataset type → further keys of `model` that its `preprocess_parameters` take over."""


def derive_processor_folder(root: Node) -> None:
    """A dataset that names no processor uses the model's folder, with the tokens that are added to it. One of
    generators also takes what else decides the model, and one of speech tokens how the model takes turns."""
    for dataset in ("data.dataset_param", "data.val_dataset_param"):
        if dataset == "data.dataset_param" or value_at_key(root, dataset) is not None:
            for key in (*_OF_PROCESSOR, *_MODEL_KEYS.get(text_at(root, f"{dataset}.dataset_type") or "", ())):
                _derive(root, f"model.{key}", f"{dataset}.preprocess_parameters.{key}", dataset)


def read_token_files(root: Node) -> list[Problem]:
    """Replace the name of a file of tokens by the list of its lines, so that the resolved configuration holds them.

    Returns:
        What is wrong with the files.
    """
    problems = []
    for key in TOKEN_FILES:
        entry = find(root, key)
        if entry is None or not isinstance(entry.node.value, str):
            continue
        place = entry.node.place
        try:
            lines = Path(entry.node.value).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = "is not a file of text" if isinstance(error, ValueError) else str(error.strerror)
            way_out = "Write a list of tokens, or name a text file with one token a line."
            problems.append(Problem(f"'{entry.node.value}': {reason}", str(place), key, way_out))
            entry.node.value = None
            continue
        entry.node.value = [Node(line, place) for line in lines if line.strip()]
    return problems


def _derive(root: Node, source: str, key: str, dataset: str) -> None:
    given = find(root, source)
    if given is None or not given.node.value or value_at_key(root, key) is not None:
        return
    for section in ("data", dataset, key.rpartition(".")[0]):
        entry = find(root, section)
        if entry is not None and entry.node.value is not None and not isinstance(entry.node.value, dict):
            return  # the schema says what is wrong with it
    place = SourcePosition(f"derived: {source}")
    merge(root, nest(key, MappingEntry(place, Node(given.node.value, place))))


@dataclass(frozen=True)
class _Written:
    """A relative path in the YAML, one of several in the same text perhaps."""

    key: str
    node: Node
    text: str

    @property
    def is_here(self) -> bool:
        return _exists(Path(self.text))

    def is_beside(self, config: Path) -> bool:
        return _exists(config.parent / self.text)


def locate_paths(root: Node, config: Path) -> list[Problem]:
    """Write the YAML's relative paths as paths from the working directory, wherever it is.

    Where every input that exists does so from the working directory, that is the base of all paths; where inputs exist
    beside the YAML only, its folder is, for what is written too. Where neither is there, a run folder beside the YAML
    tells.

    Args:
        root: The tree; changed in place.
        config: The YAML.

    Returns:
        One finding when some inputs exist from the working directory only and others beside the YAML only.
    """
    if config.parent.resolve() == Path.cwd():
        return []
    inputs = list(chain.from_iterable(_written(root, key, config) for key in INPUT_PATHS))
    outputs = list(chain.from_iterable(_written(root, key, config) for key in OUTPUT_PATHS))
    here, beside, found = [], [], False
    for each in inputs:
        is_here, is_beside = each.is_here, each.is_beside(config)
        found |= is_here or is_beside
        if is_here and not is_beside:
            here.append(each)
        elif is_beside and not is_here:
            beside.append(each)
    if here and beside:
        return [_two_bases(here[0], beside[0], config)]
    went_on = any(each.is_beside(config) and not each.is_here for each in outputs)
    if beside or (went_on and not found):
        _move(inputs, config, only_existing=True)
        _move(outputs, config, only_existing=False)
    return []


def _two_bases(here: _Written, beside: _Written, config: Path) -> Problem:
    return Problem(
        f"'{beside.text}' exists only beside the YAML ({config.parent.resolve()}), and '{here.text}' of {here.key} "
        f"only in the working directory ({Path.cwd()}): all paths of a YAML must have one base",
        str(beside.node.place),
        beside.key,
        "Start from the other folder, or write one of them as an absolute path.",
    )


def _written(root: Node, key: str, config: Path) -> Iterator[_Written]:
    """The relative paths that the YAML has under a key; what was put over it starts at the working directory."""
    entry = find(root, key)
    if entry is None or (key in TOKEN_FILES and isinstance(entry.node.value, list)):
        return
    for node in _text_nodes(entry.node):
        if node.place.source == str(config):
            for part in filter(_is_relative, _parts(node)):
                yield _Written(key, node, part)


def _text_nodes(node: Node) -> Iterator[Node]:
    if isinstance(node.value, list):
        for item in node.value:
            yield from _text_nodes(item)
    elif isinstance(node.value, dict):  # an entry of `dataset` with what is special about it
        if "path" in node.value:
            yield from _text_nodes(node.value["path"].node)
    elif isinstance(node.value, str):
        yield node


def _parts(node: Node) -> list[str]:
    return [part.strip() for part in str(node.value).split(",")]


def _is_relative(part: str) -> bool:
    return part != "" and "://" not in part and "\0" not in part and not with_home(Path(part)).is_absolute()


def _exists(path: Path) -> bool:
    """Whether it is there, or is a pattern that fits something that is."""
    try:
        return path.exists() or ("*" in path.name and any(path.parent.glob(path.name)))
    except OSError:  # a name that no file can have, or no right to look
        return False


def _move(written: list[_Written], config: Path, *, only_existing: bool) -> None:
    """Let paths begin at the YAML's folder."""
    moved = {each.text for each in written if not only_existing or each.is_beside(config)}
    # A text with several paths is one node: it is written once.
    for node in {id(each.node): each.node for each in written}.values():
        parts = _parts(node)
        for number, part in enumerate(parts):
            if part in moved:
                parts[number] = str(config.parent / part)
        if parts != _parts(node):
            node.value, node.place = ",".join(parts), SourcePosition(f"derived: beside the YAML, {node.place}")
