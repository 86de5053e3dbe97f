"""The command `mm-convert <Converter> <subcommand> --flags`, in the grammar of the documents.

The converters are listed here by name, so that the help needs no torch; a converter's module is imported when it is
called, and its subcommands are the methods that it defines.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mindspeed_mm.cli.converter_flags import (
    Subcommand,
    Values,
    as_flag,
    as_yaml,
    flags_of,
    merge,
    of_environment,
    parse_flags,
    read_yaml,
    taken,
    validated,
)
from mindspeed_mm.core.errors import CollectedErrors, ExitCode, UsageError, told_as
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.terminal import say, say_json

if TYPE_CHECKING:
    from mindspeed_mm.checkpoint.common.converter import Converter
    from mindspeed_mm.checkpoint.conversion.run import Conversion

_JSON = "--json"
_HELP_WORDS = {"-h", "--help", "help"}

_FSDP = "mindspeed_mm.checkpoint.fsdp"
_MEGATRON = "mindspeed_mm.checkpoint.ptd.converters"
_CONVERT = "mindspeed_mm.tasks.convert"
_FAMILIES = f"{_CONVERT}.family_converters"
_ORIGINAL = "mindspeed_mm.checkpoint.original"
_GENERATORS = f"{_ORIGINAL}.converters"
CONVERTERS: dict[str, tuple[str, str]] = {
    "GenericDCPConverter": (f"{_FSDP}.generic_dcp_converter", "Any model that transformers knows ↔ DCP."),
    "Qwen3VLConverter": (_FAMILIES, "Qwen3-VL ↔ DCP, adapters of it, and merging them."),
    "Qwen35Converter": (_FAMILIES, "Qwen3.5 ↔ DCP, adapters of it, and merging them."),
    "Mistral3Converter": (_FAMILIES, "Mistral 3 ↔ DCP, adapters of it, and merging them."),
    "MOSSTTSConverter": (_FAMILIES, "MOSS-TTS with a delay pattern ↔ DCP, adapters of it, and merging them."),
    "Qwen3TTSConverter": (f"{_CONVERT}.qwen3_tts", "Qwen3-TTS ↔ DCP, with a voice of its own in the folder."),
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
    "VideoAlignConverter": (_MEGATRON, "VideoAlign: released files, Hugging Face folder, Megatron-style checkpoint."),
    "LanguageModelConverter": (_MEGATRON, "Llama, Qwen, Mixtral, GLM, DeepSeek alone ↔ Megatron-style checkpoint."),
    "WanConverter": (_GENERATORS, "Wan 2.1 and 2.2: diffusers, the authors' names, MindSpeed-MM's names."),
    "VACEConverter": (_GENERATORS, "VACE, Wan's control variant: the same layouts."),
    "CogVideoConverter": (_GENERATORS, "CogVideoX 1.0 and 1.5: the same layouts."),
    "HunyuanVideoConverter": (_GENERATORS, "HunyuanVideo and HunyuanVideo 1.5: the same layouts."),
    "OpenSoraPlanConverter": (
        _GENERATORS,
        "Open-Sora Plan 1.3 and 1.5: the same layouts, and their VAE (vae_convert).",
    ),
    "StepVideoConverter": (_GENERATORS, "Step-Video: released folder, diffusers' layout, MindSpeed-MM's names."),
    "GeneratorConverter": (_GENERATORS, "Any of these, FLUX and LTX: diffusers' folder ↔ the authors' names."),
    "LuminaConverter": (f"{_ORIGINAL}.lumina", "Lumina-mGPT: Hugging Face folder ↔ MindSpeed-MM's folder."),
    "BagelConverter": (f"{_ORIGINAL}.bagel", "BAGEL: the released folder ↔ MindSpeed-MM's folder."),
    "MingConverter": (f"{_ORIGINAL}.ming", "Ming-Lite-Omni: the released folder ↔ what draws, in diffusers' layout."),
    "InternVLUConverter": (f"{_ORIGINAL}.internvlu", "InternVL-U: the released folder ↔ one folder, which trains."),
}
"""Name → (module, help line)."""
PLANNED = ("OpenSoraConverter",)
"""Converters of models that are not built here yet."""

USAGE = """\
Usage: mm-convert CONVERTER [--version t2v] SUBCOMMAND [--flag value]... [--config file.yaml] [--print_config]
                  [--plugin PACKAGE] [--json]

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
Environment variables give flags too, as MM_CONVERT_WANCONVERTER__HF_TO_MM__CFG__SOURCE_PATH, where
JSONARGPARSE_DEFAULT_ENV is true; files and flags override them.
A converter of your own: a subclass of mindspeed_mm.checkpoint.common.converter.Converter in a package that
--plugin names, as training.plugin does in a YAML file.
--json prints what was written as JSON, as mm convert --json does; an error, too.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code."""
    from mindspeed_mm.cli.main import guarded, without_traceback_word

    words = without_traceback_word(sys.argv[1:] if arguments is None else arguments)
    sys.exit(guarded(lambda: run(words), as_json=_JSON in words))


def run(words: list[str]) -> int:
    """Run a command; errors are raised.

    Raises:
        UsageError: A word is unknown.
        ConfigError: A value is missing, unknown or of the wrong type.
    """
    as_json = _JSON in words
    plugins, words = taken("--plugin", [word for word in words if word != _JSON])
    if plugins:
        from mindspeed_mm.fsdp.utils.register import import_plugin

        import_plugin(tuple(plugins), key="--plugin")
    wants_help = not _HELP_WORDS.isdisjoint(words)
    words = [word for word in words if word not in _HELP_WORDS]
    if not words:
        say(_overview())
        return ExitCode.OK
    converter = _converter(words[0])
    built_with, words = _constructor_words(converter, words)
    if len(words) == 1:
        say(_converter_help(converter))
        if wants_help:
            return ExitCode.OK
        return ExitCode.USAGE
    name, method = _subcommand(converter, words[1])
    if wants_help:
        say(_subcommand_help(converter, name, method))
        return ExitCode.OK
    built = converter(**built_with)
    built.examine = _same_logits
    return _run_subcommand(built, name, method, words[2:], as_json=as_json)


def _same_logits(conversion: Conversion, draft: Path, any_size: bool) -> str:
    from mindspeed_mm.tasks.convert.same_logits import same_logits  # models: not for --help

    return same_logits(conversion, draft, any_size)


def _constructor_words(converter: type[Converter], words: list[str]) -> tuple[Values, list[str]]:
    """Flags before the subcommand say how the converter is built: `CogVideoConverter --version t2v source_to_mm`."""
    end = 1
    while end < len(words) and words[end].startswith("--"):
        if (name := words[end].removeprefix("--")) in converter.subcommands():  # written like a flag in some scripts
            words = [*words[:end], name, *words[end + 1 :]]
            break
        end += 1 if "=" in words[end] else 2  # with the value behind it
    own = words[1:end]
    if not own:
        return {}, words
    command = f"mm-convert {converter.__name__}"
    build = inspect.getattr_static(converter, "__init__")
    takes_flags = build is not object.__init__
    given = parse_flags(own, flags_of(build) if takes_flags else {}, command)
    return validated(build, given, command), [words[0], *words[end:]]


def _run_subcommand(converter: Converter, name: str, method: Subcommand, words: list[str], *, as_json: bool) -> int:
    flags_given = [word for word in words if word.partition("=")[0] != "--print_config"]
    printing = len(flags_given) < len(words)
    files, words = taken("--config", flags_given)
    fields = flags_of(method)
    command = f"mm-convert {type(converter).__name__} {name}"
    other_names = converter.other_flags.get(name, {})
    given = of_environment(fields, f"{type(converter).__name__}__{name}")
    for file in files:
        merge(given, {other_names.get(key, key): value for key, value in read_yaml(Path(file)).items()})
    merge(given, parse_flags(words, fields, command, other_names))
    if printing:
        say(as_yaml(fields, given), end="")
        return ExitCode.OK
    values = validated(method, given, command)
    if type(converter).__name__ in CONVERTERS:  # another's may mean something else by the names of its flags
        _check_inputs(name, values)
    with told_as(lambda problem: as_flag(problem, fields)):
        done = method(converter, **values)
    if as_json:
        written = asdict(done) if is_dataclass(done) and not isinstance(done, type) else {}
        say_json({"converter": type(converter).__name__, "subcommand": name, **written})
    elif (lines := getattr(done, "lines", None)) is not None:  # a converter of somebody's own may return nothing
        say("\n".join(lines()))
    return ExitCode.OK


def _check_inputs(subcommand: str, values: Values) -> None:
    """Raise an error for the inputs that are not there, before any of them is read."""
    from mindspeed_mm.checkpoint.common.converter import MAY_BE_FILES, reads

    errors = CollectedErrors()
    for flag, path in _paths(values):
        if reads(subcommand, flag) and not (path.is_file() and flag.rpartition(".")[2] in MAY_BE_FILES):
            errors.attempt(_check_folder, path, f"--{flag}")
    errors.raise_all("inputs cannot be read")


def _check_folder(path: Path, flag: str) -> None:
    from mindspeed_mm.checkpoint.recognise import check_folder_exists

    with told_as(lambda problem: replace(problem, key=flag)):
        check_folder_exists(path)


def _paths(values: Mapping[str, object], section: str = "") -> Iterator[tuple[str, Path]]:
    """Flags that were given a path; those of sections, which are models of pydantic, are dotted."""
    for name, value in values.items():
        if isinstance(value, Path):
            yield f"{section}{name}", value
        elif isinstance(fields := getattr(value, "__dict__", None), dict):
            yield from _paths(fields, f"{section}{name}.")


# --- which converter, which subcommand --------------------------------------------------------------------------------


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


# --- help -------------------------------------------------------------------------------------------------------------


def _overview() -> str:
    lines = {name: text for name, (_, text) in CONVERTERS.items()}
    if "mindspeed_mm.checkpoint.common.converter" in sys.modules:  # plugins import it; the help alone does not
        for name, converter in _registry().items():
            lines.setdefault(name, _summary_of(converter))
    lines |= dict.fromkeys(PLANNED, "Planned: this family is not built yet.")
    return f"{USAGE}\nConverters:\n{_table(lines)}\n\n{EXAMPLES}"


def _converter_help(converter: type[Converter]) -> str:
    usage = f"Usage: mm-convert {converter.__name__} SUBCOMMAND [--flag value]..."
    title = inspect.cleandoc(converter.__doc__ or "")
    lines = {name: _summary_of(method) for name, method in converter.subcommands().items()}
    return "\n".join([usage, "", title, "", "Subcommands:", _table(lines)])


def _summary_of(documented: object) -> str:
    return (documented.__doc__ or "").strip().partition("\n")[0]


def _table(lines: Mapping[str, str]) -> str:
    width = max(map(len, lines), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())


def _subcommand_help(converter: type[Converter], name: str, method: Subcommand) -> str:
    text = inspect.cleandoc(method.__doc__ or "").partition("\n\nArgs:")[0]
    lines = [f"Usage: mm-convert {converter.__name__} {name} [--flag value]... [--config file.yaml]", "", text, ""]
    also = {flag: f" (or --{other})" for other, flag in converter.other_flags.get(name, {}).items()}
    for flag, told in flags_of(method).items():
        note = ""
        if told.is_required:
            note = " (needed)"
        elif told.default:
            note = f" Default: {told.default}."
        lines += [f"  --{flag}{also.get(flag, '')}", f"      {told.help}{note}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
