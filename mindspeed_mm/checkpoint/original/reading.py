"""Opens the weights of a generator wherever they lie: a diffusers folder, the authors' own file or folder,
MindSpeed-MM's `mp_rank_*` folders, or a run; and says whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import safe_open

from mindspeed_mm.checkpoint.dcp_folder.reading import MODEL, DcpReader, model_noted_in, step_in
from mindspeed_mm.checkpoint.keymap import names_behind
from mindspeed_mm.checkpoint.layout import TRACKER
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored
from mindspeed_mm.checkpoint.megatron.folder import find_step, read_divided
from mindspeed_mm.checkpoint.megatron.layout import WEIGHTS_FILE
from mindspeed_mm.checkpoint.megatron.pt_reading import PtContent, read_pt_files
from mindspeed_mm.checkpoint.original.families import generator_of
from mindspeed_mm.checkpoint.original.generator import GeneratorLayouts, Json, Naming, to_diffusers
from mindspeed_mm.checkpoint.original.mm_division import DIVISIONS, megatron_family
from mindspeed_mm.checkpoint.recognise import check_folder_exists, is_megatron_folder
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.healing import heal_missing
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import EXPERT_PARTS

CONFIG_FILE = "config.json"
_PT_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}
_SECTIONS = ("module", "model", "state_dict", "ema_state_dict")
"""What the authors' `.pt` files put the weights under."""
_STUDENTS = ("generator_ema", "generator")
"""The same in files of Self-Forcing and CausVid: the average, with which they draw, or the trained weights alone."""
_OF_TRAINING = re.compile(r"(^model|\b_fsdp_wrapped_module|\b_checkpoint_wrapped_module)\.")
"""What their names have beside the authors'."""
_AVERAGE = "ema."
"""What the names of averages begin with in a checkpoint."""


