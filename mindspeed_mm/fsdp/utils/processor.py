"""The processor (or tokenizer) of a model folder, read offline: its chat template is checked before it runs, and the
numbers of its files before anything divides by them, as a fault of theirs would be blamed on the first row whose
picture is prepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.fsdp.params.cards import own_model_types, types_of_processors_in_code
from mindspeed_mm.fsdp.utils.added_tokens import extend_tokenizer
from mindspeed_mm.fsdp.utils.fun_asr_features import asks_for_it, provide_fun_asr_features
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.own_families import know_family_of, model_type_of, own_processor_of
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    Processor: TypeAlias = ProcessorMixin | PreTrainedTokenizerBase
    """Of a multimodal model; of a text model its tokenizer."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
_VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "tekken.json", "*.model", "*.tiktoken")
_MAX_TEMPLATE_CHARACTERS = 200_000
_MOST_BUILT_IN_WORDS = 1
"""What a tokenizer without any file knows at most beside special tokens: T5's has the mark of a space."""
_MAX_TEMPLATE_FACTOR = 10_000
"""The largest number that a template may multiply by, count to or raise to."""


def load_processor(
    folder: str | Path,
    *,
    use_fast: bool = True,
    trust_remote_code: bool = False,
    add_tokens: Sequence[str] = (),
    add_special_tokens: Sequence[str] = (),
    **options: object,
) -> Processor:
    """The processor of a multimodal model's folder, or the tokenizer of a text model's.

    Args:
        folder: A local model folder; nothing is ever downloaded.
        use_fast: Take the torchvision image processor; otherwise the one that works with Pillow.
        trust_remote_code: Let a folder run its own processor code. Classes of transformers come first.
        add_tokens: Tokens that the tokenizer gets unless it has them.
        add_special_tokens: The same, as special tokens.
        options: For the tokenizer, as its class takes them; those that are None are left out.

    Raises:
        ModelFolderError: No folder or no tokenizer there, a broken file, a tokenizer without words, or an
            unsafe chat template.
    """
    folder = Path(folder)
    is_multimodal = _check_files(folder)
    check_processor_settings(folder)
    if asks_for_it(folder):
        provide_fun_asr_features()
    try:
        processor = _read(folder, is_multimodal, use_fast, trust_remote_code=False, **options)
    except ModelFolderError:
        raise  # of a family that is written here, which says it all
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        if not (trust_remote_code and "trust_remote_code" in str(error)):
            has_vocabulary = any(any(folder.glob(pattern)) for pattern in _VOCABULARY_FILES)
            raised = _unreadable(folder, error) if has_vocabulary else _no_vocabulary(folder)
            raise _broken_file(folder) or raised from error
        processor = _read(folder, is_multimodal, use_fast, trust_remote_code=True, **options)
    check_words(processor, folder)
    _fill_padding(processor)
    for source in chat_templates_of(processor).values():
        check_chat_template(source, where=str(folder))
    extend_tokenizer(tokenizer_of(processor), add_tokens, add_special_tokens, where=str(folder))
    return processor


def chat_templates_of(processor: object) -> dict[str, str]:
    """The chat templates, by name, that a processor brings, else the tokenizer inside it; `default` is the one that is
    used where none is named."""
    for holder in (processor, tokenizer_of(processor)):
        named = setting_of(holder, dict, "chat_template")
        if named:
            return named
        only = setting_of(holder, str, "chat_template")
        if only:
            return {"default": only}
    return {}


def _read(folder: Path, is_multimodal: bool, use_fast: bool, *, trust_remote_code: bool, **options: object) -> Any:
    prepare_for_transformers()
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer  # seconds, and only after the guard

    know_family_of(folder)
    common: JsonObject = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    own = {name: value for name, value in options.items() if value is not None}
    reads = (own_processor_of(folder) or AutoProcessor) if is_multimodal else AutoTokenizer
    processor = reads.from_pretrained(str(folder), **common, **own)
    if is_multimodal and not use_fast and hasattr(processor, "image_processor"):
        processor.image_processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil", **common)
    return processor


