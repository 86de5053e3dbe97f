"""The command `mm-convert <Converter> <subcommand> --flags`, in the grammar of the documents.

The converters are listed here by name, so that the help needs no torch; a converter's module is imported when it is
called, and its subcommands are the methods that it defines.
"""

from __future__ import annotations

import importlib
import inspect
import io
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_mm.core.errors import ConfigError, ExitCode, Problem, UsageError, told_as
from mindspeed_mm.core.suggest import did_you_mean

_FSDP = "mindspeed_mm.checkpoint.fsdp"
_MEGATRON = "mindspeed_mm.checkpoint.ptd.converters"
_FAMILIES = "mindspeed_mm.tasks.convert.family_converters"
_ORIGINAL = "mindspeed_mm.checkpoint.original"
_GENERATORS = f"{_ORIGINAL}.converters"
CONVERTERS: dict[str, tuple[str, str]] = {
    "GenericDCPConverter": (f"{_FSDP}.generic_dcp_converter", "Any model that transformers knows ↔ DCP."),
    "Qwen3VLConverter": (_FAMILIES, "Qwen3-VL ↔ DCP, adapters of it, and merging them."),
    "Qwen35Converter": (_FAMILIES, "Qwen3.5 ↔ DCP, adapters of it, and merging them."),
    "Mistral3Converter": (_FAMILIES, "Mistral 3 ↔ DCP, adapters of it, and merging them."),
    "ExpertMergeDcpConverter": (_FAMILIES, "Experts stored one by one on the hub, stacked in DCP."),
    "Qwen2VLConverter": (_MEGATRON, "Qwen2-VL ↔ Megatron-style checkpoint (hf2mg, mg2hf)."),
    "Qwen2_5_VLConverter": (_MEGATRON, "Qwen2.5-VL ↔ Megatron-style checkpoint (hf2mg, mg2hf)."),
    "Qwen2_5_OmniConverter": (_MEGATRON, "Qwen2.5-Omni's thinker ↔ Megatron-style checkpoint (hf2mg, mg2hf)."),
    "Qwen3VLMegatronConverter": (
        _MEGATRON,
        "Qwen3-VL, dense and MoE ↔ Megatron-style checkpoint (hf2mg, mg2hf).",
    ),
    "InternVLConverter": (_MEGATRON, "InternVL 2.5 and 3 ↔ Megatron-style checkpoint (hf2mg, mg2hf)."),
    "GlmConverter": (_MEGATRON, "GLM-4.1V ↔ Megatron-style checkpoint (hf2mg, mg2hf)."),
    "DeepSeekVLConverter": (_MEGATRON, "DeepSeek-VL2 ↔ Megatron-style checkpoint (hf2mg, mg2hf)."),
    "LanguageModelConverter": (_MEGATRON, "Llama, Qwen, Mixtral, GLM, DeepSeek alone ↔ Megatron-style checkpoint."),
    "WanConverter": (_GENERATORS, "Wan 2.1 and 2.2: diffusers, the authors' names, MindSpeed-MM's names."),
    "VACEConverter": (_GENERATORS, "VACE, Wan's control variant: the same layouts."),
    "CogVideoConverter": (_GENERATORS, "CogVideoX 1.0 and 1.5: the same layouts."),
    "HunyuanVideoConverter": (_GENERATORS, "HunyuanVideo and HunyuanVideo 1.5: the same layouts."),
    "GeneratorConverter": (_GENERATORS, "Any of these, FLUX and LTX: diffusers' folder ↔ the authors' names."),
    "LuminaConverter": (f"{_ORIGINAL}.lumina", "Lumina-mGPT: Hugging Face folder ↔ MindSpeed-MM's folder."),
}
"""Name → (module, help line)."""
PLANNED = ("Qwen3TTSConverter", "OpenSoraPlanConverter", "BagelConverter", "StepVideoConverter")
"""Converters of models that are not built here yet."""

