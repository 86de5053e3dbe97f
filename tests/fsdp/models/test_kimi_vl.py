"""Kimi-VL against the paper's formulas (arXiv:2504.07491) in plain torch, in fp64, on weights under the released names;
then as any model: steps under plans, adapters, resumed and exported, and asked."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.decoder_logits import Weights, decoder_logits
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, PP
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.tiny_kimi_vl import HEADS_SEE, HIDDEN, PATCH, WIDTH, make_tiny_kimi_vl
from tests.helpers.tiny_run import make_tiny_run
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Kimi_K25Config"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)

SIZES = [(62, 15), (16, 8)]
"""Of the two pictures, in pixels: one is padded, one is taken as it is. The table of 8 × 8 places is brought to 4 × 16
and 2 × 4 by weights that are exact in fp32, which transformers computes them in."""


@cache
def released(root: str) -> tuple[Path, Weights]:
    folder = Path(root) / "model"
    return folder, make_tiny_kimi_vl(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kimi_vl"))


# --- the formulas -----------------------------------------------------------------------------------------------------


def tower(w: Weights, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """(rows · columns, 3, side, side) → (rows · columns, width)."""
    hidden = linear(w, "vision_tower.patch_embed.proj", patches.flatten(1))
    table = w["vision_tower.patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    places = F.interpolate(table, size=(rows, columns), mode="bicubic")[0]
    hidden = hidden + places.permute(1, 2, 0).flatten(0, 1)
    turns = turned(rows, columns, WIDTH // HEADS_SEE)
    for block in ("vision_tower.encoder.blocks.0.", "vision_tower.encoder.blocks.1."):
        q, k, v = linear(w, f"{block}wqkv", layer_norm(w, f"{block}norm0", hidden)).split(WIDTH, dim=1)
        heads = []
        for part in torch.arange(WIDTH).split(WIDTH // HEADS_SEE):
            own_q, own_k = (
                torch.view_as_real(
                    torch.view_as_complex(each[:, part].unflatten(1, (-1, 2)).contiguous()) * turns
                ).flatten(1)
                for each in (q, k)
            )
            heads.append((own_q @ own_k.T / math.sqrt(len(part))).softmax(dim=1) @ v[:, part])
        hidden = hidden + linear(w, f"{block}wo", torch.cat(heads, dim=1))
        inner = linear(w, f"{block}mlp.fc0", layer_norm(w, f"{block}norm1", hidden))
        hidden = hidden + linear(w, f"{block}mlp.fc1", F.gelu(inner, approximate="tanh"))
    return layer_norm(w, "vision_tower.encoder.final_layernorm", hidden)


def turned(rows: int, columns: int, width: int) -> torch.Tensor:
    """(patches, width / 2) complex numbers: each frequency turns one pair by the column and the next by the row."""
    speeds = 1 / 10000 ** (torch.arange(0, width, 4) / width)  # in fp32, as models of transformers have them
    found = []
    for y in range(rows):
        for x in range(columns):
            angles = torch.stack([x * speeds, y * speeds], dim=1).flatten()
            found.append(torch.complex(angles.cos().double(), angles.sin().double()))
    return torch.stack(found)


def written(w: Weights, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What stands in the places of one picture's tokens, token by token."""
    normed = layer_norm(w, "multi_modal_projector.pre_norm", tower(w, patches, rows, columns)).view(rows, columns, -1)
    found = []
    for y in range(0, rows, 2):
        for x in range(0, columns, 2):
            inner = linear(w, "multi_modal_projector.linear_1", normed[y : y + 2, x : x + 2].flatten())
            found.append(linear(w, "multi_modal_projector.linear_2", F.gelu(inner)))
    return torch.stack(found)


def text_logits(w: Weights, vocabulary: int, embeddings: torch.Tensor) -> torch.Tensor:
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=40,
        moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, vocab_size=vocabulary,
        kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, rms_norm_eps=1e-5,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.446,
        rope_parameters={"rope_type": "default", "rope_theta": 800000.0}, attn_implementation="eager",
    )  # fmt: skip
    return decoder_logits(transformers.DeepseekV3Model(config), w, "language_model.", embeddings)


