"""Whatever stands at a place of a file, the answer is a configuration or lines that say what is wrong; never a
traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.provider.translate import from_flags
from mindspeed_mm.tasks.config import run_flags

GOLDEN = Path(__file__).parent / "golden"
NEEDED = "--lr 1e-5 --train-iters 10 --micro-batch-size 1"
PARALLEL = "--pipeline-model-parallel-size 2 --global-batch-size 16 --recompute-granularity full"
JUNK: tuple[Any, ...] = (5, -1, "x", "", [], {}, True, None, [[1]], [None], {"a": 1}, 1e99)
FILES = {
    "model.json": f"{NEEDED} {PARALLEL} --mm-model junk",
    "transformers_model.json": f"{NEEDED} --mm-model junk",
    "wan_model.json": f"{NEEDED} --mm-model junk",
    "data.json": f"{NEEDED} --mm-data junk --eval-interval 2 --seq-length 8",
    "feature_data.json": f"{NEEDED} --mm-data junk --mm-model wan_model.json",
    "tools.json": f"{NEEDED} --mm-tool junk",
}


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value."""
    yield path
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, inner in entries:
        yield from places(inner, (*path, name))


def with_junk(content: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = content.copy()
    copy[path[0]] = with_junk(content[path[0]], path[1:], junk)
    return copy


@pytest.mark.parametrize("name", FILES)
def test_junk_at_every_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    content = json.loads(Path(name).read_text())
    file = tmp_path / "junk.json"
    words = FILES[name].replace("junk", str(file)).split()
    answers = {True: 0, False: 0}
    for number, path in enumerate(places(content)):
        for junk in (JUNK[number % len(JUNK)], JUNK[(number + 5) % len(JUNK)], JUNK[(number + 8) % len(JUNK)]):
            file.write_text(json.dumps(with_junk(content, path, junk)))
            try:
                from_flags(words, {"WORLD_SIZE": "8"})
                answers[True] += 1
            except MMError as error:
                answers[False] += 1
                assert all(str(problem).strip() for problem in error.problems)
    assert min(answers.values()) > 0


@pytest.mark.parametrize("name", ["fsdp2_config.yaml", "one.yaml"])
def test_junk_on_every_line_of_a_yaml(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    lines = Path(name).read_text().splitlines()
    for number, line in enumerate(lines):
        for junk in ("[", "5", "{a: 1}", "[[1]]", "null", "'x", "\t5"):
            changed = [*lines[:number], f"{line.split(':')[0]}: {junk}", *lines[number + 1 :]]
            (tmp_path / "junk.yaml").write_text("\n".join(changed))
            file = str(tmp_path / "junk.yaml")
            try:
                if name == "one.yaml":
                    run_flags([file], {"WORLD_SIZE": "8"})
                else:
                    from_flags([*NEEDED.split(), "--use-torch-fsdp2", "--fsdp2-config-path", file], {})
            except MMError:
                pass
