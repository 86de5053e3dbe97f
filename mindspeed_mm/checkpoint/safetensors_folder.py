"""The weights of a Hugging Face folder as lazy tensors: one file, or shards with an index that must agree with them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from safetensors import safe_open

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored, TensorReader
from mindspeed_mm.checkpoint.pt_files import find_unsafe_globals
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.checkpoint.safetensors_file import TensorEntry, read_header
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, Problem, first_problems
from mindspeed_mm.core.folder_links import check_links
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import expert_folders

_STEMS = ("model", "diffusion_pytorch_model")
"""What transformers and diffusers call a model's weights, alone or as the stem of shards and index."""

VAE_FILE = "ae.safetensors"
"""Beside the weights of a model that draws, the frozen autoencoder of its pictures."""
_SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors$")


def find_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder by key, from the files' own headers. Of a generator with two transformers the keys of
    both, behind the names of their folders.

    Raises:
        ModelFolderError: There is no such folder, or no safetensors in it; a file is damaged or a link out of the
            folder, or index and shards disagree.
    """
    check_folder_exists(folder, ModelFolderError)
    check_links(folder)
    if parts := expert_folders(folder):
        found: dict[str, TensorEntry] = {}
        for part in parts:
            for key, entry in find_entries(part).items():
                found[f"{part.name}.{key}"] = entry
        return found
    index = _find_index(folder)
    if index is None:
        return read_header(_single_file(folder))
    weight_map = _read_index(index)
    headers = {name: read_header(folder / name) for name in _named_files(weight_map, folder, index)}
    problems = [*_wrong_shards(weight_map, headers, index), *_orphans(weight_map, headers, folder, index)]
    if problems:
        raise ModelFolderError(f"{folder}: index and shards disagree", problems=problems)
    return {key: headers[name][key] for key, name in weight_map.items()}


def holds_safetensors(folder: Path) -> bool:
    """Whether there are weights in a folder, or in those of its two transformers."""
    folders = expert_folders(folder) or [folder]
    return all(any(part.glob("*.safetensors")) for part in folders)


def check_same_tensors(made: Mapping[str, LazyTensor], source: Path, folder: Path) -> None:
    """Compare with a model's own folder: all of its keys and no others, each in its shape there.

    Args:
        made: What would be written, by key.
        source: What it is made of.
        folder: The model's own, with weights.

    Raises:
        CheckpointError: Naming the first keys of each kind of difference.
    """
    wanted = find_entries(folder)
    missing, surplus, reshaped = [], [], []
    for key in sorted(wanted.keys() | made.keys()):
        if key not in made:
            missing.append(Problem("is in the model's folder and not in the checkpoint", key=key))
        elif key not in wanted:
            surplus.append(Problem("is in the checkpoint and not in the model's folder", key=key))
        elif made[key].shape != wanted[key].shape:
            shapes = f"has shape {made[key].shape}, in the model's folder {wanted[key].shape}"
            reshaped.append(Problem(shapes, key=key))
    problems = first_problems(missing) + first_problems(surplus) + first_problems(reshaped)
    if problems:
        raise CheckpointError(
            f"{source} does not give the tensors of {folder}: {len(missing)} missing, {len(surplus)} surplus, "
            f"{len(reshaped)} of another shape. Name the folder of the model that was saved.",
            problems=problems,
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the folder's tensors, by name: one, or the shards that the index names.

    Raises:
        ModelFolderError: There are no safetensors, or a shard that the index names is missing.
    """
    if parts := expert_folders(folder):
        files = []
        for part in parts:
            files += weight_files(part)
        return files
    index = _find_index(folder)
    if index is None:
        return [_single_file(folder)]
    return [folder / name for name in _named_files(_read_index(index), folder, index)]


MAPPED_BYTES = 64 * 2**20
"""So much is read of mapped files before they are closed, where the memory of a process is to stay small."""