def linear(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ w[f"{name}.weight"].flatten(1).T + w[f"{name}.bias"]


def layer_norm(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(dim=-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def test_equals_the_formulas(root: str) -> None:
    folder, stored = released(root)
    processor: Any = load_processor(folder)
    model = loaded(folder)
    text = "<|im_user|>user<|im_middle|><|media_pad|>Which of <|media_pad|>both?<|im_end|>"
    batch = processor(images=random_pictures(SIZES), text=[text], return_tensors="pt")
    w = {name: tensor.double() for name, tensor in stored.items()}
    pixels, grids = batch["pixel_values"].double(), batch["image_grid_thw"].tolist()
    assert grids == [[1, 4, 16], [1, 2, 4]]
    features = torch.cat([written(w, pixels[:64], 4, 16), written(w, pixels[64:], 2, 4)])
    ids = batch["input_ids"]
    embeddings = w["language_model.model.embed_tokens.weight"][ids]
    embeddings[ids == processor.image_token_id] = features
    inputs = dict(batch) | {"pixel_values": pixels}
    with torch.no_grad(), keeping_double():
        expected = text_logits(w, len(processor.tokenizer), embeddings)
        assert (model(**inputs).logits[0] - expected).abs().max() < 1e-9
        # Planted: rows and columns of the table of places in each other's stead.
        places = model.model.vision_tower.patch_embed.pos_emb.position_embeddings
        places.data = places.data.transpose(0, 1).contiguous()
        assert (model(**inputs).logits[0] - expected).abs().max() > 1e-3


def test_pictures_in_their_own_size(root: str) -> None:
    """62 × 15 pixels are 15 × 3 patches, within the limit of 64: nothing is made smaller, zeros fill both sides up."""
    processor: Any = load_processor(released(root)[0])
    picture = random_pictures(SIZES)[0]
    made = processor(images=[picture], text=["<|media_pad|>"], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 4, 16]]
    whole = torch.zeros(16, 64, 3, dtype=torch.uint8)
    whole[:15, :62] = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(15, 62, 3)
    expected = (whole.permute(2, 0, 1) / 255 - 0.5) / 0.5
    for number in range(64):
        y, x = divmod(number, 16)
        patch = expected[:, y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH]
        torch.testing.assert_close(made["pixel_values"][number], patch)
    assert made["input_ids"].shape[1] == 16


def test_too_many_patches_are_made_fewer(root: str) -> None:
    """16 × 12 patches for a limit of 64: both sides times √(64 / 192), then filled up to whole squares."""
    processor: Any = load_processor(released(root)[0])
    made = processor(images=[Image.new("RGB", (64, 48))], text=["<|media_pad|>"], return_tensors="pt")
    width, height = (int(side * math.sqrt(64 / 192)) for side in (64, 48))
    assert made["image_grid_thw"].tolist() == [[1, math.ceil(height / 8) * 2, math.ceil(width / 8) * 2]]


def test_released_size() -> None:
    from mindspeed_mm.fsdp.models.kimi_vl.modeling_kimi_vl import KimiVLForConditionalGeneration, tell_transformers

    tell_transformers()
    model, differing_entries = model_of_record(KimiVLForConditionalGeneration, "kimi-vl-a3b")
    assert billions(model) == pytest.approx(16.4, rel=0.005)
    assert differing_entries == []


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {"kimi fsdp2": Case("kimi", 2, 2, 2)},
    slow={
        "kimi scratch fsdp2": Case("kimi scratch", 2, 2, 2),
        "kimi pp2 × ep2": Case("kimi", 4, 2, 2, (PP, EP)),
        "kimi pp2 × ep2, recompute": Case("kimi", 4, 2, 2, (PP, EP, "features.recompute=true")),
    },
    kinds={"scratch": ("model.train_from_scratch=true",)},
    slow_faults={"own denominator": Fault("kimi pp2 × ep2", "rank's own denominator")},
)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    make_tiny_kimi_vl(folder / "kimi" / "model", layers=4)
    return {"kimi": str(make_tiny_run(folder / "kimi", **FP64))}


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
