"""The average of the weights is saved, resumed and exported with them, and begins anew where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import CheckpointError, MachineError
from mindspeed_mm.fsdp.checkpoint import commit
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint, open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.diffusion_args import EmaArguments
from mindspeed_mm.fsdp.utils.ranks import Ranks
from tests.fsdp.checkpoint.small_run import build, differing, everything, manager, train_step
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import full

ARGUMENTS = EmaArguments(enable=True, decay=0.7)


def average(ema: Ema) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in ema.tensors().items()}


def train(model: Any, optimizer: Any, ema: Ema, first: int, last: int) -> None:
    for step in range(first, last + 1):
        train_step(model, optimizer, step)
        ema.update(step)


def saved(folder: Path, **changes: Any) -> tuple[CheckpointManager, CommittedCheckpoint, Ema, Any]:
    """A run of two steps with an average, saved; in this process alone."""
    model, optimizer = build()
    ema, checkpoints = Ema(model, ARGUMENTS), manager(folder, **changes)
    train(model, optimizer, ema, 1, 2)
    checkpoints.save(2, model, optimizer, {"iteration": 2}, ema)
    checkpoints.wait()
    found = checkpoints.find_latest()
    assert found is not None
    return checkpoints, found, ema, model


# --- resumed ---------------------------------------------------------------------------------------------------------


def unbroken_and_resumed(save: str) -> dict[str, Any]:
    model, optimizer = build()
    ema = Ema(model, ARGUMENTS)
    torch.manual_seed(5)
    train(model, optimizer, ema, 1, 3)
    saved, generator = average(ema), torch.get_rng_state()
    checkpoints = manager(save, save_async=True)
    checkpoints.save(3, model, optimizer, {"iteration": 3}, ema)
    train(model, optimizer, ema, 4, 6)  # the save under way must not see these
    checkpoints.wait()
    unbroken, weights = average(ema), everything(model, optimizer)

    model, optimizer = build(seed=1)
    ema = Ema(model, ARGUMENTS)
    found = checkpoints.find_latest()
    assert found is not None
    checkpoints.load(found, model, optimizer, ema)
    at_load = average(ema)
    torch.set_rng_state(generator)
    train(model, optimizer, ema, 4, 6)
    return {
        "at_load": differing(saved, at_load),
        "after": differing(unbroken, average(ema)) + differing(weights, everything(model, optimizer)),
        "moved": differing(unbroken, at_load),
        "apart": differing(at_load, {name: full(p) for name, p in model.named_parameters() if p.requires_grad}),
        "saved": saved,
    }


def load_only(save: str) -> dict[str, torch.Tensor]:
    model, optimizer = build(seed=2)
    ema, checkpoints = Ema(model, ARGUMENTS), manager(save)
    found = checkpoints.find_latest()
    assert found is not None
    checkpoints.load(found, model, optimizer, ema)
    return average(ema)


def test_resume_is_bitwise_and_reshards(tmp_path: Path) -> None:
    saved = {}
    for world_size in (1, 2):
        for outcome in run_ranks(world_size, unbroken_and_resumed, str(tmp_path / str(world_size))):
            assert outcome["at_load"] == outcome["after"] == []
            assert {"block.0.weight", "embed.weight"} <= set(outcome["moved"]) & set(outcome["apart"])
            assert not any(name.startswith("frozen") for name in outcome["saved"])
            saved[world_size] = outcome["saved"]
    for saved_by, loaded_by in ((1, 2), (2, 1)):
        for found in run_ranks(loaded_by, load_only, str(tmp_path / str(saved_by))):
            assert differing(saved[saved_by], found) == []


def test_without_the_optimizer_the_average_is_resumed_and_stays_exact(tmp_path: Path) -> None:
    checkpoints, found, ema, _ = saved(tmp_path, no_load_optim=True, no_save_optim=True, save_ckpt_dtype="bf16")
    model, optimizer = build(seed=1)
    other = Ema(model, ARGUMENTS)
    checkpoints.load(found, model, optimizer, other)
    assert differing(average(ema), average(other)) == []


# --- begun anew ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [True, False], ids=["weights only", "none was kept"])
def test_average_starts_from_the_loaded_weights(
    weights_only: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, found, ema, trained = saved(tmp_path / "with")
    if not weights_only:
        model, optimizer = build()
        train(model, optimizer, Ema(model, ARGUMENTS), 1, 2)
        checkpoints = manager(tmp_path / "without")
        checkpoints.save(2, model, optimizer, {})
        found = checkpoints.find_latest()
        assert found is not None
    model, optimizer = build(seed=1)
    other = Ema(model, ARGUMENTS)
    checkpoints.load(found, model, None if weights_only else optimizer, other)
    assert differing(average(other), {n: full(p) for n, p in trained.named_parameters() if p.requires_grad}) == []
    assert differing(average(other), average(ema))
    assert f"{found.path}: the average of the weights starts from the weights loaded" in capsys.readouterr().out


def test_run_without_an_average_leaves_it_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, found, _, trained = saved(tmp_path)
    model, optimizer = build(seed=1)
    checkpoints.load(found, model, optimizer)
    assert torch.equal(model.embed.weight, trained.embed.weight)
    assert "the average of the weights" not in capsys.readouterr().out


def test_average_of_other_parameters_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    checkpoints, found, _, _ = saved(tmp_path)
    model, _ = build(seed=1)
    model.idle.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ema, before = Ema(model, ARGUMENTS), model.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match="the average of the weights, was saved from another model") as caught:
        checkpoints.load(found, model, optimizer, ema)
    assert {problem.key for problem in caught.value.problems} == {"idle.weight", "idle.bias"}
    assert torch.equal(model.embed.weight, before)


# --- counted, read ---------------------------------------------------------------------------------------------------


def test_space_is_asked_for_the_average_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    ema, checkpoints = Ema(model, ARGUMENTS), manager(tmp_path)
    weights = sum(t.numel() * t.element_size() for t in dict(model.state_dict()).values())
    weights -= model.head.weight.numel() * 4  # tied
    monkeypatch.setattr(commit, "free_bytes", lambda folder: 2 * weights - 400)
    with pytest.raises(MachineError, match="the disk is full"):
        checkpoints.save(1, model, optimizer, {}, ema)
    monkeypatch.setattr(commit, "free_bytes", lambda folder: 2 * weights)
    checkpoints.save(1, model, optimizer, {}, ema)


def test_tensors_for_an_export_are_the_average_unless_told_otherwise(tmp_path: Path) -> None:
    _, found, ema, trained = saved(tmp_path)
    read, asked = DcpTensors(found), DcpTensors(found, "ema")
    as_trained = DcpTensors(found, "model")
    assert (read.weights, asked.weights, as_trained.weights) == ("ema", "ema", "model")
    whole = {name: tensor for name, tensor in trained.state_dict().items() if name != "head.weight"}
    assert read.lazy().keys() == as_trained.lazy().keys() == read.matched_to(trained).keys() == whole.keys()
    assert differing(whole, {name: as_trained.lazy()[name].read() for name in whole}) == []
    expected = {**whole, **average(ema)}
    for reader in (read, asked):
        assert differing(expected, {name: reader.lazy()[name].read() for name in whole}) == []
    assert differing(expected, whole)


def test_average_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    model, optimizer = build()
    manager(tmp_path).save(1, model, optimizer, {})
    found = open_checkpoint(tmp_path, Ranks(), "size")
    assert DcpTensors(found).weights == "model"
    with pytest.raises(CheckpointError, match=r"holds no average .*--weights model"):
        DcpTensors(found, "ema")
