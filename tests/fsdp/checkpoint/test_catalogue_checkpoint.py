"""Bad checkpoints, one row each: what was done to it, which exit code and which words a person gets, and where the run
goes on when it can."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.core.errors import ExitCode, MMError
from mindspeed_mm.fsdp.checkpoint import manifest
from mindspeed_mm.fsdp.checkpoint.resume import check_resumable
from tests.fsdp.checkpoint import small_run
from tests.fsdp.checkpoint.small_run import CONTEXT, build, saved_run
from tests.helpers.permissions import unreadable

NEWEST = "iter_0000003"
SHARD = "__0_0.distcp"


@dataclass(frozen=True)
class Outcome:
    """Where the run goes on, and what was said on the way."""

    step: int | None
    said: str = ""


Action = Callable[[Path], Outcome]


def resume(save: Path, **options: Any) -> Outcome:
    """What `mm train` does: find, load."""
    said: list[str] = []
    checkpoints = small_run.manager(save, note=said.append, **options)
    found = checkpoints.find_latest()
    if found is None:
        return Outcome(None)
    model, optimizer = build(seed=7)
    state = checkpoints.load(found, model, optimizer)
    assert state["iteration"] == found.iteration
    return Outcome(found.iteration, "\n".join(said))


def named(folder: str = NEWEST) -> Action:
    """Load the checkpoint that a person named in `training.load`."""

    def action(save: Path) -> Outcome:
        said: list[str] = []
        checkpoints = small_run.manager(save, note=said.append)
        found = checkpoints.open(save / folder)
        model, optimizer = build(seed=7)
        checkpoints.load(found, model, optimizer)
        return Outcome(found.iteration, "\n".join(said))

    return action


def with_run(width: int = 7, optimizer: type[torch.optim.Optimizer] | None = None) -> Action:
    """Resume with another model, or another optimizer."""

    def action(save: Path) -> Outcome:
        model, adamw = build(width=width)
        other = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1) if optimizer else adamw
        checkpoints = small_run.manager(save)
        found = checkpoints.find_latest()
        assert found is not None
        checkpoints.load(found, model, other)
        return Outcome(found.iteration)

    return action


def context(**changes: Any) -> Action:
    """Compare with a run whose configuration, data or batch is another."""

    def action(save: Path) -> Outcome:
        found = small_run.manager(save).find_latest()
        assert found is not None
        now = json.loads(json.dumps(CONTEXT)) | changes
        return Outcome(found.iteration, "\n".join(check_resumable(found.context, now)))

    return action


# --- what is done to the folder --------------------------------------------------------------------------------------


def edit(name: str, change: Callable[[bytes], bytes], folder: str = NEWEST) -> Callable[[Path], None]:
    def damage(save: Path) -> None:
        path = save / folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def remove(*names: str, folder: str = NEWEST) -> Callable[[Path], None]:
    return lambda save: [(save / folder / name).unlink() for name in names] and None


def flipped(content: bytes) -> bytes:
    """One bit in the middle of the tensors' bytes, which torch would load."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def mixed_steps(save: Path) -> None:
    shutil.copyfile(save / "iter_0000002" / SHARD, save / NEWEST / SHARD)


def all_damaged(save: Path) -> None:
    for step in layout.list_iterations(save):
        remove(SHARD, folder=layout.checkpoint_folder(save, step).name)(save)


def hostile_metadata(save: Path) -> None:
    """A checkpoint from elsewhere whose index would run a command."""

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (save / "was-run",))

    remove("MANIFEST.json")(save)
    (save / NEWEST / ".metadata").write_bytes(pickle.dumps(Hostile()))


def newer_format(save: Path) -> None:
    edit("MANIFEST.json", lambda text: text.replace(b'"format_version": 2', b'"format_version": 9'))(save)


def manifest_with(**changes: Any) -> Callable[[Path], None]:
    """A manifest that is JSON, with some of its values replaced."""
    return edit("MANIFEST.json", lambda text: json.dumps(json.loads(text) | changes).encode())


def without_permission(save: Path) -> Outcome:
    with unreadable(save / NEWEST / "MANIFEST.json"):
        return resume(save)


