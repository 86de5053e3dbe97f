"""DeepSeek-OCR against transformers' encoder and decoder put together by hand, in fp64, on weights under the released
names (arXiv:2510.18234); then as any model: steps, adapters, resumed and exported, and asked."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.decoder_logits import Weights, decoder_logits
from tests.helpers.parity_runs import Case, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, PP
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.tiny_deepseek_ocr import CLIP, MIDDLE, PAGE, SAM, make_tiny_deepseek_ocr
from tests.helpers.tiny_run import make_tiny_run
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "UnlimitedOcrModel"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)

SIZES = [(24, 36), (12, 9)]
"""Of the two pages, in pixels: of three rows of two tiles, and of none."""


@cache
def released(root: str) -> tuple[Path, Weights]:
    folder = Path(root) / "model"
    return folder, make_tiny_deepseek_ocr(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("deepseek_ocr"))


# --- put together by hand ---------------------------------------------------------------------------------------------

SAM_NAMES = {
    ".norm1.": ".layer_norm1.", ".norm2.": ".layer_norm2.", "blocks.": "layers.", "patch_embed.proj.":
    "patch_embed.projection.", "neck.0.": "neck.conv1.", "neck.1.": "neck.layer_norm1.", "neck.2.": "neck.conv2.",
    "neck.3.": "neck.layer_norm2.", "net_2.": "proj.conv1.", "net_3.": "proj.conv2.",
}  # fmt: skip
"""Released → transformers, of SAM."""


def encoder(w: Weights) -> Any:
    """transformers' SAM and CLIP with the released weights put in by hand."""
    import transformers
    from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrVisionModel

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2}
    sam = sizes | {"hidden_size": SAM, "mlp_dim": 4 * SAM, "global_attn_indexes": [1], "image_size": PAGE}
    clip = sizes | {"hidden_size": CLIP, "intermediate_size": 4 * CLIP, "image_size": 28, "patch_size": 14}
    config = transformers.UnlimitedOcrVisionConfig(
        sam_config=sam | {"downsample_channels": [MIDDLE, CLIP]}, encoder_config=clip, attn_implementation="eager"
    )
    state: Weights = {}
    for name, tensor in w.items():
        if name.startswith("model.sam_model."):
            name = name.removeprefix("model.sam_model.")
            for old, new in SAM_NAMES.items():
                name = name.replace(old, new)
            state[f"sam_encoder.{name}"] = tensor
        elif name.startswith("model.vision_model.") and "patch_embedding" not in name:
            name = name.removeprefix("model.vision_model.").replace("transformer.", "encoder.")
            if "qkv_proj" in name:
                parts = zip("qkv", tensor.chunk(3), strict=True)
                state |= {f"vision_encoder.{name.replace('qkv', each)}": part for each, part in parts}
            else:
                state[f"vision_encoder.{name}"] = tensor
    model = UnlimitedOcrVisionModel(config).double().eval()
    model.load_state_dict(state)
    return model


def written(w: Weights, model: Any, page: torch.Tensor, tiles: torch.Tensor, across: int) -> torch.Tensor:
    """What stands in the places of one page's tokens, token by token; a tile becomes one."""

    def tokens(pixels: torch.Tensor) -> torch.Tensor:
        features = model(pixels[None]).last_hidden_state[0]
        return features @ w["model.projector.layers.weight"].T + w["model.projector.layers.bias"]

    found: list[torch.Tensor] = []
    for row in tiles.split(across) if len(tiles) else ():
        found += [*(tokens(tile)[0] for tile in row), w["model.image_newline"]]
    for row in tokens(page).view(2, 2, -1):
        found += [*row, w["model.image_newline"]]
    return torch.stack([*found, w["model.view_seperator"]])


