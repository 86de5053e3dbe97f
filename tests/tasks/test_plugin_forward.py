"""What a plugin's `forward` takes: the same words from `mm check` and `mm train`, and transformers' own answers."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.models.forward_arguments import list_arguments
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows

prepare_for_transformers()
from transformers import Qwen3VLForConditionalGeneration  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), seed=3, initializer_range=0.4)


class PassesOn(Qwen3VLForConditionalGeneration):
    """Hands all that it is given on."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs)


class PassesOnTwice(PassesOn):
    """The same, one class further, with an argument of its own."""

    def forward(self, pixel_values: Any = None, *, scale: float = 1.0, **inputs: Any) -> Any:
        return super().forward(pixel_values=pixel_values, **inputs)


class TakesTextAlone(Qwen3VLForConditionalGeneration):
    """Leaves the pictures out."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values)


def answers(generator: Generator, folder: Path) -> list[tuple[int, ...]]:
    """Two questions of different lengths in one batch, one with a picture: rows are padded on the left."""
    make_rows(folder / "media", count=1, images=(1,))
    media = generator.encoder.media(folder / "media")
    rows = []
    picture = MediaItem("image", "images/0_0.png")
    for text, shown in (("what?", [picture]), ("what is this, and what is that? " * 3, [])):
        question = ask(text, shown)
        rows.append(LiveAnswer(generator.encode(question.sample, media), Sampling(6, temperature=0)))
    return [tuple(answer.token_ids) for answer in generator.answer_live(rows)]


@pytest.mark.parametrize("model_class", [PassesOn, PassesOnTwice])
def test_a_forward_of_any_keyword_answers_as_the_class_above_it(folder: Path, model_class: Any, tmp_path: Path) -> None:
    plain = load_generator(folder)
    ours = Generator(model_class.from_pretrained(folder), plain.encoder)
    assert answers(ours, tmp_path) == answers(plain, tmp_path)
    assert ours.model._supports_logits_to_keep()


def test_a_forward_that_does_not_take_a_question_is_named(folder: Path, tmp_path: Path) -> None:
    encoder = load_generator(folder).encoder
    with pytest.raises(ConfigError, match=r"TakesTextAlone\.forward refuses the question.*image_grid_thw") as caught:
        answers(Generator(TakesTextAlone.from_pretrained(folder), encoder), tmp_path)
    assert "**kwargs" in caught.value.problems[0].way_out


def test_keywords_of_a_class_without_one_above_are_those_that_it_is_given() -> None:
    class Alone(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return inputs

    model = Alone()
    list_arguments(model, ["input_ids", "spectra"])
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "spectra", "inputs"]
    assert model(spectra=1) == {"spectra": 1}


PLUGIN = """
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoProcessor

from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("half_marked")
class HalfMarked:
    def __init__(self, basic_param, preprocess_param, dataset_param):
        self.folder = Path(basic_param.dataset)
        self.processor = AutoProcessor.from_pretrained(preprocess_param.model_name_or_path)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = Image.open(self.folder / f"images/{index}_0.png").convert("RGB")
        content = [{"type": "image"}, {"type": "text", "text": "what?"}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return dict(self.processor(text=[text], images=[image], return_tensors="pt"))

    def collate_fn(self, samples):
        (sample,) = samples
        del sample["mm_token_type_ids"]
        return {**sample, "labels": sample["input_ids"].clone()}
"""


def test_check_refuses_a_batch_that_training_refuses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "half_marked.py").write_text(PLUGIN)
    make_rows(tmp_path, count=4, images=(1,))
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"""\
model: {{model_name_or_path: {folder}}}
data:
  dataset_param: {{dataset_type: half_marked, basic_parameters: {{dataset: {tmp_path}}}}}
  dataloader_param: {{num_workers: 0}}
training: {{plugin: [{tmp_path / "half_marked.py"}], micro_batch_size: 1, train_iters: 1, save: {tmp_path / "run"}}}
""")
    for verb in ("check", "train"):
        said = mm(verb, yaml)
        assert said.code == 2, said.err + said.out
        told = said.err + said.out
        assert "forward refuses the batch" in told and "`mm_token_type_ids` is missing" in told
        assert "collate_fn" in told and "this is a bug" not in told
