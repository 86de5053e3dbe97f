"""Commands that could destroy something: each is refused in one line, and every byte is still there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.tasks.data.check import write_bad_rows
from tests.helpers.kills import everything
from tests.helpers.runs import mm
from tests.helpers.small_run_folder import make_text_run

USERS = {
    "mine/config.yaml": "mine\n",
    "mine/report.html": "<html>mine</html>",
    "mine/results.json": '{"mine": 1}',
    "mine/answers.jsonl": '{"question": "mine"}\n',
    "mine/manifest.jsonl": '{"file": "picture.png"}\n',
    "mine/picture.png": "mine",
    "features/features.json": '{"mine": 1}',
    "features/index.jsonl": "mine",
    "X.tmp/a": "mine",
    "X.former/a": "mine",
    "empty-but-for/.keep": "",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its model, an export of the run, and files of a user; nothing here may change."""
    root = tmp_path_factory.mktemp("attacks")
    make_text_run(root)
    for name, text in USERS.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    row = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    (root / "rows.jsonl").write_text(json.dumps({"messages": row}) + "\n")
    for name in ("exported", "edited"):
        assert mm("export", root / "run", root / name).code == 0
    config = root / "edited" / "config.json"
    time.sleep(0.02)  # later than the clock of the file system is coarse
    config.write_bytes(config.read_bytes().replace(b"true", b"null"))  # as many bytes as before
    (root / "to-mine").symlink_to(root / "mine")
    (root / "to-run").symlink_to(root / "run")
    (root / "nowhere").symlink_to(root / "gone" / "deep")
    return root


EXPORT = [
    # target, --overwrite or not, what is said
    ("run", "is the input|is a run folder"),
    ("to-run", "is a run folder"),
    (".", "holds the input|is the working directory"),
    ("", "is the working directory"),
    ("..", "holds"),
    ("/", "holds"),
    ("run/iter_0000001", "lies in a run folder"),
    ("run/iter_0000002", "lies in a run folder"),
    ("run/iter_0000002/sub", "lies in a checkpoint"),
    ("run/new", "lies in a run folder"),
    ("run/hf", "lies in a run folder"),
    ("model", "no mm command wrote"),
    ("model/new", "lies in a model folder"),
    ("exported/new", "lies in a model folder"),
    ("mine", "no mm command wrote"),
    ("edited", "changed after an mm command wrote there (config.json)"),
    ("to-mine", "no mm command wrote"),
    ("empty-but-for", "no mm command wrote"),
    ("nowhere", "leads nowhere"),
    ("rows.jsonl", "is a file"),
    ("x" * 300, "File name too long"),
]
OTHERS = [
    (["merge", "exported", "model", "--out", "exported", "--overwrite"], "is the input"),
    (["merge", "model", "exported", "--out", "exported", "--overwrite"], "is the input"),
    (["merge", "run", "--out", "run", "--overwrite"], "is the input"),
    (["merge", "run", "--out", "edited", "--overwrite"], "changed after an mm command wrote there (config.json)"),
    (["merge", "run", "--out", "mine", "--overwrite"], "no mm command wrote"),
    (["export", "run", "exported", "--model", "exported", "--overwrite"], "is the input"),
    (["export", "run", "exported"], "the target exists"),
    (["report", "run", "--out", "mine/config.yaml"], "did not write"),
    (["report", "run", "--out", "mine/report.html"], "did not write"),
    (["report", "run", "--out", "mine"], "is a folder"),
    (["report", "run", "--out", "nowhere"], "leads nowhere"),
    (["report", "run", "--out", "run/iter_0000002/report.html"], "lies in a checkpoint"),
    (["report", "run", "--out", "model/report.html"], "lies in a model folder"),
    (["evaluate", "model", "--data", "rows.jsonl", "--out", "mine"], "did not write"),
    (["evaluate", "model", "--data", "rows.jsonl", "--out", "model"], "lies in a model folder"),
    (["infer", "model", "--data", "rows.jsonl", "--out", "mine/answers.jsonl", "--overwrite"], "did not write"),
    (["infer", "model", "--data", "rows.jsonl", "--out", "run/iter_0000001/a.jsonl"], "lies in a checkpoint"),
    (["infer", "model", "--data", "rows.jsonl", "--out", "rows.jsonl", "--overwrite"], "is the file of questions"),
]


def attacks() -> Iterator[tuple[list[str], str]]:
    for target, said in EXPORT:
        yield ["export", "run", target], said
        yield ["export", "run", target, "--overwrite"], said
    yield from OTHERS


@pytest.mark.edge("S1", "S7", "S13")
def test_every_byte_is_still_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    before = everything(root)
    for words, said in attacks():
        ended = mm(*words)
        assert ended.code == 2, (words, ended)
        assert any(part in ended.err for part in said.split("|")), (words, ended.err)
        assert ended.err.count("\n") == 1, (words, ended.err)
        assert everything(root) == before, words
    assert not (root / "gone").exists()


@pytest.mark.edge("S1")
def test_names_beside_the_target_are_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    before = everything(root)
    assert mm("export", "run", "X").code == 0
    assert mm("export", "run", "X", "--step", "1", "--overwrite").code == 0
    after = everything(root)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"X"}


@pytest.mark.edge("S7")
def test_a_users_features_and_rows_are_kept(root: Path) -> None:
    before = everything(root)
    with pytest.raises(UsageError, match=r"is not a folder of features, and holds features\.json"):
        FeatureFolder(root / "features").check()
    FeatureFolder(root / "features").clear()
    with pytest.raises(UsageError, match="lies in a model folder"):
        FeatureFolder(root / "model" / "features").prepare()
    with pytest.raises(UsageError, match="did not write"):
        write_bad_rows(root / "rows.jsonl", [])
    assert everything(root) == before


@pytest.mark.edge("S6")
def test_modes_of_what_is_written(root: Path) -> None:
    paths = [*(root / "run" / "iter_0000002").iterdir(), *(root / "exported").iterdir()]
    plain = (root / "rows.jsonl").stat().st_mode & 0o777
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in paths} == {path.name: oct(plain) for path in paths}
