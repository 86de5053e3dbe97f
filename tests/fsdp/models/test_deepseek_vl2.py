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
from PIL import Image, ImageOps

from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.models.loading.folder import load_model_config
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.decoder_logits import decoder_logits
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, PP
from tests.helpers.planned_steps import train_steps
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.runs import differing, mm
from tests.helpers.tiny_deepseek_vl2 import HIDDEN, KINDS, PATCH, RESOLUTIONS, TILE, WIDTH, make_tiny_deepseek_vl2
from tests.helpers.tiny_run import make_tiny_run
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


def row_by_rule(tokenizer: Any, question: str, answer: str, pictures: list[Image.Image]) -> dict[str, Any]:
    """A conversation as deepseek-ai/DeepSeek-VL2's `format_messages_v2` and `tokenize_with_images` make it."""

    def worth(candidate: list[int], picture: Image.Image) -> tuple[int, int]:
        scale = min(candidate[0] / picture.width, candidate[1] / picture.height)
        kept = min(int(picture.width * scale) * int(picture.height * scale), picture.width * picture.height)
        return kept, kept - candidate[0] * candidate[1]

    def pixels(view: Image.Image) -> torch.Tensor:
        return (torch.tensor(list(view.getdata())).view(TILE, TILE, 3).permute(2, 0, 1) / 255 - 0.5) / 0.5

    vocabulary = tokenizer.get_vocab()
    tiles, crops, tokens = [], [], []
    for picture in pictures:
        width, height = TILE, TILE
        if len(pictures) <= 2:
            width, height = max(RESOLUTIONS, key=lambda candidate: worth(candidate, picture))
        tiles.append(pixels(ImageOps.pad(picture, (TILE, TILE), color=(127, 127, 127))))
        fitted = ImageOps.pad(picture, (width, height), color=(127, 127, 127))
        for top in range(0, height, TILE):
            tiles += [pixels(fitted.crop((x, top, x + TILE, top + TILE))) for x in range(0, width, TILE)]
        across, down = width // TILE, height // TILE
        crops.append([across, down])
        tokens.append(TOKENS * (TOKENS + 1) + 1 + down * TOKENS * (across * TOKENS + 1))
    first, *others = f"<|User|>: {question.strip()}\n\n<|Assistant|>:".split("<image>")
    ids = [vocabulary[tokenizer.bos_token], *tokenizer.encode(first, add_special_tokens=False)]
    for number, other in zip(tokens, others, strict=True):
        ids += [vocabulary["<image>"]] * number + tokenizer.encode(other, add_special_tokens=False)
    said = [*tokenizer.encode(answer.strip(), add_special_tokens=False), vocabulary[tokenizer.eos_token]]
    return {
        "question": ids,
        "input_ids": ids + said,
        "labels": [-100] * len(ids) + said,
        "pixel_values": torch.stack(tiles),
        "images_spatial_crop": crops,
    }


@pytest.fixture(scope="module")
def many(root: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML whose rows have 1, 2, 3 and 5 pictures of different sizes."""
    folder = tmp_path_factory.mktemp("many")
    rows = []
    for number, pictures in enumerate((1, 2, 3, 5)):
        names = [f"{number}_{index}.png" for index in range(pictures)]
        for name, picture in zip(names, random_pictures([*SIZES, (18, 70), (30, 30), (60, 20)]), strict=False):
            picture.save(folder / name)
        messages = [
            {"role": "user", "content": "<image>and " * (pictures - 1) + "<image> which? "},
            {"role": "assistant", "content": f"number {number}"},
        ]
        rows.append({"messages": messages, "images": names})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataloader_param": {"num_workers": 0, "shuffle": False}}
    training = {"train_iters": 2, "adam_fused": False}
    return make_tiny_run(
        folder, model={"model_name_or_path": str(released(root, "small")[0])}, data=data, training=training
    )


def rule_of(many: Path, root: str) -> list[dict[str, Any]]:
    tokenizer, made = load_processor(released(root, "small")[0]).tokenizer, []  # type: ignore[union-attr]
    for row in map(json.loads, (many.parent / "rows.jsonl").read_text().splitlines()):
        pictures = [Image.open(many.parent / name) for name in row["images"]]
        question, answer = (message["content"] for message in row["messages"])
        made.append(row_by_rule(tokenizer, question, answer, pictures))
    return made


def test_any_number_of_pictures_as_the_released_processor_shows_them(many: Path, root: str) -> None:
    """Ids, labels, tiles and crops of rows with 1, 2, 3 and 5 pictures; the sizes that packing asks for; and questions
    that `mm infer`, `mm evaluate` and `mm serve` ask."""
    param = load_config(many).arguments.data.dataset_param
    dataset: Any = build_mm_dataset(param)[0]
    expected = rule_of(many, root)
    assert [len(set(map(tuple, row["images_spatial_crop"]))) > 1 for row in expected] == [False, True, False, False]
    assert expected[0]["images_spatial_crop"] == [[3, 1]]
    for number, rule in enumerate(expected):
        encoded = dataset[number]
        assert encoded["input_ids"].tolist() == rule["input_ids"]
        assert encoded["labels"].tolist() == rule["labels"]
        batch = dataset.build_collator(CollateParam())([encoded])
        assert batch["images_spatial_crop"].tolist() == rule["images_spatial_crop"]
        torch.testing.assert_close(batch["pixel_values"], rule["pixel_values"])
        assert dataset.measure(number).tokens == len(rule["input_ids"])
    encoder = QuestionEncoder(released(root, "small")[0], RowsView(param))
    media = encoder.media(many.parent)
    for question, rule in zip(read_questions(many.parent / "rows.jsonl", needs_answers=True), expected, strict=True):
        asked = encoder.collate([encoder.encode(question.sample, media)])
        assert asked["input_ids"].tolist() == [rule["question"]]
        assert asked["images_spatial_crop"].tolist() == rule["images_spatial_crop"]
        torch.testing.assert_close(asked["pixel_values"], rule["pixel_values"])


def test_rows_of_three_and_five_pictures_are_trained(many: Path) -> None:
    """Each row with its own padding and all in one pack give the same loss, gradients and weights."""
    words = ["parallel.fsdp_plan.param_dtype=fp64", "training.micro_batch_size=4"]
    with keeping_double(), InDouble():
        compare_steps(train_steps(str(many), words, packs=False), train_steps(str(many), words, packs=True), 1e-9)


def test_commands_take_rows_of_many_pictures(many: Path, root: str, tmp_path: Path) -> None:
    shown = mm("data", "preview", many, "--rows", "0,3", "--json")
    assert shown.code == 0, shown.err
    scored = mm("evaluate", released(root, "small")[0], "--data", many.parent / "rows.jsonl", "--json",
                "--out", tmp_path / "scores", "--max-new-tokens", 3)  # fmt: skip
    assert scored.code == 0 and json.loads(scored.out)["overall"]["n"] == 4, scored.err
    pictures = [word for number in range(3) for word in ("--image", many.parent / f"2_{number}.png")]
    answered = mm("infer", released(root, "small")[0], *pictures, "--prompt", "Which?", "--max-new-tokens", 3)
    assert answered.code == 0, answered.err


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
    {"small pp2": Case("small", 2, 1, 4, (PP,))},
    slow={
        "small pp2 × ep2": Case("small", 4, 2, 2, (PP, EP)),
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
