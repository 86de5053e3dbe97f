"""What is imported: a file of another tool, a command line, or a shell script, as settings that know their place.

Formats: YAML and JSON by the package's own parser, TOML by the standard library, shell scripts by their text. Nothing
is executed, downloaded or included.
"""

from __future__ import annotations

import operator
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, UsageError, count_problems
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import MOST_DEPTH, parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import Node, plain

FILES = (".yaml", ".yml", ".json", ".toml")
_ASSIGNMENT = re.compile(r"(?:export\s+)?(\w+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_SUMS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod}
UNKNOWN = "\0"
"""Stands in a value for what only a shell can work out."""


@dataclass(frozen=True)
class Setting:
    """A setting as it is given: `datasets[].path` is the key of an entry of a list."""

    key: str
    value: Any
    where: str
    """File, line and column; the words `command line` for a command."""


@dataclass(frozen=True)
class Given:
    """What somebody wants to import."""

    source: str
    settings: list[Setting]
    tree: JsonMapping = field(default_factory=dict)
    """The file's content as plain values; of a command its options."""
    program: tuple[str, ...] = ()
    """Of a command: the program and its first words, such as `swift sft` or `train_network.py`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that a command is started with."""
    folder: Path = Path()
    """Where the file is: files that it names are looked for there as well."""


def read_given(words: Sequence[str]) -> Given:
    """A file, a script, or a command.

    Args:
        words: The name of a file, with options that win over it; or a command, as one word or several.

    Raises:
        UsageError: Nothing is given, or a script without a command that is known.
        ConfigError: The file cannot be read; the first fault is named with its line.
    """
    if not words:
        raise UsageError("nothing to import", key="--from", way_out="Name a file, or write the command behind it.")
    if len(words) == 1 and " " in words[0].strip() and not _is_file(words[0]):
        words = _split(words[0], "command line")
    first = Path(words[0])
    if first.suffix in FILES or (
        _is_file(words[0]) and first.is_file() and first.suffix != ".sh" and not _is_program(first)
    ):
        given = read_file(first)
        if len(words) > 1:
            return with_options(given, options_of(words[1:], "command line"))
        return given
    if first.suffix == ".sh":
        return _read_script(first)
    return _read_command(words, "command line")


def read_file(path: Path) -> Given:
    """A YAML, JSON or TOML file.

    Raises:
        ConfigError: Not there, not text, too large, too deep, or not of its format.
    """
    text = read_config_text(path)
    if path.suffix == ".toml":
        tree = _read_toml(text, path)
        settings = list(_flatten_plain(tree, "", lambda key: f"{path}:{_line_of(text, key)}"))
        return Given(str(path), settings, tree, folder=path.parent)
    document = parse_yaml(text, str(path))
    if document.problems:
        raise ConfigError(count_problems(path, document.problems), problems=document.problems)
    if not isinstance(document.root.value, dict):
        what = "the file is empty" if document.root.value is None else "holds no settings"
        raise ConfigError(what, where=str(path), way_out="Name a configuration file of another trainer.")
    return Given(str(path), list(_flatten(document.root, "")), plain(document.root), folder=path.parent)


def with_options(given: Given, options: Sequence[Setting]) -> Given:
    """The same with options that win over the file."""
    named = {option.key for option in options}
    settings = [*(each for each in given.settings if each.key not in named), *options]
    return Given(
        given.source,
        settings,
        {**given.tree, **{option.key: option.value for option in options}},
        given.program,
        given.environment,
        given.folder,
    )


def options_of(words: Sequence[str], where: str) -> list[Setting]:
    """`--key value …`, `--key=value`, `--switch` and `key=value` as settings; dashes in names become underscores."""
    found: dict[str, list[Any]] = {}
    switches: set[str] = set()
    name = ""
    for word in words:
        if match := re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL):
            name = match[1].replace("-", "_") if "." not in match[1] else match[1]
            found[name] = [] if match[2] is None else [value_of(match[2])]
            switches.add(name)
        elif name:
            found[name].append(value_of(word))
        elif match := re.fullmatch(r"([A-Za-z][\w.]*)=(.*)", word, re.DOTALL):
            found[match[1]] = [value_of(match[2])]
    return [Setting(key, _given_value(values), where) for key, values in found.items()]


