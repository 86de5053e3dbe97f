"""`mm verify` takes every family and task of generators, with whatever media and sounds stand beside the target: the
small model that it makes of a folder is one that the family trains, and two processes equal one in fp64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.tasks.verify import ranks
from mindspeed_mm.tasks.verify.ranks import run_ranks
from tests.families import test_conditioned_generators as conditioned
from tests.families import test_generators as generators
from tests.families import test_ltx2 as with_sound
from tests.families.test_generator_plans import CHAINS, ON_RINGS, PLANS, SIDE, SIDE_OF_COARSE, SPLIT
from tests.helpers.tiny_generator_families import FAMILIES
from tests.tasks.verify_cases import IN_RANKS, Asked, job_of, verify_all

WITH_SOUND = {
    "ltx2": ("ltx2", "t2av"), "ltx2 i2av": ("ltx2", "i2av"), "ltx2 t2v": ("ltx2", "t2v"), "ltx2_3": ("ltx2_3", "i2av"),
}  # fmt: skip
"""Name → release and task of LTX-2."""
LIBRARIES = ("diffusers.hooks.group_offloading", "diffusers.loaders.single_file_utils", "peft")
ALONE = "parallel.data_parallel_size=1"
PLANNED = {
    "data": (*FAMILIES, *conditioned.CASES, *WITH_SOUND),
    "pipeline": (*CHAINS[::3], *WITH_SOUND),
    "tensor": SPLIT[1::3],
    "ring": ON_RINGS[2::3],
}
"""Plan → what is verified under it: everything on two data ranks, and a third under each of the other plans."""
WIDE = {
    "sd3": {"num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536},
    "hunyuan_video": {"num_attention_heads": 24, "attention_head_dim": 128, "rope_axes_dim": [16, 56, 56]},
    "z_image": {"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48]},
    "sana": {"num_attention_heads": 70, "attention_head_dim": 32, "cross_attention_dim": 2240},
    "ltx2": {
        "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096,
        "audio_num_attention_heads": 32, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048,
    },
}  # fmt: skip
"""Widths as released, whose settings repeat one another: what is made of them is narrow, and runs."""
CASES = [(plan, name) for plan, names in PLANNED.items() for name in names]


def yaml_of(name: str, folder: Path) -> Path:
    """A tiny run of a family or task."""
    folder.mkdir()
    if name in conditioned.CASES:
        return conditioned.write_run(folder, name) / "run.yaml"
    if name in WITH_SOUND:
        return with_sound.make_run(WITH_SOUND[name][0], folder, WITH_SOUND[name][1])
    return generators.make_run(name, folder, SIDE_OF_COARSE if name.startswith("wan2_2_5b") else SIDE)


@pytest.fixture(autouse=True, scope="module")
def libraries_are_loaded_once() -> None:
    """In the server that all ranks are forked from."""
    ranks.PRELOADED.extend(each for each in LIBRARIES if each not in ranks.PRELOADED)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "name"), CASES)
def test_a_family_is_verified(plan: str, name: str, tmp_path: Path) -> None:
    words = () if plan == "data" else (*PLANS[plan][1], ALONE)
    if name.startswith("qwen_image_edit"):
        words = (*words, "training.plugin=[tests.helpers.small_pictures]")
    found = verify_all(2, {name: Asked(yaml_of(name, tmp_path / "run"), words)}, tmp_path / "work")[name]
    assert not isinstance(found, str), found
    compared = {row.check for row in found if not row.note}
    assert {"as planned = one process", "resumed = uninterrupted"} <= compared
    assert not [row for row in found if row.is_missed]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "sana" else pytest.mark.slow) for n in WIDE])
def test_a_wide_model_is_made_narrow(name: str, tmp_path: Path) -> None:
    asked = Asked(yaml_of(name, tmp_path / "run"), (f"model.transformer={json.dumps(WIDE[name])}",))
    (found,) = run_ranks(1, f"{IN_RANKS}:run_reference", job_of(asked, tmp_path / "work"), str)
    told = " ".join(found.job.setup.changes)
    assert "attention_head" in told or "n_heads" in told
    assert found.model.endswith("M parameters, random weights (--full uses the real model)")
    assert float(found.model.split(", ")[1].split()[0]) < 30
