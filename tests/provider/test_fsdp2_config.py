"""fsdp2_config.yaml and the file of --layerzero-config, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.provider.size_rules import FSDP2_KEYS
from mindspeed_mm.provider.translate import from_flags

NEEDED = ["--lr", "1e-5", "--train-iters", "10", "--micro-batch-size", "1"]
PLAN = "parallel.fsdp_plan"

CASES: dict[str, tuple[str, str, Any]] = {
    "param_dtype": ("fp16", f"{PLAN}.param_dtype", "fp16"),
    "reduce_dtype": ("fp32", f"{PLAN}.reduce_dtype", "fp32"),
    "output_dtype": ("bf16", f"{PLAN}.output_dtype", "bf16"),
    "cast_forward_inputs": ("False", f"{PLAN}.cast_forward_inputs", False),
    "reshard_after_forward": ("4", f"{PLAN}.reshard_after_forward", 4),
    "offload_to_cpu": ("True", f"{PLAN}.cpu_offload", True),
    "pin_memory": ("True", f"{PLAN}.pin_memory", True),
    "num_to_forward_prefetch": ("3", f"{PLAN}.num_to_forward_prefetch", 3),
    "num_to_backward_prefetch": ("3", f"{PLAN}.num_to_backward_prefetch", 3),
    "expert_parallel_size": ("2", "parallel.expert_parallel_size", 2),
    "sub_modules_to_wrap": ("[a, b.c]", f"{PLAN}.apply_modules", ("a", "b.c")),
    "ignored_modules": ("[a]", f"{PLAN}.ignored_modules", ("a",)),
    "recompute_modules": ("[a]", "features.recompute", True),
    "moe_modules": ("[a]", "parallel.ep_plan.apply_modules", ("a",)),
    "sharding_size": ("auto", "parallel.fully_shard_parallel_size", "auto"),
    "use_reentrant": ("False\nrecompute_modules: [a]", "features.recompute_plan.use_reentrant", False),
    "reshard_local_experts": ("False", "parallel.expert_fully_shard_parallel_size", 1),
    "align_fsdp_param_groups": ("True", "parallel.fully_shard_parallel_size", 1),
}
"""Key → a value, and what it sets; the last has no effect here: every group holds all parameters of its module."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(text: str, *words: str) -> Any:
    Path("f.yaml").write_text(text)
    given = ["--use-torch-fsdp2", "--fsdp2-config-path", "f.yaml", *words]
    return from_flags([*NEEDED, *given], {"WORLD_SIZE": "8"}).arguments


def test_every_key_has_its_case() -> None:
    assert set(CASES) == set(FSDP2_KEYS)


@pytest.mark.parametrize("name", CASES)
def test_a_key_acts(name: str) -> None:
    written, key, value = CASES[name]
    assert value_at(run(f"{name}: {written}\n"), key) == value
    if name != "align_fsdp_param_groups":
        without = written.partition("\n")[2]
        assert value_at(run(f"{without}\noutput_dtype: fp32\n"), key) != value


def test_recomputed_modules_are_re_entrant_by_default() -> None:
    plan = run("recompute_modules: ['layers.{*}']\n").features.recompute_plan
    assert (plan.use_reentrant, plan.apply_modules) == (True, ("layers.{*}",))


def test_a_group_holds_the_ranks_of_a_sequence_and_of_experts() -> None:
    words = ("--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo")
    assert run("sharding_size: 1\n", *words).parallel.fully_shard_parallel_size == 2
    assert run("sharding_size: 2\nexpert_parallel_size: 4\n").parallel.fully_shard_parallel_size == 4
    assert run("sharding_size: 4\n", *words).parallel.fully_shard_parallel_size == 4


def test_the_file_wins_over_the_flag() -> None:
    plan = run("param_dtype: fp32\n", "--bf16").parallel.fsdp_plan
    assert (plan.param_dtype, plan.reduce_dtype) == ("fp32", "fp32")
    assert run("sharding_size: auto\n", "--bf16").parallel.fsdp_plan.param_dtype == "bf16"


def test_the_guide_s_own_file_is_read_as_it_stands() -> None:
    """With the tabs that it has, which PyYAML refuses."""
    text = (
        "sharding_size: auto\t\nsub_modules_to_wrap:\t\n"
        '  - "text_decoder.output_layer"\t\n  - "text_decoder.decoder.layers.{*}"\t\nparam_dtype: "bf16"\t\n'
        'ignored_modules:\t\n  - "image_encoder"\t\nnum_to_backward_prefetch: 2\noffload_to_cpu: False\n'
    )
    plan = run(text).parallel.fsdp_plan
    assert plan.apply_modules == ("text_decoder.output_layer", "text_decoder.decoder.layers.{*}")
    assert (plan.ignored_modules, plan.num_to_backward_prefetch, plan.cpu_offload) == (("image_encoder",), 2, False)


def test_expert_sizes_of_flag_and_file() -> None:
    with pytest.raises(ConfigError, match=r"f.yaml:1:23  4, but --expert-model-parallel-size says 2"):
        run("expert_parallel_size: 4\n", "--expert-model-parallel-size", "2")


def test_the_file_of_layerzero() -> None:
    Path("z.yaml").write_text("zero3_size: 4\nparam_dtype: bf16\nforward_prefetch: True\nignored_modules: [a]\n")
    words = ["--layerzero", "--layerzero-config", "z.yaml"]
    parallel = from_flags([*NEEDED, *words], {"WORLD_SIZE": "8"}).arguments.parallel
    plan = parallel.fsdp_plan
    assert (parallel.fully_shard_parallel_size, plan.num_to_forward_prefetch) == (4, 1)
    assert (plan.param_dtype, plan.ignored_modules) == ("bf16", ("a",))
    Path("z.yaml").write_text("zero3_sise: 4\n")
    with pytest.raises(
        ConfigError, match=r"z.yaml:1:1  'zero3_sise' is not a key of this file. Did you mean 'zero3_size'\\?"
    ):
        from_flags([*NEEDED, *words], {"WORLD_SIZE": "8"})
