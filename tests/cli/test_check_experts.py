"""`mm check` says before a run what of experts does not fit; a run says the same before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.check import check
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

EP = "parallel.expert_parallel_size"


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    make_tiny_qwen3_moe(folder / "moe" / "model")
    make_tiny_qwen3(folder / "dense" / "model")
    for kind in ("moe", "dense"):
        make_rows(folder / kind, count=4, images=(0,))
    return {kind: make_tiny_run(folder / kind) for kind in ("moe", "dense")}


WRONG = {  # name → (model, ranks, overrides, key, words of the message)
    "experts that ranks do not divide": (
        "moe", 3, [f"{EP}=3"], EP, "3 does not divide the 8 experts of model.layers.0.mlp.experts",
    ),
    "ranks that experts do not divide": ("moe", 6, [f"{EP}=4"], EP, "4 does not divide the 6 ranks of a group"),
    "outside of what is wrapped": (
        "moe", 2, [f"{EP}=2", "parallel.fsdp_plan.apply_modules=[lm_head]"], "parallel.fsdp_plan.apply_modules",
        "the expert module 'model.layers.0.mlp.experts' lies in no module",
    ),
    "no expert modules": (
        "moe", 2, [f"{EP}=2", "parallel.ep_plan.apply_modules=[model.layers.*.mlp]"], "parallel.ep_plan.apply_modules",
        "'model.layers.0.mlp' holds no fused experts",
    ),
    "a dispatcher of other machines": (
        "moe", 2, [f"{EP}=2", "parallel.ep_plan.dispatcher=mc2"], "parallel.ep_plan.dispatcher", "'mc2' needs NPU",
    ),
    "balance without ranks": (
        "moe", 2, ["features.enable_ep_balance=true"], "features.enable_ep_balance", f"{EP} is 1",
    ),
    "no experts": ("dense", 2, [f"{EP}=2"], EP, "Qwen3ForCausalLM has no experts"),
    "no routers": (
        "dense", 2, ["features.loss_cfg.router_aux_loss_coef=0.1"], "features.loss_cfg.router_aux_loss_coef",
        "names no router",
    ),
    "no experts to keep padding from": (
        "dense", 2, ["features.skip_moe_pad_tokens=true"], "features.skip_moe_pad_tokens", "has no experts behind",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_found(name: str, yamls: dict[str, Path]) -> None:
    model, ranks, overrides, key, words = WRONG[name]
    result = check.run(yamls[model], overrides, nproc=ranks)
    found = [finding.problem for finding in result.findings if words in finding.problem.what]
    assert len(found) >= 1 and key in found[0].key and found[0].way_out
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{EP}=2", "features.enable_ep_balance=true", "features.loss_cfg.router_aux_loss_coef=0.01"],
        [f"{EP}=4", "parallel.ep_plan.apply_modules=['model.layers.{*}.mlp.experts']", "features.recompute=true"],
        ["features.skip_moe_pad_tokens=true", "model.use_grouped_expert_matmul=true"],
    ],
)
def test_what_fits_passes(overrides: list[str], yamls: dict[str, Path]) -> None:
    result = check.run(yamls["moe"], [*overrides, "training.micro_batch_size=1"], nproc=4)
    assert (result.findings, result.warnings) == ([], [])


def test_padded_experts_are_warned_of(yamls: dict[str, Path]) -> None:
    assert check.run(yamls["moe"], nproc=16).warnings == []  # cut on the next dimension
    (warning,) = check.run(yamls["moe"], nproc=5).warnings
    assert "8 experts on 5 ranks are padded, 1.2 times the memory and traffic" in warning


@pytest.mark.parametrize("name", ["balance without ranks", "no routers", "no experts to keep padding from"])
def test_a_run_says_the_same(name: str, yamls: dict[str, Path]) -> None:
    model, _, overrides, key, words = WRONG[name]
    with pytest.raises(ConfigError, match=words) as error:
        Trainer(load_with_plugins(yamls[model], overrides)).train()
    assert error.value.problems[0].key == key
