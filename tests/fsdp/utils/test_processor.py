"""The processor of a folder loads offline beside a CPU-only torch; every trouble is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import (
    PROCESSOR_FILES,
    check_chat_template,
    check_media_processor,
    load_processor,
    tokenizer_of,
)
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_tiny_qwen3, make_tiny_qwen3_vl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_qwen3_vl(tmp_path / "model")


def test_multimodal_folder_gives_its_processor(folder: Path) -> None:
    processor = load_processor(folder)
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert tokenizer_of(processor) is processor.tokenizer
    ids = processor.tokenizer("Hello, wörld 7\n").input_ids
    assert processor.tokenizer.decode(ids) == "Hello, wörld 7\n"


def test_the_pillow_backend_can_be_chosen(folder: Path) -> None:
    fast, slow = load_processor(folder), load_processor(folder, use_fast=False)
    assert type(fast.image_processor) is not type(slow.image_processor)


@pytest.mark.edge("R10")
@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_qwen3_vl])
def test_options_reach_the_tokenizer(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    asked, unasked = (load_processor(folder, fix_mistral_regex=value) for value in (True, None))
    assert tokenizer_of(asked).init_kwargs["fix_mistral_regex"] is True
    assert "fix_mistral_regex" not in tokenizer_of(unasked).init_kwargs


def test_text_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_processor(make_tiny_qwen3(tmp_path))
    assert tokenizer_of(tokenizer) is tokenizer
    assert tokenizer.pad_token_id is not None


def test_absent_folder_and_absent_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"is not a folder.*local folder"):
        load_processor(tmp_path / "Qwen" / "Qwen3-VL")
    with pytest.raises(ModelFolderError, match=r"no processor or tokenizer.*tokenizer\.json"):
        load_processor(tmp_path)


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_qwen3_vl])
@pytest.mark.parametrize("has_settings", [True, False])
def test_absent_vocabulary(make: Callable[[Path], Path], has_settings: bool, tmp_path: Path) -> None:
    """transformers builds a tokenizer of special tokens alone, and every text becomes empty."""
    folder = make(tmp_path)
    (folder / "tokenizer.json").unlink()
    if not has_settings:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json") as raised:
        load_processor(folder)
    assert raised.value.exit_code == 4
    assert str(folder) in str(raised.value)


def test_vocabulary_of_special_tokens_alone(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json  the vocabulary holds no words, only \d+ special"):
        load_processor(folder)


def test_media_for_a_folder_without_its_processor(tmp_path: Path) -> None:
    """Rows of text need no processor; a medium names the file that is missing instead of another model."""
    folder = make_tiny_qwen3_vl(tmp_path / "vl")
    check_media_processor(folder)
    for name in PROCESSOR_FILES:
        (folder / name).unlink(missing_ok=True)
    plugin = build_mm_plugin(load_processor(folder), PreprocessParameters())
    with pytest.raises(ModelFolderError, match=r"'qwen3_vl' model is missing: .* nor preprocessor_config\.json"):
        plugin.encode_image(Image.new("RGB", (8, 8)))
    with pytest.raises(ModelFolderError, match=r"preprocessor_config\.json"):
        plugin.measure("video", None)
    check_media_processor(make_tiny_qwen3(tmp_path / "text"))


def test_processor_of_ones_own_that_is_not_registered(folder: Path) -> None:
    """transformers reads the tokenizer alone: a medium names the registration, not another model."""
    for name in PROCESSOR_FILES:
        (folder / name).unlink(missing_ok=True)
    (folder / "processor_config.json").write_text('{"processor_class": "HeronProcessor"}')
    plugin = build_mm_plugin(load_processor(folder), PreprocessParameters())
    with pytest.raises(ModelFolderError, match=r"'HeronProcessor' is not registered.* AutoProcessor\.register\("):
        plugin.encode_image(Image.new("RGB", (8, 8)))


def test_image_processor_of_ones_own_that_is_not_registered(folder: Path) -> None:
    """The error of transformers lists every model type; ours names the registration."""
    for name in PROCESSOR_FILES:
        (folder / name).unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "HeronImageProcessor"}')
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    (folder / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    with pytest.raises(ModelFolderError, match=r"AutoImageProcessor\.register\(") as raised:
        load_processor(folder)
    assert "qwen2_vl" not in str(raised.value)


def test_broken_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelFolderError, match=r"tokenizer.json  is not valid JSON"):
        load_processor(folder)


@pytest.mark.edge("BR5")
def test_the_end_token_pads_where_no_token_does(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    tokenizer = tokenizer_of(load_processor(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_unsafe_template_in_a_folder(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'a' * 300000000 }}")
    with pytest.raises(ModelFolderError, match="300,000,000 times"):
        load_processor(folder)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{{ ''.__class__.__mro__ }}", "__class__|__mro__"),
        ("{{ ''['__class__'] }}", "__class__"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "1,000,000,000"),
        ("{{ 10 ** 10 ** 10 }}", "power"),
        ("{% include '/etc/passwd' %}", "another file"),
        ("{% if %}", "not valid jinja"),
        ("x" * 200_001, "200001 characters"),
    ],
)
def test_unsafe_templates(source: str, found: str) -> None:
    with pytest.raises(ModelFolderError, match=found):
        check_chat_template(source, where="folder")


@pytest.mark.parametrize(
    "source",
    [CHAT_TEMPLATE, "{%- generation %}x{% endgeneration -%}", "{% for m in messages %}{% break %}{% endfor %}"],
)
def test_ordinary_templates_pass(source: str) -> None:
    check_chat_template(source, where="folder")
