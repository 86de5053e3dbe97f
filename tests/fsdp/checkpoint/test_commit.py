"""The commit protocol under failure: nothing half-written stays, nothing saved before is lost, all ranks agree."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.utils.serialization import config

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.dcp_folder.storage import _SMALL_BYTES, write_tree
from mindspeed_mm.core.errors import CheckpointError, MachineError
from mindspeed_mm.core.hashed_file import FileRecord
from mindspeed_mm.fsdp.checkpoint import commit, manager
from mindspeed_mm.fsdp.checkpoint.manifest import FORMAT_VERSION, read_manifest, verify_files
from mindspeed_mm.fsdp.utils.ranks import Ranks
from tests.fsdp.checkpoint import small_run
from tests.fsdp.checkpoint.small_run import CONTEXT, build, differing, everything, saved_run
from tests.helpers.distributed import _context as warm_server
from tests.helpers.distributed import run_ranks


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    saved_run(tmp_path, 3)
    folder = tmp_path / "iter_0000003"
    assert names(tmp_path) == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    assert names(folder) == [
        ".metadata",
        "MANIFEST.json",
        "__0_0.distcp",
        "rng_rank0.safetensors",
        "trainer_state.json",
    ]
    assert (tmp_path / layout.TRACKER).read_text() == "3\n"
    manifest = read_manifest(folder)
    assert (manifest.iteration, manifest.world_size, manifest.optimizer) == (3, 1, "AdamW")
    assert (manifest.context, manifest.format_version) == (CONTEXT, FORMAT_VERSION)
    assert manifest.ties == {"head.weight": "embed.weight"}
    assert set(manifest.files) == {*names(folder)} - {"MANIFEST.json"}
    assert verify_files(folder, manifest.files, "hash") == []
    assert json.loads((folder / "trainer_state.json").read_text()) == {"iteration": 3}


def test_only_tensors_are_stored_and_ties_once(tmp_path: Path) -> None:
    from mindspeed_mm.checkpoint.dcp_folder.metadata_unpickler import read_metadata

    saved_run(tmp_path, 1)
    index = read_metadata(tmp_path / "iter_0000001").state_dict_metadata
    assert {type(entry).__name__ for entry in index.values()} == {"TensorStorageMetadata"}
    assert "model.embed.weight" in index
    assert "model.head.weight" not in index
    assert "model.scratch" not in index
    assert index["model.frozen.weight"].properties.dtype == torch.bfloat16
    assert "optimizer.state.block.0.weight.exp_avg" in index


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_those_of_torchs_own_writer(tmp_path: Path) -> None:
    """To the byte, on both sides of the size to which a tensor is written in one piece, and where it is none."""
    torch.manual_seed(0)
    edge = _SMALL_BYTES // 4
    tensors = {str(count): torch.randn(count) for count in (0, 1, 7, edge - 1, edge, edge + 1, 3 * edge)}
    tensors |= {"flags": torch.tensor([True, False]), "halves": torch.randn(3, 5).bfloat16(), "number": torch.tensor(2)}
    ours, torchs = tmp_path / "ours", tmp_path / "torchs"
    records = write_tree({"model": tensors}, ours, Ranks())
    with config.patch("save.compute_crc32", False):
        dcp.save({"model": tensors}, checkpoint_id=torchs, no_dist=True)
    assert names(ours) == names(torchs) == [".metadata", "__0_0.distcp"]
    written = (ours / "__0_0.distcp").read_bytes()
    assert written == (torchs / "__0_0.distcp").read_bytes()
    assert records["__0_0.distcp"].size == len(written)
    assert verify_files(ours, records, "hash") == []


def test_optimizer_and_generators_can_be_left_out_and_weights_cast(tmp_path: Path) -> None:
    model, _ = saved_run(tmp_path, 2, no_save_optim=True, no_save_rng=True, save_ckpt_dtype="bf16")
    folder = tmp_path / "iter_0000002"
    assert "rng_rank0.safetensors" not in names(folder)
    assert (read_manifest(folder).optimizer, read_manifest(folder).dtype) == (None, "bf16")
    fresh, optimizer = build(seed=9)
    checkpoints = small_run.manager(tmp_path)
    found = checkpoints.find_latest()
    assert found is not None
    with pytest.raises(CheckpointError, match=r"no optimizer state\. Say --weights-only"):
        checkpoints.load(found, fresh, optimizer)
    checkpoints.load(found, fresh, None)
    assert torch.equal(fresh.embed.weight, model.embed.weight.bfloat16().float())
    assert fresh.steps_seen == 2


def bytes_read() -> int:
    """That this process has read from files so far, the page cache included."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_what_is_written_is_hashed_without_reading_it_back(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(1 << 20), "v": torch.arange(1 << 18)[::2]}
    tree = {"model": tensors, "optimizer": {"state.w.step": torch.tensor(3.0)}}
    contents = commit.CheckpointContents(1, tree, "{}", {"cpu": torch.get_rng_state()}, "AdamW")
    commit.commit_checkpoint(tmp_path, contents, {}, Ranks(), print)  # imports what it needs
    before = bytes_read()
    folder = commit.commit_checkpoint(tmp_path, replace(contents, iteration=2), {}, Ranks(), print)
    files = read_manifest(folder).files
    assert files[".metadata"].size and files["__0_0.distcp"].size > 5_000_000
    assert bytes_read() - before < 100_000
    for name, record in files.items():
        content = (folder / name).read_bytes()
        assert record == FileRecord(len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"), name


# --- failures --------------------------------------------------------------------------------------------------------


def full_disk_on_one_rank(save: str, save_async: bool) -> list[str]:
    """A real refused write, in the middle of a file, on rank 1 only; then the next save goes through."""
    model, optimizer = build()
    checkpoints = small_run.manager(save, save_async=save_async)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()
    small_run.train_step(model, optimizer, 1)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    said = []
    for attempt in (lambda: checkpoints.save(2, model, optimizer, {}), checkpoints.wait):
        try:
            attempt()
        except MachineError as error:
            said.append(str(error))
    dist.barrier()
    said += names(Path(save))
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.save(2, model, optimizer, {})
    checkpoints.wait()
    return [*said, (Path(save) / layout.TRACKER).read_text()]


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_full_disk_on_one_rank_fails_all_and_loses_nothing(save_async: bool, tmp_path: Path) -> None:
    for said in run_ranks(2, full_disk_on_one_rank, str(tmp_path), save_async):
        error, *files, tracker = said
        assert "the disk is full: a checkpoint needs" in error
        assert "bytes" in error and "are free" in error and str(tmp_path) in error
        assert files == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert tracker == "2\n"


@pytest.mark.parametrize("function", ["_fresh_folder", "_write", "_commit"])
def test_failure_in_any_phase_leaves_the_older_checkpoint_alone(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = saved_run(tmp_path, 1)
    before = (tmp_path / "iter_0000001" / "MANIFEST.json").read_bytes()
    real = getattr(commit, function)

    def broken(*args: Any) -> None:
        real(*args) if function != "_commit" else None
        raise OSError(errno.EIO, "Input/output error", "/some/file")

    monkeypatch.setattr(commit, function, broken)
    with pytest.raises(MachineError, match=r"/some/file .*could not be written: Input/output error"):
        small_run.manager(tmp_path).save(2, model, optimizer, {})
    assert names(tmp_path) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "iter_0000001" / "MANIFEST.json").read_bytes() == before


def test_unforeseen_error_of_one_rank_reaches_all() -> None:
    for rank, said in enumerate(run_ranks(2, error_on_rank_one)):
        assert said == ["writing failed on rank 1: ZeroDivisionError: division by zero", 10 + rank]


def error_on_rank_one() -> list[Any]:
    ranks = Ranks(20)
    try:
        ranks.together("writing", lambda: 1 / (1 - ranks.rank))
    except CheckpointError as error:
        return [str(error), ranks.together("again", lambda: 10 + ranks.rank)]
    return []


def test_failed_save_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = build()
    checkpoints = small_run.manager(tmp_path, save_async=True)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_tree", lambda *args: 1 // 0)
        checkpoints.save(1, model, optimizer, {})
        with pytest.raises(CheckpointError, match="ZeroDivisionError"):
            checkpoints.save(2, model, optimizer, {})
        with pytest.raises(CheckpointError, match="ZeroDivisionError"):  # of the second, which was tried all the same
            checkpoints.wait()
    assert "the save in the background failed" in capsys.readouterr().out
    checkpoints.wait()  # told once
    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_tree", lambda *args: 1 // 0)
        checkpoints.save(3, model, optimizer, {})
        assert checkpoints._under_way is not None and checkpoints._under_way.exception()
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        checkpoints.save(4, model, optimizer, {})
    checkpoints.wait()
    assert names(tmp_path) == ["iter_0000004", "latest_checkpointed_iteration.txt"]


def test_space_is_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = build()
    needed = sum(t.nbytes for t in {id(t): t for t in model.state_dict().values()}.values())
    needed -= model.head.weight.nbytes
    checkpoints = small_run.manager(tmp_path)
    monkeypatch.setattr(commit, "free_bytes", lambda path: needed - 1)
    with pytest.raises(MachineError, match=rf"the disk is full: .* {needed:,} bytes, {needed - 1:,} are free"):
        checkpoints.save(1, model, optimizer, {})
    assert names(tmp_path) == []
    monkeypatch.setattr(commit, "free_bytes", lambda path: int(1.1 * needed))
    checkpoints.save(1, model, optimizer, {})
    assert f"needs {needed:,} bytes and only" in capsys.readouterr().out
    monkeypatch.setattr(commit, "free_bytes", lambda path: int(1.3 * needed))
    checkpoints.save(2, model, optimizer, {})
    assert "needs" not in capsys.readouterr().out


def test_state_that_is_no_json_and_extra_state_are_refused_before_writing(tmp_path: Path) -> None:
    model, optimizer = build()
    checkpoints = small_run.manager(tmp_path)
    with pytest.raises(CheckpointError, match="collecting failed on rank 0: TypeError"):
        checkpoints.save(1, model, optimizer, {"when": object()})
    type(model.idle).get_extra_state = lambda self: {"a": 1}  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError, match=r"_extra_state.*not a tensor but a dict"):
            checkpoints.save(1, model, optimizer, {})
    finally:
        del type(model.idle).get_extra_state
    assert names(tmp_path) == []


