"""Every file that a run reads, damaged in every way: a line that names it and an exit code of its kind, never a bug.

A few of the cases are in the default run, the whole product is slow.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.permissions import unreadable
from tests.helpers.runs import mm, train
from tests.helpers.tiny_run import make_tiny_run

pytestmark = pytest.mark.edge("S13")

STEP = "save/iter_0000002"
UNVERIFIED = ("training.verify_checkpoint=none", "training.train_iters=3")


@dataclass(frozen=True)
class Read:
    """A file, and a command that reads it."""

    file: str
    words: tuple[str, ...]
    name: str = ""
    """What a message about it names; empty: the file's own name."""


TRAIN = ("train", "run.yaml", "training.save=save", *UNVERIFIED)
EXPORT = ("export", "save", "exported")
READS = (
    Read("run.yaml", ("check", "run.yaml")),
    Read("model/config.json", ("check", "run.yaml")),
    Read("model/config.json", ("train", "run.yaml")),
    Read("model/model.safetensors", ("train", "run.yaml")),
    Read("model/tokenizer.json", ("check", "run.yaml"), "model"),
    Read("model/tokenizer_config.json", ("check", "run.yaml"), "model"),
    Read("model/preprocessor_config.json", ("check", "run.yaml"), "model"),
    Read("model/processor_config.json", ("check", "run.yaml"), "model"),
    Read("model/video_preprocessor_config.json", ("check", "run.yaml"), "model"),
    Read("model/chat_template.jinja", ("check", "run.yaml"), "model"),
    Read("model/generation_config.json", ("train", "run.yaml"), "model"),
    Read("rows.jsonl", ("check", "run.yaml")),
    Read("rows.jsonl", ("train", "run.yaml")),
    Read("save/latest_checkpointed_iteration.txt", TRAIN),
    Read(f"{STEP}/MANIFEST.json", TRAIN),
    Read(f"{STEP}/trainer_state.json", TRAIN),
    Read(f"{STEP}/.metadata", TRAIN),
    Read(f"{STEP}/__0_0.distcp", TRAIN),
    Read(f"{STEP}/rng_rank0.safetensors", TRAIN),
    Read(f"{STEP}/MANIFEST.json", EXPORT),
    Read(f"{STEP}/__0_0.distcp", EXPORT),
    Read("save/run.json", EXPORT, "save"),
    Read("save/run.json", ("infer", "save", "--prompt", "hello", "--max-new-tokens", "1"), "save"),
    Read("save/run.json", ("report", "save")),
    Read("save/resolved.yaml", EXPORT),
    Read("save/metrics.jsonl", ("report", "save")),
    Read("save/events.jsonl", ("report", "save")),
    Read("model/config.json", EXPORT),
    Read("model/model.safetensors", EXPORT),
    Read("model/tokenizer_config.json", ("infer", "model", "--prompt", "hello", "--max-new-tokens", "1"), "model"),
)


def bytes_of(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def gone(path: Path) -> None:
    path.unlink()


def mistyped(path: Path) -> None:
    """Every value of a JSON object is one of another kind; of any other file its bytes are doubled."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        path.write_bytes(path.read_bytes() * 2)
        return
    path.write_text(json.dumps({key: other_kind(value) for key, value in content.items()}))


def other_kind(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else "x" if not isinstance(value, list) else 7


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": bytes_of(b""),
    "list": bytes_of(b"[]"),
    "null": bytes_of(b"null"),
    "object": bytes_of(b"{}"),
    "nul": bytes_of(b'{"a": "\x00"}\x00'),
    "binary": bytes_of(bytes(range(256)) * 8),
    "deep": bytes_of(b"[" * 100_000),
    "truncated": truncated,
    "mistyped": mistyped,
    "folder": folder,
    "gone": gone,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with all that it reads and has written."""
    home = tmp_path_factory.mktemp("trained")
    yaml = make_tiny_run(home, training={"train_iters": 2, "save_interval": 1, "save": str(home / "save")})
    train(yaml, None)
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, at work in: what it names, it names by paths of its own."""
    copy = tmp_path / "home"
    shutil.copytree(trained, copy)
    for path in (copy / "run.yaml", copy / "save" / "resolved.yaml", copy / "save" / "run.json"):
        path.write_text(path.read_text().replace(str(trained), str(copy)))
    monkeypatch.chdir(copy)
    yield copy


def try_it(read: Read, path: Path, kept_away: AbstractContextManager[None]) -> None:
    with kept_away:
        said = mm(*read.words)
    told = said.err + said.out
    assert said.code in (0, 2, 3, 4), told
    assert "this is a bug" not in told and "Traceback" not in told, told
    if said.code:
        assert (read.name or path.name) in told, told
        assert len(said.err.strip().splitlines()) <= 8, said.err


def damage_and_try(read: Read, damage: str, home: Path) -> None:
    path = home / read.file
    if not path.exists():
        pytest.skip("this model has no such file")
    if damage == "unreadable":
        try_it(read, path, unreadable(path))
        return
    DAMAGES[damage](path)
    try_it(read, path, nullcontext())


QUICK = (
    ("check", "model/config.json", "list"),
    ("check", "model/tokenizer_config.json", "truncated"),
    ("check", "model/config.json", "unreadable"),
    ("check", "rows.jsonl", "folder"),
    ("train", "model/config.json", "deep"),
    ("train", f"{STEP}/trainer_state.json", "list"),
    ("train", f"{STEP}/trainer_state.json", "mistyped"),
    ("train", f"{STEP}/rng_rank0.safetensors", "binary"),
    ("export", "save/run.json", "list"),
    ("report", "save/run.json", "mistyped"),
    ("report", "save/metrics.jsonl", "folder"),
)
"""One of each kind of reader and of damage; they were bugs, or blamed on another file."""


@pytest.mark.parametrize(("verb", "file", "damage"), QUICK)
def test_a_damaged_file_is_named_quickly(verb: str, file: str, damage: str, home: Path) -> None:
    damage_and_try(next(read for read in READS if (read.words[0], read.file) == (verb, file)), damage, home)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [*DAMAGES, "unreadable"])
@pytest.mark.parametrize("read", READS, ids=lambda read: f"{read.words[0]}-{Path(read.file).name}")
def test_a_damaged_file_is_named(read: Read, damage: str, home: Path) -> None:
    damage_and_try(read, damage, home)
