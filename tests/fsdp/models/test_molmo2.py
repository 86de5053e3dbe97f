"""Molmo2, which is no listed family: its processor numbers the patches of all pictures of a call, begins every text
itself, and marks frames of videos as pictures; its pictures' tokens see each other both ways."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.data.data_utils.template import TEMPLATES
from mindspeed_mm.tasks.verify.run import agreeing_rows
from tests.helpers.runs import mm
from tests.helpers.tiny_processors import byte_tokenizer
from tests.tasks.verify_cases import Asked, job_of, verify_all

TEMPLATE = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + ' ' }}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|image|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{{ '<|im_end|>' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant ' }}{%- endif -%}"""
PLUGIN = """
import torch
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import register_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import ProcessorPlugin

@register_mm_plugin("Molmo2Processor")
class Pictures(ProcessorPlugin):
    def collate(self, media):
        batch, pooling, before = super().collate(media), [], 0
        for item in media:
            own, (crops, patches, _) = item.tensors["image_token_pooling"], item.tensors["pixel_values"].shape
            pooling.append(torch.where(own >= 0, own + before, own))
            before += crops * patches
        return batch | {"image_token_pooling": torch.cat(pooling)} if pooling else batch
"""
MARKS = (
    *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>"),
    *("<im_low>", "<|image|>", "<|video|>"),
)
BASIC = "data.dataset_param.basic_parameters"
OWN = ("training.plugin=[pictures.py]", "data.dataset_param.basic_parameters.chat_template=begun.jinja")
QUESTION = "<|im_start|>user <|image|>colour?<|im_end|>"
ANSWERS = ("red", "deep green")


pytestmark = pytest.mark.skipif(not hasattr(transformers, "Molmo2Config"), reason="this transformers lacks it")


