"""`mm check` on real models: sizes that do not fit heads, layers or features, and plans that do not fit the model, are
found before anything is trained; each error names what does not fit and what would (catalogue I)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.launch import launcher
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

NORMS = '"*.layers.{*}.input_layernorm"'
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    (root / "six").mkdir()
    make_tiny_qwen3_vl(root / "six" / "model", **SIX_HEADS)
    return {
        "vlm": make_tiny_run(root / "vlm"),
        "six heads": make_tiny_run(root / "six"),
        "flux": make_tiny_generator_run(root / "flux"),
    }


# name → (run, overrides, what is wrong, way out)
CASES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "I100 query heads": ("vlm", ("tensor_parallel_size=3",), "the 4 heads of", "model: 1, 2."),
    "I100 key-value heads": ("vlm", ("tensor_parallel_size=4",), "4 does not divide the 2 heads of", "model: 1, 2."),
    "I100 features": ("six heads", ("tensor_parallel_size=3",), "the 32 features of", "model: 1."),
    "I100 heads of a tower": (
        "six heads",
        ("tensor_parallel_size=3",),
        "3 does not divide the 2 num_heads",
        "model: 1.",
    ),
    "I100 heads of a generator": ("flux", ("tensor_parallel_size=7",), "7 does not divide the", "Sizes that"),
    "I104 nothing matches": (
        "vlm",
        (
            "tensor_parallel_size=2",
            'tp_plan.colwise_parallel=["model.language_model.layers.{*}.self_attn.q_prj"]',
            'tp_plan.rowwise_parallel=["*.o_proj"]',
        ),
        "q_prj",
        "q_proj",
    ),
    "half of a pair": (
        "vlm",
        ("tensor_parallel_size=2", 'tp_plan.colwise_parallel=["*.q_proj"]'),
        "split by output features, and no layer near it by input features",
        "",
    ),
    "a norm left out of the slice": (
        "vlm",
        ("tensor_parallel_size=2", f"tp_plan.sequence_parallel=[{NORMS}]"),
        "runs on a slice of the sequence too",
        "Name it as well",
    ),
    "two streams in slices": (
        "flux",
        ("tensor_parallel_size=2", 'tp_plan.sequence_parallel=["transformer_blocks.{*}.norm1"]'),
        "side by side",
        "ulysses_parallel_size",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_does_not_fit_is_found(name: str, runs: dict[str, Path]) -> None:
    run, words, what, way_out = CASES[name]
    result = check.run(runs[run], [f"parallel.{word}" for word in words])
    problems = [finding.problem for finding in result.findings if finding.stage == "module patterns"]
    found = [problem for problem in problems if what in f"{problem.key} {problem.what}"]
    assert found, problems
    assert any(way_out in (problem.way_out or "") for problem in found), found
    assert result.exit_code == 2, result.problems


def test_the_models_own_loss_needs_whole_rows(runs: dict[str, Path]) -> None:
    words = ["parallel.ring_attention_size=2", "features.loss_cfg.loss_type=raw"]
    (finding,) = check.run(runs["vlm"], words).findings
    assert finding.problem.key == "features.loss_cfg.loss_type"


def test_so_does_the_loss_of_a_model_without_an_output_head(runs: dict[str, Path]) -> None:
    arguments = load_with_plugins(runs["vlm"], ["parallel.ring_attention_size=2"]).arguments
    outline = build_outline(arguments)
    assert resolve_plan(outline, arguments).head is not None
    with pytest.raises(ConfigError, match="without an output head is trained by its own loss, which needs the whole"):
        resolve_plan(replace(outline, spec=replace(outline.spec, head="")), arguments)


@pytest.mark.parametrize(
    "words",
    [
        ("tensor_parallel_size=2", "ring_attention_size=2", "ulysses_parallel_size=2"),
        ("ulysses_parallel_size=3",),
        ("ring_attention_size=5",),
    ],
)
def test_what_need_not_divide_is_no_problem(words: tuple[str, ...], runs: dict[str, Path]) -> None:
    """Heads over Ulysses and tokens over ranks may be uneven, with tensor parallelism and without."""
    assert check.run(runs["vlm"], [f"parallel.{word}" for word in words]).findings == []


PIPELINE, ACCUMULATION = "parallel.pipeline_parallel_size", "training.gradient_accumulation_steps"


def test_sizes_are_told_beside_other_problems_of_the_configuration(runs: dict[str, Path]) -> None:
    """Ranks that do not fit need the YAML alone; a value that is nobody's has no place."""
    result = check.run(runs["vlm"], [f"{PIPELINE}=8"], nproc=2)
    assert {(p.key, p.where) for p in result.problems} == {(PIPELINE, "command line"), (ACCUMULATION, "")}
    assert "8 does not divide the 2 ranks" in [problem.what for problem in result.problems]


def test_of_ranks_that_cannot_be_no_memory_is_predicted(runs: dict[str, Path]) -> None:
    words = [f"{PIPELINE}=2", f"{ACCUMULATION}=2"]
    result = check.run(runs["vlm"], words, nproc=3)
    assert [problem.key for problem in result.problems] == [PIPELINE]
    assert (result.memory, result.skipped) == ([], {"memory": "parallel sizes"})
    assert check.run(runs["vlm"], words, nproc=2).memory


def test_training_starts_no_ranks_that_do_not_fit(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "launch", lambda *_: pytest.fail("ranks were started"))
    said = mm("train", runs["vlm"], "--nproc", 3, f"{PIPELINE}=2", f"{ACCUMULATION}=2")
    assert said.code == 2
    assert said.err.splitlines()[:2] == [
        f"{runs['vlm']}: 1 problem",
        f"  command line  {PIPELINE}  2 does not divide the 3 ranks. Nearest sizes that do: 1, 3.",
    ]
