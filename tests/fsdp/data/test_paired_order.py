"""Pairs of samples of a subject and of its prior: as many of both in a micro-batch, each side in its own epochs."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed_mm.core.errors import CheckpointError, ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.dataloader.buckets import BucketOrder
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, MicroBatch
from mindspeed_mm.fsdp.data.dataloader.pairing import PairedOrder
from mindspeed_mm.fsdp.params.loader import load_config

GEOMETRY = MediaGeometry(8, 1, (1, 2, 2), 16, is_video=False)
SMALL, LARGE = MediaSize(1, 16, 16), MediaSize(1, 32, 32)
SUBJECT, PRIOR = 3, 10
IS_PRIOR = [False] * SUBJECT + [True] * PRIOR


def order(
    sizes: list[MediaSize], is_prior: list[bool], samples: int = 4, ranks: int = 1, **settings: int
) -> PairedOrder:
    return PairedOrder(is_prior, sizes, GEOMETRY, Deal(samples, 1, 0, ranks), seed=5, **settings)


def micro_batches(order_: PairedOrder, steps: int) -> list[MicroBatch]:
    position, found = DataPosition(0, 0), []
    for _ in range(steps):
        planned = order_.step(position)
        found += planned.step
        position = planned.after
    return found


@pytest.mark.edge("BN3")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_micro_batch_has_as_many_of_both(ranks: int) -> None:
    paired = order([SMALL] * 13, IS_PRIOR, ranks=ranks)
    assert paired.steps_per_epoch == {1: 5, 2: 3}[ranks]
    for batch in micro_batches(paired, 30):
        half = len(batch.picks) // 2
        assert [IS_PRIOR[pick.row] for pick in batch.picks] == [False] * half + [True] * half
        assert batch.blank_rows in (0, len(batch.picks))


@pytest.mark.edge("BN3")
def test_each_side_runs_through_its_own_epochs() -> None:
    batches = micro_batches(order([SMALL] * 13, IS_PRIOR), 3 * 5)  # three epochs of ten pairs
    picks = [pick for batch in batches for pick in batch.picks]
    assert Counter(pick.row for pick in picks if IS_PRIOR[pick.row]) == dict.fromkeys(range(3, 13), 3)
    assert Counter(pick.row for pick in picks if not IS_PRIOR[pick.row]) == dict.fromkeys(range(3), 10)
    assert len(set(picks)) == len(picks)  # a picture that comes again comes in another epoch: with other noise


@pytest.mark.edge("BN3")
def test_pairs_have_one_size() -> None:
    sizes = [SMALL, LARGE, *[SMALL] * 5, *[LARGE] * 3]
    is_prior = [False, False, *[True] * 8]
    for batch in micro_batches(order(sizes, is_prior), 12):
        assert len({sizes[pick.row] for pick in batch.picks}) == 1
    with pytest.raises(ConfigError, match="32×32 has samples of the subject and none of the prior"):
        order(sizes[:7], is_prior[:7])


@pytest.mark.edge("BN3")
def test_a_budget_of_tokens_holds_for_both_together() -> None:
    tokens = GEOMETRY.tokens(GEOMETRY.latent_shape(LARGE))
    paired = order([LARGE] * 13, IS_PRIOR, max_tokens=5 * tokens)
    assert {len(batch.picks) for batch in micro_batches(paired, 5)} == {4}
    with pytest.raises(ConfigError, match="a pair of samples"):
        order([LARGE] * 13, IS_PRIOR, max_tokens=tokens)


@pytest.mark.edge("BN3")
def test_odd_micro_batches_and_shares_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ConfigError, match="3 is odd"):
        order([SMALL] * 13, IS_PRIOR, samples=3)
    entries = [{"path": "dog.jsonl"}, {"path": "class.jsonl", "prior": True}]
    content = {
        "model": {"model_name_or_path": "m", "model_id": "flux"},
        "data": {"dataset_param": {"dataset_type": "generation", "basic_parameters": {"dataset": entries}}},
        "training": {"micro_batch_size": 3, "train_iters": 1, "diffusion": {"prior_loss_weight": 1.0}},
    }
    with pytest.raises(ConfigError, match="3 is odd"):
        load_config(content)
    content["data"]["dataset_param"]["basic_parameters"]["mix"] = {"weights": {"dog.jsonl": 1, "class.jsonl": 1}}
    with pytest.raises(ConfigError, match="sets shares"):
        load_config(content)


def test_a_run_that_did_not_pair_goes_on_at_an_epoch() -> None:
    paired = order([SMALL] * 13, IS_PRIOR)
    before = BucketOrder([SMALL] * 13, GEOMETRY, Deal(4, 1, 0, 1), seed=5).batching
    middle = DataPosition(1, 4)
    assert paired.go_on(middle, paired.batching, may_skip=False) == (middle, "")
    with pytest.raises(CheckpointError, match="without pairing"):
        paired.go_on(middle, before, may_skip=False)
    assert paired.go_on(middle, before, may_skip=True)[0] == DataPosition(2, 0)
