"""DeepSeek-VL2 against the paper's formulas (arXiv:2412.10302) in plain torch, in fp64, on weights under the released
names; then as any model: steps, plans, adapters, resumed and exported, and asked."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import mindspeed_mm as mm
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.models.loading.folder import load_model_config
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.decoder_logits import decoder_logits
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, PP
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.runs import differing
from tests.helpers.tiny_deepseek_vl2 import HIDDEN, KINDS, PATCH, RESOLUTIONS, TILE, WIDTH, make_tiny_deepseek_vl2
from tests.helpers.tiny_run import make_rows, make_tiny_run
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DeepseekOcr2TextModel"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)

TOKENS = 3
"""Along a side of a tile: five patches are filled up to six and joined two by two."""
SIZES = [(48, 18), (20, 20)]
"""Of the two pictures, in pixels: of three tiles, and of one."""


@cache
def released(root: str, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = Path(root) / kind / "model"
    return folder, make_tiny_deepseek_vl2(folder, kind)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("deepseek_vl2"))


# --- the formulas -----------------------------------------------------------------------------------------------------


def tower(w: dict[str, torch.Tensor], tile: torch.Tensor) -> torch.Tensor:
    """(3, side, side) → (patches, width)."""
    side = TILE // PATCH
    rows = [
        tile[:, y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH].flatten()
        for y in range(side)
        for x in range(side)
    ]
    hidden = torch.stack(rows) @ w["vision.patch_embed.proj.weight"].flatten(1).T + w["vision.patch_embed.proj.bias"]
    hidden = hidden + w["vision.pos_embed"][0]
    for block in ("vision.blocks.0.", "vision.blocks.1."):
        normed = layer_norm(w, f"{block}norm1", hidden)
        q, k, v = linear(w, f"{block}attn.qkv", normed).split(WIDTH, dim=1)
        heads = []
        for part in torch.arange(WIDTH).split(WIDTH // 3):
            scores = q[:, part] @ k[:, part].T / math.sqrt(len(part))
            heads.append(scores.softmax(dim=1) @ v[:, part])
        hidden = hidden + linear(w, f"{block}attn.proj", torch.cat(heads, dim=1))
        inner = linear(w, f"{block}mlp.fc1", layer_norm(w, f"{block}norm2", hidden))
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        hidden = hidden + linear(w, f"{block}mlp.fc2", inner)
    return layer_norm(w, "vision.norm", hidden)


def projected(w: dict[str, torch.Tensor], patches: torch.Tensor) -> list[list[torch.Tensor]]:
    """(patches, width) → rows of tokens (hidden)."""
    side = TILE // PATCH
    grid = F.pad(patches.view(side, side, WIDTH), (0, 0, 0, 1, 0, 1))
    rows = []
    for y in range(TOKENS):
        square = [grid[2 * y : 2 * y + 2, 2 * x : 2 * x + 2] for x in range(TOKENS)]
        features = torch.stack([each.permute(2, 0, 1).flatten() for each in square])
        inner = linear(w, "projector.layers.0", features)
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        rows.append(list(linear(w, "projector.layers.2", inner)))
    return rows


def written(w: dict[str, torch.Tensor], views: list[torch.Tensor], across: int, down: int) -> torch.Tensor:
    """What stands in the places of one picture's tokens, token by token."""
    whole, *tiles = (projected(w, tower(w, view)) for view in views)
    found: list[torch.Tensor] = []
    for row in whole:
        found += [*row, w["image_newline"]]
    found.append(w["view_seperator"])
    for y in range(down):
        for line in range(TOKENS):
            for x in range(across):
                found += tiles[y * across + x][line]
            found.append(w["image_newline"])
    return torch.stack(found)