def tokenizer_of(processor: object) -> PreTrainedTokenizerBase:
    """The tokenizer inside a processor; a tokenizer is returned as it is."""
    return getattr(processor, "tokenizer", processor)


def check_words(processor: object, folder: Path) -> None:
    """Refuse a tokenizer that knows nothing but special tokens: where the files of its vocabulary are missing,
    transformers builds it all the same, and every text becomes empty. What has no tokenizer is passed over.

    Args:
        processor: Processor or tokenizer.
        folder: Where it was read.

    Raises:
        ModelFolderError: Naming the missing file.
    """
    tokenizer = tokenizer_of(processor)
    added = setting_of(tokenizer, dict, "added_tokens_decoder")
    if added is None or len(tokenizer) - len(added) > _MOST_BUILT_IN_WORDS:
        return
    files = setting_of(tokenizer, dict, "vocab_files_names") or {}
    names = list(filter(None, map(files.get, ("vocab_file", "merges_file"))))
    for name in (_TOKENIZER_FILES[0], *names):
        path = folder / name
        if path.is_file():
            raise ModelFolderError(
                f"the vocabulary holds no words, only {len(added)} special tokens",
                where=str(path),
                way_out="Copy the original model's file.",
            )
    raise _no_vocabulary(folder, names)


def _no_vocabulary(folder: Path, names: Sequence[str] = ()) -> ModelFolderError:
    instead = f" (or {' and '.join(names)}, where it has these instead)" if names else ""
    return ModelFolderError(
        f"the tokenizer has no vocabulary: {_TOKENIZER_FILES[0]} is missing",
        where=str(folder),
        way_out=f"Copy {_TOKENIZER_FILES[0]}{instead} of the original model into the folder.",
    )


def check_media_processor(folder: Path) -> None:
    """Refuse a folder without a processor whose model takes media: transformers gives its tokenizer alone, and the
    model would pass for a text model. For rows with media: rows of text need no processor.

    Raises:
        ModelFolderError: Naming the missing file.
    """
    if missing := missing_processor(folder):
        raise missing


def missing_processor(folder: Path) -> ModelFolderError | None:
    """What to say of a folder whose model takes media, but whose processor is missing or of an unknown class; None of
    any other."""
    path = folder / "config.json"
    if unknown := _unknown_class(folder):
        return unknown
    if not path.is_file() or _has_processor(folder):
        return None
    prepare_for_transformers()
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # seconds, and only after the guard

    model_type = read_json_object(path, ModelFolderError).get("model_type")
    if model_type not in PROCESSOR_MAPPING_NAMES and model_type not in own_model_types():
        return None
    return ModelFolderError(
        f"the processor of this '{model_type}' model is missing: the folder has neither {PROCESSOR_FILES[0]} nor "
        f"{PROCESSOR_FILES[1]}",
        where=str(folder),
        way_out=f"Copy {', '.join(PROCESSOR_FILES)}, those that the original model has, into the folder.",
    )


def _unknown_class(folder: Path) -> ModelFolderError | None:
    """What to say where a file names a class of processors that is not registered: transformers then reads the
    tokenizer alone. Classes that come as the folder's own code are left to whoever allows it."""
    if own_processor_of(folder) is not None:
        return None
    prepare_for_transformers()
    from transformers.models.auto.processing_auto import processor_class_from_name  # seconds, and only after the guard

    for path in filter(Path.is_file, map(folder.joinpath, PROCESSOR_FILES)):
        content = read_json_object(path, ModelFolderError)
        name = content.get("processor_class")
        if not isinstance(name, str) or "auto_map" in content or processor_class_from_name(name) is not None:
            continue
        return ModelFolderError(
            f"the processor '{name}' is not registered with transformers",
            where=str(path),
            key="processor_class",
            way_out=f"In the plugin, beside the class: AutoProcessor.register(<its configuration>, {name}, "
            "exist_ok=True). A command finds the plugin by training.plugin or --plugin.",
        )
    return None


