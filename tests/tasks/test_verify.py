"""`mm verify` on whole runs: plans that are equal, faults that are noticed, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from mindspeed_mm.tasks.verify.faults import FAULTS
from mindspeed_mm.tasks.verify.table import Row
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_run import make_pictures, make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3_vl, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_tiny_run
from tests.tasks.verify_cases import Asked, verify_all

ONE = "parallel.data_parallel_size=1"
TP, RING, ULYSSES = (
    "parallel.tensor_parallel_size=2",
    "parallel.ring_attention_size=2",
    "parallel.ulysses_parallel_size=2",
)
EP = "parallel.expert_parallel_size=2"
PP = "parallel.pipeline_parallel_size=2"
FILLED = "training.gradient_accumulation_steps=2"
COPIES = "parallel.fully_shard_parallel_size=1"
PACKING = ("data.dataset_param.basic_parameters.packing=true", "data.dataset_param.basic_parameters.cutoff_len=128")
LORA = ("training.lora.enable=true", "training.lora.dropout=0.1")
CHECKS = ["as planned = one process", "accumulated = one big batch", "resumed = uninterrupted", "packed = unpacked"]

PLANS = {  # name → (model, overrides); two processes each
    "vlm tp2": ("vlm", (TP, ONE)),
}
FAULTY = {  # fault → plan in which it shows
    "missing-norm-sum": ("vlm", (TP, ONE)),
}
MORE_PLANS = {
    "vlm fsdp2": ("vlm", ("data.dataloader_param.sampler_type=LengthGroupedSampler",)),
    "flux ulysses2": ("flux", (ULYSSES, ONE)),
    "vlm copies": ("vlm", (COPIES,)),
    "vlm ring2, recompute": ("plain vlm", (RING, ONE, "features.recompute=true")),
    "vlm lora tp2": ("vlm", (TP, ONE, *LORA)),
    "moe ep2": ("moe", (EP,)),
    "vlm packed": ("vlm", PACKING),
    "vlm pp2": ("vlm", (PP, ONE, FILLED)),
    "flux sizes": ("flux sizes", ()),
    "flux lora": ("flux", LORA),
    "t2v tp2": ("t2v", (TP, ONE)),
    "i2v": ("i2v", ()),
}
MORE_FAULTS = {
    "averaged-gradients": ("vlm", ()),
    "lost-optimizer-state": ("vlm", ()),
    "dropped-all-reduce": ("vlm", (COPIES,)),
    "wrong-divisor": ("vlm", ()),
    "averaged-micro-batches": ("vlm", ()),
    "local-clip-norm": ("vlm", ()),
    "dropped-tensor-sum": ("vlm", (TP, ONE)),
    "lost-border-token": ("plain vlm", (RING, ONE)),
    "doubled-expert-gradient": ("moe", (EP,)),
    "stage-norm": ("vlm", (PP, ONE, FILLED)),
    "labels-off-by-one": ("vlm", ()),
    "packed-leak": ("vlm", ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    make_tiny_qwen3_vl(folder / "vlm" / "model", attention_dropout=0.2, num_hidden_layers=3)
    make_tiny_run(folder / "vlm", training={"save": str(folder / "vlm" / "run"), "lr": 1e-3, "micro_batch_size": 4})
    make_tiny_run(folder / "plain vlm")  # without the dropout, which sequences over ranks cannot have
    make_tiny_qwen3_vl_moe(folder / "moe" / "model")
    make_tiny_run(folder / "moe")
    for family in ("flux", "t2v", "i2v"):
        make_tiny_generator_run(folder / family, family)
    sizes = {"parallel": {}}
    make_tiny_generator_run(folder / "flux sizes", "flux", **sizes)
    make_pictures(folder / "flux sizes", count=24, sizes=((16, 16), (16, 32)))
    return folder


@cache
def results_of(folder: Path, slow: bool) -> dict[str, list[Row] | str]:
    plans, faults = (MORE_PLANS, MORE_FAULTS) if slow else (PLANS, FAULTY)
    asked = {name: Asked(folder / model / "run.yaml", words) for name, (model, words) in plans.items()}
    asked |= {fault: Asked(folder / model / "run.yaml", words, fault) for fault, (model, words) in faults.items()}
    if slow:
        sizes = "data.dataset_param.preprocess_parameters."
        buckets = (f"{sizes}buckets=['16x16', '16x32']", f"{sizes}height=null", f"{sizes}width=null")
        asked["flux sizes"] = Asked(folder / "flux sizes" / "run.yaml", buckets)
        asked["vlm full"] = Asked(folder / "vlm" / "run.yaml", full=True)
    return verify_all(2, asked, folder / f"work {slow}")


UNUSED = {
    "packed = unpacked": "not used, the data set makes its own batches",  # those of generators
    "accumulated = one big batch": "not used, because sizes decide which samples share a micro-batch",
}


def check_equal(rows: list[Row] | str, unused: Sequence[str] = ()) -> None:
    assert not isinstance(rows, str), rows
    assert list(dict.fromkeys(row.check for row in rows)) == CHECKS
    assert not [row for row in rows if row.is_missed]
    notes = {row.check: row.note for row in rows if row.note}
    assert notes == {name: UNUSED[name] for name in unused}


def unused_by(name: str) -> list[str]:
    """Checks that do not apply to a case."""
    by_size = ["accumulated = one big batch"] if name in ("vlm packed", "flux sizes") else []
    return by_size + (["packed = unpacked"] if name.startswith(("flux", "t2v", "i2v")) else [])


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_equal(name: str, folder: Path) -> None:
    check_equal(results_of(folder, slow=False)[name], unused_by(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MORE_PLANS, "vlm full"])
def test_more_plans_are_equal(name: str, folder: Path) -> None:
    check_equal(results_of(folder, slow=True)[name], unused_by(name))


def missed(rows: list[Row] | str) -> set[str]:
    assert not isinstance(rows, str), rows
    return {row.check for row in rows if row.is_missed}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_noticed(fault: str, folder: Path) -> None:
    assert missed(results_of(folder, slow=False)[fault]) >= set(CHECKS[:2])


@pytest.mark.slow
@pytest.mark.parametrize("fault", MORE_FAULTS)
def test_more_faults_are_noticed(fault: str, folder: Path) -> None:
    only = {"lost-optimizer-state": {CHECKS[2]}, "averaged-micro-batches": {CHECKS[1]}, "packed-leak": {CHECKS[3]}}
    assert missed(results_of(folder, slow=True)[fault]) >= only.get(fault, set(CHECKS[:2]))


@pytest.mark.slow
def test_samples_of_several_sizes_are_not_put_into_one_batch(folder: Path) -> None:
    rows = results_of(folder, slow=True)["flux sizes"]
    assert not isinstance(rows, str), rows
    notes = {row.check: row.note for row in rows}
    assert "sizes decide" in notes["accumulated = one big batch"]


def test_every_fault_is_tried() -> None:
    assert set(FAULTY) | set(MORE_FAULTS) == set(FAULTS)


@pytest.mark.slow
def test_the_command_leaves_nothing_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = folder / "vlm" / "run.yaml"
    before = set(folder.rglob("*"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = mm("verify", yaml, ONE, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["missed"] == 0
    assert set(folder.rglob("*")) == before
    assert not (folder / "vlm" / "run").exists() and not list((tmp_path / "here").iterdir())
