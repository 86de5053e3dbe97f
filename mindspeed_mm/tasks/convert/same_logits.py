"""Whether what was written computes what its source computes: the logits of both, of the same tokens and media.

The side that is a Hugging Face folder is loaded by transformers alone; the other one through the doors of
`training.load`. Where both are checkpoints, both come through those doors.
"""

from __future__ import annotations

import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mindspeed_mm.checkpoint.conversion.run import Conversion
from mindspeed_mm.checkpoint.dcp_folder.reading import find_step
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.checkpoint.transformers_outline import TransformersOutline
from mindspeed_mm.core.errors import CheckpointError, MachineError, MMError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import LANGUAGE, kind_of_folder
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.loading import load_tensors
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.models.loading.construction import is_transformers
from mindspeed_mm.fsdp.models.loading.folder import load_model_config, native_class
from mindspeed_mm.fsdp.models.loading.meta_device import materialize
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.utils.host_memory import available_bytes
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.convert.agreement import Agreement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_PARAMETERS = 1_000_000_000
"""Larger models are compared when they are asked for: building one twice takes minutes."""
_BYTES_EACH = 8
"""Of memory for each parameter: one model in single precision, and the files that it is read from, which are mapped."""
_TOKENS, _PICTURE = 16, 32
_RATE, _SAMPLES = 16_000, 8_000
_BUILD_ERRORS = (MMError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError)
"""How a model's class or processor says that it is not to be had."""

Inputs = Mapping[str, Any]


class _NotCompared(Exception):
    """Why there is nothing to compare."""


@dataclass(frozen=True)
class _Sides:
    home: Path
    """With the config.json of the checkpoints' model, and perhaps the processor."""
    plain: Path | None
    """The Hugging Face folder; None: both are checkpoints. Its model may be the language model of theirs alone."""
    checkpoints: tuple[Path, ...]
    """One, or the source and what was written."""
    is_plain_written: bool = False
    """Else it is the source."""


def same_logits(conversion: Conversion, draft: Path, any_size: bool) -> str:
    """Compare the logits of what was written with those of its source.

    Args:
        conversion: What was written, and from what.
        draft: Where it was written.
        any_size: Compare models of more than a billion parameters too.

    Returns:
        A sentence: what was compared, or why nothing was.

    Raises:
        CheckpointError: The logits differ, or what was written cannot be loaded.
        MachineError: `any_size`, and the model does not fit into memory.
    """
    try:
        return _compare(_sides(conversion, draft), conversion.sources[0], any_size)
    except _NotCompared as reason:
        return f"logits not compared: {reason}"


def _sides(conversion: Conversion, draft: Path) -> _Sides:
    if conversion.incomparable:
        raise _NotCompared(conversion.incomparable)
    source = conversion.sources[0]
    homes = [folder for folder in (draft, *conversion.sources) if (folder / "config.json").is_file()]
    if not homes:
        raise _NotCompared("no config.json says what model it is")
    home = homes[0]
    if kind_of_folder(home) is not LANGUAGE or "_class_name" in read_json_object(home / "config.json", CheckpointError):
        raise _NotCompared("generators give none")
    if conversion.layout["kind"] == "hf":
        return _Sides(home, draft, (source,), is_plain_written=True)
    if recognise(source) == "hf":
        return _Sides(home, source, (draft,))
    return _Sides(home, None, (source, draft))


def _compare(sides: _Sides, source: Path, any_size: bool) -> str:
    models = [_built(sides.home, any_size) for _ in sides.checkpoints]
    given, told = _inputs(sides.plain or sides.home, sides.home)
    computed: list[dict[str, torch.Tensor]] = []
    if sides.plain is not None:
        try:
            computed.append(_logits(_plain(sides.plain), given))
        except _BUILD_ERRORS as error:
            raise _NotCompared(f"transformers alone does not compute it: {_first_line(error)}") from error
    # What a folder was written in may be narrower than its checkpoint: that is rounded likewise.
    dtypes: Mapping[str, torch.dtype] = {}
    if sides.plain is not None and sides.is_plain_written:
        dtypes = _written_dtypes(sides.plain)
    for folder in sides.checkpoints:
        model = models.pop()
        _fill(model, folder)
        with UsedWeights(model) as used:
            # The numbers of what was written, computed in single precision.
            for name, parameter in model.named_parameters():
                dtype = dtypes.get(name, parameter.dtype)
                if dtype.is_floating_point and dtype.itemsize < parameter.dtype.itemsize:
                    parameter.data = parameter.data.to(dtype).to(parameter.dtype)
            computed.append(_logits(model, given))
        unused = used.told()
        del model, used
    if sides.is_plain_written:
        computed.reverse()
    of_source, of_written = computed
    found = {what: Agreement.of(of_source[what], of_written[what]) for what in given}
    for what, agreement in found.items():
        if agreement.worst is not None:
            raise CheckpointError(
                f"what was written computes another model: logits of {what} differ by {agreement.difference:.3g} of "
                f"their size, {agreement.worst[0]:.6g} of the source and {agreement.worst[1]:.6g} of what was "
                "written. Nothing was left behind.",
                where=str(source),
                way_out="Report this with the model's config.json; --no-verify (of mm-convert --verify false) "
                "writes all the same.",
            )
    sentence = _agreement_words(found) + told
    if unused:
        sentence += f"; not used for them, so not compared: {unused}"
    return sentence