def unverified(save: Path) -> Outcome:
    """Resume as with `training.verify_checkpoint: none`: damage is met where it is read."""
    return resume(save, verify_checkpoint="none")


def pickle_in_a_shard(save: Path) -> None:
    """Every tensor's bytes become an archive that would run something."""
    path = save / NEWEST / SHARD
    content = path.read_bytes()
    path.write_bytes(content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_x2"))


def folder_in_place_of(name: str) -> Callable[[Path], None]:
    def damage(save: Path) -> None:
        (save / NEWEST / name).unlink()
        (save / NEWEST / name).mkdir()

    return damage


def in_place_of_the_run(**files: str) -> Callable[[Path], None]:
    def build_other(save: Path) -> None:
        shutil.rmtree(save)
        for name, text in files.items():
            path = save / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return build_other


def nothing(save: Path) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    id: str
    damage: Callable[[Path], object]
    said: str
    """Pattern of the message or, when the run goes on, of its notes."""
    goes_on_at: int | None = None
    exit_code: ExitCode = ExitCode.DATA
    action: Action = resume


LR = CONTEXT["config"]["training"]["lr"]
CASES = [
    Case("90-no-manifest", remove("MANIFEST.json"), r"skipped \S+/iter_0000003 +has no MANIFEST\.json", 2),
    Case("90-no-metadata", remove(".metadata"), r"iter_0000003/\.metadata +file is missing", 2),
    Case(
        "90-drafts",
        lambda s: (s / ".mindspeed-mm-iter_0000004.draft").mkdir(),
        r"cleared \.mindspeed-mm-iter_0000004\.draft",
        3,
    ),
    Case("91-truncated", edit(SHARD, lambda b: b[:-7]), rf"{NEWEST}/{SHARD} +has \d+ bytes, \d+ were committed", 2),
    Case(
        "91-flipped",
        edit(SHARD, flipped),
        rf"{SHARD} +content has changed: xxh3_128 \w+…, xxh3_128 \w+… was committed",
        2,
    ),
    Case("91-extra", lambda s: (s / NEWEST / "x").write_text(""), r"iter_0000003/x +extra file, not in the man", 2),
    Case("91-missing-shard", remove(SHARD), rf"{NEWEST}/{SHARD} +file is missing", 2),
    Case("91-mixed-steps", mixed_steps, rf"{NEWEST}/{SHARD} +(content has changed|has \d+ bytes)", 2),
    Case("91-renamed", lambda s: (s / NEWEST).rename(s / "iter_0000009"), r"holds step 3, which its name contrad", 2),
    Case("91-manifest-cut", edit("MANIFEST.json", lambda b: b[:99]), r"MANIFEST\.json +is not valid JSON: ", 2),
    Case("91-manifest-alien", edit("MANIFEST.json", lambda b: b"[]"), r"MANIFEST\.json +holds a list, not", 2),
    Case("91-manifest-other", edit("MANIFEST.json", lambda b: b"{}"), r"is not a manifest of a checkpoint", 2),
    Case("91-manifest-folder", folder_in_place_of("MANIFEST.json"), r"MANIFEST\.json +cannot be read: Is a dir", 2),
    Case("91-named", remove(SHARD), r"iter_0000003 is damaged\. An older one is \S+/iter_0000002", action=named()),
    Case("91-all", all_damaged, r"no checkpoint in it is good\. Restore one, or add --allow-fresh.*missing"),
    Case("92-tracker", edit(layout.TRACKER, lambda b: b"40", "."), r"tracker names step 40, which is not there", 3),
    Case("92-tracker-cut", edit(layout.TRACKER, lambda b: b"", "."), r"^$", 3),
    Case(
        "92-only-tracker",
        lambda s: [shutil.rmtree(s / f"iter_000000{n}") for n in (1, 2, 3)],
        r"names step 3, which does not exist",
    ),
    Case(
        "93-no-optimizer",
        lambda s: saved_run(s, 4, no_save_optim=True),
        r"iter_0000004 +holds no optimizer state\. Say --weights-only",
    ),
    Case(
        "93-other-optimizer",
        nothing,
        r"training\.optimizer +holds the state of AdamW, this run has SGD\. Say --weights-only",
        action=with_run(optimizer=torch.optim.SGD),
    ),
    Case(
        "94-other-shapes",
        nothing,
        r"from another model: 0 tensors are missing, 0 unknown, 6 of another shape.*"
        r"embed\.weight +\[11, 7\] in the checkpoint, \[11, 9\] in the model",
        action=with_run(width=9),
    ),
    Case(
        "94-other-config",
        nothing,
        r"not the run that saved.*model\.rank +was null, is 16",
        action=context(config={"training": {"lr": LR}, "model": {"rank": 16}}),
    ),
    Case(
        "94-other-lr",
        nothing,
        r"^training\.lr +was 0\.01, is 0\.02",
        3,
        action=context(config={"training": {"lr": 0.02}}),
    ),
    Case("94-log-interval", nothing, r"^$", 3, action=context(config={"training": {"lr": LR, "log_interval": 9}})),
    Case(
        "95-megatron",
        in_place_of_the_run(
            release__mp_rank_00__model_optim_rng_DOT_pt="", **{"latest_checkpointed_iteration.txt": "release"}
        ),
        r"folder of kind 'megatron'.*convert",
        action=named("."),
    ),
    Case(
        "95-hf", in_place_of_the_run(config_DOT_json="{}"), r"kind 'hf'.*model\.model_name_or_path", action=named(".")
    ),
    Case("95-deepspeed", in_place_of_the_run(global_step5__x=""), r"is a DeepSpeed checkpoint", action=named(".")),
    Case(
        "95-nothing",
        in_place_of_the_run(notes="x"),
        r"is neither a checkpoint nor .* it holds notes.*converter of your own: docs/conversion\.md",
        action=named("."),
    ),
    Case(
        "95-absent",
        nothing,
        r"iter_0000033 +does not exist\. Did you mean '[^']*iter_0000003'\?",
        action=named("iter_0000033"),
    ),
    Case("95-hostile-metadata", hostile_metadata, r"is refused: it asks for pathlib\.\S*touch", action=named()),
    Case("96-newer-format", newer_format, r"format_version +has format version 9, this installation reads up to 2"),
    Case(
        "97-global-batch",
        nothing,
        r"global batch size +was 4, is 8\. Choose gradient_acc",
        action=context(global_batch=8),
    ),
    Case("97-world-size", nothing, r"world size was 1, is 2: .* resharded", 3, action=context(world_size=2)),
    Case("98-unreadable", nothing, r"MANIFEST\.json +cannot be read: permission denied", action=without_permission),
    Case(
        "F16-data",
        nothing,
        r"data: rows +was 3, is 4\. Restore .*--accept-data-change",
        action=context(dataset={"rows": 4}),
    ),
]


MISTYPED: dict[str, Any] = {
    "iteration": "3", "world_size": None, "files": [], "optimizer": 7, "ties": [], "dtype": 16, "context": "x",
    "time": "now", "format_version": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three good checkpoints, made once."""
    save = tmp_path_factory.mktemp("runs") / "run"
    saved_run(save, 1, 2, 3)
    return save


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bad_checkpoint(case: Case, run: Path, tmp_path: Path) -> None:
    save = shutil.copytree(run, tmp_path / "run")
    case.damage(save)
    if case.goes_on_at is not None:
        outcome = case.action(save)
        assert outcome.step == case.goes_on_at
        said = outcome.said
    else:
        with pytest.raises(MMError) as caught:
            case.action(save)
        assert caught.value.exit_code == case.exit_code
        said = str(caught.value)
    assert re.search(case.said, said, re.DOTALL), said
    assert not (save / "was-run").exists()


@pytest.mark.edge("S12")
@pytest.mark.parametrize("field", MISTYPED)
def test_a_mistyped_manifest_falls_back_to_the_older_step(field: str, run: Path, tmp_path: Path) -> None:
    save = shutil.copytree(run, tmp_path / "run")
    manifest_with(**{field: MISTYPED[field]})(save)
    outcome = resume(save)
    assert outcome.step == 2
    assert re.search(rf"skipped {save}/{NEWEST}/MANIFEST\.json ", outcome.said), outcome.said


@pytest.mark.edge("S12")
@pytest.mark.parametrize(
    "record",
    [
        {"size": "9", "sha256": "0" * 64},
        {"size": 9, "sha256": None},
        {"size": 9, "checksum": "md5:0"},
        {"size": 9, "checksum": None},
        {"size": 9},
        3,
    ],
)
def test_a_mistyped_record_of_a_file_falls_back_to_the_older_step(record: Any, run: Path, tmp_path: Path) -> None:
    save = shutil.copytree(run, tmp_path / "run")
    manifest_with(files={SHARD: record})(save)
    assert resume(save).step == 2


@pytest.mark.edge("S11")
@pytest.mark.parametrize("damage", [pickle_in_a_shard, edit(SHARD, lambda b: b"no tensor" * len(b))])
def test_a_shard_that_torch_refuses_is_named_in_our_words(
    damage: Callable[[Path], None], run: Path, tmp_path: Path
) -> None:
    save = shutil.copytree(run, tmp_path / "run")
    damage(save)
    with pytest.raises(MMError) as caught:
        unverified(save)
    said = str(caught.value)
    assert caught.value.exit_code == ExitCode.DATA
    assert f"{save}/{NEWEST}/{SHARD}" in said and "damaged" in said
    assert "weights_only" not in said and "\n" not in said


def test_nothing_saved_yet_is_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / ".mindspeed-mm-iter_0000001.draft").mkdir()  # killed in its first save
    assert resume(tmp_path) == Outcome(None)
    assert list(tmp_path.iterdir()) == []


def test_allow_fresh(run: Path, tmp_path: Path) -> None:
    save = shutil.copytree(run, tmp_path / "run")
    all_damaged(save)
    assert small_run.manager(save).find_latest(allow_fresh=True) is None


@pytest.mark.parametrize(("verification", "step"), [("hash", 2), ("size", 3), ("none", 3)])
def test_how_closely_files_are_verified(verification: str, step: int, run: Path, tmp_path: Path) -> None:
    save = shutil.copytree(run, tmp_path / "run")
    edit(SHARD, flipped)(save)
    found = small_run.manager(save, verify_checkpoint=verification).find_latest()
    assert found is not None and found.iteration == step


@pytest.mark.parametrize(("damage", "step"), [(nothing, 3), (edit(SHARD, flipped), 2)])
def test_a_manifest_with_sha_256_is_verified_by_it(
    damage: Callable[[Path], None], step: int, run: Path, tmp_path: Path
) -> None:
    """As they were before they named their hash."""
    save = shutil.copytree(run, tmp_path / "run")
    files = {}
    for path in (save / NEWEST).iterdir():
        if path.name != "MANIFEST.json":
            content = path.read_bytes()
            files[path.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest_with(files=files, format_version=1)(save)
    damage(save)
    outcome = resume(save)
    assert outcome.step == step
    assert ("content has changed: sha256" in outcome.said) == (step == 2)


def test_checkpoint_from_elsewhere_loads_with_a_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No manifest, and a shared parameter under both of its names, as other tools store it."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = build()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "foreign")
    checkpoints = small_run.manager(tmp_path / "save")
    found = checkpoints.open(tmp_path / "foreign")
    assert found.manifest is None and "it comes from elsewhere" in found.notes[0]
    assert "it comes from elsewhere" in capsys.readouterr().out
    fresh, _ = build(seed=3)
    checkpoints.load(found, fresh, None)
    assert torch.equal(fresh.head.weight, model.embed.weight)
    with pytest.raises(MMError, match="holds no optimizer state"):
        checkpoints.load(found, fresh, optimizer)


def test_every_number_of_the_catalogue_is_here() -> None:
    assert {case.id.split("-")[0] for case in CASES} >= {str(number) for number in range(90, 99)}


def test_format_version_is_what_the_cases_assume() -> None:
    assert manifest.FORMAT_VERSION == 2