def value_of(text: str) -> object:
    """A word of a command as the value that YAML would read."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "none", "~"):
        return None
    if _NUMBER.fullmatch(text):
        if re.fullmatch(r"[+-]?\d+", text):
            return int(text)
        return float(text)
    return text


def _given_value(values: Sequence[object]) -> object:
    """A switch is on, one value is itself, several are a list."""
    if not values:
        return True
    if len(values) == 1:
        return values[0]
    return values


def _flatten(node: Node, prefix: str) -> Iterator[Setting]:
    """The leaves below a mapping; a list of mappings has the keys of its entries."""
    for name, entry in node.value.items():
        key, value = prefix + name, entry.node.value
        if isinstance(value, dict):
            yield from _flatten(entry.node, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item.value, dict) for item in value):
            for item in value:
                yield from _flatten(item, f"{key}[].")
        else:
            yield Setting(key, plain(entry.node), str(entry.key))


def _flatten_plain(tree: Mapping[str, object], prefix: str, place: Any) -> Iterator[Setting]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict):
            yield from _flatten_plain(value, f"{key}.", place)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                yield from _flatten_plain(item, f"{key}[].", place)
        else:
            yield Setting(key, value, place(key))


def _read_toml(text: str, path: Path) -> JsonObject:
    if _too_deep(text):
        what = f"nested deeper than {MOST_DEPTH} levels"
        raise ConfigError(what, where=str(path), way_out="Flatten it.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+), column (\d+)", str(error))
        where = f"{path}:{place[1]}:{place[2]}" if place else str(path)
        what = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"not valid TOML: {what[:1].lower()}{what[1:]}", where=where) from None


def _too_deep(text: str) -> bool:
    """Whether brackets or dotted names nest deeper than a configuration may: the library's parser recurses."""
    level = 0
    for character in text:
        level += (character in "[{") - (character in "]}")
        if level > MOST_DEPTH:
            return True
    return any(line.count(".") > MOST_DEPTH for line in text.splitlines() if line.lstrip().startswith("["))


def _line_of(text: str, key: str) -> int:
    """The line of a key's last name, the first one of that name."""
    found = re.search(rf"^\s*{re.escape(key.rpartition('.')[2])}\s*=", text, re.MULTILINE)
    if found:
        return text.count("\n", 0, found.start()) + 1 + found.group().count("\n")
    return 1


def _split(text: str, where: str) -> list[str]:
    try:
        return shlex.split(_without_comment(re.sub(r"\\\r?\n", " ", text)))
    except ValueError as error:
        raise ConfigError(f"cannot be read as a command: {str(error).lower()}", where=where) from None


def _without_comment(line: str) -> str:
    """A line up to a `#` that begins a word outside of quotes: `rows.jsonl#500` is a word."""
    quote = ""
    for number, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (number == 0 or line[number - 1].isspace()):
            return line[:number]
    return line


def _is_file(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):  # too long for a name
        return False


def _is_program(path: Path) -> bool:
    """Whether a file is a script of Python, whose options follow."""
    return path.suffix == ".py"


def _read_script(path: Path) -> Given:
    """The command of a shell script that trains; variables that it sets are filled in."""
    from mindspeed_mm.tasks.importing.recognise import tool_of_program

    text = read_config_text(path)
    variables: dict[str, str] = {}
    commands: list[Given] = []
    for number, line in _logical_lines(text):
        try:
            words = shlex.split(_without_comment(_computed(line, variables)))
        except ValueError:
            continue
        words = [_with_variables(word, variables) for word in words]
        if words and words[0] in ("export", "set"):
            words = words[1:]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            variables[match[1]] = match[2]
            words = words[1:]
        if words:
            given = _read_command(words, f"{path}:{number}", dict(variables))
            if tool_of_program(given.program) is not None:
                commands.append(given)
    if not commands:
        known = "llamafactory-cli, swift, axolotl, trl, or a training script of kohya, musubi-tuner or diffusers"
        raise UsageError("starts no training that is known", where=str(path), way_out=f"Known are {known}.")
    trains = [given for given in commands if not _only_serves(given.program)]
    chosen = (trains or commands)[0]
    return Given(str(path), chosen.settings, chosen.tree, chosen.program, chosen.environment, folder=path.parent)