USAGE = """\
Usage: mm-convert CONVERTER [--version t2v] SUBCOMMAND [--flag value]... [--config file.yaml] [--print_config]
                  [--plugin PACKAGE]

Convert checkpoints between layouts. The output folder appears when it is complete and was read back.
"""
EXAMPLES = """\
Examples:
  mm-convert GenericDCPConverter hf_to_dcp --hf_dir models/Qwen3-0.6B --dcp_dir models/Qwen3-0.6B-dcp
  mm-convert GenericDCPConverter dcp_to_hf --load_dir run --save_dir exported --model_assets_dir models/Qwen3-0.6B
  mm-convert GenericDCPConverter hf_to_dcp --print_config > convert.yaml
  mm-convert GenericDCPConverter hf_to_dcp --config convert.yaml
  mm-convert WanConverter hf_to_mm --cfg.source_path models/Wan/transformer --cfg.target_path models/Wan-mm
  mm-convert CogVideoConverter --version t2v source_to_mm --cfg.source_path models/SAT --cfg.target_path models/mm

hf2mg and mg2hf are other names of hf_to_mm (Hugging Face to Megatron) and mm_to_hf (Megatron to Hugging Face).
A converter of your own: a subclass of mindspeed_mm.checkpoint.common.converter.Converter in a package that
--plugin names, as training.plugin does in a YAML file.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code."""
    from mindspeed_mm.cli.main import guarded

    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(guarded(lambda: run(words), with_traceback="--traceback" in words))


def run(words: list[str]) -> int:
    """Run a command; errors are raised.

    Raises:
        UsageError: A word is unknown.
        ConfigError: A value is missing, unknown or of the wrong type.
    """
    words = [word for word in words if word != "--traceback"]
    plugins, words = _taken("--plugin", words)
    _import_plugins(plugins)
    wants_help = any(word in ("-h", "--help", "help") for word in words)
    words = [word for word in words if word not in ("-h", "--help", "help")]
    if not words:
        print(_overview())
        return ExitCode.OK
    converter = _converter(words[0])
    built_with, words = _constructor_words(converter, words)
    if len(words) == 1:
        print(_converter_help(converter))
        return ExitCode.OK if wants_help else ExitCode.USAGE
    name, method = _subcommand(converter, words[1])
    if wants_help:
        print(_subcommand_help(converter, name, method))
        return ExitCode.OK
    built = converter(**built_with)
    built.examine = _same_logits
    return _call(built, name, method, words[2:])


def _same_logits(*arguments: Any) -> str:
    from mindspeed_mm.tasks.convert.same_logits import same_logits  # models: not for --help

    return same_logits(*arguments)


