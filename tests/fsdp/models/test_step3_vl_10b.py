"""Step3-VL-10B against the published formulas in plain torch, in fp64, on weights under the released names; then its
pictures and crops, plans, and the ids that name it."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.decoder_logits import Weights
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import FP64, TP, ULYSSES
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.tiny_run import make_rows, make_tiny_run
from tests.helpers.tiny_step3_vl_10b import (
    BLOCKS,
    CROP,
    GROUPS,
    HEAD,
    HEADS,
    HEADS_SEE,
    LAYERS,
    PATCH,
    SIDE,
    WIDTH,
    make_tiny_step3_vl_10b,
)
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Step3p7Config"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)

SIZES = [(24, 24), (44, 24), (40, 12)]
"""Of the pictures, in pixels: one without crops, one of 3 × 2 crops, one of 3 × 1 crops that are higher than it."""


@cache
def released(root: str) -> tuple[Path, Weights]:
    folder = Path(root) / "model"
    return folder, make_tiny_step3_vl_10b(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("step3_vl_10b"))


# --- the formulas -----------------------------------------------------------------------------------------------------


def seen(w: Weights, pixels: torch.Tensor) -> torch.Tensor:
    """(3, side, side) → (tokens, hidden): the tower, the convolutions behind it, and the projector."""
    side = pixels.shape[1] // PATCH
    hidden = F.conv2d(pixels[None], w["vision_model.conv1.weight"], stride=PATCH)[0].flatten(1).T
    table = w["vision_model.positional_embedding"].T.reshape(1, WIDTH, SIDE // PATCH, SIDE // PATCH)
    places = F.interpolate(table, size=(side, side), mode="bilinear", align_corners=False)[0]
    hidden = layer_norm(w, "vision_model.ln_pre", hidden + places.flatten(1).T)
    turns = turned(side, WIDTH // HEADS_SEE)
    for block in (f"vision_model.transformer.resblocks.{number}." for number in range(BLOCKS)):
        mixed = layer_norm(w, f"{block}ln_1", hidden) @ w[f"{block}attn.in_proj_weight"].T
        q, k, v = (mixed + w[f"{block}attn.in_proj_bias"]).split(WIDTH, dim=1)
        heads = []
        for part in torch.arange(WIDTH).split(WIDTH // HEADS_SEE):
            own_q, own_k = (turn(each[:, part], turns) for each in (q, k))
            heads.append((own_q @ own_k.T / math.sqrt(len(part))).softmax(dim=1) @ v[:, part])
        attended = linear(w, f"{block}attn.out_proj", torch.cat(heads, dim=1))
        hidden = hidden + w[f"{block}ls_1.gamma"] * attended
        inner = linear(w, f"{block}mlp.c_fc", layer_norm(w, f"{block}ln_2", hidden))
        inner = inner * (1.702 * inner).sigmoid()
        hidden = hidden + w[f"{block}ls_2.gamma"] * linear(w, f"{block}mlp.c_proj", inner)
    grid = hidden.T.reshape(1, WIDTH, side, side)
    for name in ("vision_model.vit_downsampler1", "vision_model.vit_downsampler2"):
        grid = F.conv2d(grid, w[f"{name}.weight"], w[f"{name}.bias"], stride=2, padding=1)
    return grid[0].flatten(1).T @ w["vit_large_projector.weight"].T


def turned(side: int, width: int) -> torch.Tensor:
    """(side², width / 2) complex numbers: the first half of the pairs is turned by the column, the other by the row."""
    speeds = 1 / 10000 ** (torch.arange(0, width // 2, 2) / (width // 2))  # in fp32, as transformers has them
    places = [torch.cat([x * speeds, y * speeds]) for y in range(side) for x in range(side)]
    angles = torch.stack(places)
    return torch.complex(angles.cos().double(), angles.sin().double())


def turn(rows: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Each pair of neighbouring features as one complex number, turned."""
    return torch.view_as_real(torch.view_as_complex(rows.unflatten(1, (-1, 2)).contiguous()) * turns).flatten(1)


