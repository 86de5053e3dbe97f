"""A trained model's folder tells which plugins its rows and media were seen through, and is not used without them in
silence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from mindspeed_mm.cli import chat, evaluate, infer, serve
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import ProcessorPlugin
from mindspeed_mm.fsdp.data.data_utils.training_view import view_writer
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.utils.register import data_register
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.evaluate.harness.served import Folder
from mindspeed_mm.tasks.model_source import ModelSource
from tests.fsdp.data.conftest import conversation, write_jsonl
from tests.helpers.tiny_models import build_tokenizer
from tests.helpers.tiny_processors import FAMILIES
from tests.tasks.test_same_view import trained_from


class OneToken(ProcessorPlugin):
    """Shows a picture as its first token alone."""

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        made = super().encode_image(image)
        return replace(made, token_ids=made.token_ids[:1])


def test_a_model_that_was_trained_with_a_media_plugin_is_not_used_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES["llava"].build().save_pretrained(tmp_path / "base")
    monkeypatch.setitem(MM_PLUGINS._entries, "LlavaProcessor", OneToken)
    exported = trained_from(tmp_path / "base", tmp_path / "exported")
    adapters = trained_from(tmp_path / "base", tmp_path / "adapters", only_template=True)
    sources = [ModelSource(exported), ModelSource(tmp_path / "base", lora=adapters)]
    for source in sources:
        rows_view(source)
    monkeypatch.delitem(MM_PLUGINS._entries, "LlavaProcessor")
    rows_view(ModelSource(tmp_path / "base"))
    for source in sources:
        with pytest.raises(ConfigError, match=rf"OneToken for LlavaProcessor.*--plugin {__name__}"):
            rows_view(source)
    rows = write_jsonl(tmp_path / "rows.jsonl", [conversation("a")])
    section = {"basic_parameters": {"dataset": str(rows), "dataset_dir": str(tmp_path)}}
    param = DatasetParam.model_validate(section | {"preprocess_parameters": {"model_name_or_path": str(exported)}})
    with pytest.raises(ConfigError, match="OneToken"):
        build_mm_dataset(param)


def test_rows_of_a_plugins_data_set_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tokenizer().save_pretrained(tmp_path / "base")
    monkeypatch.setitem(data_register._entries, "my_rows", OneToken)
    exported = shutil.copytree(tmp_path / "base", tmp_path / "exported")
    view_writer(DatasetParam.model_validate({"dataset_type": "my_rows"}), tmp_path / "base")(exported)
    with pytest.warns(UserWarning, match=r"trained on rows of the data set 'my_rows' \(.*OneToken\)"):
        rows_view(ModelSource(exported))
    assert trained_from(exported, tmp_path / "again").joinpath("training_view.json").is_file()


def test_plugins_are_imported_first_by_every_command_that_shows_rows_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    folder = str(tmp_path / "hf")
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [conversation("a")]))
    build_tokenizer().save_pretrained(folder)
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen3"}')
    for command, words in (
        (evaluate.command, ["--data", rows]),
        (evaluate.command, ["--data", rows, "--loss"]),
        (infer.command, ["--prompt", "a"]),
        (chat.command, []),
        (serve.command, []),
    ):
        result = CliRunner().invoke(command, [folder, *words, "--plugin", "no_such_package"])
        assert isinstance(result.exception, ConfigError), words
        assert "--plugin" in str(result.exception) and "no_such_package" in str(result.exception)
    assert "--plugin" in Folder(tmp_path, plugins=("mine",)).words(tmp_path / "key")