def text_logits(w: dict[str, torch.Tensor], kind: str, vocabulary: int, embeddings: torch.Tensor) -> torch.Tensor:
    """(1, L, hidden) → (L, vocabulary), by transformers' decoders with the released tensors put in by hand."""
    common: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 40, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 2, "vocab_size": vocabulary, "attn_implementation": "eager",
    }  # fmt: skip
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
    if kind == "tiny":
        config = transformers.DeepseekOcr2TextConfig(**common, mlp_layer_types=["dense", "sparse", "sparse"])
        decoder: Any = transformers.DeepseekOcr2TextModel(config)
    elif kind == "small":
        config = transformers.DeepseekV2Config(**common, **latent, first_k_dense_replace=1)
        decoder = transformers.DeepseekV2Model(config)
    else:
        own = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.0}
        config = transformers.DeepseekV3Config(**common, **latent, **own, first_k_dense_replace=1)
        decoder = transformers.DeepseekV3Model(config)
    return decoder_logits(decoder, w, "language.", embeddings)


def linear(w: dict[str, torch.Tensor], name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w: dict[str, torch.Tensor], name: str, rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(dim=-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_the_formulas(kind: str, root: str) -> None:
    folder, stored = released(root, kind)
    processor: Any = load_processor(folder)
    model = loaded(folder)
    text = "<|User|>: <image>Which of <image>both?\n\n<|Assistant|>:"
    batch = processor(images=random_pictures(SIZES), text=text, return_tensors="pt")
    w = {name: tensor.double() for name, tensor in stored.items()}
    pixels, grids = batch["pixel_values"].double(), batch["images_spatial_crop"].tolist()
    assert grids == [[3, 1], [1, 1]]
    features = torch.cat([written(w, list(pixels[:4]), 3, 1), written(w, list(pixels[4:]), 1, 1)])
    ids = batch["input_ids"]
    embeddings = w["language.model.embed_tokens.weight"][ids]
    embeddings[ids == processor.image_token_id] = features
    with torch.no_grad(), keeping_double():
        expected = text_logits(w, kind, len(processor.tokenizer), embeddings)
        found = model(**dict(batch) | {"pixel_values": pixels}).logits[0]
        assert (found - expected).abs().max() < 1e-9
        # Planted: each of the two marks in the other's place.
        model.image_newline.data, model.view_seperator.data = model.view_seperator.data, model.image_newline.data
        assert (model(**dict(batch) | {"pixel_values": pixels}).logits[0] - expected).abs().max() > 1e-3


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_in_tiles(root: str) -> None:
    """A picture of 48 × 18 pixels keeps most of itself in three tiles side by side; by hand, pixel by pixel."""
    processor: Any = load_processor(released(root, "small")[0])
    picture = random_pictures(SIZES)[0]
    made = processor(images=[picture], text="<image>", return_text_replacement_offsets=True, return_tensors="pt")
    assert made["images_spatial_crop"].tolist() == [[3, 1]]
    assert made["pixel_values"].shape == (4, 3, 20, 20)
    # 60 × 20 holds 53 × 20 pixels of it, in the middle between grey borders
    wide = Image.new("RGB", (60, 20), (127, 127, 127))
    wide.paste(picture.resize((53, 20), Image.Resampling.BICUBIC), (4, 0))
    for number in range(3):
        tile = torch.tensor(list(wide.crop((20 * number, 0, 20 * number + 20, 20)).getdata())).view(20, 20, 3)
        expected = (tile.permute(2, 0, 1) / 255 - 0.5) / 0.5
        torch.testing.assert_close(made["pixel_values"][1 + number], expected)
    tokens = 3 * (3 + 1) + 1 + 3 * (3 * 3 + 1)
    assert made["input_ids"].shape[1] == tokens == int(made["mm_token_type_ids"].sum())


@pytest.mark.parametrize("size", [(20, 20), (200, 30), (41, 39), (10, 80), (37, 20)])
def test_grids_lose_least(size: tuple[int, int], root: str) -> None:
    """Of all candidates the one that keeps most pixels, and of those the smallest, in whole numbers."""
    processor: Any = load_processor(released(root, "small")[0])
    width, height = size

    def worth(candidate: list[int]) -> tuple[int, int]:
        scale = min(candidate[0] / width, candidate[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - candidate[0] * candidate[1]

    best = max(RESOLUTIONS, key=worth)
    assert processor.grid(Image.new("RGB", size)) == (best[0] // 20, best[1] // 20)


def test_more_than_two_pictures_are_not_cut(root: str) -> None:
    processor: Any = load_processor(released(root, "small")[0])
    three = [Image.new("RGB", (50, 30))] * 3
    assert (
        processor(images=three, text="<image>" * 3, return_tensors="pt")["images_spatial_crop"].tolist() == [[1, 1]] * 3
    )
    assert build_mm_plugin(processor, _Preprocess()).pictures_seen_alone == 2  # type: ignore[attr-defined]


def test_rows_of_more_pictures_are_refused(root: str, tmp_path: Path) -> None:
    folder, _ = released(root, "small")
    make_rows(tmp_path, count=2, images=(3,))
    yaml = make_tiny_run(tmp_path, model={"model_name_or_path": str(folder)})
    with pytest.raises(DataError, match="cuts more than 2 otherwise"):
        mm.train(str(yaml))


class _Preprocess(dict[str, Any]):
    image_max_pixels, image_min_pixels, use_audio_in_video, audio_sampling_rate = 10**6, 0, False, None
    image_max_tiles = None

    def __missing__(self, key: str) -> None:
        return None


# --- released sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "published"), [("deepseek-vl2-tiny", 3.37), ("deepseek-vl2-small", 16.1), ("deepseek-vl2-base", 27.5)]
)
def test_released_sizes(size: str, published: float) -> None:
    from mindspeed_mm.fsdp.models.deepseek_vl2.modeling_deepseek_vl2 import DeepseekVLV2ForCausalLM, tell_transformers

    tell_transformers()
    model, differing_entries = model_of_record(DeepseekVLV2ForCausalLM, size)
    assert billions(model) == pytest.approx(published, rel=0.005)
    assert differing_entries == []


def test_a_family_of_the_same_type_that_is_not_known_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCR2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="DeepseekOCR2ForCausalLM is not one of DeepseekVLV2ForCausalLM"):
        load_model_config(tmp_path)


# --- as any model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
def test_goes_back_to_the_bit(kind: str, root: str, tmp_path: Path) -> None:
    folder, stored = released(root, kind)
    save_hf(loaded(folder, torch.float32), tmp_path / "out", folder)
    with open_weights(tmp_path / "out") as written_again:
        assert differing({name: tensor.read() for name, tensor in written_again.items()}, stored) == []


def test_the_cache_changes_nothing(root: str) -> None:
    folder, _ = released(root, "small")
    processor, model = load_processor(folder), loaded(folder)
    batch = processor(images=random_pictures(SIZES), text="<image>one <image>two", return_tensors="pt")  # type: ignore[operator]
    answers = [
        model.generate(**batch, max_new_tokens=6, do_sample=False, use_cache=use_cache) for use_cache in (True, False)
    ]
    assert answers[0].shape[1] > batch["input_ids"].shape[1]
    assert answers[0].tolist() == answers[1].tolist()


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {"small pp2 × ep2": Case("small", 4, 2, 2, (PP, EP))},
    slow={
        "small fsdp2": Case("small", 2, 2, 2),
        "small scratch fsdp2": Case("small scratch", 2, 2, 2),
        "base pp2 × ep2, recompute": Case("base", 4, 2, 2, (PP, EP, "features.recompute=true")),
        "tiny pp2 × ep2": Case("tiny", 4, 2, 2, (PP, EP)),
        "tiny fsdp2": Case("tiny", 2, 2, 2),
    },
    kinds={"scratch": ("model.train_from_scratch=true",)},
    slow_faults={"own denominator": Fault("tiny pp2 × ep2", "rank's own denominator")},
)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    for kind in KINDS:
        make_tiny_deepseek_vl2(folder / kind / "model", kind, layers=4)
    return {kind: str(make_tiny_run(folder / kind, **FP64)) for kind in KINDS}


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
