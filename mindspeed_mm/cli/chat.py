"""The command `mm chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from mindspeed_mm.cli.sharing import is_address, of_checkpoint
from mindspeed_mm.core.errors import ExitCode, MMError, UsageError
from mindspeed_mm.core.os_errors import explained_os_error, with_home
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.terminal import say, say_json

if TYPE_CHECKING:
    from mindspeed_mm.tasks.answer.conversation import Conversation

EXAMPLES = """
\b
Examples:
  mm chat models/Qwen3-VL-2B-Instruct
  mm chat runs/mine --lora exported/lora --temperature 0
  mm chat runs/digits/run --image three.png --system "Answer in one word."
  mm chat http://127.0.0.1:8000/v1
"""
COMMANDS = """/image FILE, /video FILE, /audio FILE   show a file with what you say next
/system TEXT   set the system prompt, and begin anew
/reset         begin anew
/save FILE     add the conversation to a file, as a row that training takes
/exit          leave, as does the end of the input
"""


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Picture that is sent with the first message.",
)
@click.option(
    "--video",
    "videos",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Video that is sent with the first message.",
)
@click.option(
    "--audio",
    "audios",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Audio file that is sent with the first message.",
)
@click.option("--system", default="", help="System prompt; default: that of the model's chat template.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    help="Maximum length of an answer in tokens. [default: 512, or the server's]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="Sampling temperature; 0 is greedy. Default: that of the model's generation_config.json.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Sample from the most likely tokens whose probabilities add up to this; default: generation_config.json.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of each answer; default: a new one each time.")
@click.option("--lora", type=click.Path(path_type=Path), help="Folder of adapters to apply to the weights.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="YAML whose data section sets the chat template and media sizes; default: the run's.",
)
@click.option("--name", default="", help="Name of a server's model to talk to; default: the first one listed.")
@click.option("--key-file", type=click.Path(path_type=Path), help="File with the API key of a server.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a line of JSON, once it is complete.")
@of_checkpoint
def command(
    model: str,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    audios: tuple[Path, ...],
    system: str,
    max_new_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    lora: Path | None,
    config: Path | None,
    name: str,
    key_file: Path | None,
    as_json: bool,
) -> int:
    """Talk to MODEL, a Hugging Face folder, a run or the address of a running server, in the terminal.

    Answers appear while they are made; Ctrl-C stops one. /help lists what else can be typed. Where lines do not
    come from a terminal, the exit code is that of the first one that failed.
    """
    if temperature == 0 and top_p is not None:
        raise UsageError("does nothing with --temperature 0", key="--top-p", way_out="Leave one of them out.")
    settings = Settings(max_new_tokens or USUAL_LENGTH, temperature, top_p, seed)
    if is_address(model):
        others: dict[str, object] = {"--lora": lora, "--config": config}
        chat = beside_server(model, name, key_file, settings, system, others, says_length=max_new_tokens is not None)
    else:
        chat = with_folder(Path(model), {"--name": name, "--key-file": key_file}, settings, system, lora, config)
    for path in images:
        chat.show("image", path)
    for path in videos:
        chat.show("video", path)
    for path in audios:
        chat.show("audio", path)
    if sys.stdin.isatty():
        say("Say something, or /help.")
    code = ExitCode.OK
    for line in said():
        try:
            if not reply(chat, line, as_json):
                break
        except (MMError, OSError) as error:
            known = error if isinstance(error, MMError) else explained_os_error(error)
            if known is None:
                raise
            say(str(known), err=True)
            if not sys.stdin.isatty():
                code = code or known.exit_code
    return code


USUAL_LENGTH = 512
"""Tokens of an answer that is made here."""


class Settings(NamedTuple):
    """How tokens are chosen; as `Sampling` begins, which takes seconds to import."""

    max_new_tokens: int
    temperature: float | None
    top_p: float | None
    seed: int | None


def beside_server(
    address: str,
    name: str,
    key_file: Path | None,
    settings: Settings,
    system: str,
    others: dict[str, object],
    *,
    says_length: bool,
) -> Conversation:
    """A conversation with a server's model."""
    refuse(others, "is for models that are loaded here, and a server has loaded its own")
    from mindspeed_mm.cli.serve import read_key
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
    from mindspeed_mm.tasks.answer import conversation, remote

    key = read_key(key_file)
    server = replace(remote.RemoteModel.at(address, name, key), says_length=says_length)
    return conversation.Conversation(server, Sampling(*settings), system)


