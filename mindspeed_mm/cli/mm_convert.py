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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin

from mindspeed_mm.core.errors import ConfigError, ExitCode, Problem, UsageError, told_as
from mindspeed_mm.core.suggest import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

    from mindspeed_mm.checkpoint.common.converter import Converter
    from mindspeed_mm.checkpoint.conversion.run import Conversion

Subcommand = Callable[..., object]
"""A method of a converter: its parameters are the flags of a subcommand."""
Values = dict[str, object]
"""Values of flags by name, those of a section in a table of their own."""
_REQUIRED = inspect.Parameter.empty
"""The default of a flag that has none."""
_HELP_WORDS = {"-h", "--help", "help"}

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
    plugins, words = _taken("--plugin", words)
    _import_plugins(plugins)
    wants_help = not _HELP_WORDS.isdisjoint(words)
    words = [word for word in words if word not in _HELP_WORDS | {"--traceback"}]
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


def _same_logits(conversion: Conversion, draft: Path, any_size: bool) -> str:
    from mindspeed_mm.tasks.convert.same_logits import same_logits  # models: not for --help

    return same_logits(conversion, draft, any_size)


def _constructor_words(converter: type[Converter], words: list[str]) -> tuple[Values, list[str]]:
    """Flags before the subcommand say how the converter is built: `CogVideoConverter --version t2v source_to_mm`."""
    end = 1
    while end < len(words) and words[end].startswith("--"):
        has_its_value = "=" in words[end]
        end += 1 if has_its_value else 2
    own = words[1:end]
    if not own:
        return {}, words
    command = f"mm-convert {converter.__name__}"
    build = inspect.getattr_static(converter, "__init__")
    fields = {} if build is object.__init__ else _flags(build)
    given = _parse_flags(own, fields, command)
    return _validated(build, given, command), [words[0], *words[end:]]


def _call(converter: Converter, name: str, method: Subcommand, words: list[str]) -> int:
    from mindspeed_mm.checkpoint.conversion.run import Converted

    flags_given = [word for word in words if word.partition("=")[0] != "--print_config"]
    printing = len(flags_given) < len(words)
    files, words = _taken("--config", flags_given)
    fields = _flags(method)
    command = f"mm-convert {type(converter).__name__} {name}"
    given: Values = {}
    for file in files:
        _merge(given, _read_yaml(Path(file)))
    _merge(given, _parse_flags(words, fields, command))
    if printing:
        print(_as_yaml(fields, given), end="")
        return ExitCode.OK
    values = _validated(method, given, command)
    with told_as(lambda problem: _as_flag(problem, fields)):
        done = method(converter, **values)
    if isinstance(done, Converted):
        print("\n".join(done.lines()))
    return ExitCode.OK


# --- which converter, which subcommand --------------------------------------------------------------------------------


def _import_plugins(names: Sequence[str]) -> None:
    if names:
        from mindspeed_mm.fsdp.utils.register import import_plugin

        import_plugin(tuple(names), key="--plugin")


def _registry() -> dict[str, type[Converter]]:
    from mindspeed_mm.checkpoint.common.converter import Converter

    return dict(Converter.registry)


def _converter(name: str) -> type[Converter]:
    if name in CONVERTERS:
        module, _ = CONVERTERS[name]
        importlib.import_module(module)
    registry = _registry()
    if name in registry:
        return registry[name]
    if name in PLANNED:
        raise UsageError(f"{name} is planned: this family is not built yet")
    near = did_you_mean(name, [*CONVERTERS, *registry])
    raise UsageError(f"unknown converter '{name}'", way_out=f"{near}See mm-convert --help for all of them.")


def _subcommand(converter: type[Converter], word: str) -> tuple[str, Subcommand]:
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


