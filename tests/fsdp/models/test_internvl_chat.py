"""InternVL's original folders: the same model as transformers' own class with the weights put in by hand, in fp64; its
pictures as transformers' processor cuts them; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.loading.folder import load_model_config
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.packed_families import InDouble
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.tiny_internvl_chat import EXPERTS, KINDS, TEMPLATE, TILE, WIDTH, make_tiny_internvl_chat
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)
from mindspeed_mm.fsdp.models.internvl_chat.processing_internvl_chat import CHAT_TEMPLATE  # isort: skip  (the same)

SIZES = [(40, 20), (16, 16)]
"""Of two pictures, in pixels: of two tiles and the whole, and of one."""
TOWER_NAMES = {
    r"^vision_model\.embeddings\.class_embedding": "embeddings.cls_token",
    r"^vision_model\.embeddings\.position_embedding": "embeddings.position_embeddings",
    r"^vision_model\.embeddings\.patch_embedding": "embeddings.patch_embeddings.projection",
    r"^vision_model\.encoder\.layers": "encoder.layer",
    r"\.ls(\d)": r".lambda_\1",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.proj\.": ".attention.projection_layer.",
    r"\.attn\.": ".attention.",
}
PROJECTOR_NAMES = {"mlp1.0.": "layer_norm.", "mlp1.1.": "linear_1.", "mlp1.3.": "linear_2."}


def by_hand(stored: dict[str, torch.Tensor], kind: str, *, large: bool) -> Any:
    """transformers' class with each of its tensors named here."""
    text = json.loads(json.dumps({"vocab_size": len(stored["language_model.lm_head.weight"])} | text_of(kind)))
    config = transformers.InternVLConfig(
        text_config=text,
        vision_config={
            "hidden_size": WIDTH, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": [TILE, TILE], "patch_size": [4, 4], "attention_bias": not large, "use_qk_norm": large,
            "norm_type": "rms_norm" if large else "layer_norm",
        },
        image_seq_length=4, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.InternVLForConditionalGeneration(config).double().eval()
    state: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in stored.items():
        if name.startswith("vision_model"):
            for pattern, own in TOWER_NAMES.items():
                name = re.sub(pattern, own, name)
            parts = {name: tensor}
            if ".qkv." in name:
                parts = {name.replace("qkv", f"{q}_proj"): part for q, part in zip("qkv", tensor.chunk(3), strict=True)}
            state |= {f"model.vision_tower.{key}": part for key, part in parts.items()}
        elif name.startswith("mlp1"):
            old = next(old for old in PROJECTOR_NAMES if name.startswith(old))
            state[f"model.multi_modal_projector.{name.replace(old, PROJECTOR_NAMES[old])}"] = tensor
        elif found := re.fullmatch(r"language_model\.(.*experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        else:
            name = name.removeprefix("language_model.")
            state[name.replace("model.", "model.language_model.", 1)] = tensor
    for name in {key.rpartition(".")[0] for key in experts}:
        gate, up, down = (
            torch.stack([experts[f"{name}.{part}_proj"][number] for number in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        own = name.replace("model.", "model.language_model.", 1)
        state |= {f"{own}.gate_up_proj": torch.cat([gate, up], dim=1), f"{own}.down_proj": down}
    model.load_state_dict({key: tensor.double() for key, tensor in state.items()})
    model.set_experts_implementation("eager")
    return model


def text_of(kind: str) -> dict[str, Any]:
    from tests.helpers.tiny_internvl_chat import TEXT

    return TEXT | KINDS[kind]


@pytest.mark.parametrize(("kind", "large"), [("qwen2", False), ("qwen2", True), ("qwen3_moe", False)])
def test_equals_transformers_with_weights_put_in_by_hand(kind: str, large: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    stored = make_tiny_internvl_chat(folder, kind, large=large)
    processor: Any = load_processor(folder)
    text = "<|im_start|>user\n<IMG_CONTEXT>\nWhich of <IMG_CONTEXT>\nboth?<|im_end|>\n<|im_start|>assistant\n"
    batch = dict(processor(images=random_pictures(SIZES), text=[text], return_tensors="pt"))
    batch["pixel_values"] = batch["pixel_values"].double()
    assert batch["pixel_values"].shape == (4, 3, TILE, TILE)
    model, expected = loaded(folder), by_hand(stored, kind, large=large)
    assert model.config.image_token_id == processor.image_token_id
    expected.config.image_token_id = processor.image_token_id
    with torch.no_grad(), keeping_double(), InDouble():
        logits = expected(**batch).logits
        assert (model(**batch).logits - logits).abs().max() < 1e-9
        # Planted: queries in the place of keys.
        attention = model.model.vision_tower.encoder.layer[0].attention
        attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj
        attention.k_proj.weight.data.mul_(2)
        assert (model(**batch).logits - logits).abs().max() > 1e-6


@pytest.mark.parametrize("is_cut", [True, False])
def test_pictures_are_those_of_transformers_processor(tmp_path: Path, is_cut: bool) -> None:
    folder = tmp_path / "model"
    make_tiny_internvl_chat(folder)
    change(folder, dynamic_image_size=is_cut)
    processor: Any = load_processor(folder)
    images = transformers.GotOcr2ImageProcessor(
        size={"height": TILE, "width": TILE}, crop_to_patches=is_cut, min_patches=1, max_patches=4,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    picture = random_pictures([(48, 16)])
    made = processor(images=picture, text=["<IMG_CONTEXT>"], return_tensors="pt")
    expected = images(picture, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(made["pixel_values"], expected)
    assert len(expected) == (4 if is_cut else 1)
    assert made["input_ids"].shape[1] == 2 + 4 * len(expected)


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ps_version": "v1"}, "ps_version is 'v1'"),
        ({"use_thumbnail": False}, "use_thumbnail is False"),
        ({"llm_config": {"model_type": "internlm2"}}, "llm_config.model_type is 'internlm2'"),
    ],
)
def test_what_no_class_computes_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    make_tiny_internvl_chat(tmp_path / "model")
    change(tmp_path / "model", **settings)
    with pytest.raises(ModelFolderError, match=words):
        load_model_config(tmp_path / "model")


@pytest.mark.parametrize("has_place", [True, False])
def test_a_template_of_texts_alone_gives_way_to_the_family_s(tmp_path: Path, has_place: bool) -> None:
    """transformers writes the released tokenizer's template beside the model when the tokenizer is saved again."""
    make_tiny_internvl_chat(tmp_path / "model")
    own = "{{ '<IMG_CONTEXT>' }}" if has_place else TEMPLATE
    (tmp_path / "model" / "chat_template.jinja").write_text(own)
    assert load_processor(tmp_path / "model").chat_template == (own if has_place else CHAT_TEMPLATE)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    shown = load_processor(tmp_path / "model").apply_chat_template([{"role": "user", "content": parts}])
    assert shown.count("<IMG_CONTEXT>") == 1


def test_a_tokenizer_without_the_token_of_pictures_is_refused(tmp_path: Path) -> None:
    make_tiny_internvl_chat(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(ModelFolderError, match="IMG_CONTEXT"):
        load_model_config(tmp_path / "model")


@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("internvl2.5-4b", 3.7),
        ("internvl3-8b", 7.94),
        ("internvl3-78b", 78.4),
        pytest.param("internvl3.5-30b-a3b", 30.8, marks=pytest.mark.slow),
    ],
)
def test_released_sizes(size: str, published: float) -> None:
    from mindspeed_mm.fsdp.models.internvl_chat.modeling_internvl_chat import InternVLChatModel, tell_transformers

    tell_transformers()
    model, differing_entries = model_of_record(InternVLChatModel, size)
    assert billions(model) == pytest.approx(published, rel=0.01)
    assert differing_entries == []
