"""PaliGemma, which is no listed family: its questions are seen in both directions, which a plugin's collator says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from mindspeed_mm.fsdp.data.data_utils.data_collator import DATA_COLLATOR
from mindspeed_mm.fsdp.data.data_utils.template import TEMPLATES
from tests.helpers.runs import mm
from tests.helpers.tiny_paligemma import make_tiny_paligemma

TEMPLATE = """\
{%- for message in messages -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<image>
{%- elif message.role == 'user' -%}{{ '<bos>' + part.text + '\\n' }}
{%- else -%}{{ part.text + '<eos>' }}{%- endif -%}
{%- endfor -%}{%- endfor -%}"""
PLUGIN = """
from mindspeed_mm.fsdp.data.data_utils.data_collator import GenericCollator, register_collator

@register_collator("prefix", keys=["token_type_ids"])
class PrefixCollator(GenericCollator):
    def __call__(self, samples):
        batch = super().__call__(samples)
        return batch | {"token_type_ids": (batch["labels"] != -100).long()}
"""
PREFIX = ["training.plugin=[prefixes.py]", "data.dataloader_param.collate_param.model_name=prefix"]
ANSWERS = ("red", "deep green")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, two rows, a YAML and the plugin with the collator."""
    for registry in (DATA_COLLATOR, TEMPLATES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    make_tiny_paligemma(tmp_path / "model")
    rows = []
    for number, answer in enumerate(ANSWERS):
        Image.new("RGB", (40, 30), answer.split()[-1]).save(f"{number}.png")
        turns = [{"role": "user", "content": "<image>colour?"}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns, "images": [f"{number}.png"]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("turns.jinja").write_text(TEMPLATE)
    Path("prefixes.py").write_text(PLUGIN)
    Path("run.yaml").write_text("""\
model: {model_name_or_path: model}
data:
  dataset_param: {basic_parameters: {dataset: rows.jsonl, chat_template: turns.jinja}}
  dataloader_param: {num_workers: 0, shuffle: false}
parallel: {fsdp_plan: {param_dtype: fp32}}
training: {lr: 1.0e-3, micro_batch_size: 2, train_iters: 1, log_interval: 1, save: out}
""")
    yield tmp_path
    sys.modules.pop("prefixes", None)


def test_its_loss_is_that_of_transformers_with_the_processors_own_suffixes(folder: Path) -> None:
    trained = mm("train", "run.yaml", *PREFIX)
    assert trained.code == 0, trained.err
    (step,) = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    processor = transformers.AutoProcessor.from_pretrained("model")
    model = transformers.PaliGemmaForConditionalGeneration.from_pretrained("model").train()
    inputs = processor(
        text=["<image>colour?"] * 2,
        suffix=list(ANSWERS),
        images=[Image.open(f"{number}.png") for number in range(2)],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    with torch.no_grad():
        assert step["loss"] == pytest.approx(model(**inputs).loss.item(), rel=1e-6)
        inputs.pop("token_type_ids")
        assert step["loss"] != pytest.approx(model(**inputs).loss.item(), rel=1e-6)


def test_the_check_says_when_questions_would_be_seen_in_one_direction(folder: Path) -> None:
    told = "the batch has no token_type_ids, which PaliGemmaProcessor gives"
    alone, marked = mm("check", "run.yaml"), mm("check", "run.yaml", *PREFIX)
    assert (alone.code, marked.code) == (0, 0), alone.err + marked.err
    assert told in alone.out and told not in marked.out