def _constructor_words(converter: type[Any], words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Flags before the subcommand say how the converter is built: `CogVideoConverter --version t2v source_to_mm`."""
    end = 1
    while end < len(words) and words[end].startswith("--"):
        end += 1 if "=" in words[end] else 2
    own = words[1:end]
    if not own:
        return {}, words
    build = converter.__init__
    fields = {} if build is object.__init__ else _flags(build)
    given = _parse_flags(own, fields, f"mm-convert {converter.__name__}")
    return _validated(build, given, f"mm-convert {converter.__name__}"), [words[0], *words[end:]]


def _call(converter: Any, name: str, method: Callable[..., Any], words: list[str]) -> int:
    printing = any(word.partition("=")[0] == "--print_config" for word in words)
    words = [word for word in words if word.partition("=")[0] != "--print_config"]
    files, words = _taken("--config", words)
    fields = _flags(method)
    given: dict[str, Any] = {}
    for file in files:
        _merge(given, _read_yaml(Path(file)))
    command = f"mm-convert {type(converter).__name__} {name}"
    _merge(given, _parse_flags(words, fields, command))
    if printing:
        print(_as_yaml(fields, given), end="")
        return ExitCode.OK
    values = _validated(method, given, command)
    with told_as(lambda problem: _as_flag(problem, fields)):
        done = method(converter, **values)
    if done is not None and hasattr(done, "lines"):
        print("\n".join(done.lines()))
    return ExitCode.OK


# --- which converter, which subcommand --------------------------------------------------------------------------------


def _import_plugins(names: Sequence[str]) -> None:
    if names:
        from mindspeed_mm.fsdp.utils.register import import_plugin

        import_plugin(tuple(names), key="--plugin")


def _registry() -> dict[str, type[Any]]:
    from mindspeed_mm.checkpoint.common.converter import Converter

    return dict(Converter.registry)


def _converter(name: str) -> type[Any]:
    if name in CONVERTERS:
        importlib.import_module(CONVERTERS[name][0])
    found = _registry().get(name)
    if found is not None:
        return found
    if name in PLANNED:
        raise UsageError(f"{name} is planned: this family is not built yet")
    known = [*CONVERTERS, *_registry()]
    raise UsageError(
        f"unknown converter '{name}'", way_out=f"{did_you_mean(name, known)}See mm-convert --help for all of them."
    )


def _subcommand(converter: type[Any], word: str) -> tuple[str, Callable[..., Any]]:
    from mindspeed_mm.checkpoint.common.converter import ALIASES, SUBCOMMANDS

    found = converter.subcommands()
    name = ALIASES.get(word, word)
    if name in found:
        return name, found[name]
    what = "has no" if name in SUBCOMMANDS else "has no subcommand"
    raise UsageError(
        f"{converter.__name__} {what} '{word}'",
        way_out=f"{did_you_mean(word, found)}It has: {', '.join(found)}.",
    )


# --- flags ------------------------------------------------------------------------------------------------------------


def _flags(method: Callable[..., Any]) -> dict[str, tuple[Any, Any, str]]:
    """Dotted name → (type, default, help); a default of `inspect.Parameter.empty` is none."""
    described = _argument_help(method)
    found: dict[str, tuple[Any, Any, str]] = {}
    for name, kind, default in _parameters(method):
        if _is_model(kind):
            found |= _model_flags(name, kind, is_needed=default is inspect.Parameter.empty)
        else:
            found[name] = (kind, default, described.get(name, ""))
    return found


def _parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    kinds = typing.get_type_hints(method)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [(parameter.name, kinds.get(parameter.name, str), parameter.default) for parameter in parameters]


def _model_flags(prefix: str, model: Any, *, is_needed: bool) -> dict[str, tuple[Any, Any, str]]:
    found: dict[str, tuple[Any, Any, str]] = {}
    for name, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        needed = is_needed and field.is_required()
        if inner is not None:
            found |= _model_flags(f"{prefix}.{name}", inner, is_needed=needed)
        else:
            default = inspect.Parameter.empty if needed else None if field.is_required() else field.get_default()
            found[f"{prefix}.{name}"] = (field.annotation, default, field.description or "")
    return found


def _is_model(kind: Any) -> bool:
    from pydantic import BaseModel

    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def _model_of(kind: Any) -> Any | None:
    """The pydantic model of an annotation, also of an optional one."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return next((option for option in options if _is_model(option)), None)


def _argument_help(method: Callable[..., Any]) -> dict[str, str]:
    """The `Args:` section of a docstring: name → text."""
    section = inspect.cleandoc(method.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for item in re.split(r"\n    (?=\w+:)", "\n" + inspect.cleandoc("    " + section).replace("\n", "\n    ")):
        name, colon, text = item.strip().partition(":")
        if colon and name.isidentifier():
            found[name] = " ".join(text.split())
    return found


def _parse_flags(words: list[str], fields: Mapping[str, Any], command: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        name = flag.removeprefix("--")
        if not flag.startswith("--"):
            raise UsageError(f"'{flag}' is no flag", way_out=f"Flags begin with two dashes. See {command} --help.")
        if name not in fields and not any(known.startswith(f"{name}.") for known in fields):
            near = did_you_mean(f"--{name}", [f"--{known}" for known in fields])
            raise UsageError(f"unknown flag '--{name}'", way_out=f"{near}See {command} --help.")
        position += 1
        if not equals:
            if position < len(words) and not words[position].startswith("--"):
                value = words[position]
                position += 1
            elif name in fields and bool in (fields[name][0], *typing.get_args(fields[name][0])):
                value = "true"
            else:
                raise UsageError(f"'--{name}' needs a value", way_out=f"See {command} --help.")
        _merge(given, _nested(name, _value(value, name, fields)))
    return given


def _value(text: str, name: str, fields: Mapping[str, Any]) -> Any:
    """Paths and words stay text; lists, tables, numbers and switches are YAML."""
    kind = fields[name][0] if name in fields else dict
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if str in options or Path in options:
        return text
    value = _yaml(text, f"--{name}")
    if isinstance(value, str):  # `a,b,c,d`, as the documents write lists and mappings
        items = [item.strip() for item in value.split(",")]
        origins = [typing.get_origin(option) or option for option in options]
        if dict in origins and len(items) % 2 == 0:
            return dict(zip(items[::2], items[1::2], strict=True))
        if list in origins:
            return items
    return value


def _nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return typing.cast(dict[str, Any], value)


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _taken(flag: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The values of a flag that may stand anywhere, and the other words."""
    values, rest, position = [], [], 0
    while position < len(words):
        name, equals, value = words[position].partition("=")
        if name == flag and not equals:
            position += 1
            if position == len(words):
                raise UsageError(f"'{flag}' needs a value")
            value = words[position]
        if name == flag:
            values.append(value)
        else:
            rest.append(words[position])
        position += 1
    return values, rest


# --- values -----------------------------------------------------------------------------------------------------------


def _validated(method: Callable[..., Any], given: Mapping[str, Any], command: str) -> dict[str, Any]:
    from pydantic import ConfigDict, ValidationError, create_model

    fields: dict[str, Any] = {
        name: (kind, ... if default is inspect.Parameter.empty else default)
        for name, kind, default in _parameters(method)
    }
    model = create_model("Flags", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        checked = model.model_validate(dict(given))
    except ValidationError as error:
        errors = error.errors()
        problems = [problem for each in errors for problem in _problems(each, method)]
        example = ""
        if any(each["type"] == "missing" for each in errors):
            needs = [need for name, (kind, default) in fields.items() if default is ... for need in _needs(name, kind)]
            words = [command, *(f"--{flag} {flag.rpartition('.')[2].upper()}" for flag, *_ in needs)]
            example = f" For example: {' '.join(words)}"
        raise ConfigError(f"the flags do not fit.{example}", problems=problems) from None
    return {name: getattr(checked, name) for name in fields}


def _problems(error: Any, method: Callable[..., Any]) -> list[Problem]:
    """What is wrong with a flag; of a section that is missing, each flag in it that is needed."""
    name = ".".join(str(part) for part in error["loc"] if not isinstance(part, int))
    if error["type"] == "missing":
        first, *rest = error["loc"]
        kind = next(kind for parameter, kind, _ in _parameters(method) if parameter == first)
        for part in rest:
            kind = _model_of(kind).model_fields[part].annotation  # type: ignore[union-attr]
        helps = {flag: text for flag, (_, _, text) in _flags(method).items()}
        found = []
        for flag, *others in _needs(name, kind):
            rest = f", or another: {', '.join(other.rpartition('.')[2] for other in others)}" if others else ""
            found.append(Problem(f"is needed{rest}", key=f"--{flag}", way_out="" if others else helps[flag]))
        return found
    if error["type"] == "extra_forbidden":
        return [Problem("is unknown", key=f"--{name}", way_out=did_you_mean(name, list(_flags(method))).strip())]
    return [Problem(f"{error['input']!r:.80}: {error['msg'][0].lower()}{error['msg'][1:]}", key=f"--{name}")]


def _needs(name: str, kind: Any) -> Iterator[list[str]]:
    """Flags that a parameter cannot do without, each with those that would do in its place."""
    model = _model_of(kind)
    if model is None:
        yield [name]
        return
    inside = {f"{name}.{part}": field for part, field in model.model_fields.items()}
    required = {flag: field.annotation for flag, field in inside.items() if field.is_required()}
    if not required:
        yield list(inside)
    for flag, inner in required.items():
        yield from _needs(flag, inner)


def _as_flag(problem: Problem, flags: Collection[str]) -> Problem:
    """Under the flag that somebody has to change, where the key is its name or the end of it."""
    if not problem.key or problem.key.startswith("--"):
        return problem
    meant = [flag for flag in flags if f".{flag}".endswith(f".{problem.key}")]
    if any(flag.startswith(f"{problem.key}.") for flag in flags):
        meant = [problem.key]
    return replace(problem, key=f"--{meant[0]}") if len(meant) == 1 else problem


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(file), key="--config") from error
    content = _yaml(text, str(file))
    if content is not None and not isinstance(content, dict):
        raise ConfigError("is not a table of flags", where=str(file), key="--config")
    return _without_empty(content or {})


def _without_empty(content: Mapping[str, Any]) -> dict[str, Any]:
    """What `--print_config` left open is not given."""
    kept = {k: _without_empty(v) if isinstance(v, Mapping) else v for k, v in content.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _yaml(text: str, where: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe").load(text)
    except YAMLError as error:
        raise ConfigError(f"is not valid YAML: {str(error).splitlines()[0]}", where=where) from error


def _as_yaml(fields: Mapping[str, tuple[Any, Any, str]], given: Mapping[str, Any]) -> str:
    """Every flag with its value, its help above it; what is needed and not given is left open."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    root = CommentedMap()
    for name, (_, default, text) in fields.items():
        *path, last = name.split(".")
        place, value, depth = root, given, 0
        for part in path:
            place = place.setdefault(part, CommentedMap())
            value = value.get(part, {}) if isinstance(value, Mapping) else {}
            depth += 1
        shown = value.get(last) if isinstance(value, Mapping) and last in value else default
        place[last] = None if shown is inspect.Parameter.empty else _plain(shown)
        need = " (needed)" if default is inspect.Parameter.empty else ""
        place.yaml_set_comment_before_after_key(last, before=f"{text}{need}", indent=2 * depth)
    out = io.StringIO()
    YAML().dump(root, out)
    return out.getvalue()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


# --- help -------------------------------------------------------------------------------------------------------------


def _overview() -> str:
    lines = {name: text for name, (_, text) in CONVERTERS.items()}
    for name, found in _registry().items() if "mindspeed_mm.checkpoint.common.converter" in sys.modules else ():
        lines.setdefault(name, (found.__doc__ or "").strip().partition("\n")[0])
    lines |= dict.fromkeys(PLANNED, "Planned: this family is not built yet.")
    width = max(map(len, lines))
    table = "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())
    return f"{USAGE}\nConverters:\n{table}\n\n{EXAMPLES}"


def _converter_help(converter: type[Any]) -> str:
    found = converter.subcommands()
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {(m.__doc__ or '').strip().partition(chr(10))[0]}" for name, m in found.items()]
    title = inspect.cleandoc(converter.__doc__ or "")
    usage = f"Usage: mm-convert {converter.__name__} SUBCOMMAND [--flag value]..."
    return "\n".join([usage, "", title, "", "Subcommands:", *lines])


def _subcommand_help(converter: type[Any], name: str, method: Callable[..., Any]) -> str:
    text = inspect.cleandoc(method.__doc__ or "").partition("\n\nArgs:")[0]
    lines = [f"Usage: mm-convert {converter.__name__} {name} [--flag value]... [--config file.yaml]", "", text, ""]
    for flag, (_, default, about) in _flags(method).items():
        note = " (needed)" if default is inspect.Parameter.empty else f" Default: {default}." if default else ""
        lines += [f"  --{flag}", f"      {about}{note}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
