"""Text models in GGUF: what is trained and asked is what transformers reads from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import MachineError, ModelFolderError, UsageError
from mindspeed_mm.fsdp.models.loading import gguf as own
from mindspeed_mm.fsdp.models.loading.gguf import model_folder_of
from tests.helpers.runs import losses, mm

from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip  (after tests.helpers, which guards torchvision)

gguf = pytest.importorskip("gguf")

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.?:", "Ġ", "Ċ", "an", "is"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WIDTH, HEADS, LAYERS, INNER = 64, 2, 2, 96
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [
    {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "it is red."}]},
    {"messages": [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "blue: 7"}]},
]


def write_gguf(path: Path, seed: int = 0, *, broken: str = "") -> Path:
    """A Qwen2 of two layers in Q8_0, as llama.cpp's converter lays it out; one of its vectors may hold NaN."""
    draw = torch.Generator().manual_seed(seed)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    for add, value in (
        (writer.add_context_length, 256), (writer.add_embedding_length, WIDTH), (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INNER), (writer.add_head_count, HEADS), (writer.add_head_count_kv, HEADS),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 10000.0),
    ):  # fmt: skip
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*LETTERS, *SPECIAL])
    writer.add_token_types([1] * len(LETTERS) + [3] * len(SPECIAL))
    writer.add_token_merges(["a n", "i s"])
    writer.add_eos_token_id(len(LETTERS) + 2)
    writer.add_pad_token_id(len(LETTERS))
    writer.add_chat_template(TEMPLATE)

    def add_matrix(name: str, rows: int, columns: int) -> None:
        values = (torch.randn(rows, columns, generator=draw) * 0.3).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def add_vector(name: str, size: int) -> None:
        values = (1 + torch.randn(size, generator=draw) * 0.1).numpy()
        if name == broken:
            values[size // 2] = float("nan")
        writer.add_tensor(name, values)

    vocabulary = len(LETTERS) + len(SPECIAL)
    add_matrix("token_embd.weight", vocabulary, WIDTH)
    add_matrix("output.weight", vocabulary, WIDTH)
    add_vector("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_norm.weight", "ffn_norm.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias"):
            add_vector(f"blk.{layer}.{name}", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add_matrix(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add_matrix(f"blk.{layer}.{name}.weight", INNER, WIDTH)
        add_matrix(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def read(file: Path) -> tuple[Any, Any]:
    """By transformers alone."""
    place = (str(file.parent),)
    model = AutoModelForCausalLM.from_pretrained(*place, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(*place, gguf_file=file.name)


def conversation(tokenizer: Any, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a row, and labels of its answer with the end mark, by the file's own chat template."""
    whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    asked = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
    start = len(tokenizer(asked).input_ids)
    ids = torch.tensor(tokenizer(whole).input_ids)
    labels = ids.clone()
    labels[:start] = -100
    labels[-1] = -100  # the line break behind the end mark
    return ids, labels


@pytest.mark.edge("BR19")
def test_a_run_and_its_model_are_what_transformers_reads(file: Path, read: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = read
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {{model_name_or_path: {file}}}\n"
        f"data: {{dataset_param: {{basic_parameters: {{dataset: {rows}}}}}, dataloader_param: {{num_workers: 0}}}}\n"
        f"training: {{lr: 1e-3, micro_batch_size: 2, train_iters: 2, save: {tmp_path / 'run'}}}\n"
    )
    said = mm("train", yaml)
    assert said.code == 0, said.err
    total = count = 0.0
    with torch.no_grad():
        for row in ROWS:
            ids, labels = conversation(tokenizer, row)
            logits = model(ids[None]).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100))
            count += int((labels[1:] != -100).sum())
    assert losses(tmp_path / "run")[1] == pytest.approx(total / count, abs=2e-5)
    folder = AutoModelForCausalLM.from_pretrained(model_folder_of(file), dtype=torch.float32)
    assert {k: v for k, v in folder.state_dict().items() if not torch.equal(v, model.state_dict()[k])} == {}
    answer = mm("infer", file, "--prompt", "what is it?", "--max-new-tokens", "5", "--json")
    prompt = tokenizer.apply_chat_template(ROWS[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    assert json.loads(answer.out)["text"] == tokenizer.decode(expected, skip_special_tokens=True).strip(), answer.err


@pytest.mark.edge("BR19")
def test_the_folder_follows_its_file_and_nobody_elses_is_replaced(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    folder = model_folder_of(file)
    assert folder == tmp_path / "a.gguf.hf"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert (model_folder_of(file) / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(file, seed=1)
    assert (model_folder_of(file) / "model.safetensors").stat().st_mtime_ns > made
    other = write_gguf(tmp_path / "b.gguf")
    mine = tmp_path / "b.gguf.hf" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        model_folder_of(other)
    assert mine.read_text() == "mine"


@pytest.mark.edge("BR19")
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelFolderError, match="transformers cannot read it"):
        model_folder_of(broken)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]

    def without(*_: Any, **__: Any) -> None:
        raise ImportError("gguf")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", without)
    with pytest.raises(MachineError, match="pip install gguf"):
        own.write_model_folder(broken, tmp_path / "out")


@pytest.mark.edge("BR19")
def test_convert_writes_it_where_it_is_told(file: Path, tmp_path: Path) -> None:
    said = mm("convert", file, tmp_path / "folder")
    assert said.code == 0 and "from a folder of kind 'gguf'" in said.out, said.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "folder").config.model_type == "qwen2"
    assert mm("convert", file, tmp_path / "dcp", "--to", "dcp").code == 2


@pytest.mark.edge("BR19")
def test_convert_names_weights_that_are_not_finite(file: Path, tmp_path: Path) -> None:
    """As of every other source; a sound file has no warning."""
    said = mm("convert", file, tmp_path / "sound")
    assert said.code == 0 and "NaN" not in said.out + said.err
    broken = write_gguf(tmp_path / "broken.gguf", broken="blk.1.ffn_norm.weight")
    said = mm("convert", broken, tmp_path / "folder")
    assert said.code == 0, said.err
    assert "NaN or infinity in model.layers.1.post_attention_layernorm.weight" in said.out + said.err
    again = mm("convert", broken, tmp_path / "folder", "--overwrite", "--json")
    assert json.loads(again.out)["not_finite"] == ["model.layers.1.post_attention_layernorm.weight"]
