"""Opens the weights of a generator wherever they lie: a diffusers folder, the authors' own file or folder, or
MindSpeed-MM's `mp_rank_*` folders; and says whose they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from mindspeed_mm.checkpoint.keymap import names_behind
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored
from mindspeed_mm.checkpoint.megatron.folder import DividedWeights, find_step, read_divided
from mindspeed_mm.checkpoint.megatron.layout import WEIGHTS_FILE
from mindspeed_mm.checkpoint.megatron.pt_reading import PtContent, read_pt_files
from mindspeed_mm.checkpoint.original.families import generator_of
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, to_diffusers
from mindspeed_mm.checkpoint.original.mm_division import DIVISIONS, megatron_family
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.healing import heal_missing
from mindspeed_mm.core.json_file import read_json_object

CONFIG_FILE = "config.json"
_PT_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_SECTIONS = ("module", "model", "state_dict")
"""What the authors' `.pt` files put the weights under."""


@dataclass(frozen=True)
class GeneratorWeights:
    """The weights of a generator, read when they are needed."""

    path: Path
    """The folder or file that holds them."""
    family: GeneratorLayouts
    naming: Naming
    stored: Mapping[str, LazyTensor]
    """By the names in the files; of MindSpeed-MM's folders, every rank's pieces."""
    config: Json
    """The config.json beside them, {} where there is none: diffusers' own, but the authors' beside their names."""
    divided: DividedWeights | None = None
    """MindSpeed-MM's folder."""

    @property
    def left_out(self) -> dict[str, str]:
        """Keys that are no part of the transformer → why."""
        if self.divided is not None:
            return dict(self.divided.left_out)
        if self.naming is not Naming.ORIGINAL:
            return {}
        reasons = {}
        for key in self.stored:
            why = self.family.why_left_out(key)
            if why is not None:
                reasons[key] = why
        return reasons

    def under_diffusers_names(self, tensors: Mapping[str, LazyTensor] | None = None) -> dict[str, LazyTensor]:
        """The transformer's tensors.

        Args:
            tensors: Stand for `stored`, as a ledger counts them.

        Raises:
            ModelFolderError: The names do not fit the family; the keys are named.
        """
        if tensors is None:
            tensors = self.stored
        if self.divided is not None:
            tensors = self.divided.whole(tensors)
        return to_diffusers(tensors, self.family, self.naming)


@contextmanager
def open_file(path: Path) -> Iterator[tuple[dict[str, LazyTensor], dict[str, str]]]:
    """The tensors of one safetensors file by key, and the text in its header, for the length of the `with` block.

    Raises:
        ModelFolderError: As `read_header`.
    """
    entries = read_header(path)
    with safe_open(path, framework="pt") as file:
        stored: dict[str, LazyTensor] = {}
        for key, entry in entries.items():
            stored[key] = Stored(key, entry.shape, entry.dtype, lambda: file)
        yield stored, file.metadata() or {}


@contextmanager
def open_generator(path: Path) -> Iterator[GeneratorWeights]:
    """Open weights for the length of the `with` block.

    Args:
        path: A pipeline's folder (its `transformer` is taken), a folder of weights, one weight file, or a folder with
            `mp_rank_*` or with the step that holds them.

    Raises:
        ModelFolderError: There are no weights, or they are of no family here.
        UsageError: A pipeline holds two transformers.
        CheckpointError: A file is damaged, or asks for something that weights do not need.
    """
    heal_missing(path)
    if path.is_file() and path.suffix in _PT_SUFFIXES:
        yield _recognised(path, _pt_tensors(path))
    elif path.is_file():
        with open_file(path) as (stored, _):
            yield _recognised(path, stored)
    elif _has_ranks(path):
        yield _mm_weights(path)
    elif (pickled := _pickled_weights(path)) is not None:
        yield _recognised(pickled, _pt_tensors(pickled))
    else:
        folder = transformer_folder(path)
        if folder != path and (path / "transformer_2").is_dir():
            raise UsageError(
                "holds two transformers, and one is converted at a time",
                where=str(path),
                way_out=f"Name {folder}, and then {path / 'transformer_2'}.",
            )
        with open_weights(folder) as tensors:
            yield _recognised(folder, tensors, _config_of(folder))


def _recognised(path: Path, stored: Mapping[str, LazyTensor], config: Json | None = None) -> GeneratorWeights:
    family, naming = generator_of(stored, str(path))
    return GeneratorWeights(path, family, naming, stored, config or {})


def _config_of(folder: Path) -> Json:
    file = folder / CONFIG_FILE
    return read_json_object(file, ModelFolderError) if file.is_file() else {}


def _has_ranks(path: Path) -> bool:
    if any(path.glob("mp_rank_*/")) or any(path.glob("*/mp_rank_*/")):
        return True
    return (path / "latest_checkpointed_iteration.txt").is_file()


def transformer_folder(path: Path) -> Path:
    """Where a pipeline's transformer lies; of any other folder itself."""
    inside = path / "transformer"
    heal_missing(inside)
    return inside if inside.is_dir() else path


def _pickled_weights(folder: Path) -> Path | None:
    """The one `.pt` file of an authors' folder that has no safetensors: CogVideoX's `latest` names a folder of one."""
    if any(folder.glob("*.safetensors")) or (folder / "transformer").is_dir():
        return None
    latest = folder / "latest"
    if latest.is_file():
        folder = folder / Path(latest.read_text(errors="replace").strip()).name
    files = [file for file in sorted(folder.glob("*")) if file.suffix in _PT_SUFFIXES]
    return files[0] if len(files) == 1 else None


def _pt_tensors(path: Path) -> dict[str, LazyTensor]:
    (content,) = read_pt_files([path])
    for section in _SECTIONS:
        if section in content.tensors:
            return dict(content.tensors[section])
    found: dict[str, LazyTensor] = {}
    for key, tensors in content.tensors.items():
        for name, tensor in tensors.items():
            found[f"{key}.{name}" if name else key] = tensor
    return found


def _mm_weights(path: Path) -> GeneratorWeights:
    step = find_step(path)
    contents = read_pt_files([folder / WEIGHTS_FILE for folder in sorted(step.glob("mp_rank_*/"))])
    names: set[str] = set()
    for content in contents:
        names.update(*content.tensors.values())
    family, naming = generator_of(names, str(step))
    if naming is not Naming.MM:
        raise CheckpointError(
            f"holds {family.name} under {naming} names, and MindSpeed-MM's are expected in mp_rank_* folders",
            where=str(step),
            way_out="Was it converted by another program? Convert the original weights anew.",
        )
    config = {"model_type": family.name, "num_layers": _depth(contents, DIVISIONS[family.name].layers)}
    divided = read_divided(step, megatron_family(family), config)
    return GeneratorWeights(path, family, naming, divided.stored, _config_of(step), divided)


def _depth(contents: Sequence[PtContent], layers: str) -> int:
    """Layers of the whole model: those of every stage and chunk, told by one rank of each stage."""
    of_place: dict[tuple[str, str], int] = {}
    for content in contents:
        stage = "_".join(content.path.parent.name.split("_")[3:])
        for chunk, tensors in content.tensors.items():
            of_place[stage, chunk] = len(names_behind(tensors, layers))
    return sum(of_place.values())
