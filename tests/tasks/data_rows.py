"""A data set with one row for each thing that a look at data must find, and the configuration that trains on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_run import make_tiny_run

GOOD_ROWS = 24


def conversation(question: str, answer: str = "seven", **row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **row}


def bad_rows(folder: Path) -> dict[str, list[Any]]:
    """Kind of fault → rows that have it; a string is written as it stands. The files they name are made."""
    (folder / "images" / "page.jpg").write_text("<html>not found</html>")
    picture = (folder / "images" / "0_0.png").read_bytes()
    (folder / "images" / "half.png").write_bytes(picture[: len(picture) // 2])
    (folder / "images" / "empty.png").write_bytes(b"")
    asks = "<image>What is it like?"
    untrained = conversation("hello")
    untrained["messages"][1]["train"] = False
    return {
        "missing media": [conversation(asks, images=["images/none.png"])],
        "media outside the roots": [
            conversation(asks, images=["../a.png"]),
            conversation(asks, images=["http://a/b.png"]),
        ],
        "broken media": [
            conversation(asks, images=["images/page.jpg"]),
            conversation(asks, images=["images/empty.png"]),
        ],
        "placeholders and media differ": [
            conversation(asks * 2, images=["images/0_0.png"]),
            conversation(asks, images=["images/0_0.png"] * 2),
        ],
        "roles": [
            {"messages": [{"role": "wizard", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}]},
        ],
        "nothing is trained": [untrained],
        "text files": ['{"messages": [', '{"messages": undefined}'],
        "fields": [{"dialogue": "x"}, {"messages": "x"}],
        "too long": [conversation("red " * 200, "green " * 300)],
    }


def add_rows(folder: Path, rows: list[Any]) -> None:
    """Append rows to `rows.jsonl`."""
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def make_run(folder: Path, *, bad: bool = False) -> Path:
    """`run.yaml` over 24 good rows and, if asked for, all bad ones after them."""
    folder.mkdir(parents=True, exist_ok=True)
    yaml = make_tiny_run(folder)
    if bad:
        add_rows(folder, [row for rows in bad_rows(folder).values() for row in rows])
    return yaml


def basics(**values: Any) -> list[str]:
    """Overrides of `basic_parameters`."""
    return [f"data.dataset_param.basic_parameters.{name}={json.dumps(value)}" for name, value in values.items()]