@dataclass(frozen=True)
class ConverterFlag:
    """One flag of a subcommand."""

    annotation: object
    default: object
    help: str

    @property
    def is_required(self) -> bool:
        """Whether the subcommand cannot do without it."""
        return self.default is _REQUIRED

    @property
    def types(self) -> tuple[object, ...]:
        """The types that its value may have."""
        return _members(self.annotation)


def _flags(method: Subcommand) -> dict[str, ConverterFlag]:
    """The flags of a subcommand by name; that of a value inside a section is dotted."""
    described = _argument_help(method)
    found: dict[str, ConverterFlag] = {}
    for name, parameter in _parameters(method).items():
        section = _model_of(parameter.annotation)
        if section is None:
            found[name] = ConverterFlag(parameter.annotation, parameter.default, described.get(name, ""))
        else:
            found |= _section_flags(name, section, is_required=parameter.default is _REQUIRED)
    return found


def _parameters(method: Subcommand) -> dict[str, inspect.Parameter]:
    """The parameters besides `self`; one without an annotation is text."""
    _, *parameters = inspect.signature(method, eval_str=True).parameters.values()
    found = {parameter.name: parameter for parameter in parameters}
    for name, parameter in found.items():
        if parameter.annotation is inspect.Parameter.empty:
            found[name] = parameter.replace(annotation=str)
    return found


def _section_flags(prefix: str, section: type[BaseModel], *, is_required: bool) -> dict[str, ConverterFlag]:
    found: dict[str, ConverterFlag] = {}
    for name, field in section.model_fields.items():
        flag = f"{prefix}.{name}"
        inner = _model_of(field.annotation)
        required = is_required and field.is_required()
        if inner is not None:
            found |= _section_flags(flag, inner, is_required=required)
            continue
        default: object
        if required:
            default = _REQUIRED
        elif field.is_required():  # of a section that may be left out
            default = None
        else:
            default = field.get_default()
        found[flag] = ConverterFlag(field.annotation, default, field.description or "")
    return found


def _members(annotation: object) -> tuple[object, ...]:
    """The types that a union allows, or the one type."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _model_of(annotation: object) -> type[BaseModel] | None:
    """The pydantic model of an annotation, also of an optional one."""
    from pydantic import BaseModel

    for member in _members(annotation):
        if inspect.isclass(member) and issubclass(member, BaseModel):
            return member
    return None


def _argument_help(method: Subcommand) -> dict[str, str]:
    """The `Args:` section of a docstring: name → text."""
    section = inspect.cleandoc(method.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        # An argument begins at the first indentation; what is indented further goes on with it.
        begins = re.match(r"    (\w+):(.*)", line)
        if begins:
            name, text = begins.groups()
        else:
            text = line
        found[name] = f"{found.get(name, '')} {text.strip()}".strip()
    return found


def _parse_flags(words: list[str], fields: Mapping[str, ConverterFlag], command: str) -> Values:
    given: Values = {}
    remaining = list(reversed(words))
    while remaining:
        flag, equals, value = remaining.pop().partition("=")
        name = flag.removeprefix("--")
        _check_known(flag, fields, command)
        if not equals:
            if remaining and not remaining[-1].startswith("--"):
                value = remaining.pop()
            elif name in fields and bool in fields[name].types:
                value = "true"
            else:
                raise UsageError(f"'--{name}' needs a value", way_out=f"See {command} --help.")
        _merge(given, _nested(name, _value(value, name, fields)))
    return given


def _check_known(flag: str, fields: Collection[str], command: str) -> None:
    if not flag.startswith("--"):
        raise UsageError(f"'{flag}' is not a flag", way_out=f"Flags begin with two dashes. See {command} --help.")
    name = flag.removeprefix("--")
    is_section = any(known.startswith(f"{name}.") for known in fields)
    if name not in fields and not is_section:
        near = did_you_mean(flag, [f"--{known}" for known in fields])
        raise UsageError(f"unknown flag '{flag}'", way_out=f"{near}See {command} --help.")


def _value(text: str, name: str, fields: Mapping[str, ConverterFlag]) -> object:
    """Paths and words stay text; lists, tables, numbers and switches are YAML."""
    allowed = fields[name].types if name in fields else (dict,)
    if str in allowed or Path in allowed:
        return text
    value = _yaml(text, f"--{name}")
    if not isinstance(value, str):
        return value
    # `a,b,c,d`, as the documents write lists and mappings.
    items = [item.strip() for item in value.split(",")]
    kinds = [get_origin(member) or member for member in allowed]
    if dict in kinds and len(items) % 2 == 0:
        return dict(zip(items[::2], items[1::2], strict=True))
    return items if list in kinds else value


def _nested(name: str, value: object) -> Values:
    *sections, last = name.split(".")
    nested = {last: value}
    for section in reversed(sections):
        nested = {section: nested}
    return nested


def _merge(into: Values, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        inner = into.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            _merge(inner, value)
        else:
            into[key] = value


def _taken(flag: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The values of a flag that may stand anywhere, and the other words."""
    values, others = [], []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != flag:
            others.append(word)
        elif equals:
            values.append(value)
        else:
            following = next(remaining, None)
            if following is None:
                raise UsageError(f"'{flag}' needs a value")
            values.append(following)
    return values, others