def text_logits(w: Weights, vocabulary: int, embeddings: torch.Tensor) -> torch.Tensor:
    config = transformers.DeepseekOcr2TextConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=40,
        moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, vocab_size=vocabulary,
        mlp_layer_types=["dense", "sparse", "sparse"], attn_implementation="eager",
    )  # fmt: skip
    own = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    text = {name: tensor for name, tensor in w.items() if name.startswith(own)}
    return decoder_logits(transformers.DeepseekOcr2TextModel(config), text, "", embeddings)


def test_equals_its_parts_put_together(root: str) -> None:
    folder, stored = released(root)
    processor: Any = load_processor(folder)
    model = loaded(folder)
    text = "<|User|>: <image>Which of <image>both?\n\n<|Assistant|>:"
    batch = dict(processor(images=random_pictures(SIZES), text=[text], return_tensors="pt"))
    assert [list(each) for each in batch["patches_grid"]] == [[2, 3], [1, 1]]
    w = {name: tensor.double() for name, tensor in stored.items()}
    batch |= {key: torch.as_tensor(batch[key]).double() for key in ("pixel_values", "pixel_values_local")}
    with torch.no_grad(), keeping_double():
        sees = encoder(w)
        views, tiles = batch["pixel_values"], batch["pixel_values_local"]
        features = torch.cat([written(w, sees, views[0], tiles, 2), written(w, sees, views[1], tiles[:0], 1)])
        ids = batch["input_ids"]
        embeddings = w["model.embed_tokens.weight"][ids]
        embeddings[ids == processor.image_token_id] = features
        expected = text_logits(w, len(processor.tokenizer), embeddings)
        assert (model(**batch).logits[0] - expected).abs().max() < 1e-9
        # Planted: each of the two marks in the other's place.
        inner = model.model
        inner.image_newline.data, inner.view_separator.data = inner.view_separator.data, inner.image_newline.data
        assert (model(**batch).logits[0] - expected).abs().max() > 1e-3


def test_pages_in_tiles(root: str) -> None:
    """A page of 24 × 36 pixels is larger than a tile of 16, and three rows of two of them have its shape."""
    processor: Any = load_processor(released(root)[0])
    page = random_pictures(SIZES)[0]
    made = processor(images=[page], text=["<image>"], return_tensors="pt")
    assert list(made["num_local_patches"]) == [6]
    assert made["input_ids"].shape[1] == 2 * (2 + 1) + 1 + 3 * (2 + 1)
    whole = Image.new("RGB", (128, 128), (127, 127, 127))
    whole.paste(page.resize((85, 128), Image.Resampling.BICUBIC), (21, 0))
    assert (torch.as_tensor(made["pixel_values"][0]) - normalised(whole)).abs().mean() < 0.01  # torchvision resizes
    tiled = normalised(page.resize((32, 48), Image.Resampling.BICUBIC))
    for number, tile in enumerate(made["pixel_values_local"]):
        y, x = divmod(number, 2)
        expected = tiled[:, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16]
        assert (torch.as_tensor(tile) - expected).abs().mean() < 0.01


def normalised(picture: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(picture.height, picture.width, 3).permute(2, 0, 1) / 127.5 - 1


def test_released_size() -> None:
    from mindspeed_mm.fsdp.models.deepseek_ocr.modeling_deepseek_ocr import DeepseekOCRForCausalLM, tell_transformers

    tell_transformers()
    model, differing_entries = model_of_record(DeepseekOCRForCausalLM, "deepseek-ocr")
    assert billions(model) == pytest.approx(3.34, rel=0.005)
    assert differing_entries == []


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {"ocr fsdp2": Case("ocr", 2, 2, 2)},
    slow={
        "ocr scratch fsdp2": Case("ocr scratch", 2, 2, 2),
        "ocr pp2 × ep2": Case("ocr", 4, 2, 2, (PP, EP)),
    },
    kinds={"scratch": ("model.train_from_scratch=true",)},
)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    make_tiny_deepseek_ocr(folder / "ocr" / "model", layers=4)
    return {"ocr": str(make_tiny_run(folder / "ocr", **FP64))}


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)
