"""What a cached sample depends on, in two parts: the settings, which name the folder, and the row with its media.

Nothing is told by a time stamp alone. Settings are told by content: of the tokenizer's and processor's files, of the
chat template, of our own code that encodes. A row is told by what the encoder is given. Media files are told by path,
size, and the times of their last change of content and of inode (nanoseconds): reading them again at every start would
cost what the cache is to save, and a file put in another's place cannot keep the last of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data import data_utils
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Sample
from mindspeed_mm.fsdp.data.data_utils.tar_members import split_member
from mindspeed_mm.fsdp.data.data_utils.template import TEMPLATES
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam
from mindspeed_mm.fsdp.utils.plugins import files_beside

KEY_BYTES = 16
_FORMAT = 1
_PACKAGES = ("transformers", "tokenizers", "torch", "torchvision", "numpy", "pillow", "av", "soundfile", "jinja2")
"""Packages that decode, resize, render or tokenise."""
_CHOOSE_ROWS_ONLY = frozenset(
    {
        "dataset",
        "cache_dir",
        "overwrite_cache",
        "preprocess_on_fly",
        "preprocessing_batch_size",
        "preprocessing_num_workers",
        "async_preprocess",
        "async_preprocess_buffer_size",
        "streaming",
        "packing",
        "neat_packing",
        "mix",
        "max_samples",
        "val_dataset",
        "val_max_samples",
        "val_rate",
        "on_bad_sample",
        "max_bad_fraction",
    }
)
"""`basic_parameters` that say which rows are used and how they are put together, not what becomes of one. Every other
key, new ones too, is taken to shape samples."""
_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".md", ".png"}
)


def settings_of(dataset_param: DatasetParam, plugin: object = None, dataset: object = None) -> JsonObject:
    """Everything but the row that shapes a sample, as a person can read it.

    Args:
        dataset_param: The section; `preprocess_parameters.model_name_or_path` filled in.
        plugin: The media plugin, which may come from outside.
        dataset: The data set, which may too.
    """
    basic, preprocess = dataset_param.basic_parameters, dataset_param.preprocess_parameters
    folder = preprocess.model_name_or_path
    template = named_template = None
    if basic.chat_template and Path(basic.chat_template).is_file():
        template = sha256_file(Path(basic.chat_template))
    if basic.template:
        named_template = repr(TEMPLATES.get(basic.template))
    settings: JsonObject = {
        "format": _FORMAT,
        "dataset_type": dataset_param.dataset_type,
        "basic_parameters": basic.model_dump(mode="json", exclude=set(_CHOOSE_ROWS_ONLY)),
        "preprocess_parameters": preprocess.model_dump(mode="json", exclude={"model_name_or_path"}),
        "model_files": _model_files(Path(folder)) if folder else {},
        "chat_template": template,
        "named_template": named_template,
        "code": _code(plugin, dataset),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    if dataset_param.model_extra:  # keys that a plugin has declared
        own_keys = set(dataset_param.model_extra)
        settings["own_keys"] = dataset_param.model_dump(mode="json", include=own_keys)
    return settings


def digest_of(settings: Mapping[str, object]) -> str:
    """Return a name for settings: 16 hexadecimal digits of the SHA-256 of their JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class SampleKeys:
    """Names samples by all that the encoder is given, the state of their media files included.

    Args:
        basic: Where relative media paths start.
    """

    def __init__(self, basic: BasicParameters) -> None:
        self._folder = os.path.realpath(basic.dataset_dir or "")

    def key(self, sample: Sample) -> bytes:
        """Return the key of a sample: a BLAKE2b digest of `KEY_BYTES` bytes."""
        content = json.dumps(self._content(sample), ensure_ascii=True, default=_of_bytes)
        return hashlib.blake2b(content.encode(), digest_size=KEY_BYTES).digest()

    def _content(self, sample: Sample) -> list[object]:
        media = []
        for item in sample.media:
            media.append((item.kind, item.source, list(map(self._facts, _names(item)))))
        rejected = sample.rejected and self._content(sample.rejected)
        return [sample.messages, sample.weights, media, sample.tools, sample.text, rejected]

    def _facts(self, name: str) -> list[object]:
        """What the file system says of a medium, or of the archive that it lies in; of a folder, of all in it."""
        # The real path: the same rows read from another working directory keep their keys.
        path = os.path.join(self._folder, name)  # noqa: PTH118 (a million times at a start)
        status = _status(path)
        if status is None:  # paths may start at the working directory, too
            path = os.path.abspath(name)  # noqa: PTH100
            status = _status(path)
        if status is None:
            return []
        facts: list[Any] = [path, *_marks(status)]
        if stat.S_ISDIR(status.st_mode):
            facts += [(entry.name, *_marks(entry.stat())) for entry in sorted(os.scandir(path), key=lambda e: e.name)]
        return facts


def _status(path: str) -> os.stat_result | None:
    """None: it is missing, or no path but base64 text."""
    for file in (path, split_member(path)[0]):
        with contextlib.suppress(OSError, ValueError):
            return os.stat(file)  # noqa: PTH116
    return None


def _marks(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _names(item: MediaItem) -> Iterator[str]:
    """Every text in a medium's source that may be a path."""
    waiting = [item.source]
    while waiting:
        source = waiting.pop()
        if isinstance(source, str):
            yield source
        elif isinstance(source, dict):
            waiting += source.values()
        elif isinstance(source, list | tuple):
            waiting += source


def _of_bytes(value: object) -> object:
    """Media that stand in the row itself, by content; times and the like of parquet files, as they print."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    return {type(value).__name__: repr(value)}


def _model_files(folder: Path) -> dict[str, str]:
    """Content of all that a processor may read; weights do not belong to it."""
    hashes = {}
    for path in sorted({*folder.glob("*"), *folder.glob("*/*.jinja"), *folder.rglob("*.py")}):
        is_of_weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_of_weights:
            hashes[path.relative_to(folder).as_posix()] = sha256_file(path)
    return hashes


def _code(*makers: object) -> str:
    """Of the modules that make a sample: a change of ours, or of what comes from outside, makes old samples void."""
    # All of `data_utils`, not only what this row uses: a needless new encoding is cheaper than a stale sample.
    files = sorted(Path(str(data_utils.__file__)).parent.rglob("*.py"))
    classes = dict.fromkeys(cls.__module__ for maker in makers for cls in type(maker).__mro__)
    for module in map(sys.modules.get, classes):
        if module is not None and getattr(module, "__file__", None):
            files += files_beside(Path(str(module.__file__)))
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