# --- values -----------------------------------------------------------------------------------------------------------


def _validated(method: Subcommand, given: Mapping[str, object], command: str) -> Values:
    from pydantic import ConfigDict, ValidationError, create_model

    parameters = _parameters(method)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        fields[name] = (parameter.annotation, ... if parameter.default is _REQUIRED else parameter.default)
    model = create_model("Flags", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        checked = model.model_validate(dict(given))
    except ValidationError as error:
        errors = error.errors()
        problems = []
        for each in errors:
            problems += _problems(each, method)
        has_missing = any(each["type"] == "missing" for each in errors)
        example = f" For example: {_example(command, parameters)}" if has_missing else ""
        raise ConfigError(f"the flags do not fit.{example}", problems=problems) from None
    return dict(checked)  # the fields only, sections as their models


def _example(command: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """A command with every flag that it needs."""
    words = [command]
    for name, parameter in parameters.items():
        if parameter.default is _REQUIRED:
            for flag, *_ in _needs(name, parameter.annotation):
                words.append(f"--{flag} {flag.rpartition('.')[2].upper()}")
    return " ".join(words)


def _problems(error: ErrorDetails, method: Subcommand) -> list[Problem]:
    """What is wrong with a flag; of a section that is missing, each flag in it that is needed."""
    path = [part for part in error["loc"] if isinstance(part, str)]
    name = ".".join(path)
    if error["type"] == "missing":
        return _missing(path, method)
    if error["type"] == "extra_forbidden":
        return [Problem("is unknown", key=f"--{name}", way_out=did_you_mean(name, list(_flags(method))).strip())]
    message = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    return [Problem(f"{error['input']!r:.80}: {message}", key=f"--{name}")]


def _missing(path: list[str], method: Subcommand) -> list[Problem]:
    parameter, *inside = path
    annotation: object = _parameters(method)[parameter].annotation
    for part in inside:
        section = _model_of(annotation)
        assert section is not None  # pydantic looked for a field in it
        annotation = section.model_fields[part].annotation
    flags = _flags(method)
    problems = []
    for flag, *others in _needs(".".join(path), annotation):
        if others:
            names = ", ".join(other.rpartition(".")[2] for other in others)
            problems.append(Problem(f"is needed, or another: {names}", key=f"--{flag}"))
        else:
            problems.append(Problem("is needed", key=f"--{flag}", way_out=flags[flag].help))
    return problems


def _needs(name: str, annotation: object) -> Iterator[list[str]]:
    """Flags that a parameter cannot do without, each with those that would do in its place."""
    section = _model_of(annotation)
    if section is None:
        yield [name]
        return
    fields = section.model_fields
    required = [part for part, field in fields.items() if field.is_required()]
    if not required:
        yield [f"{name}.{part}" for part in fields]
    for part in required:
        yield from _needs(f"{name}.{part}", fields[part].annotation)


def _as_flag(problem: Problem, flags: Collection[str]) -> Problem:
    """Under the flag that somebody has to change, where the key is its name or the end of it."""
    key = problem.key
    if not key or key.startswith("--"):
        return problem
    if any(flag.startswith(f"{key}.") for flag in flags):  # a section
        return replace(problem, key=f"--{key}")
    meant = [flag for flag in flags if f".{flag}".endswith(f".{key}")]
    return replace(problem, key=f"--{meant[0]}") if len(meant) == 1 else problem


def _read_yaml(file: Path) -> Values:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(file), key="--config") from error
    content = _yaml(text, str(file))
    if content is not None and not isinstance(content, dict):
        raise ConfigError("is not a table of flags", where=str(file), key="--config")
    return _without_empty(content or {})


def _without_empty(content: Mapping[str, object]) -> Values:
    """What `--print_config` left open is not given."""
    kept: Values = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            value = _without_empty(value)
        if value is not None and value != {}:
            kept[key] = value
    return kept


def _yaml(text: str, where: str) -> object:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content: object = YAML(typ="safe").load(text)
    except YAMLError as error:
        raise ConfigError(f"is not valid YAML: {str(error).splitlines()[0]}", where=where) from error
    return content


def _as_yaml(fields: Mapping[str, ConverterFlag], given: Mapping[str, object]) -> str:
    """Every flag with its value, its help above it; what is needed and not given is left open."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    root = CommentedMap()
    for name, flag in fields.items():
        *path, last = name.split(".")
        place, values = root, given
        for part in path:
            place = place.setdefault(part, CommentedMap())
            inside = values.get(part)
            values = inside if isinstance(inside, Mapping) else {}
        shown = values.get(last, None if flag.is_required else flag.default)
        place[last] = str(shown) if isinstance(shown, Path) else shown
        needed = " (needed)" if flag.is_required else ""
        place.yaml_set_comment_before_after_key(last, before=f"{flag.help}{needed}", indent=2 * len(path))
    out = io.StringIO()
    YAML().dump(root, out)
    return out.getvalue()


# --- help -------------------------------------------------------------------------------------------------------------


def _overview() -> str:
    lines = {name: text for name, (_, text) in CONVERTERS.items()}
    if "mindspeed_mm.checkpoint.common.converter" in sys.modules:  # plugins import it; the help alone does not
        for name, converter in _registry().items():
            lines.setdefault(name, _first_line(converter))
    lines |= dict.fromkeys(PLANNED, "Planned: this family is not built yet.")
    return f"{USAGE}\nConverters:\n{_table(lines)}\n\n{EXAMPLES}"


def _converter_help(converter: type[Converter]) -> str:
    usage = f"Usage: mm-convert {converter.__name__} SUBCOMMAND [--flag value]..."
    title = inspect.cleandoc(converter.__doc__ or "")
    lines = {name: _first_line(method) for name, method in converter.subcommands().items()}
    return "\n".join([usage, "", title, "", "Subcommands:", _table(lines)])


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def _table(lines: Mapping[str, str]) -> str:
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())


def _subcommand_help(converter: type[Converter], name: str, method: Subcommand) -> str:
    text = inspect.cleandoc(method.__doc__ or "").partition("\n\nArgs:")[0]
    lines = [f"Usage: mm-convert {converter.__name__} {name} [--flag value]... [--config file.yaml]", "", text, ""]
    for flag, told in _flags(method).items():
        note = ""
        if told.is_required:
            note = " (needed)"
        elif told.default:
            note = f" Default: {told.default}."
        lines += [f"  --{flag}", f"      {told.help}{note}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