def beginning_of(processor: Any) -> list[int]:
    """Tokens that a processor begins every text with by itself, as Molmo2's does: neither its tokenizer nor a chat
    template writes them. Empty: there are none, or its code takes no text alone."""
    if setting_of(processor, object, "tokenizer") is None:
        return []
    tokenizer, word = tokenizer_of(processor), "a"
    try:
        made = list(processor(text=[word])["input_ids"][0])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # foreign code, or needs media
        return []
    plain = list(tokenizer(word, add_special_tokens=False)["input_ids"])
    if made[-len(plain) :] != plain:
        return []
    beginning, begins = made[: -len(plain)], setting_of(tokenizer, int, "bos_token_id")
    if beginning[:2] == [begins, begins]:  # the processor writes one, and its tokenizer another
        return beginning[1:]
    return beginning


def check_chat_template(source: str, *, where: str) -> None:
    """Refuse a template that is not jinja, reaches for Python's internals or blows up memory.

    The sandbox stops attribute tricks when the template runs; sizes it does not limit, so they are read off here.

    Raises:
        ModelFolderError: Saying what was found.
    """
    if len(source) > _MAX_TEMPLATE_CHARACTERS:
        raise _unsafe(f"is {len(source)} characters long, more than {_MAX_TEMPLATE_CHARACTERS}", where)
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_without_generation_blocks(source))
    except jinja2.TemplateSyntaxError as error:
        raise ModelFolderError(
            f"the chat template is not valid jinja: {error.message} (line {error.lineno})",
            where=where,
            way_out="Fix chat_template.jinja, or set data.dataset_param.basic_parameters.template.",
        ) from error
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Mul, nodes.Pow, nodes.Call, nodes.Include)):
        if found := _objection(node):
            raise _unsafe(found, where)


def _without_generation_blocks(source: str) -> str:
    """transformers' own `{% generation %}` tags mark text; they are not part of jinja."""
    for tag in ("{% generation %}", "{%- generation %}", "{% generation -%}", "{%- generation -%}"):
        source = source.replace(tag, "").replace(tag.replace("generation", "endgeneration"), "")
    return source


def _objection(node: nodes.Node) -> str:
    """What is unsafe about a node of a template, or an empty string."""
    if isinstance(node, nodes.Include):
        return "includes another file"
    if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
        return f"reaches for '{node.attr}'"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and str(node.arg.value).startswith("__"):
        return f"reaches for '{node.arg.value}'"
    if isinstance(node, nodes.Pow):
        return "raises to a power"
    counts = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "range"
    if isinstance(node, nodes.Mul) or counts:
        for constant in node.find_all(nodes.Const):
            if isinstance(constant.value, int) and constant.value > _MAX_TEMPLATE_FACTOR:
                return f"repeats something {constant.value:,} times"
    return ""


def _unsafe(found: str, where: str) -> ModelFolderError:
    return ModelFolderError(
        f"the chat template {found}: it is refused as unsafe",
        where=where,
        way_out="Replace chat_template.jinja, or set data.dataset_param.basic_parameters.template.",
    )


def _check_files(folder: Path) -> bool:
    """Whether the folder holds a processor; raises when it holds no tokenizer either."""
    if not folder.is_dir():
        raise ModelFolderError(
            f"'{folder}' is not a folder",
            key="model.model_name_or_path",
            way_out="Use a local folder; nothing is downloaded.",
        )
    is_multimodal = _has_processor(folder)
    if not is_multimodal and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelFolderError(
            "the folder has no processor or tokenizer",
            where=str(folder),
            way_out=f"Copy {_TOKENIZER_FILES[0]} and {_TOKENIZER_FILES[1]} (and {PROCESSOR_FILES[0]} or "
            f"{PROCESSOR_FILES[1]}) of the original model into the folder.",
        )
    return is_multimodal


def _has_processor(folder: Path) -> bool:
    """Whether a processor is made of a folder: it holds settings of one, or its model's code does."""
    if any((folder / name).is_file() for name in PROCESSOR_FILES):
        return True
    return model_type_of(folder) in types_of_processors_in_code()


