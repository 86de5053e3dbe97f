"""Words that users and readers meet: help texts that can be read alone, class names that stand for one thing, and
nothing said past the log. `make check` runs this file."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mindspeed_mm.cli import main
from mindspeed_mm.fsdp.params.schema_walk import walk_fields

PACKAGE = Path(__file__).parents[1] / "mindspeed_mm"

# --- help texts ------------------------------------------------------------------------------------------------------

_FRAGMENT = re.compile(r"(Of|Whose|Those|Its|Their|Such|Where (its|their))\b")
_NEIGHBOUR = re.compile(
    r"\b(next|previous|following|preceding) (key|setting|option|one|two|three)s?\b|\bkeys? (that follow|below|above)\b|"
    r"\bnext (two|three|four)\b|\bof (its|their) own\b",
    re.IGNORECASE,
)
"""Words that send the reader to the key before or after."""
_POINTING = re.compile(
    r"\b(of|in|on|at|by|with|from) (that|such|those|these|it|them)\b|\bwhich (it|they)\b", re.IGNORECASE
)
"""In a first clause, where nothing has been named yet, these stand for what the key before is about."""


_AUDIENCE = re.compile(r"(Generators|Language models|Qwen3-Omni|(With|For|To) [^:]*): ")
"""What some texts begin with: `Generators: …`."""


def points_elsewhere(text: str) -> str:
    """The words of a help text that need the one before or after it; empty: there are none."""
    first_clause = re.split(r"[.;:(]", _AUDIENCE.sub("", text, count=1))[0]
    found = _FRAGMENT.match(text) or _NEIGHBOUR.search(text) or _POINTING.search(first_clause)
    return found[0] if found else ""


def unreadable_help(text: str) -> bool:
    """Whether a help text cannot be read alone: too short, a fragment of the sentence that its key would begin, or one
    that points at another key."""
    return len(text.split()) < 5 or bool(points_elsewhere(text))


def options_of(command: click.Command, name: str = "mm") -> Iterator[tuple[str, str]]:
    """(name, help text) of every option of a command and of those below it."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield f"{name} {parameter.opts[0]}", parameter.help or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from options_of(found, f"{name} {below}")


def test_every_help_text_can_be_read_alone() -> None:
    unreadable = {key: info.description or "" for key, info in walk_fields() if unreadable_help(info.description or "")}
    assert unreadable == {}


def test_every_help_text_of_an_option_can_be_read_alone() -> None:
    options = dict(options_of(main.cli))
    assert len(options) > 100
    found = {name: f"'{words}' in: {text}" for name, text in options.items() if (words := points_elsewhere(text))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "When.",
        "The slices.",
        "Of the weights.",
        "Whose activations are moved to the host.",
        "",
        "Where its log-probabilities come from, in a few words.",
        "Share of the policy in that mixture (TR-DPO, arXiv:2404.09656).",
        "Generators: numerator of that weight; null: the largest share of the histogram.",
        "Distance above 1 at which it is clipped; null: `epsilon`.",
        "Number of such steps; null: all of them.",
        "Number of steps by which it moves.",
        "Factor on it before rewards are summed.",
        "Settings of its own: arguments of the reward by name.",
        "Number of passes over the rows. For generators only, like the next key.",
        "Maximum area. Null, here and in the keys that follow, leaves the choice to the processor.",
        "Level of detail. The three keys below add to any level.",
    ],
)
def test_a_fragment_of_a_help_text_is_found(text: str) -> None:
    assert unreadable_help(text)


# --- docstrings ------------------------------------------------------------------------------------------------------


_DOCSTRING = re.compile(
    r"""(?:\A|:)(?:\s|\#[^\n]*\n)*[rRuU]?("{3}|'{3}|"|')((?:(?!\1).)*)\1[ \t]*(?=$|[;\#"'])""",
    re.DOTALL | re.MULTILINE,
)
"""What may be one: a text at the beginning of a file, or behind a colon."""


def short_docstrings(source: str) -> list[str]:
    """Names of what is documented in four words or fewer: they say what the name says. A method that overrides another
    and needs no more is marked with `@override` and has no docstring."""
    found: list[str] = []
    if not any(len(match[2].split()) <= 4 for match in _DOCSTRING.finditer(source)):
        return found  # parsing all files would take seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text is not None and len(text.split()) <= 4:
                found.append(getattr(node, "name", "the module"))
    return found


