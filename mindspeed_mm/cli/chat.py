"""The command `mm chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from mindspeed_mm.cli.requests import takes
from mindspeed_mm.cli.sharing import import_plugins
from mindspeed_mm.core.errors import ExitCode, MMError, UsageError
from mindspeed_mm.core.os_errors import explained_os_error, with_home
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.terminal import say, say_failure, say_json
from mindspeed_mm.tasks.requests.infer import ChatRequest
from mindspeed_mm.tasks.requests.shared import is_address, read_key

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
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
@takes(ChatRequest)
def command(request: ChatRequest) -> int:
    """Talk to MODEL, a Hugging Face folder, a run or the address of a running server, in the terminal.

    Answers appear while they are made; Ctrl-C stops one. /help lists what else can be typed. Where lines do not
    come from a terminal, the exit code is that of the first one that failed.
    """
    request.check_choice()
    if is_address(request.model):
        chat = beside_server(request)
    else:
        chat = with_folder(request)
    for path in request.images:
        chat.show("image", path)
    for path in request.videos:
        chat.show("video", path)
    for path in request.audios:
        chat.show("audio", path)
    if sys.stdin.isatty():
        say("Say something, or /help.", err=request.as_json)
    code = ExitCode.OK
    for line in said():
        try:
            if not reply(chat, line, request.as_json):
                break
        except (MMError, OSError) as error:
            known: MMError | None
            if isinstance(error, MMError):
                known = error
            else:
                known = explained_os_error(error)
            if known is None:
                raise
            say(str(known), err=True)
            if request.as_json:
                say_failure(str(known), known.exit_code, known.problems)
            if not sys.stdin.isatty():
                code = code or known.exit_code
    return code


USUAL_LENGTH = 512
"""Tokens of an answer that is made here."""


def beside_server(request: ChatRequest) -> Conversation:
    """A conversation with a server's model."""
    request.check_for_server()
    from mindspeed_mm.tasks.answer import conversation, remote  # torch: the help does without

    server = remote.RemoteModel.at(request.model, request.name, read_key(request.key_file))
    server = replace(server, says_length=request.max_new_tokens is not None)
    return conversation.Conversation(server, sampling_of(request), request.system)


def with_folder(request: ChatRequest) -> Conversation:
    """A conversation with a model that is loaded here."""
    request.check_for_folder()
    from mindspeed_mm.core.model_kinds import GENERATOR
    from mindspeed_mm.tasks.model_kind import kind_of_path

    import_plugins(request.plugins)
    model = Path(request.model)
    if kind_of_path(model) is GENERATOR:
        raise UsageError("makes pictures or clips and does not talk", where=str(model), way_out="See mm infer --help.")
    from mindspeed_mm.tasks.answer import conversation  # torch: the help does without

    sampling = sampling_of(request)
    return conversation.begin(model, sampling, system=request.system, lora=request.lora, config=request.config)


def sampling_of(request: ChatRequest) -> Sampling:
    """How the tokens of answers are chosen."""
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling  # torch: the help does without

    length = request.max_new_tokens or USUAL_LENGTH
    return Sampling(length, request.temperature, request.top_p, request.seed)


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
            say(obey(chat, line), err=as_json)
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