def _fill_padding(processor: ProcessorMixin | PreTrainedTokenizerBase) -> None:
    """Let another token pad where the tokenizer names none: masks leave padding out of attention and
    loss, so that which one it is does not matter."""
    tokenizer = tokenizer_of(processor)
    if setting_of(tokenizer, int, "pad_token_id") is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token or tokenizer.convert_ids_to_tokens(0)


def _broken_file(folder: Path) -> ModelFolderError | None:
    """The error about the file of the folder that is not JSON, where one is: libraries do not say which they read."""
    names = ["config.json", *PROCESSOR_FILES, *_TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json"]
    for path in map(folder.joinpath, names):
        if path.suffix != ".json" or not path.exists():
            continue
        try:
            content = read_json_object(path, ModelFolderError)
        except ModelFolderError as error:
            return error
        if path.name == "config.json" and not isinstance(content.get("model_type"), str):
            return ModelFolderError("names no model type", where=str(path), key="model_type")
    return None


def _unreadable(folder: Path, error: Exception) -> ModelFolderError:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    way_out = "Compare its tokenizer and processor files with the original model's."
    if "Unrecognized image processor" in str(error):
        first_line = f"{first_line.partition('. ')[0]}."  # behind it, every model type that has one
        way_out = (
            "One of your own is registered in the plugin, beside AutoProcessor.register: AutoImageProcessor.register("
            '<its configuration>, image_processor_classes={"pil": <its class>}, exist_ok=True). Of a released model, '
            "compare the processor files with the original's."
        )
    if "trust_remote_code" in str(error):
        way_out = "It needs the folder's own code: read it, then set model.trust_remote_code: true."
    what = f"the processor cannot be read: {type(error).__name__}: {first_line}"
    return ModelFolderError(what, where=str(folder), way_out=way_out)


# --- the numbers of its files -----------------------------------------------------------------------------------------


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_PIECES = frozenset({"patch_size", "temporal_patch_size", "merge_size", "spatial_merge_size"})
_LARGEST_PIECE = 4096
_SIZES = _PIECES | {
    *("size", "crop_size", "height", "width", "shortest_edge", "longest_edge", "min_pixels", "max_pixels"),
}
"""Whole numbers from 1, lists of them, or tables of them."""
_DIVISORS = frozenset({"rescale_factor", "image_std"})
"""Numbers other than 0, or lists of them."""
_NUMBERS = frozenset({"image_mean"})


def check_processor_settings(folder: Path) -> None:
    """Look through the files of a model folder's processors.

    Raises:
        ModelFolderError: A size is not a number from 1, or what pixels are divided by is 0 or no number.
    """
    for path in map(folder.joinpath, PROCESSOR_FILES):
        if not path.exists():
            continue
        for key, value, wanted in _faults(read_json_object(path, ModelFolderError)):
            raise ModelFolderError(
                f"{value!r:.40} is not {wanted}",
                where=str(path),
                key=key,
                way_out="Compare it with the original model's file.",
            )


def _faults(settings: Mapping[str, object], section: str = "") -> Iterator[tuple[str, object, str]]:
    """(key, value, what it should be) of every number that cannot be used."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _faults(value, f"{section}{key}.")
            continue
        if value is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        if key in _SIZES and not all(map(_is_size, numbers)):
            yield section + key, value, "a whole number from 1"
        elif key in _PIECES and max(numbers, default=1) > _LARGEST_PIECE:
            yield section + key, value, f"at most {_LARGEST_PIECE}"
        if key in _DIVISORS and not all(map(_is_divisor, numbers)):
            yield section + key, value, "a number other than 0"
        if key in _NUMBERS and not all(map(_is_number, numbers)):
            yield section + key, value, "a number, or a list of numbers"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(number: object) -> bool:
    return type(number) is int and number >= 1


def _is_divisor(number: object) -> bool:
    return _is_number(number) and number != 0
