"""The flags of a launch: a command such as `torchrun … pretrain_vlm.py …`, or a script that makes one."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.provider.flags import by_spelling

_RUNNER = "mindspeed_mm.megatron_names"
_NUMBER_OF_RANKS = ("nproc_per_node", "nnodes")
_DO_NOT_TRAIN = ("inference_", "evaluate_", "get_")
"""How entries begin that need no learning rate and no number of steps."""
_STANDS_FOR = dict.fromkeys(("posttrain_qwen2vl_dpo.py", "posttrain_sora_dpo.py"), ("--posttrain-method", "dpo"))
"""Entry → flags that it is as good as given."""
_NOT_BUILT = {
    "inference_qihoo.py": ("Qihoo-T2X", 'Models that draw and film: mm route "make a video".'),
    "pretrain_ae.py": ("the training of autoencoders", "Take the weights of one that is released."),
}
"""Entry of MindSpeed-MM → what it starts, which is not built, and a way out."""
_READ_THEIR_FLAGS = {"posttrain_flux_dancegrpo.py": "--save", "finetune_t2i.py": "--output_dir"}
"""Entry with flags of its own → the one that names the run's folder."""
_NAME = re.compile(r"\s*(?:export\s+)?(\w+)=")
_PIECE = re.compile(
    r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'|(\$\(\(.*?\)\)|\$\([^)]*\)|\$\{[^}]*\}|\$\w+|`[^`]*`|[^\s;\"'`$]+|\$)", re.DOTALL
)
"""A part of a word: in double quotes, in single quotes, or bare. A shell joins those that touch."""
_LAUNCH = re.compile(
    r"(?:(?:exec|nohup)\s+)?(?:\w+=\S*\s+)*"
    r"(?:torchrun|accelerate\s+launch|\S*python3?(?:\s+-m\s+torch\.distributed\.\w+)?)\s+(.*\.py\b.*)",
    re.DOTALL,
)
_OF_MINDSPORE = re.compile(r"(?:(?:exec|nohup)\s+)?msrun\s.*\.py\b", re.DOTALL)
_OPENS = re.compile(r"(?:if|for|while|case|until)\b|(?:function\s+)?\w+\s*\(\)")
_CLOSES = re.compile(r"(?:.*[;\s])?(?:fi|done|esac|})\s*;?$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_COMMAND = re.compile(r"\$\([^)]*\)|`[^`]*`")
_OWN_WORDS = re.compile(r"[\"']?\$[@*][\"']?")
"""What a script is called with; here those words stand behind the script's name."""
_UNKNOWN = re.compile("\0(.*?)\0")
"""What stands for a value that only a shell can tell, with the name of its variable."""
_NEVER_SET = "?"
"""Stands behind the name of a variable that the script does not set and the environment does not have."""
_UNSET = re.compile("\0(\\w+)[?]\0")
_SET_BY_COMMANDS = re.compile(r"\b(?:for|read(?:\s+-\w+)*)\s+(\w+)")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Launch(NamedTuple):
    """Holds what a launch starts: the entry script, its flags, and notes on how they were read."""

    entry: str
    """The script's name; empty where there are flags alone."""
    flags: list[str]
    """Its flags, with torchrun's own that say how many ranks there are."""
    path: Path = Path()
    """The script that is started."""
    has_runner: bool = False
    """Whether `mindspeed_mm.megatron_names` starts it."""
    notes: tuple[str, ...] = ()
    """What a person should know of how the script was read."""

    @property
    def trains(self) -> bool:
        """Whether the entry needs what every training needs."""
        return not self.entry.startswith(_DO_NOT_TRAIN)


def read_launch(words: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The entry and the flags of a launch.

    Args:
        words: Flags alone; or a whole command, with the entry's name between torchrun's flags and its own; or a script,
            and flags that win over it.
        environment: Values of variables that the script does not set itself.

    Raises:
        UsageError: A script without a launch, or with one that only a shell can work out.
        ConfigError: The script cannot be read.
    """
    if words and words[0].endswith(".sh"):
        command, empty = _without_empty(_command_of(Path(words[0]), environment))
        launch = read_launch(command, environment)
        _check_words(launch.flags, words[0])
        notes = [f"{words[0]}: {name} is set nowhere in it, and taken as empty." for name in empty]
        return launch._replace(flags=[*launch.flags, *words[1:]], notes=tuple(notes))
    scripts = [at for at, word in enumerate(words) if word.endswith(".py")]
    if not scripts:
        return Launch("", list(words))
    entry = scripts[0]
    name = Path(words[entry]).name
    if name in _READ_THEIR_FLAGS:
        raise UsageError(
            f"reads its flags itself and writes them as a YAML beside the folder of {_READ_THEIR_FLAGS[name]}",
            where=words[entry],
            way_out="Start it: it trains as that YAML does.",
        )
    if name in _NOT_BUILT:
        what, way_out = _NOT_BUILT[name]
        raise UsageError(f"starts {what}, which is not built", where=words[entry], way_out=way_out)
    launcher, own = words[:entry], list(words[entry + 1 :])
    if "msrun" in launcher[:1]:
        raise _of_mindspore(words[entry])
    kept: list[str] = []
    for at, word in enumerate(launcher):
        flag, sign, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and flag in _NUMBER_OF_RANKS:
            words_of_flag = 1 if sign else 2
            kept += launcher[at : at + words_of_flag]
    file = 1 if own and own[0].endswith((".yaml", ".yml")) else 0
    kept += _STANDS_FOR.get(name, ())
    return Launch(name, [*own[:file], *kept, *own[file:]], Path(words[entry]), _RUNNER in launcher)


def _of_mindspore(where: str) -> UsageError:
    return UsageError(
        "msrun starts it, which is MindSpore's, and the suite runs on PyTorch",
        where=where,
        way_out="Take the launch of the same model that torchrun starts.",
    )


def _without_empty(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without those that are variables which nothing has set, and the names of these: a shell leaves them
    out. What stands behind a flag may be its value, which only the environment of the run can tell."""
    kept: list[str] = []
    names: list[str] = []
    for word in words:
        unset = _UNSET.fullmatch(word)
        if unset and kept and not _wants_value(kept[-1]):
            names.append(unset[1])
        else:
            kept.append(word)
    return kept, list(dict.fromkeys(names))


def _wants_value(word: str) -> bool:
    flag = by_spelling().get(word)
    return word.startswith("-") and "=" not in word and (flag is None or flag.kind != "switch")


def _check_words(words: Sequence[str], script: str) -> None:
    """Raise where a flag's value is one that only a shell can tell."""
    for word in words:
        mark = _UNKNOWN.search(word)
        if mark is None:
            continue
        unknown = mark[1].removesuffix(_NEVER_SET)
        way_out = "Write its value into the script."
        if unknown.isidentifier():
            way_out = f"Set it before the command: {unknown}=… mm config --from-flags {quoted(script)}."
        why = "is worked out while the script runs"
        if mark[1].endswith(_NEVER_SET):
            why = "is set nowhere in the script"
        raise UsageError(f"{unknown} {why}", where=script, way_out=way_out)


def _command_of(path: Path, environment: Mapping[str, str]) -> list[str]:
    """The words of the launch in a script: those of its quoted groups, with variables and sums worked out."""
    values: dict[str, str] = {}
    depth = 0
    for statement in _statements(read_config_text(path)):
        if _OPENS.match(statement):
            depth += 1
        if _OF_MINDSPORE.match(statement):
            raise _of_mindspore(str(path))
        launch = _LAUNCH.fullmatch(statement)
        if launch and depth == 0:
            return _launch_words(launch[1], values, environment, path)
        for name in _SET_BY_COMMANDS.findall(statement):
            values.setdefault(name, f"\0{name}\0")
        for name, pieces in _assignments(statement):
            asks = any(_asks_a_shell(text) for text, is_literal in pieces if not is_literal)
            if depth > 0 or asks:  # whether a block runs, only a shell knows
                values[name] = environment.get(name, f"\0{name}\0")
            else:
                values[name] = "".join(
                    text if is_literal else _expanded(text, values, environment) for text, is_literal in pieces
                )
        if depth and _CLOSES.fullmatch(statement):
            depth -= 1
    raise UsageError(
        "holds no line that starts an entry with torchrun or python",
        where=str(path),
        way_out="Give the flags themselves: mm config --from-flags --lr 1e-5 …",
    )


def _assignments(statement: str) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Each variable that a statement sets, with the parts of its value, and whether each stands in single quotes."""
    at = 0
    while name := _NAME.match(statement, at):
        at, pieces = name.end(), []
        while piece := _PIECE.match(statement, at):
            in_quotes, literal, bare = piece.groups()
            pieces.append((next(each for each in (in_quotes, literal, bare) if each is not None), literal is not None))
            at = piece.end()
        yield name[1], pieces
        if at < len(statement) and not statement[at].isspace():
            return


def _statements(text: str) -> list[str]:
    """The script's statements: lines, of which a backslash or an open quote joins several; comments are left out, and a
    backslash that ends one joins nothing."""
    statements, current, quote = [], "", ""
    for line in text.split("\n"):
        kept, quote = _without_comment(line, quote)
        goes_on = kept.endswith("\\")
        current += " " + kept.removesuffix("\\")
        if not quote and not goes_on:
            statements.append(current.strip())
            current = ""
    return [statement for statement in statements if statement]


def _without_comment(line: str, quote: str) -> tuple[str, str]:
    """The line up to its comment, and the quote that is open at its end; `quote` is open at its start."""
    for at, character in enumerate(line):
        if quote:
            if character == quote and line[at - 1 : at] != "\\":
                quote = ""
        elif character in "\"'`":
            quote = character
        elif character == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at], ""
    return line, quote


def _launch_words(command: str, values: Mapping[str, str], environment: Mapping[str, str], path: Path) -> list[str]:
    command = re.split(r"\s(?:\d?>|\||&)", command)[0]
    text = _expanded(_OWN_WORDS.sub("", command), values, environment)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"its launch cannot be read: {error}", where=str(path)) from None


def _asks_a_shell(text: str) -> bool:
    """Whether a text holds the output of a command, or a form of a variable that is not worked out here."""
    left = _VARIABLE.sub("", _ARITHMETIC.sub("", text))
    return "$" in left or "`" in left


def _expanded(text: str, values: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The text with variables and sums worked out, and with marks for those that only a shell knows."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        known = values.get(name) or environment.get(name)
        if known or default is not None:
            return known or default
        is_empty = name in values or name in environment
        is_group = name.endswith("ARGS")  # of flags, which a copied script names and does not have
        if is_empty or is_group:
            return ""
        return f"\0{name}{_NEVER_SET}\0"

    def total(match: re.Match[str]) -> str:
        inner = _VARIABLE.sub(value, match[1])
        inner = re.sub(r"(?<![\w\0])[A-Za-z_]\w*(?!\0)", lambda found: values.get(found[0], f"\0{found[0]}\0"), inner)
        unknown = _UNKNOWN.search(inner)
        if unknown:
            return unknown[0]
        return _sum(inner)

    return _VARIABLE.sub(value, _COMMAND.sub("\0$(…)\0", _ARITHMETIC.sub(total, text)))


def _sum(expression: str) -> str:
    """Whole numbers with + - * / % and brackets, as a shell computes them; anything else stays unknown."""

    def compute(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](compute(node.left), compute(node.right))
        raise ValueError(expression)

    try:
        return str(compute(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return f"\0(({expression.strip()}))\0"