# --- same step, retention --------------------------------------------------------------------------------------------


def test_the_same_step_is_saved_once_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    model, optimizer = saved_run(tmp_path, 1, 2)
    folder = tmp_path / "iter_0000002"
    (folder / "__0_0.distcp").write_bytes(b"damaged")
    checkpoints = small_run.manager(tmp_path)
    checkpoints.save(2, model, optimizer, {})
    committed = folder.stat().st_ino
    checkpoints.save(2, model, optimizer, {})
    assert folder.stat().st_ino == committed
    assert verify_files(folder, read_manifest(folder).files, "hash") == []
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]


def test_retention(tmp_path: Path) -> None:
    saved_run(tmp_path, 1, 2, 3, 4, 5, save_total_limit=3)
    assert layout.list_iterations(tmp_path) == [3, 4, 5]
    assert names(tmp_path)[-1] == layout.TRACKER  # nothing half-deleted


def test_retention_keeps_two_good_ones_whatever_is_asked(tmp_path: Path) -> None:
    saved_run(tmp_path, 1, 2, 3, 4)
    (tmp_path / "iter_0000003" / ".metadata").unlink()
    assert manager.prune(tmp_path, None) == []
    assert manager.prune(tmp_path, 1) == [1]
    assert layout.list_iterations(tmp_path) == [2, 3, 4]  # 3 is damaged: it does not count and stays as evidence