def _only_serves(program: tuple[str, ...]) -> bool:
    return any(
        word in ("infer", "deploy", "rollout", "export", "eval", "vllm-serve", "chat", "api") for word in program
    )


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of commands, with continued lines joined; comments between them are left out."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") and (held or stripped.startswith("#!") or not held):
            continue
        start = start if held else number
        if stripped.endswith("\\"):
            held += stripped[:-1] + " "
            continue
        # a quote that is open goes on in the next line
        held += stripped
        if held.count("'") % 2 or held.count('"') % 2:
            held += "\n"
            continue
        if held:
            yield start, held.rstrip("&; ")
        held = ""
    if held.strip():
        yield start, held.rstrip("\\&; \n")


def _computed(line: str, variables: Mapping[str, str]) -> str:
    """A line with the results of divisions and the like of two whole numbers: `$(expr 16 / $n)`, `$((16 / n))`."""

    def result(match: re.Match[str]) -> str:
        inside = match[1] or match[2] or match[3]
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[0]), inside)
        parts = re.fullmatch(r"\s*(\d+)\s*\\?([-+*/%])\s*(\d+)\s*", filled)
        if parts is None or (parts[2] in "/%" and int(parts[3]) == 0):
            return match[0]
        return str(_SUMS[parts[2]](int(parts[1]), int(parts[3])))

    return re.sub(r"\$\(\(([^()]*)\)\)|\$\(expr ([^()]*)\)|`expr ([^`]*)`", result, line)


def _with_variables(word: str, variables: Mapping[str, str]) -> str:
    """A word with the values of variables; what the script does not set stays marked."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else f"{UNKNOWN}{name}{UNKNOWN}")

    filled = _VARIABLE.sub(value, word)
    if filled.startswith(("$(", "`")):
        return UNKNOWN + filled.strip("`") + UNKNOWN
    return filled


def _read_command(words: Sequence[str], where: str, variables: Mapping[str, str] | None = None) -> Given:
    """A command: what stands before its options names the program, a file among it is read first."""
    words, environment = list(words), dict(variables or {})
    while words and (match := _ASSIGNMENT.fullmatch(words[0])) and not words[0].startswith("-"):
        environment[match[1]] = match[2]
        words = words[1:]
    program, options = _program_and_options(words)
    settings = options_of(options, where)
    given = Given(where, settings, {each.key: each.value for each in settings}, program, environment)
    return _with_file(given)


_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3", "uv", "nohup", "exec", "srun", "sh", "bash")


def _program_and_options(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The program with its verb or file, and the options behind it; a launcher's own options are left out."""
    start = 0
    if words and Path(words[0]).name in _LAUNCHERS:
        for number, word in enumerate(words):
            if word.endswith(".py") or (words[number - 1] in ("-m", "--module") and number):
                start = number
                break
            if Path(word).name in ("llamafactory-cli", "axolotl", "swift", "trl", "megatron"):
                start = number
                break
    program = [words[start]] if words else []
    rest = start + 1
    while rest < len(words) and not words[rest].startswith("-") and "=" not in words[rest]:
        program.append(words[rest])
        rest += 1
    return tuple(program), list(words[rest:])


def _with_file(given: Given) -> Given:
    """A command with the settings of the configuration file that it names, over which its own options win."""
    named = [word for word in given.program[1:] if Path(word).suffix in FILES]
    for key in ("config", "config_file"):
        value = given.tree.get(key)
        if isinstance(value, str) and (Path(value).suffix in FILES or Path(value).is_file()):
            named.append(value)
    if not named:
        return given
    path = Path(named[-1])
    if not path.is_file() and given.source != "command line":
        beside = Path(re.sub(r":\d+$", "", given.source)).parent / path
        above = [folder / path for folder in Path(beside).resolve().parents] if not path.is_absolute() else []
        path = next((each for each in above if each.is_file()), beside)
    if not path.is_file() and path.suffix == "":
        path = path.with_suffix(".toml")
    of_file = read_file(path)
    merged = with_options(of_file, [each for each in given.settings if each.key not in ("config", "config_file")])
    return Given(str(path), merged.settings, merged.tree, given.program, given.environment, path.parent)


def shell_value(value: object) -> str | None:
    """The name of what only a shell could work out in a value; None where it is plain."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if UNKNOWN in text:
        return text.split(UNKNOWN)[1] or "a command"
    return None
