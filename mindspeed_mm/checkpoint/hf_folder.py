"""A Hugging Face folder on disk: weights in safetensors shards with an index, beside the files of the source model."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.conversion.files import SafetensorsFile
from mindspeed_mm.checkpoint.cosyvoice3_release import SOUND_FILES
from mindspeed_mm.checkpoint.dequantized import sections_of, without_quantization
from mindspeed_mm.checkpoint.lazy_tensor import Cast, LazyTensor
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.checkpoint.safetensors_file import write_safetensors
from mindspeed_mm.checkpoint.safetensors_folder import VAE_FILE, find_entries, holds_safetensors
from mindspeed_mm.core.errors import ModelFolderError, first_names
from mindspeed_mm.core.folder_links import check_links
from mindspeed_mm.core.folder_writing import atomic_folder, copy_plain
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.utils.finite import is_finite
from mindspeed_mm.fsdp.utils.ranks import Ranks

MAX_SHARD_BYTES = 5_000_000_000
_ASSET_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".py", ".bpe", ".mvn"}
_ASSET_NAMES = {"LICENSE", "LICENSE.md", "NOTICE", "spk_dict.pt", VAE_FILE, *SOUND_FILES}
"""The fourth: the voices of Qwen2.5-Omni."""
_NO_ASSETS = {"conversion_manifest.json", "latest_checkpointed_iteration.txt", "layout.json"}
"""About the weights of the folder that they lie in."""
_OF_PROCESSOR = (
    *("*processor_config.json", "processing_*.py", "*_processing_*.py", "chat_template.*", "additional_chat_templates"),
    *("tokenizer.*", "tokenizer_config.json", "tokenization_*.py", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "vocab.*", "tekken.json", "*.model", "*.tiktoken", "*.bpe"),
)
_ASSET_FOLDERS = {"additional_chat_templates", "audio_tokenizer", "speech_tokenizer", "vae"}
"""The second and the third: what makes codes of sound for MiMo-V2.5 and Qwen3-TTS, with its weights; the last: the
frozen autoencoder of a model that draws."""
_FOLDERS_BESIDE = {"bailingmm": {"connector", "mlp", "scheduler", "talker", "transformer"}}
"""Model type → folders of further models that lie in a released one: Ming-Lite-Omni's, which speak and draw."""
_CODECS = {"moss_tts_delay": "MOSS-Audio-Tokenizer"}
"""Model type → folder of what turns its codes into sound, which lies in the model's folder, or beside it."""