def test_failing_to_delete_old_ones_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(manager, "prune", refuse)
    saved_run(tmp_path, 1)
    assert "old checkpoints could not be deleted" in capsys.readouterr().out
    assert layout.read_tracker(tmp_path) == "1"


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def kill_at_random(save: Path, delay_s: float) -> None:
    """Kill -9 a saving process `delay_s` after it has committed something."""
    before = layout.read_tracker(save)
    process = warm_server().Process(target=small_run.save_for_ever, args=(str(save),), daemon=True)
    process.start()
    patience = time.monotonic() + 60
    while layout.read_tracker(save) == before and time.monotonic() < patience:
        time.sleep(0.005)
    time.sleep(delay_s)
    assert process.pid is not None and process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_at_random_moments(kills: int, tmp_path: Path) -> None:
    random_moment = random.Random(kills)
    newest = 0
    mid_save = 0
    for _ in range(kills):
        kill_at_random(tmp_path, random_moment.random() * 0.1)
        mid_save += any(name.endswith(".draft") for name in names(tmp_path))
        for step in layout.list_iterations(tmp_path):
            folder = layout.checkpoint_folder(tmp_path, step)
            assert verify_files(folder, read_manifest(folder).files, "hash") == []
        tracker = layout.read_tracker(tmp_path)
        assert tracker is not None and int(tracker) in layout.list_iterations(tmp_path)
        found = small_run.manager(tmp_path).find_latest()
        assert found is not None and found.iteration is not None and found.iteration >= max(newest, int(tracker))
        newest = found.iteration
        model, optimizer = build(seed=4)
        assert small_run.manager(tmp_path).load(found, model, optimizer)["iteration"] == newest
        assert not [name for name in names(tmp_path) if name.endswith((".tmp", ".draft", ".former"))]
    assert newest >= kills  # it did save
    assert mid_save or kills < 20


def test_two_runs_of_the_same_steps_save_the_same(tmp_path: Path) -> None:
    """The state that the kill test reloads is the state of that step."""
    torch.manual_seed(3)
    first = everything(*saved_run(tmp_path, 2))
    torch.manual_seed(3)
    again, optimizer = build(seed=8)
    checkpoints = small_run.manager(tmp_path)
    found = checkpoints.find_latest()
    assert found is not None
    checkpoints.load(found, again, optimizer)
    assert differing(first, everything(again, optimizer)) == []