def with_folder(
    model: Path, others: dict[str, object], settings: Settings, system: str, lora: Path | None, config: Path | None
) -> Conversation:
    """A conversation with a model that is loaded here."""
    refuse(others, "is for servers")
    from mindspeed_mm.core.model_kinds import GENERATOR
    from mindspeed_mm.tasks.model_kind import kind_of_path

    if kind_of_path(model) is GENERATOR:
        raise UsageError("makes pictures or clips and does not talk", where=str(model), way_out="See mm infer --help.")
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
    from mindspeed_mm.tasks.answer import conversation  # torch: the help does without

    return conversation.begin(model, Sampling(*settings), system=system, lora=lora, config=config)


def refuse(given: dict[str, object], why: str) -> None:
    """Raise `UsageError` for the first of these options that has a value."""
    for option, value in given.items():
        if value:
            raise UsageError(why, key=option, way_out="Leave it out.")


def said() -> Iterator[str]:
    """What is typed, line by line; in a terminal with a prompt, and editing where Python has it."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            say()
            return
        if not line and not sys.stdin.isatty():
            return
        yield line.strip()


def reply(chat: Conversation, line: str, as_json: bool = False) -> bool:
    """Answer a line, or do what it says; whether the conversation goes on.

    Raises:
        MMError: The line is no command, or is not answered.
    """
    if line == "/exit":
        return False
    try:
        if line.startswith("/"):
            say(obey(chat, line))
        elif line or chat.waiting:

            def show(piece: str) -> None:
                if not as_json:
                    say(piece, end="")

            answer = chat.say(line, show)
            if as_json:
                say_json(asdict(answer))
            else:
                say("")
            if not answer.finished:
                say("(cut off: --max-new-tokens)", err=True)
    except KeyboardInterrupt:
        say("\n(stopped; what you said and this answer are forgotten)", err=True)
    return True


def obey(chat: Conversation, line: str) -> str:
    """Carry out a command; what to print.

    Raises:
        MMError: It is unknown, or its file is.
    """
    name, _, rest = line.partition(" ")
    actions: dict[str, Callable[[str], str]] = {
        "/image": lambda file: show(chat, "image", file),
        "/video": lambda file: show(chat, "video", file),
        "/audio": lambda file: show(chat, "audio", file),
        "/system": lambda text: begin_anew(chat, text),
        "/reset": lambda _: begin_anew(chat, chat.system),
        "/save": lambda file: save(chat, file),
        "/help": lambda _: COMMANDS.rstrip(),
    }
    if name not in actions:
        raise UsageError(f"unknown command '{name}'", way_out=did_you_mean(name, actions) or "/help lists them.")
    return actions[name](rest.strip())


def show(chat: Conversation, kind: Literal["image", "video", "audio"], words: str) -> str:
    """Take a file for the next turn."""
    chat.show(kind, named_file(words))
    files = "file" if len(chat.waiting) == 1 else "files"
    return f"shown with what you say next: {len(chat.waiting)} {files}"


def begin_anew(chat: Conversation, system: str) -> str:
    """Set the system prompt, forget all turns, and return the line to print."""
    chat.system = system
    chat.reset()
    return "a new conversation"


def save(chat: Conversation, words: str) -> str:
    """Add the conversation to a file."""
    if not chat.turns:
        raise UsageError("nothing was said yet", key="/save", way_out="Say something first.")
    path = named_file(words)
    chat.save(path)
    return f"added to {path}"


def named_file(words: str) -> Path:
    """The file that follows a command; quotes and backslashes are as in a shell, blanks need neither.

    Raises:
        UsageError: None is named.
    """
    try:
        parts = shlex.split(words)
    except ValueError:
        parts = [words]
    if not words:
        raise UsageError("no file is named", way_out="Write its name behind the command.")
    return with_home(Path(parts[0] if len(parts) == 1 else words))
