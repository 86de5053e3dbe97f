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

pytestmark = pytest.mark.edge("S13", "BS13")

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
    Read("model/config.json", ("train", "run.yaml"), "model"),
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
    Read("save/resolved.yaml", ("report", "save")),
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


def numbers_become(change: Callable[[float], float]) -> Callable[[Path], None]:
    """Every number of a JSON file, or of each line of one, is another."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    def damage(path: Path) -> None:
        texts = path.read_text().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("\n".join(json.dumps(changed(json.loads(text))) for text in texts if text))

    return damage


NUMBERS: dict[str, Callable[[Path], None]] = {
    "negative": numbers_become(lambda number: -abs(number) - 1),
    "large": numbers_become(lambda number: 10**12),
    "400 digits": numbers_become(lambda number: 10**400),
}
DAMAGES: dict[str, Callable[[Path], None]] = {
    **NUMBERS,
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
        assert len(said.err.strip().splitlines()) <= 9, said.err  # one for each section of a file that stands twice


def damage_and_try(read: Read, damage: str, home: Path) -> None:
    path = home / read.file
    if not path.exists():
        pytest.skip("this model has no such file")
    if damage in NUMBERS and path.suffix not in (".json", ".jsonl"):
        pytest.skip("holds no JSON")
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
    ("train", f"{STEP}/trainer_state.json", "negative"),
    ("train", f"{STEP}/trainer_state.json", "400 digits"),
    ("train", f"{STEP}/MANIFEST.json", "400 digits"),
    ("check", "model/processor_config.json", "large"),
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


# --- values that are out of reason ------------------------------------------------------------------------------------


def set_value(path: Path, key: str, value: Any) -> None:
    content = json.loads(path.read_text())
    *sections, last = key.split(".")
    inner = content
    for section in sections:
        inner = inner[section]
    assert last in inner
    inner[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("verb", ["check", pytest.param("train", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "text_config.hidden_size", -8),
        ("config.json", "text_config.num_attention_heads", 0),
        ("config.json", "text_config.num_attention_heads", 7),
        ("config.json", "text_config.num_key_value_heads", 3),
        ("config.json", "text_config.num_hidden_layers", 10**9),
        ("config.json", "vision_config.patch_size", 0),
        ("config.json", "vision_config.spatial_merge_size", -2),
        ("processor_config.json", "image_processor.patch_size", 0),
        ("processor_config.json", "image_processor.image_std", [0, 0, 0]),
        ("processor_config.json", "image_processor.rescale_factor", "x"),
        ("processor_config.json", "video_processor.temporal_patch_size", -1),
        ("processor_config.json", "video_processor.merge_size", 0),
    ],
)
def test_a_size_out_of_range_is_named_with_its_file(verb: str, file: str, key: str, value: Any, home: Path) -> None:
    set_value(home / "model" / file, key, value)
    said = mm(verb, "run.yaml", "training.save=other")
    told = said.err + said.out
    assert said.code == 4, told
    shown = "text_config.num_key_value_heads" if value in (3, 7) else key  # of two that do not fit, the second
    assert file in told and shown in told, told
    assert "this is a bug" not in told and "rows.jsonl" not in said.err, told


@pytest.mark.parametrize(
    "override",
    [
        f"training.train_iters={'9' * 400}",
        f"training.seed={'9' * 400}",
        f"training.lr={'9' * 400}",
        f"data.dataset_param.basic_parameters.cutoff_len={'9' * 400}",
        f"model.model_name_or_path={'n' * 300}",
        f"data.dataset_param.basic_parameters.dataset={'n' * 300}",
        f"training.load={'n' * 300}",
        r'model.model_name_or_path="a\0b"',
        r'training.save="a\0b"',
    ],
    ids=lambda override: override[:50],
)
@pytest.mark.parametrize("verb", ["check", pytest.param("train", marks=pytest.mark.slow)])
def test_numbers_and_names_that_are_too_long_are_refused(verb: str, override: str, home: Path) -> None:
    said = mm(verb, "run.yaml", override, *([] if "save" in override else ["training.save=other"]))
    told = said.err + said.out
    assert said.code in (2, 4), told
    assert "this is a bug" not in told and "Traceback" not in told, told
    assert all(len(line) < 400 for line in said.err.splitlines())


def test_a_name_that_is_too_long_is_no_fault_of_a_rank(home: Path) -> None:
    said = mm("export", "n" * 300, "exported")
    assert (said.code, "File name too long" in said.err, "rank" in said.err) == (2, True, False), said.err