def _agreement_words(found: Mapping[str, Agreement]) -> str:
    if not any(agreement.compared for agreement in found.values()):
        raise _NotCompared("the source itself computes no finite number of them")
    most = max(agreement.difference for agreement in found.values())
    how = f"to {most:.1g} of their size" if most else "to the bit"
    counts = "; ".join(agreement.told() for agreement in found.values())
    what = " and of ".join(found)
    return f"logits of {what} are those of the source, {how} (compared: {counts}; both under one config.json)"


# --- the two models ---------------------------------------------------------------------------------------------------


def _built(home: Path, any_size: bool) -> nn.Module:
    """transformers' model without memory, as training builds it."""
    if "quantization_config" in read_json_object(home / "config.json", CheckpointError):
        raise _NotCompared("the weights are quantised")
    arguments = ModelArguments(model_name_or_path=str(home), attn_implementation="eager")
    try:
        model = ModelHub.build(arguments, param_dtype=torch.float32)
    except _BUILD_ERRORS as error:
        raise _NotCompared(f"the model cannot be built: {_first_line(error)}") from error
    if not is_transformers(type(model)):
        raise _NotCompared(f"{type(model).__name__} is not a class of transformers")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS and not any_size:
        raise _NotCompared(
            f"the model has {parameters / 1e9:.1f} billion parameters, more than {MOST_PARAMETERS / 1e9:g}; "
            "--verify full compares them"
        )
    if (room := available_bytes()) < (needed := parameters * _BYTES_EACH):
        what = f"the model takes {needed / 2**30:.1f} GiB of memory, and {room / 2**30:.1f} GiB are free"
        if any_size:
            raise MachineError(f"{what}: its logits cannot be compared", way_out="Leave 'full' out of --verify.")
        raise _NotCompared(what)
    return model.eval()


def _fill(model: nn.Module, folder: Path) -> None:
    """What `training.load` does with a folder of this kind, in one process."""
    device = torch.device("cpu")
    if recognise(folder) in ("megatron", "hf"):
        ModelHub.load_weights(model, ModelArguments(), seed=0, device=device, folder=folder)
        return
    materialize(model, device)
    load_tensors(CommittedCheckpoint(find_step(folder), None, None), model, None, Ranks())


def _plain(folder: Path) -> nn.Module:
    """The model of a Hugging Face folder, by transformers alone."""
    model_class: type[PreTrainedModel] = native_class(load_model_config(folder), folder)
    with quiet("transformers"):
        model, report = model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    if lacking := sorted(map(str, report["missing_keys"])):
        raise ValueError(f"it lacks {lacking[0]}")
    return model.eval()


def _written_dtypes(plain: Path) -> dict[str, torch.dtype]:
    """Name of a parameter → the type that a folder has it in: what is read of a wider checkpoint is rounded so."""
    outline = TransformersOutline.of(plain)
    if outline is None:
        raise _NotCompared("config.json names no class of transformers")
    with open_weights(plain) as stored:
        own, _ = outline.own_tensors(stored)
        return {name: tensor.dtype for name, tensor in own.items()}


# --- what they are shown ----------------------------------------------------------------------------------------------


