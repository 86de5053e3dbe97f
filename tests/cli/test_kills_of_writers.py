"""Kill -9 before the changes that an export, a merge and a save make to the disk: sources are intact, the target is
there and whole, the old one or the new one, and the next command clears what is left."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.core import exchange
from mindspeed_mm.core.folder_kinds import MARKER
from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.checkpoint.manifest import read_manifest, verify_files
from mindspeed_mm.tasks.export import export, merge
from mindspeed_mm.tasks.requests.export import ExportRequest, MergeRequest
from tests.fsdp.checkpoint import small_run
from tests.helpers.adapters import adapted_model
from tests.helpers.distributed import alone
from tests.helpers.kills import everything, killed_before_each_change
from tests.helpers.small_run_folder import make_text_run

pytestmark = pytest.mark.edge("S2")


def changes_around_the_end(changes: int) -> Collection[int]:
    """Those around the moment when the target is replaced, and a few before."""
    return sorted({*range(0, changes, 20), *range(max(0, changes - 7), changes)})


WHICH = {"the last changes": changes_around_the_end, "every change": range}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_run(tmp_path_factory.mktemp("writers"))


def weights_and_files(folder: Path) -> dict[str, bytes]:
    """What matters of an exported folder: its card and its marker have times in them."""
    return {name: data for name, data in everything(folder).items() if name not in ("README.md", MARKER)}


def check_exports(run: Path, tmp_path: Path, adapter: Path | None, which: str) -> None:
    """Kill an export, or the merge of an adapter, that replaces an older export of the run's first step."""

    def write(target: Path, overwrite: bool) -> None:
        if adapter is None:
            export.run(ExportRequest(run, target, overwrite=overwrite))
        else:
            merge.run(MergeRequest(run.parent / "model", [adapter], out=target, overwrite=overwrite))

    older, newer = tmp_path / "older", tmp_path / "newer"
    export.run(ExportRequest(run, older / "X", step=1))
    write(newer / "X", False)
    wholes = [weights_and_files(older / "X"), weights_and_files(newer / "X")]
    assert wholes[0] != wholes[1]
    sources = everything(run.parent)
    parent = tmp_path / "parent"
    target = parent / "X"
    seen = set()
    for change in killed_before_each_change(
        parent, lambda: shutil.copytree(older, parent, dirs_exist_ok=True), lambda: write(target, True), WHICH[which]
    ):
        assert weights_and_files(target) in wholes, change
        seen.add(wholes.index(weights_and_files(target)))
        assert everything(run.parent) == sources, change
        write(target, True)
        assert weights_and_files(target) == wholes[1], change
        assert [path.name for path in parent.iterdir()] == ["X"], change
    assert seen == {0, 1}


@pytest.mark.parametrize("which", ["the last changes", pytest.param("every change", marks=pytest.mark.slow)])
@alone
def test_export(run: Path, tmp_path: Path, which: str) -> None:
    check_exports(run, tmp_path, None, which)


@pytest.mark.slow
@alone
def test_merge(run: Path, tmp_path: Path) -> None:
    save_adapters(adapted_model(run.parent / "model"), tmp_path / "adapter", run.parent / "model")
    check_exports(run, tmp_path, tmp_path / "adapter", "every change")


def save(folder: Path, step: int) -> None:
    """Commit a step whose content depends on its number, keeping two."""
    model, optimizer = small_run.build(seed=step)
    rng = {"cpu": torch.get_rng_state()}
    small_run.manager(folder, save_total_limit=2).save(step, model, optimizer, {"iteration": step, "rng": rng})


@pytest.mark.edge("BS3")
@pytest.mark.parametrize(
    ("step", "has_exchange"),
    [
        pytest.param(3, True, id="a new step"),
        pytest.param(2, True, id="a step that is there"),
        pytest.param(2, False, id="a step that is there, in two renames"),
    ],
)
@alone
def test_save(tmp_path: Path, step: int, has_exchange: bool) -> None:
    if not has_exchange:
        exchange.exchange = lambda one, other: False  # in a process of its own
    before, folder = tmp_path / "before", tmp_path / "run"
    save(before, 1)
    save(before, 2)
    (before / "iter_0000009.tmp").mkdir()
    (before / "iter_mine.former").mkdir()

    def begin() -> None:
        shutil.copytree(before, folder, dirs_exist_ok=True)

    for change in killed_before_each_change(folder, begin, lambda: save(folder, step)):
        steps = layout.list_iterations(folder)
        assert {1, 2} <= set(steps) or steps == [2, 3] or (steps == [1] and not has_exchange), change
        for each in steps:
            place = layout.checkpoint_folder(folder, each)
            assert verify_files(place, read_manifest(place).files, "hash") == [], change
        found = small_run.manager(folder).find_latest()
        newest = 2 if steps == [1] else steps[-1]  # the one that was put aside is back
        assert found is not None and found.iteration == newest, change
        save(folder, step)
        left = {path.name for path in folder.iterdir()}
        kept = {"iter_0000001", "iter_0000002"} if step == 2 else {"iter_0000002", "iter_0000003"}
        assert left == kept | {layout.TRACKER, "iter_0000009.tmp", "iter_mine.former"}, change
