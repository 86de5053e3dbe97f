"""What the other commands say of BAGEL: rows that draw are trained rows, FLOPs are those of each set of parameters, a
first YAML reads its rows, and a plan is verified with the model's VAE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.core.batch import LATENT
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.denoised_pictures import WithDenoisedPictures
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.tools.flops_tool.reading import count_flops
from mindspeed_mm.tasks.extract import extract
from mindspeed_mm.tasks.models import routes
from tests.helpers.bagel_by_hand import toy_latents
from tests.helpers.runs import mm
from tests.helpers.tiny_bagel import SIZES, run_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("bagel"))


def built_rows(path: Path) -> Any:
    return build_mm_dataset(load_config(path).arguments.data.dataset_param)[0]


def test_rows_that_only_draw_are_trained_rows(run: Path) -> None:
    """`mm data check` takes them, and the preview marks their latents: a picture of 8 × 12 pixels is six tokens."""
    said = mm("data", "check", run)
    assert said.code == 0 and "4 usable" in said.out, said.out + said.err
    shown = mm("data", "preview", run, "--rows", "0,2")
    assert shown.code == 0, shown.err
    assert "16 tokens, 6 trained" in shown.out and "«[<|vision_end|> × 6]»<|vision_end|>" in shown.out
    assert "35 tokens, 13 trained" in shown.out and "rows.jsonl:1, 6 trained" in shown.out


@pytest.mark.parametrize("packs", [False, True])
def test_each_set_of_parameters_costs_its_own_tokens(run: Path, packs: bool) -> None:
    """Products of weights in a forward pass as torch counts them, of a row that draws and one that sees."""
    config = load_config(run).arguments
    model: Any = ModelHub.build(config.model, param_dtype=torch.float32)
    ModelHub.load_weights(model, config.model, seed=0, device=torch.device("cpu"))
    words: Any = build_objective(None, model, build_head_loss(model, "language_model.lm_head", FeatureArguments()))
    loss, diffusion = config.features.loss_cfg, config.training.diffusion
    objective = WithDenoisedPictures(words, model.config, loss, diffusion, toy_latents)
    dataset = built_rows(run)
    batch = dataset.build_collator(CollateParam(), packs=packs)([dataset[0], dataset[1]])
    count = count_flops(model, head_on_labels=False)
    assert count is not None and not set(count.uncounted) & {"vae2llm", "llm2vae"}
    lengths = count.lengths(batch)
    assert lengths["text"] == [10, 16] and lengths["latent tokens"] == [6, 0]
    assert int((batch["token_kinds"] == LATENT).sum()) == 6
    prepared = {name: value for name, value in objective.prepare(batch).items() if isinstance(value, torch.Tensor)}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**prepared)
    found = counter.get_flop_counts()["Global"]
    products = sum(flops for kind, flops in found.items() if kind in (torch.ops.aten.addmm, torch.ops.aten.mm))
    parts = count.by_module(lengths).items()
    assert products == sum(part.full.forward for (_, kind), part in parts if kind == "linear")


@pytest.mark.slow
def test_the_first_yaml_reads_its_rows(run: Path, tmp_path: Path) -> None:
    """Its folder has no chat template, and needs none."""
    rows = run.parent / "rows" / "rows.jsonl"
    sizes = [f"data.dataset_param.preprocess_parameters.{name}={size}" for name, size in SIZES.items()]
    said = mm("init", "--model", run.parent / "model", "--data", rows, "--out", tmp_path / "run.yaml", *sizes)
    assert said.code == 0, said.out + said.err
    written = load_config(tmp_path / "run.yaml").arguments
    assert written.data.dataset_param.dataset_type == written.model.model_id == "bagel"
    assert len(built_rows(tmp_path / "run.yaml")) == 4


def test_evaluation_is_refused_before_rows_are_read(run: Path, tmp_path: Path) -> None:
    """Rows of the model hold answers that are pictures; without these it could not be evaluated either."""
    rows = run.parent / "rows" / "rows.jsonl"
    said = mm("evaluate", run.parent / "model", "--data", rows, "--out", tmp_path / "out")
    assert said.code != 0 and "mm infer MODEL --prompt TEXT" in said.err and "rows.jsonl" not in said.err, said.err


def test_a_wish_for_one_model_that_draws_leads_to_it() -> None:
    for wish in ("fine-tune BAGEL", "edit pictures with BAGEL", "a unified model"):
        route = routes.find(wish)
        assert "bagel" in {card.name for card in route.families} and "--draw" in " ".join(route.stages.values())
    assert "bagel" not in {card.name for card in routes.find("edit an image").families}


def test_flops_of_a_picture_of_any_size(run: Path) -> None:
    """8 × 12 pixels are six patches."""
    said = mm("flops", run, "--seq", 64, "--images", 1, "--image-size", "8x12", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["lengths"]["media tokens"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("plan", [[], ["parallel.ulysses_parallel_size=2", "--nproc", 2]])
def test_a_plan_is_verified_with_the_models_vae(run: Path, plan: list[Any]) -> None:
    said = mm("verify", run, *plan, "--json")
    assert said.code == 0, said.out + said.err
    rows = {row["check"] for row in json.loads(said.out)["rows"]}
    assert {"as planned = one process", "packed = unpacked"} <= rows


@pytest.mark.slow
def test_a_plan_is_verified_on_features(run: Path, tmp_path: Path) -> None:
    """They are those of the folder's own VAE, and the small model takes them."""
    extract.run(run, out=tmp_path / "features")
    said = mm("verify", run, f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}", "--json")
    assert said.code == 0, said.out + said.err