def _inputs(shown: Path, home: Path) -> tuple[dict[str, Inputs], str]:
    """By name, and what is to be said about what is not among them.

    Args:
        shown: Folder of the model that takes least.
        home: Of the other one.
    """
    config = read_json_object(shown / "config.json", CheckpointError)
    other = read_json_object(home / "config.json", CheckpointError)
    given: dict[str, Inputs] = {f"{_TOKENS} tokens": {"input_ids": _tokens(config, other)}}
    not_shown = ""
    sections = [*config, *config.get("thinker_config", {})]
    for start, (what, item) in _MEDIA.items():
        if not any(section.startswith(start) for section in sections):
            continue
        try:
            given[what] = _shown(item, shown)
        except _BUILD_ERRORS as error:
            not_shown += f"; no {what.removeprefix('a ')} was shown: {_first_line(error)}"
    return given, not_shown


def _tokens(*configs: Mapping[str, object]) -> torch.Tensor:
    """(1, tokens): words that stand for no medium."""
    sizes: list[int] = []
    special: set[int] = set()
    sections = list(configs)
    for section in sections:  # grows as it is read: sections of sections too
        for key, value in section.items():
            if isinstance(value, dict):
                sections.append(value)
            elif type(value) is int and key == "vocab_size":
                sizes.append(value)
            elif type(value) is int and key.endswith(("token_id", "token_index")):
                special.add(value)
    words = [number for number in range(min(sizes, default=0)) if number not in special]
    if not words:
        raise _NotCompared("config.json says no vocabulary")
    picked = torch.randint(len(words), (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return torch.tensor(words)[picked]


def _shown(item: Callable[[Path], MediaItem], home: Path) -> Inputs:
    """A question about a medium, as training shows it to the model."""
    encoder = QuestionEncoder(home)
    with tempfile.TemporaryDirectory() as folder:
        question = encoder.encode(ask("What is it?", [item(Path(folder))]).sample, encoder.media(Path(folder)))
        return encoder.collate([question])


def _noise(count: int) -> bytes:
    numbers = torch.randint(256, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return numbers.numpy().tobytes()


def _picture(folder: Path) -> MediaItem:
    from PIL import Image

    path = folder / "noise.png"
    Image.frombytes("RGB", (_PICTURE, _PICTURE), _noise(3 * _PICTURE**2)).save(path)
    return MediaItem("image", str(path))


def _sound(folder: Path) -> MediaItem:
    path = folder / "noise.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(_noise(2 * _SAMPLES))
    return MediaItem("audio", str(path))


_MEDIA: Mapping[str, tuple[str, Callable[[Path], MediaItem]]] = {
    "vision": ("a picture", _picture),
    "audio": ("a sound", _sound),
}
"""What sections of config.json begin with → what their towers are shown."""


def _logits(model: nn.Module, given: Mapping[str, Inputs]) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {what: model(**inputs, use_cache=False).logits for what, inputs in given.items()}


def _first_line(error: Exception) -> str:
    text = error.problems[0].what if isinstance(error, MMError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0]


# --- weights that a forward used --------------------------------------------------------------------------------------
# Which of a model's weights a computation uses: what it leaves alone, it says nothing about.

_SHOWN = 3


class UsedWeights(TorchFunctionMode):
    """Notes which parameters torch's functions are given inside of the `with` block.

    Args:
        model: Whose.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._used: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reads_attribute = getattr(func, "__name__", "") == "__get__"
        if isinstance(result, torch.Tensor | tuple | list) and not reads_attribute:
            self._note((*args, *kwargs.values()))
        return result

    def _note(self, values: Sequence[object]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                self._used.add(id(value))
            elif isinstance(value, tuple | list):
                self._note(value)

    def told(self) -> str:
        """The parts of the model that were not used, as `audio_tower (69 tensors)`; empty where all were."""
        parts = self._unused("", self._model)
        words = []
        for name, tensors in parts[:_SHOWN]:
            count = "1 tensor" if tensors == 1 else f"{tensors} tensors"
            words.append(f"{name} ({count})")
        if len(parts) > _SHOWN:
            words.append(f"{len(parts) - _SHOWN:,} more")
        return ", ".join(words)

    def _unused(self, name: str, module: nn.Module) -> list[tuple[str, int]]:
        """The largest parts of which nothing was used, each with its number of tensors."""
        parameters = {id(parameter) for parameter in module.parameters()}
        if not parameters & self._used:
            if parameters:
                return [(name, len(parameters))]
            return []
        dot = f"{name}." if name else ""
        unused = []
        for key, tensor in module.named_parameters(recurse=False):
            if id(tensor) not in self._used:
                unused.append((dot + key, 1))
        for key, child in module.named_children():
            unused += self._unused(dot + key, child)
        return unused