def test_every_docstring_says_more_than_the_name() -> None:
    found = {str(path): short_docstrings(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source", ['"""For the log."""', 'def f():\n    """See `g`."""', 'class A:\n    async def f():\n    \t"""They."""']
)
def test_a_docstring_of_few_words_is_found(source: str) -> None:
    assert short_docstrings(source) and not short_docstrings(source.replace('."', ' and of the terminal that it is."'))


# --- class names ------------------------------------------------------------------------------------------------------


def class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Name of a class → the modules that define one of this name, or one module for a name that is used once."""
    written = {path: re.findall(r"\bclass\s+(\w+)", source) for path, source in sources.items()}
    times = Counter(name for names in written.values() for name in names)
    found: dict[str, list[str]] = {}
    for path, source in sources.items():
        if all(times[name] == 1 for name in written[path]):  # parsing all files would take seconds
            found |= {name: [path] for name in written[path]}
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return found


def test_a_class_name_stands_for_one_thing() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name: paths for name, paths in class_names(sources).items() if len(paths) > 1} == {}


def test_a_class_name_that_is_used_twice_is_found() -> None:
    found = class_names({"a.py": "class Share: ...", "b.py": "class Share: ...\nclass Other: ..."})
    assert found == {"Share": ["a.py", "b.py"], "Other": ["b.py"]}


# --- what is said to people ------------------------------------------------------------------------------------------

LIBRARIES_SILENCED = {
    "cli/main.py",
    "fsdp/models/loading/local_shard.py",
    "fsdp/tools/memory_model/simulation.py",
    "fsdp/utils/quiet.py",
    "tasks/launch/launcher.py",
}
"""Files that set the level of a library's logger."""
WARNING_ROOMS = (
    *("fsdp/data/", "fsdp/models/diffusion/live_encoding.py", "fsdp/models/vocabulary.py"),
    "checkpoint/hf_folder.py",
)
"""Code that reads samples, in worker processes too, or that answers or writes folders as well, knows no run: it warns,
and a run notes its warnings."""


PRINTS = {
    "checkpoint/megatron/pt_index.py",
    "core/terminal.py",
    "fsdp/distributed/job/launch.py",
    "fsdp/distributed/job/launcher_life.py",
    "fsdp/distributed/job/watchdog.py",
    "fsdp/tools/profiler.py",
    "fsdp/train/run/stop_signal.py",
    "fsdp/utils/work_progress.py",
    "megatron_names/training.py",
    "verl/engine.py",
}
"""Files that print: what ends a job that no longer has a log, progress, and verl's engine. They print our own words."""
SAYS = {
    "evaluate_gen.py",
    "evaluate_vlm.py",
    "fsdp/models/loading/gguf.py",
    "models/component_section.py",
    "fsdp/train/provider/entry.py",
    "fsdp/train/run/launched.py",
    "inference_sora.py",
    "inference_videoalign.py",
    "inference_vlm.py",
    "quickstart/quickstart.py",
    "checkpoint/fsdp/generic_dcp_converter.py",
    "checkpoint/ptd/converters.py",
    "tasks/convert/family_converters.py",
    "tasks/dancegrpo/run.py",
    "tasks/ming_t2i/run.py",
    "tasks/convert/cosyvoice3.py",
    "tasks/launch/launcher.py",
    "tasks/answer/generation.py",
    "tools/feature_extraction/get_sora_feature.py",
}
"""Files besides `cli/` that print texts of others by `core/terminal.py`, which shows control characters."""


DEBUGS = {"core/kept_hashes.py"}
"""Files that log at the level of debugging alone, which nobody sees who does not ask for it."""


def said_apart(inside: str, source: str) -> list[str]:
    """Ways to say something that pass a run's `note` by, so that it would be in no log and among no events."""
    if not re.search(r"\blog(?:ging|ger)\.|\bwarn\(|\bprint\b|\bsay(?:_json)?\(|\bs?echo\(|\bstdout\.write\(", source):
        return []  # most files: parsing all of them takes seconds
    tree = ast.parse(source)
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = sum(isinstance(node, ast.Name) and node.id == "print" for node in ast.walk(tree))
    handed_over = ["print"] * (named - calls.count("print"))  # to speak from every rank
    prints = [call for call in calls if call == "print" and inside not in PRINTS]
    if "core.terminal import" in source and inside not in SAYS and not inside.startswith("cli/"):
        prints += [call for call in calls if call in ("say", "say_json")]
    prints += [call for call in calls if call in ("click.echo", "click.secho", "sys.stdout.write")]
    logs = [call for call in calls if call.startswith(("logging.", "logger."))]
    warns = [call for call in calls if call in ("warnings.warn", "warn")]
    allowed = [
        *(logs if inside in LIBRARIES_SILENCED | DEBUGS else ()),
        *(warns if inside.startswith(WARNING_ROOMS) else ()),
    ]
    return [*handed_over, *prints, *(call for call in (*logs, *warns) if call not in allowed)]


@pytest.mark.edge("BS12")
def test_what_is_said_to_people_is_noted() -> None:
    assert said_apart("a.py", "import logging\nlogging.getLogger(__name__).info('deleted')")
    assert said_apart("fsdp/train/a.py", "warnings.warn('nearly full', stacklevel=2)")
    assert said_apart("a.py", "print('deleted')")
    assert said_apart("verl/engine.py", "build(note=print)")
    assert said_apart("cli/main.py", "print('deleted')") and said_apart("cli/main.py", "click.echo('deleted')")
    of_others = "from mindspeed_mm.core.terminal import say\nsay('deleted')"
    assert said_apart("fsdp/train/a.py", of_others) and not said_apart("cli/main.py", of_others)
    assert not said_apart("a.py", "blueprint('deleted')")
    assert not said_apart("fsdp/data/a.py", "warnings.warn('is silent', stacklevel=2)")
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {inside: said_apart(inside, source) for inside, source in files.items()}
    assert {inside: calls for inside, calls in found.items() if calls} == {}


def test_files_that_may_print_do() -> None:
    silent = {
        inside
        for inside in PRINTS | SAYS
        if not re.search(r"\bprint\b|\bsay\(", (PACKAGE / inside).read_text(encoding="utf-8"))
    }
    assert silent == set()
