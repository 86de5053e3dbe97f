"""Preference pairs of a generator: the loss of a run's step is the paper's, computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.datasets.generation.pair_rows import as_pair, take_scores
from mindspeed_mm.fsdp.loss import flow_pair_objective
from mindspeed_mm.fsdp.loss.flow_pair_objective import FlowPairObjective, ScoreHistogram
from mindspeed_mm.tasks.extract import extract
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_media_pairs import LORA, PAIRS, make_tiny_media_pairs

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_media_pairs(tmp_path_factory.mktemp("pairs"))


class Line(torch.nn.Module):
    """Predicts a multiple of what it is given."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor, dtype=torch.float64))


class Errors:
    """Denoising of flows whose model is `Line`, written without ours."""

    def prepare(self, batch: dict[str, Any], *, training: bool = True) -> dict[str, Any]:
        return batch

    def describe(self) -> str:
        return "noise"

    def errors(self, model: Line, batch: dict[str, Any]) -> torch.Tensor:
        x, noise, sigma = batch["latents"], batch["_noise"], batch["_time"].reshape(-1, 1, 1, 1)
        v = model.factor * ((1 - sigma) * x + sigma * noise)
        return (v - (noise - x)).square().flatten(1).mean(dim=1)


def paper(model: float, reference: float, batch: dict[str, Any], beta: float) -> float:
    """Equation 14 with the velocity's error, in Python's numbers, pair by pair."""
    total = 0.0
    for pair in range(len(batch["_time"])):
        sigma, noise = float(batch["_time"][pair]), batch["_noise"][pair].flatten().tolist()
        errors = {}
        for name, factor in (("model", model), ("reference", reference)):
            for side in ("latents", "rejected_latents"):
                x = batch[side][pair].flatten().tolist()
                squares = [
                    (factor * ((1 - sigma) * a + sigma * e) - (e - a)) ** 2 for a, e in zip(x, noise, strict=True)
                ]
                errors[name, side] = sum(squares) / len(squares)
        won = errors["model", "latents"] - errors["reference", "latents"]
        lost = errors["model", "rejected_latents"] - errors["reference", "rejected_latents"]
        total += math.log(1 + math.exp(beta / 2 * (won - lost)))
    return total


def pairs(count: int = 3) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    shape = (count, 2, 4, 4)
    latents, rejected, noise = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    return {
        "latents": latents, "rejected_latents": rejected, "_noise": noise,
        "_time": torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64),
        "_weights": torch.ones(count, dtype=torch.float64), "sample_ids": ["a", "b", "c"],
    }  # fmt: skip


def objective(reference: Line, **dpo: Any) -> FlowPairObjective:
    from contextlib import nullcontext

    from mindspeed_mm.fsdp.params.posttrain_args import DpoArguments

    dpo_arguments, errors = DpoArguments(**dpo), cast("DenoisingObjective", Errors())
    return FlowPairObjective(errors, dpo_arguments, lambda: nullcontext(reference), "a line")


def test_the_loss_is_the_paper_s() -> None:
    batch = pairs()
    policy, reference = Line(-0.4), Line(-0.7)
    made = objective(reference, beta=3.0, pref_ftx=0.5)
    found = made.terms(policy, made.prepare(batch))
    assert float(found["loss"].detach()) == pytest.approx(paper(-0.4, -0.7, batch, 3.0), rel=1e-12)
    assert float(found["sft"].detach()) == pytest.approx(
        0.5 * float(Errors().errors(policy, batch).sum().detach()), rel=1e-12
    )
    assert made.count([batch]) == dict.fromkeys(found, 3.0)
    step = 1e-6
    above, below = (paper(-0.4 + sign * step, -0.7, batch, 3.0) for sign in (1, -1))
    found["loss"].backward()
    assert policy.factor.grad is not None and reference.factor.grad is None
    assert float(policy.factor.grad) == pytest.approx((above - below) / (2 * step), rel=1e-6)


def test_the_log_tells_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text('{"bin_edges": [0, 1], "counts": [1]}')
    weighed = {"weight_alpha": 0.5, "histogram_path": str(tmp_path / "h.json")}
    described = objective(Line(0), timestep_weight="sigma", pref_ftx=1, **weighed).describe()
    assert described == (
        "preferences, beta 2000 · 200 σ + 1 · errors of the chosen, pairs weighed by rarity, alpha 0.5, "
        "reference: a line, noise"
    )


def test_other_noise_for_the_rejected_side_is_seen() -> None:
    """The planted fault of the test above."""
    real = flow_pair_objective.as_sides

    def spoilt(batch: dict[str, Any]) -> dict[str, Any]:
        sides = real(batch)
        return sides | {"_noise": torch.cat([batch["_noise"], batch["_noise"].flip(0)])}

    batch, made = pairs(), objective(Line(-0.7), beta=3.0)
    with mock.patch.object(flow_pair_objective, "as_sides", spoilt):
        found = float(made.terms(Line(-0.4), made.prepare(batch))["loss"].detach())
    assert abs(found / paper(-0.4, -0.7, batch, 3.0) - 1) > 1e-3


