"""docs/features.md: its YAML trains, its keys exist, and no feature of the configuration is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from tests.helpers.planned_steps import Quiet
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

PAGE = (Path(__file__).parents[1] / "docs" / "features.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```yaml\n# (\w+)\.yaml.*?\n(.*?)```", PAGE, flags=re.DOTALL))
KEYS = {key for key, _ in walk_fields()}
ON_OTHER_PAGES = {"features.enable_ep_balance", "features.skip_moe_pad_tokens"}
"""Of parallel plans."""


def flat(section: dict[str, object], prefix: str = "") -> list[str]:
    """Overrides that say what a block says."""
    words = []
    for name, value in section.items():
        if isinstance(value, dict):
            words += flat(value, f"{prefix}{name}.")
        else:
            words.append(f"{prefix}{name}={value if not isinstance(value, bool) else str(value).lower()}")
    return words


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    make_tiny_qwen3(folder / "model")
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, training={"train_iters": 1, "micro_batch_size": 2})


@pytest.mark.parametrize("name", BLOCKS)
def test_what_it_shows_trains(run: Path, name: str) -> None:
    words = flat(YAML(typ="safe").load(BLOCKS[name]))
    words = [word.replace("visual", "layers") for word in words]  # the model of this test has no tower
    engine = Quiet(load_with_plugins(run, words)).train()
    assert engine is not None and engine.iteration == 1


def test_there_are_blocks() -> None:
    assert set(BLOCKS) == {"memory", "offload", "further", "optimizer"}


def test_keys_that_it_names_exist() -> None:
    named = set(re.findall(r"`((?:features|training|model|parallel|tools|data)\.[a-z_0-9.]*[a-z_0-9])", PAGE))
    assert len(named) > 25
    assert {key for key in named if key not in KEYS} == set()


def test_no_feature_is_left_out() -> None:
    switches = {key for key in KEYS if re.fullmatch(r"features\.(enable_\w+|recompute|compile|fused_kernels)", key)}
    assert {key for key in switches - ON_OTHER_PAGES if key.rpartition(".")[2] not in PAGE} == set()