class PiecesOfRanks(Protocol):
    """Weights that ranks hold in pieces."""

    @property
    def stored(self) -> Mapping[str, LazyTensor]:
        """Every piece by a key of its own."""
        ...

    @property
    def beside(self) -> Mapping[str, str]:
        """What else the files hold → why it is not part of the model."""
        ...

    def whole(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The whole tensors. `stored` stand for its own, as a ledger counts them."""
        ...


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
    divided: PiecesOfRanks | None = None
    """MindSpeed-MM's folders, and files of LayerZeRO."""
    is_of_run: bool = False
    """They were trained: under whatever names, they are what `mm_to_…` takes."""
    home: Path | None = None
    """The model folder that the run says it started from."""

    @property
    def beside(self) -> dict[str, str]:
        """What the files hold beside `stored` → why it is not part of the model."""
        if self.divided is None:
            return {}
        return dict(self.divided.beside)

    @property
    def left_out(self) -> dict[str, str]:
        """Keys of `stored` that are no part of the transformer → why."""
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
def open_files(paths: Sequence[Path]) -> Iterator[dict[str, LazyTensor]]:
    """The tensors of several files by key, for the length of the `with` block: safetensors, or as of `torch.save`.

    Raises:
        ModelFolderError: No file is named, or a key lies in two of them; or as `read_header`.
        CheckpointError: As `read_pt_files`.
    """
    if not paths:
        raise ModelFolderError("no file of weights is named", way_out="Look at the pattern that finds the files.")
    homes: dict[str, Path] = {}
    found: dict[str, LazyTensor] = {}
    with ExitStack() as stack:
        for path in paths:
            if path.suffix in _PT_SUFFIXES:
                stored = pt_tensors(path)
            else:
                stored, _ = stack.enter_context(open_file(path))
            for key, tensor in stored.items():
                if key in found:
                    raise ModelFolderError(
                        f"lies in {homes[key].name} and {path.name}",
                        where=str(path.parent),
                        key=key,
                        way_out="Remove the one that does not belong here. Files of ranks share keys; open each alone.",
                    )
                found[key], homes[key] = tensor, path
        yield found


@contextmanager
def open_generator(path: Path) -> Iterator[GeneratorWeights]:
    """Open weights for the length of the `with` block.

    Args:
        path: A pipeline's folder (its `transformer` is taken), a folder of weights, one weight file, a folder with
            `mp_rank_*` or with the step that holds them, or a run or distributed checkpoint.

    Raises:
        ModelFolderError: There are no weights, or they are of no family here.
        UsageError: A pipeline holds two transformers.
        CheckpointError: A file is damaged, or asks for something that weights do not need; a checkpoint holds adapters.
    """
    heal_missing(path)
    if path.is_file() and path.suffix in _PT_SUFFIXES:
        yield _recognised(path, pt_tensors(path))
    elif path.is_file():
        with open_file(path) as (stored, _):
            yield _recognised(path, stored)
    elif not path.exists():
        check_folder_exists(path)
    elif _has_ranks(path):
        yield _mm_weights(path)
    # After the ranks' folders: Megatron-Core's distributed ones have an index as well, and names of their own.
    elif not is_megatron_folder(path) and (step := step_in(path)) is not None:
        yield weights_of_run(step)
    elif (path / TRACKER).is_file() and not any(path.glob("*.safetensors")):
        yield _mm_weights(path)  # says what is wrong with it
    elif (pickled := _pickled_weights(path)) is not None:
        yield _recognised(pickled, pt_tensors(pickled))
    else:
        folder = transformer_folder(path)
        if folder != path and (path / "transformer_2").is_dir():
            raise UsageError(
                "holds two transformers, and one is converted at a time",
                where=str(path),
                way_out=f"Name {folder}, and then {path / 'transformer_2'}.",
            )
        if folder != path and not any(folder.glob("*.safetensors")):
            with open_generator(folder) as weights:  # in another layout
                yield weights
            return
        with open_weights(folder) as tensors:
            yield _recognised(folder, tensors, _config_of(folder))


def _recognised(path: Path, stored: Mapping[str, LazyTensor], config: Json | None = None) -> GeneratorWeights:
    family, naming = generator_of(stored, str(path))
    return GeneratorWeights(path, family, naming, stored, config or {})


def _config_of(folder: Path) -> Json:
    file = folder / CONFIG_FILE
    if file.is_file():
        return read_json_object(file, ModelFolderError)
    return {}


def _has_ranks(path: Path) -> bool:
    return any(path.glob("mp_rank_*/")) or any(path.glob("*/mp_rank_*/"))


def transformer_folder(path: Path) -> Path:
    """Where a pipeline's transformer lies; of any other folder itself."""
    inside = path / "transformer"
    heal_missing(inside)
    if inside.is_dir():
        return inside
    return path


def _pickled_weights(folder: Path) -> Path | None:
    """The one `.pt` file of an authors' folder that has no safetensors: CogVideoX's `latest` names a folder of one."""
    if any(folder.glob("*.safetensors")) or (folder / "transformer").is_dir():
        return None
    latest = folder / "latest"
    if latest.is_file():
        # The last part alone: the file's words may not lead out of the folder.
        folder = folder / Path(latest.read_text(errors="replace").strip()).name
    files = [file for file in sorted(folder.glob("*")) if file.suffix in _PT_SUFFIXES]
    if len(files) == 1:
        return files[0]
    return None


def pt_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file as of `torch.save`, by name, without the section that they may stand in.

    Raises:
        CheckpointError: As `read_pt_files`.
    """
    (content,) = read_pt_files([path])
    for section in _SECTIONS:
        if section in content.tensors:
            return dict(content.tensors[section])
    found: dict[str, LazyTensor] = {}
    for section in _STUDENTS:
        if section in content.tensors:
            return {_OF_TRAINING.sub("", name): tensor for name, tensor in content.tensors[section].items()}
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
    config = _config_of(step.parent) or _config_of(step)
    if naming is Naming.DIFFUSERS and len(contents) == 1 and MODEL in contents[0].tensors:  # torch's dcp_to_torch
        return GeneratorWeights(path, family, naming, contents[0].tensors[MODEL], config, is_of_run=True)
    if naming is not Naming.MM:
        raise CheckpointError(
            f"holds {family.name} under {naming} names, and MindSpeed-MM's are expected in mp_rank_* folders",
            where=str(step),
            way_out="Was it converted by another program? Convert the original weights anew.",
        )
    sizes = {"model_type": family.name, "num_layers": _depth(contents, DIVISIONS[family.name].layers)}
    divided = read_divided(step, megatron_family(family), sizes)
    return GeneratorWeights(path, family, naming, divided.stored, config, divided)


def weights_of_run(step: Path, *, average: bool = False) -> GeneratorWeights:
    """The weights of a distributed checkpoint, whoever saved it.

    Args:
        step: Holds `.metadata`.
        average: The moving average instead of the trained weights; what is not averaged is the same in both.

    Raises:
        CheckpointError: It is damaged, holds adapters, or no average.
        ModelFolderError: The weights are of no family here.
        UsageError: It holds two transformers.
    """
    reader = DcpReader(step)
    tensors: dict[str, LazyTensor] = dict(reader.model_tensors())
    adapters = [name for name in tensors if ".lora_" in name]
    if adapters:
        raise CheckpointError(
            f"holds adapters ({len(adapters)} tensors, as {adapters[0]}) without the model under them",
            where=str(step),
            way_out="Name it in cfg.lora_path of merge_lora_to_base, or write a LoRA file with mm export.",
        )
    if any(name.startswith(f"{EXPERT_PARTS[1]}.") for name in tensors):
        raise UsageError(
            "holds two transformers, and one is converted at a time",
            where=str(step),
            way_out="Write both with mm export.",
        )
    if average:
        averages = {key.removeprefix(_AVERAGE): reader.lazy(key) for key in reader.entries if key.startswith(_AVERAGE)}
        if not averages:
            raise CheckpointError("keeps no average of the weights", where=str(step), key="ema_model")
        # Over the trained weights: what is not averaged, such as frozen parts, comes from those.
        tensors |= averages
    family, naming = generator_of(tensors, str(step))
    home = model_noted_in(step)
    config = _config_of(transformer_folder(home)) if home is not None else {}
    config = config or _config_of(step.parent)
    return GeneratorWeights(step, family, naming, tensors, config, is_of_run=True, home=home)


def _depth(contents: Sequence[PtContent], layers: str) -> int:
    """Layers of the whole model: those of every stage and chunk, told by one rank of each stage."""
    of_place: dict[tuple[str, str], int] = {}
    for content in contents:
        # mp_rank_<tensor rank>_<stage>: of each stage the tensor ranks hold the same layers.
        stage = "_".join(content.path.parent.name.split("_")[3:])
        for chunk, tensors in content.tensors.items():
            of_place[stage, chunk] = len(names_behind(tensors, layers))
    return sum(of_place.values())