def test_rare_scores_and_noise_levels_weigh(tmp_path: Path) -> None:
    path = tmp_path / "histogram.json"
    path.write_text('{"bin_edges": [0, 0.5, 1], "counts": [9, 1]}')
    batch = pairs() | {"scores": torch.tensor([[0.2, 0.1], [0.9, 0.1], [0.9, 0.8]], dtype=torch.float64)}
    made = objective(Line(-0.7), weight_alpha=1.0, histogram_path=str(path), timestep_weight="sigma", beta=0.01)
    prepared = made.prepare(batch)
    torch.testing.assert_close(prepared["_pair_weights"], torch.tensor([1.0, 3.0, 9.0]).double())
    expected = 0.0
    for at, weight in enumerate([1, 3, 9]):
        one = {key: value[at : at + 1] for key, value in batch.items()}
        expected += weight * paper(-0.4, -0.7, one, 0.01 * 200 * float(batch["_time"][at]))
    assert float(made.terms(Line(-0.4), prepared)["loss"].detach()) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(DataError, match="the rows have no scores"):
        made.prepare(pairs())


def test_a_run_on_raw_media_and_on_features(yaml: Path, tmp_path: Path) -> None:
    # Media are encoded alone or two at a time, which rounds otherwise; beta and Adam's first steps make more of it.
    words = (*PAIRS, *LORA, "training.train_iters=2", "training.lr=1e-2", "posttrain.dpo.beta=200")
    said = mm("check", yaml, *words)
    assert said.code == 0, said.out + said.err
    told = train(yaml, tmp_path / "raw", *words)
    assert "preferences, beta 200, reference: the model with its adapters off, flow matching" in told
    first, last = [line for line in lines(tmp_path / "raw" / "metrics.jsonl") if "loss" in line]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6) and first["loss"] != last["loss"]
    extract.run(yaml, PAIRS, out=tmp_path / "features")
    there = f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}"
    train(yaml, tmp_path / "stored", *words, there)
    by_features = [line["loss"] for line in lines(tmp_path / "stored" / "metrics.jsonl") if "loss" in line]
    by_media = [line["loss"] for line in lines(tmp_path / "raw" / "metrics.jsonl") if "loss" in line]
    assert by_features == pytest.approx(by_media, rel=1e-3)
    extract.run(yaml, out=tmp_path / "single")
    said = mm("check", yaml, *words, there.replace("/features", "/single"))
    assert said.code != 0 and "the features hold no rejected sides" in said.out


def test_pairs_of_two_sizes_are_refused(tmp_path: Path) -> None:
    yaml = make_tiny_media_pairs(tmp_path)
    Image.new("RGB", (32, 16)).save(tmp_path / "pictures" / "1.png")
    said = mm("train", yaml, *PAIRS, *LORA, "training.train_iters=8")
    assert said.code != 0 and "file_rejected" in said.err and "16×32×1" in said.err


def test_rows_of_other_collections() -> None:
    row = {"jpg_0": b"0", "jpg_1": b"1", "label_0": 0, "label_1": 1, "caption": "a box"}
    assert as_pair(row, "a:1") == {"file": b"1", "file_rejected": b"0", "caption": "a box"}
    assert as_pair({**row, "label_0": 1.0}, "a:1")["file"] == b"0"
    with pytest.raises(DataError, match=r"label_0  0.5 prefers neither side"):
        as_pair({**row, "label_0": 0.5}, "a:1")
    assert as_pair({"chosen": "a", "rejected": "b"}, "a:1") == {"file": "a", "rejected": "b"}
    with pytest.raises(DataError, match="are not two numbers"):
        take_scores({"score": 1}, "a:1")


def test_a_histogram_by_names_of_bins(tmp_path: Path) -> None:
    """As MindSpeed-MM's histogram_generator.py writes it, whose borders are rounded as Python prints them."""
    width, counts = 0.1, {-2: 1, -1: 0, 0: 4, 1: 3}
    content: dict[str, Any] = {f"{low * width}-{low * width + width}": count for low, count in counts.items()}
    content |= {"total_num": 8, "max_num": 4, "min_bin": -2, "max_bin": 2, "bin_width": width, "bin_size": 4}
    (tmp_path / "scores.json").write_text(json.dumps(dict(reversed(content.items()))))
    found = ScoreHistogram.read(tmp_path / "scores.json")
    assert found.counts == (1, 0, 4, 3) and found.default_beta == 0.5
    scores = [-0.15, 0.05, 0.15, -0.05]
    assert [found.probability(score) for score in scores] == [1 / 8, 4 / 8, 3 / 8, 1e-3]
    (tmp_path / "broken.json").write_text(json.dumps({"bin_width": 0.1, "0.0-0.1": 3}))
    with pytest.raises(DataError, match="is no histogram of scores"):
        ScoreHistogram.read(tmp_path / "broken.json")