def make_tiny_molmo2(folder: Path) -> None:
    """Weights and processor; the template is `TEMPLATE`."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<|endoftext|>"}
    tokenizer = byte_tokenizer(special, TEMPLATE)
    words = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *MARKS]})
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    square = {"height": 8, "width": 8}
    images = transformers.Molmo2ImageProcessor(size=square, max_crops=2, overlap_margins=[0, 0], patch_size=4)
    videos = transformers.Molmo2VideoProcessor(size=square, patch_size=4)
    transformers.Molmo2Processor(images, videos, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 16, **heads}
    text = sizes | {"vocab_size": words + 1, "additional_vocab_size": len(MARKS), "num_hidden_layers": 1}
    config = transformers.Molmo2Config(
        text_config=text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        vision_config=sizes | {"num_hidden_layers": 2, "image_size": [8, 8], "patch_size": 4},
        adapter_config=sizes | {"vision_feature_layer": [1, 0], "text_hidden_size": 16},
        image_patch_id=ids["<im_patch>"],
    )
    torch.manual_seed(0)
    model = transformers.Molmo2ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model, two rows, a YAML, the plugin, and a template that begins as the processor's texts do."""
    for registry in (MM_PLUGINS, TEMPLATES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    make_tiny_molmo2(tmp_path / "model")
    rows = []
    for number, answer in enumerate(ANSWERS):
        image = Image.new("RGB", (24, 8 + 8 * number), answer.split()[-1])
        ImageDraw.Draw(image).ellipse([2, 2, 9, 7], fill="white")
        image.save(f"{number}.png")
        turns = [{"role": "user", "content": "<image>colour?"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "images": [f"{number}.png"]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("begun.jinja").write_text("<|endoftext|>" + TEMPLATE)
    Path("pictures.py").write_text(PLUGIN)
    Path("run.yaml").write_text("""\
model: {model_name_or_path: model}
data:
  dataset_param: {basic_parameters: {dataset: rows.jsonl}}
  dataloader_param: {num_workers: 0, shuffle: false}
parallel: {fsdp_plan: {param_dtype: fp64}}
training: {lr: 1.0e-3, micro_batch_size: 2, train_iters: 1, log_interval: 1, save: out}
""")
    yield tmp_path
    sys.modules.pop("pictures", None)


def test_its_loss_is_that_of_transformers_on_the_processors_own_batch(folder: Path) -> None:
    trained = mm("train", "run.yaml", *OWN)
    assert trained.code == 0, trained.err
    (step,) = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    processor = transformers.AutoProcessor.from_pretrained("model")
    model = transformers.Molmo2ForConditionalGeneration.from_pretrained("model", dtype=torch.float64).train()
    inputs = processor(
        text=[f"{QUESTION}<|im_start|>assistant {answer}<|im_end|>" for answer in ANSWERS],
        images=[Image.open(f"{number}.png") for number in range(2)],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, answer in enumerate(ANSWERS):
        length = int(inputs["attention_mask"][row].sum())
        start = length - len(processor.tokenizer(answer)["input_ids"]) - 1
        labels[row, start:length] = inputs["input_ids"][row, start:length]
    given = inputs | {"pixel_values": inputs["pixel_values"].double()}
    with torch.no_grad():
        logits = model(**given).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-12)


def test_numbers_through_all_pictures_are_refused_without_a_plugin(folder: Path) -> None:
    for command in ("check", "train"):
        refused = mm(command, "run.yaml")
        assert refused.code != 0
        assert "Molmo2Processor makes image_token_pooling of all pictures of a call" in refused.out + refused.err
    assert not Path("out/iter_0000001").exists()


def test_the_check_says_what_the_processor_begins_texts_with(folder: Path) -> None:
    told = "Molmo2Processor begins every text with '<|endoftext|>', the rows do not"
    alone, begun = mm("check", "run.yaml", OWN[0]), mm("check", "run.yaml", *OWN)
    assert (alone.code, begun.code) == (0, 0), alone.err + begun.err
    assert told in alone.out and told not in begun.out


def test_the_check_of_rows_asks_for_the_same_template(folder: Path) -> None:
    """A template that `mm check` asks for is no other format, and what replaces another one begins as it does."""
    begun = mm("data", "check", "run.yaml", *OWN)
    assert begun.code == 0 and "template mismatch" not in begun.out, begun.out + begun.err
    Path("other.jinja").write_text(TEMPLATE.replace("message.role + ' '", "message.role + ': '"))
    other = mm("data", "check", "run.yaml", OWN[0], "data.dataset_param.basic_parameters.chat_template=other.jinja")
    assert "rows render differently than with the model's own template" in other.out
    assert "chat_template to a file with '<|endoftext|>', which Molmo2Processor begins" in other.out
    assert "leave data.dataset_param" not in other.out


def test_packed_rows_train_as_single_ones(folder: Path) -> None:
    """Their pictures' tokens see each other both ways, in their own row."""

    def step(name: str, *words: str) -> dict[str, float]:
        trained = mm("train", "run.yaml", *OWN, f"training.save={name}", *words)
        assert trained.code == 0, trained.err
        return dict(json.loads(Path(name, "metrics.jsonl").read_text()))

    single = step("single")
    room = int(single["tokens"])  # of both rows, so that no third one fits
    packed = step("packed", f"{BASIC}.packing=true", f"{BASIC}.cutoff_len={room}", "training.micro_batch_size=1")
    assert (packed["samples"], packed["tokens"]) == (2, room)
    assert packed["loss"] == pytest.approx(single["loss"], rel=1e-12)
    assert packed["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-9)


def mix_rows() -> None:
    """Rows with pictures between rows of text alone."""
    pictured = Path("rows.jsonl").read_text().splitlines()
    turns = [{"role": "user", "content": "colour?"}, {"role": "assistant", "content": "red"}]
    plain = json.dumps({"messages": turns})
    Path("rows.jsonl").write_text("".join(f"{row}\n{plain}\n" for row in pictured * 6))


def test_verify_takes_rows_that_two_processes_can_share(folder: Path) -> None:
    job = job_of(Asked(folder / "run.yaml", OWN), folder / "work")
    arguments = job.setup.arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param)
    assert agreeing_rows(dataset, arguments, job.setup) is None
    mix_rows()
    dataset, _ = build_mm_dataset(arguments.data.dataset_param)
    found = agreeing_rows(dataset, arguments, job.setup)
    assert found is not None and found[0] == tuple(range(0, 24, 2))
    assert "those with pixel_values, 12 of the first 24; the others are left out" in found[1]


@pytest.mark.slow
def test_verify_compares_rows_of_which_some_have_pictures(folder: Path) -> None:
    mix_rows()
    found = verify_all(2, {"mixed": Asked(folder / "run.yaml", OWN)}, folder / "work")["mixed"]
    assert not isinstance(found, str), found
    assert not [row for row in found if row.is_missed]
    assert "packed = unpacked" in {row.check for row in found if not row.note}


def test_an_export_cuts_the_words_where_the_release_does(folder: Path) -> None:
    """`save_pretrained` of transformers 5.23 writes two equal parts; the release has words and added ones."""
    stored = load_file("model/model.safetensors")
    names = [f"model.transformer.wte.{part}" for part in ("embedding", "new_embedding")]
    words = torch.cat([stored[name] for name in names])
    added = len(MARKS)
    parts = (words[:-added].clone(), words[-added:].clone())
    save_file(stored | dict(zip(names, parts, strict=True)), "model/model.safetensors", {"format": "pt"})
    for command in (["train", "run.yaml", *OWN], ["export", "out", "exported"]):
        done = mm(*command)
        assert done.code == 0, done.err
    exported = load_file("exported/model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in load_file("model/model.safetensors").items()
    }