@dataclass(frozen=True)
class DtypeRule:
    """In which dtype a tensor is written: as the source model has it, since training may hold it wider."""

    of_key: Mapping[str, torch.dtype]
    """Dtype of each of the source's tensors."""
    default: torch.dtype | None
    """For floating-point tensors that the source lacks; None leaves them as they are."""

    @classmethod
    def of_source(cls, source: Path, dtype: torch.dtype | None = None) -> DtypeRule:
        """What the source folder's weights and configuration say, or `dtype` for everything."""
        if dtype is not None:
            return cls({}, dtype)
        whole: dict[str, torch.dtype] = {}
        if holds_safetensors(source):
            for key, entry in find_entries(source).items():
                # Codes of one byte are written as the numbers that they stand for.
                if entry.dtype.itemsize > 1:
                    whole[key] = entry.dtype
        return cls(whole, config_dtype(source))

    def __call__(self, key: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype to write tensor `key` in, which is held in `dtype`."""
        if not dtype.is_floating_point:
            return dtype
        return self.of_key.get(key) or self.default or dtype

    def cast(self, key: str, tensor: LazyTensor) -> LazyTensor:
        """Tensor `key` in the dtype to write it in."""
        dtype = self(key, tensor.dtype)
        if tensor.dtype == dtype:
            return tensor
        return Cast(tensor, dtype)


def config_dtype(source: Path) -> torch.dtype | None:
    """The dtype that a folder's config.json names, None when it names none."""
    config = _read_json(source / "config.json")
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in sections:
        name = section.get("dtype") or section.get("torch_dtype")
        if isinstance(name, str):
            found = vars(torch).get(name.removeprefix("torch."))
            if isinstance(found, torch.dtype):
                return found
            return None
    return None


@contextmanager
def drafted_folder(folder: Path, ranks: Ranks, *, overwrite: bool = False) -> Iterator[Path]:
    """`atomic_folder` for all ranks: rank 0 makes the draft and gives it its name; when it cannot, all ranks raise.

    Args:
        folder: The final name.
        ranks: All of them.
        overwrite: Replace what stands there.

    Yields:
        The folder to write into, on every rank.
    """
    with ExitStack() as stack:
        yield ranks.first("making the folder", lambda: stack.enter_context(atomic_folder(folder, overwrite=overwrite)))
        ranks.first("naming the folder", stack.close)


def write_weights(
    tensors: Mapping[str, LazyTensor],
    folder: Path,
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
    max_shard_bytes: float = MAX_SHARD_BYTES,
    ranks: Ranks | None = None,
    *,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `<stem>.safetensors`, or shards with an index, holding one shard in memory at a time. A warning names the
    tensors that hold NaN or infinity as they are written: a narrower type makes infinity of large numbers.

    Args:
        tensors: By key, in the order of writing.
        folder: Exists.
        dtype_of: (key, dtype held) → dtype written.
        max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        ranks: Given when reading is a collective: all read, rank 0 writes.
        stem: Of the files' names.
        metadata: Text to keep in each file, beside the format.
    """
    ranks = ranks or Ranks()
    dtypes: dict[str, torch.dtype] = {}
    sizes: dict[str, int] = {}
    for key, tensor in tensors.items():
        dtypes[key] = dtype_of(key, tensor.dtype)
        sizes[key] = _elements(tensor) * dtypes[key].itemsize
    shards = plan_shards(sizes, max_shard_bytes, stem)
    notes = {"format": "pt", **(metadata or {})}
    not_finite: list[str] = []
    for name, keys in shards.items():
        shard: dict[str, torch.Tensor] = {}
        for key in keys:
            tensor = tensors[key].read()
            if ranks.is_first:
                shard[key] = tensor.to(dtypes[key]).contiguous()
                if not is_finite(shard[key]):
                    not_finite.append(key)
        ranks.first("writing", lambda name=name, shard=shard: write_safetensors(shard, folder / name, notes))  # type: ignore[misc]
    if not_finite:
        warnings.warn(f"NaN or infinity in {first_names(not_finite)}. Export an earlier checkpoint", stacklevel=2)
    if len(shards) > 1:
        index = folder / f"{stem}.safetensors.index.json"
        text = _index_text(shards, sum(sizes.values()), sum(map(_elements, tensors.values())))
        ranks.first("writing the index", lambda: index.write_text(text))


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: float, stem: str = "model") -> dict[str, list[str]]:
    """File name → keys, in order, each file as full as the limit allows; names as transformers gives them."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": keys for i, keys in enumerate(shards, start=1)}


def safetensors_files(
    tensors: Mapping[str, LazyTensor], max_shard_bytes: float = MAX_SHARD_BYTES, stem: str = "model"
) -> tuple[dict[str, SafetensorsFile], dict[str, str]]:
    """A folder's weights as a conversion writes them.

    Args:
        tensors: By key, in the order of writing.
        max_shard_bytes: Largest size of one file, unless a single tensor is larger.
        stem: Of the files' names.

    Returns:
        Name → file, and of several files the index: name → text.
    """
    sizes = {key: tensor.size_bytes for key, tensor in tensors.items()}
    shards = plan_shards(sizes, max_shard_bytes, stem)
    files: dict[str, SafetensorsFile] = {}
    for name, keys in shards.items():
        files[name] = SafetensorsFile({key: tensors[key] for key in keys})
    if len(shards) == 1:
        return files, {}
    text = _index_text(shards, sum(sizes.values()), sum(map(_elements, tensors.values())))
    return files, {f"{stem}.safetensors.index.json": text}


def _elements(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape)


def _index_text(shards: Mapping[str, Iterable[str]], total_bytes: int, parameters: int) -> str:
    weight_map: dict[str, str] = {}
    for name, keys in shards.items():
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {"total_parameters": parameters, "total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def model_config(folder: Path, way_out: str = "Name the model's own folder.") -> JsonObject:
    """A model folder's config.json.

    Args:
        folder: As a person named it.
        way_out: What to do where it holds no config.json.

    Raises:
        ModelFolderError: It is not a folder, has no config.json, or a damaged one; or an entry of it is a link that
            leads out of the folder or nowhere, or not a file.
    """
    check_folder_exists(folder, ModelFolderError)
    if not (folder / "config.json").is_file():
        raise ModelFolderError("has no config.json", where=str(folder), way_out=way_out)
    check_links(folder)
    return read_json_object(folder / "config.json", ModelFolderError)


def copy_assets(source: Path, folder: Path, dtype: torch.dtype | None = None) -> list[str]:
    """Copy configuration, generation configuration, tokenizer, processor, chat template and licence. The configuration
    says of no weights that they are quantised: those that are written are not.

    Args:
        source: A Hugging Face folder.
        folder: Where to.
        dtype: Written into config.json when given.

    Returns:
        Names of what was copied.

    Raises:
        ModelFolderError: As `asset_files`.
    """
    assets = asset_files(source)
    for name, path in assets.items():
        copy_plain(path, folder / name)
    config = _read_json(folder / "config.json")
    if any(sections_of(config)):
        _write_config(folder, without_quantization(config))
    if dtype is not None:
        (folder / "config.json").write_text(config_text(folder, dtype))
    return list(assets)


def replace_processor(source: Path, folder: Path) -> None:
    """Exchange the tokenizer, the processor and the chat templates of a folder for those of another.

    Args:
        source: A folder with a processor; it need not hold a configuration of a model.
        folder: A model's, written as a draft.

    Raises:
        ModelFolderError: Something leads out of the source; see `check_links`.
    """
    for path in [*folder.iterdir()]:
        if _is_of_processor(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(source.iterdir()):
        if _is_of_processor(path) and _is_asset(path):
            if path.is_dir():
                check_links(path, deep=True)
            copy_plain(path, folder / path.name)


def _is_of_processor(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in _OF_PROCESSOR)


def config_text(folder: Path, dtype: torch.dtype) -> str:
    """A folder's config.json as it reads for weights of one dtype."""
    name = str(dtype).removeprefix("torch.")
    config = _with_dtype(_read_json(folder / "config.json"), name)
    config.setdefault("dtype", name)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _write_config(folder: Path, config: Mapping[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def asset_files(source: Path) -> dict[str, Path]:
    """What `copy_assets` copies, by name.

    Raises:
        ModelFolderError: There is no config.json, or something leads out of the folder; see `check_links`.
    """
    kind = str(model_config(source).get("model_type"))
    beside = _FOLDERS_BESIDE.get(kind, set())
    assets: dict[str, Path] = {}
    if (codec := codec_folder(source, kind)) is not None:
        check_links(codec, deep=True)
        assets[codec.name] = codec
    for path in sorted(source.iterdir()):
        if not _is_asset(path) and not (path.is_dir() and path.name in beside):
            continue
        if path.is_dir():
            check_links(path, deep=True)
        assets[path.name] = path
    return assets


def codec_folder(model: Path, kind: str) -> Path | None:
    """What turns the codes of a model into sound, inside its folder or beside it; None where there is none, or it is a
    part of the model's own files.

    Args:
        model: The model's folder.
        kind: Its `model_type`.
    """
    name = _CODECS.get(kind)
    if name is None:
        return None
    return next((path for path in (model / name, model.resolve().parent / name) if path.is_dir()), None)


def _is_asset(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.is_dir():
        return path.name in _ASSET_FOLDERS
    if path.name.endswith(".index.json") or path.name in _NO_ASSETS:
        return False
    return path.suffix in _ASSET_SUFFIXES or path.name in _ASSET_NAMES


def _with_dtype(config: Mapping[str, object], name: str) -> dict[str, object]:
    """The configuration with every dtype that it and its parts name replaced."""
    changed = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            changed[key] = _with_dtype(value, name)
        elif key in {"dtype", "torch_dtype"} and value is not None:
            changed[key] = name
    return changed


def _read_json(path: Path) -> dict[str, object]:
    if path.exists():
        return read_json_object(path, ModelFolderError)
    return {}