class MappedFiles:
    """Safetensors files that stay open while tensors of them are read.

    What was read of a mapped file counts as this process's memory until the file is closed.

    Args:
        most_bytes: So much is read before all files are closed and opened anew; None: they stay open.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes, self._read_bytes = most_bytes, 0
        self._open: dict[Path, TensorReader] = {}
        self._stack = ExitStack()

    def stored(self, entries: Mapping[str, TensorEntry]) -> dict[str, Stored]:
        """The tensors of these entries, by the same keys."""
        return {
            key: Stored(entry.key, entry.shape, entry.dtype, partial(self._reader, entry))
            for key, entry in entries.items()
        }

    def _reader(self, entry: TensorEntry) -> TensorReader:
        self._read_bytes += entry.size_bytes
        if self._most_bytes is not None and self._read_bytes > self._most_bytes:
            self.close()
            self._read_bytes = entry.size_bytes
        if entry.file not in self._open:
            self._open[entry.file] = self._stack.enter_context(safe_open(entry.file, framework="pt"))
        return self._open[entry.file]

    def close(self) -> None:
        """Close all files; the next tensor opens its own again."""
        self._open.clear()
        self._stack.close()


@contextmanager
def open_weights(folder: Path, most_bytes: int | None = None) -> Iterator[dict[str, Stored]]:
    """The folder's tensors as views of memory-mapped files, open for the length of the `with` block.

    Args:
        folder: With one file, or shards and an index.
        most_bytes: As `MappedFiles` has it.

    Raises:
        ModelFolderError: As `find_entries`.
    """
    entries = find_entries(folder)
    with closing(MappedFiles(most_bytes)) as files:
        yield files.stored(entries)


def _find_index(folder: Path) -> Path | None:
    for stem in _STEMS:
        if (index := folder / f"{stem}.safetensors.index.json").exists():
            return index
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) == 1:
        return others[0]
    return None


def _single_file(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != VAE_FILE)
    for stem in _STEMS:
        if (file := folder / f"{stem}.safetensors") in files:
            return file
    if len(files) == 1 and not _SHARD.match(files[0].name):
        return files[0]
    if files:
        shard = _SHARD.match(files[0].name)
        stem = shard["stem"] if shard else _STEMS[0]
        raise ModelFolderError(
            f"holds {len(files)} safetensors file(s) ({files[0].name} …) but no {stem}.safetensors.index.json",
            where=str(folder),
            way_out="Copy the index file of the original model.",
        )
    raise _no_safetensors(folder)


def _no_safetensors(folder: Path) -> ModelFolderError:
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if not pickles:
        return ModelFolderError(
            "no *.safetensors here",
            where=str(folder),
            way_out="Copy the model's weights there. Only training starts without: model.train_from_scratch: true.",
        )
    danger = _unsafe_globals(pickles[0])
    if danger:
        return ModelFolderError(
            f"is a pickle that would run {', '.join(danger)}",
            where=str(pickles[0]),
            way_out="Do not load this file; get the weights as safetensors from a source that you trust.",
        )
    return ModelFolderError(
        f"only pickled weights here ({pickles[0].name}); they are never loaded",
        where=str(folder),
        way_out=f'If you trust them, convert them once: python -c "{_conversion(folder, pickles[0])}',
    )


def _conversion(folder: Path, stored: Path) -> str:
    if stored.name.startswith("diffusion_"):
        return (
            f"from diffusers import AutoModel as A; A.from_pretrained('{folder}', use_safetensors=False)"
            f".save_pretrained('{folder}-safetensors')\"."
        )
    return (
        f"from transformers import AutoModelForCausalLM as A; A.from_pretrained('{folder}', dtype='auto')"
        f".save_pretrained('{folder}-safetensors')\" (with the Auto class of this model)."
    )


def _unsafe_globals(file: Path) -> list[str]:
    """What a pickled checkpoint would import beyond torch's allow-list. The file is scanned, never run."""
    try:
        return find_unsafe_globals(file)
    except (ValueError, OSError):
        return []  # not a torch archive: refused by name above all the same


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, ModelFolderError, way_out="Copy the index file again.").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFolderError(
            "weight_map is not a table of key to file", where=str(index), way_out="Copy the index file again."
        )
    return weight_map


def _named_files(weight_map: dict[str, str], folder: Path, index: Path) -> list[str]:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        keys = Counter(weight_map.values())
        problems = [
            Problem(f"'{name}' is named for {keys[name]} tensor(s) but does not exist as a file here", str(index))
            for name in missing[:5]
        ]
        raise ModelFolderError(
            f"{len(missing)} of {len(names)} shards are missing. Copy or download them again.", problems=problems
        )
    return names


def _wrong_shards(weight_map: dict[str, str], headers: dict[str, dict[str, TensorEntry]], index: Path) -> list[Problem]:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, header in headers.items():
        for key in header:
            homes[key].append(name)
    problems = []
    for key, name in weight_map.items():
        if homes[key] != [name]:
            found = " and ".join(homes[key]) or "no shard"
            problems.append(Problem(f"says '{name}', found in {found}", str(index), key))
    return problems


def _orphans(
    weight_map: dict[str, str], headers: dict[str, dict[str, TensorEntry]], folder: Path, index: Path
) -> list[Problem]:
    """Shards beside those that the index names, a whole file beside shards, and tensors in a shard that the index does
    not name."""
    stems = set()
    for name in headers:
        if match := _SHARD.match(name):
            stems.add(match["stem"])
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        match = _SHARD.match(file.name)
        if match and match["stem"] in stems and file.name not in headers:
            way_out = "Remove it, or copy the right index."
            found.append(Problem("is named by no entry of the index", str(file), way_out=way_out))
        elif file.stem in stems:
            what = "stands beside shards with the same name: transformers reads this file, diffusers the shards"
            way_out = "Keep the weights that are meant: remove the file, or the shards with their index."
            found.append(Problem(what, str(file), way_out=way_out))
    for name, header in headers.items():
        for key in header.keys() - weight_map.keys():
            found.append(Problem(f"is in '{name}' but not in the index", str(index), key))
    return found