def text_logits(w: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Qwen3 (arXiv:2505.09388): (L, hidden) → (L, vocabulary)."""
    speeds = 1 / 1000000 ** (torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.arange(len(hidden))[:, None] * speeds
    turns = torch.complex(angles.cos().double(), angles.sin().double())
    later = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
    for layer in (f"model.layers.{number}." for number in range(LAYERS)):
        normed = rms_norm(w, f"{layer}input_layernorm", hidden)
        q, k, v = ((normed @ w[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD)) for name in "qkv")
        q, k = (rms_norm(w, f"{layer}self_attn.{name}_norm", each) for name, each in (("q", q), ("k", k)))
        heads = []
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            own_q, own_k = (turn_halves(each, turns) for each in (q[:, head], k[:, group]))
            scores = (own_q @ own_k.T / math.sqrt(HEAD)).masked_fill(later, -math.inf)
            heads.append(scores.softmax(dim=1) @ v[:, group])
        hidden = hidden + torch.cat(heads, dim=1) @ w[f"{layer}self_attn.o_proj.weight"].T
        normed = rms_norm(w, f"{layer}post_attention_layernorm", hidden)
        gate, up = (normed @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    return rms_norm(w, "model.norm", hidden) @ w["lm_head.weight"].T


def turn_halves(rows: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Each feature of the first half with its own of the other half as one complex number, turned."""
    first, second = rows.chunk(2, dim=1)
    found = torch.complex(first, second) * turns
    return torch.cat([found.real, found.imag], dim=1)


def linear(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(dim=-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]


def test_equals_the_formulas(root: str) -> None:
    folder, stored = released(root)
    processor: Any = load_processor(folder)
    model = loaded(folder)
    text = "<|im_start|>user\n<im_patch>Which<im_patch> of <im_patch>them?<|im_end|>"
    batch = processor(images=random_pictures(SIZES), text=[text], return_tensors="pt")
    w = {name: tensor.double() for name, tensor in stored.items()}
    whole, crops, counts = batch["pixel_values"], batch["pixel_values_local"], batch["num_local_patches"].tolist()
    assert (len(whole), counts) == (3, [0, 6, 3])
    features = []
    for number, (start, end) in enumerate(pairwise([0, 0, 6, 9])):
        features += [seen(w, crop.double()) for crop in crops[start:end]]
        features.append(seen(w, whole[number].double()))
    ids = batch["input_ids"][0]
    embeddings = w["model.embed_tokens.weight"][ids]
    embeddings[ids == processor.image_token_id] = torch.cat(features)
    inputs = dict(batch) | {"pixel_values": whole.double(), "pixel_values_local": crops.double()}
    inputs["labels"] = batch["input_ids"]
    with torch.no_grad(), keeping_double():
        expected = text_logits(w, embeddings)
        found = model(**inputs)
        assert (found.logits[0] - expected).abs().max() < 1e-9
        # transformers' own loss comes in fp32
        assert found.loss.item() == pytest.approx(F.cross_entropy(expected[:-1], ids[1:]).item(), rel=1e-6)
        # Planted: rows and columns of the table of places in each other's stead.
        table = model.model.vision_model.embeddings.position_embedding.weight
        table.data = table.data.view(SIDE // PATCH, SIDE // PATCH, WIDTH).transpose(0, 1).flatten(0, 1).contiguous()
        assert (model(**inputs).logits[0] - expected).abs().max() > 1e-3


# --- pictures and crops -----------------------------------------------------------------------------------------------


def test_crops_stand_in_front_of_their_picture(root: str) -> None:
    """44 × 24 pixels are 3 × 2 crops of 16: over a fifth of a crop counts as one."""
    processor: Any = load_processor(released(root)[0])
    made = processor(images=random_pictures(SIZES[1:2]), text=["a<im_patch>b"], return_tensors="pt")
    crop, end_of_row = "<patch_start><im_patch><patch_end>", "<patch_newline>"
    written = f"a{crop * 3}{end_of_row}{crop * 3}<im_start>{'<im_patch>' * 4}<im_end>b"
    assert processor.tokenizer.decode(made["input_ids"][0]) == written


def test_a_crop_over_the_edge_is_filled_up_with_black(root: str) -> None:
    """40 × 12 pixels: crops of 16 are higher than the picture, which stays as high as it is."""
    processor: Any = load_processor(released(root)[0])
    (picture,) = random_pictures([(40, 12)])
    made = processor.image_processor(images=[picture], return_tensors="pt")
    crops = made["pixel_values_local"]
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    black = (-mean / std).expand(3, CROP - 12, CROP)
    assert made["num_local_patches"].tolist() == [3]
    for crop in crops:
        torch.testing.assert_close(crop[:, 12:], black)
        assert crop[:, :12].std() > 0.1


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.mark.parametrize("keeps_class", [True, False])
def test_a_folder_without_sizes_has_those_of_the_released_code(keeps_class: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_step3_vl_10b(folder)
    (folder / "preprocessor_config.json").unlink()
    if not keeps_class:
        (folder / "processor_config.json").unlink()
    processor: Any = load_processor(folder)
    (picture,) = random_pictures([(1000, 700)])
    made = processor(images=[picture], text=["<im_patch>"], return_tensors="pt")
    assert made["pixel_values"].shape == (1, 3, 728, 728)
    assert made["pixel_values_local"].shape == (4, 3, 504, 504)
    assert made["input_ids"].shape[1] == 4 * (81 + 2) + 1 + 169 + 2


# --- the folder and the ids that name it ------------------------------------------------------------------------------


def test_released_size() -> None:
    from mindspeed_mm.fsdp.models.step3_vl_10b.modeling_step3_vl_10b import (
        StepVLForConditionalGeneration,
        tell_transformers,
    )

    tell_transformers()
    model, differing_entries = model_of_record(StepVLForConditionalGeneration, "step3-vl-10b")
    assert billions(model) == pytest.approx(10.2, rel=0.005)
    assert differing_entries == []


@pytest.mark.parametrize("model_id", ["step3_vl", "step3_vl_10b"])
def test_an_id_follows_the_folder(model_id: str, root: str) -> None:
    model = ModelHub.build(ModelArguments(model_id=model_id, model_name_or_path=str(released(root)[0])))
    assert type(model).__name__ == "StepVLForConditionalGeneration"


@pytest.mark.parametrize("setting", ["use_cls_token", "use_ln_post"])
def test_a_tower_that_was_never_released_is_refused(setting: str) -> None:
    from mindspeed_mm.fsdp.models.step3_vl_10b.modeling_step3_vl_10b import StepVLConfig

    with pytest.raises(ValueError, match=f"vision_config.{setting} is True; known is False only"):
        StepVLConfig(vision_config={setting: True})


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {"step fsdp2": Case("step", 2, 2, 2)},
    slow={
        "step scratch fsdp2": Case("step scratch", 2, 2, 2),
        "step ulysses2": Case("step", 2, 1, 2, (ULYSSES,)),
        "step tp2, recompute": Case("step", 2, 1, 2, (TP, "features.recompute=true")),
    },
    kinds={"scratch": ("model.train_from_scratch=true",)},
    slow_faults={"own denominator": Fault("step fsdp2", "rank's own denominator")},
)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rows of none to two pictures, a third of which have no crops: a rank may see pictures and no crop."""
    folder = tmp_path_factory.mktemp("plans") / "step"
    make_tiny_step3_vl_10b(folder / "model")
    make_rows(folder)
    for number, path in enumerate(sorted((folder / "images").iterdir())):
        random_pictures([SIZES[number % 3]])[0].save(path)
    return {"step": str(make_tiny_run(folder, **FP64))}


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
