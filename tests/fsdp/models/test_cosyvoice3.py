"""CosyVoice3's language model: sequences, loss and gradients are those of its definition, with the names that the
released weights have; it trains from rows of CosyVoice's recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from mindspeed_mm.core.errors import DataError, MMError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.cosyvoice import cosyvoice_dataset
from mindspeed_mm.fsdp.data.datasets.cosyvoice.cosyvoice_dataset import SpeechRows
from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3Config, CosyVoice3LM, Mark
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.helpers.runs import mm, train
from tests.helpers.tiny_processors import byte_tokenizer
from tests.helpers.tiny_run import tiny_config

CODEC, EXTRA, RATIO = 50, 8, (2, 3)
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "prompt_end": "<|endofprompt|>"}
LLM: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
RELEASED = {  # from the published checkpoint: key → shape
    "llm.model.model.embed_tokens.weight": (151936, 896),
    "llm.model.model.layers.23.self_attn.q_proj.weight": (896, 896),
    "llm.model.model.layers.23.self_attn.q_proj.bias": (896,),
    "llm.model.model.layers.0.self_attn.k_proj.weight": (128, 896),
    "llm.model.model.layers.0.mlp.gate_proj.weight": (4864, 896),
    "llm.model.lm_head.weight": (151936, 896),
    "speech_embedding.weight": (6761, 896),
    "llm_decoder.weight": (6761, 896),
}


def config_of(text_rows: int) -> CosyVoice3Config:
    return CosyVoice3Config(
        llm_config=LLM | {"vocab_size": text_rows}, speech_token_size=CODEC, extra_speech_rows=EXTRA,
        mix_ratio=list(RATIO), architectures=["CosyVoice3LM"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows in JSONL."""
    folder = tmp_path_factory.mktemp("cosyvoice")
    tokenizer = byte_tokenizer(SPECIAL, None)
    torch.manual_seed(0)
    CosyVoice3LM(config_of(len(tokenizer))).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = np.random.default_rng(0)
    rows = []
    for number in range(8):
        codes = draw.integers(0, CODEC, 20 + number).tolist()
        rows.append({"utt": f"u{number}", "text": "seven one two"[: 6 + number], "speech_token": codes})
    rows[1]["instruct"] = "Speak.<|endofprompt|>"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def dataset_of(folder: Path, rows: Path | None = None, **basic: Any) -> Any:
    basic |= {"dataset": str(rows or folder / "rows.jsonl"), "dataset_dir": str(folder)}
    preprocess = {"model_name_or_path": str(folder / "model")}
    param = {"dataset_type": "cosyvoice", "basic_parameters": basic, "preprocess_parameters": preprocess}
    return build_mm_dataset(DatasetParam.model_validate(param), seed=3)[0]


# --- sequences --------------------------------------------------------------------------------------------------------


def by_definition(
    prompt: list[int], text: list[int], speech: list[int], mixed: bool
) -> tuple[list[tuple[str, int]], list[int]]:
    """The published preparation of inputs and targets, where `targets[n]` is predicted at input n; -100 is not."""
    inputs, targets = [("speech", CODEC + 0)], [-100]
    inputs += [("text", token) for token in prompt]
    targets += [-100] * len(prompt)
    text_turn, speech_turn = RATIO
    turn = 0
    while mixed and len(text[turn * text_turn :]) >= text_turn:
        inputs += [("text", token) for token in text[turn * text_turn :][:text_turn]]
        inputs += [("speech", token) for token in speech[turn * speech_turn :][:speech_turn]]
        targets += [-100] * (text_turn - 1) + speech[turn * speech_turn :][:speech_turn] + [CODEC + 3]
        turn += 1
    text, speech = text[turn * text_turn :], speech[turn * speech_turn :]
    inputs += [*(("text", token) for token in text), ("speech", CODEC + 2), *(("speech", token) for token in speech)]
    targets += [-100] * len(text) + speech + [CODEC + 1]
    return inputs, targets


CASES = [
    pytest.param([], [4, 5, 6], [7, 8], False, id="whole"),
    pytest.param([1, 2], [4, 5, 6], [7, 8, 9, 10, 11], False, id="whole-with-prompt"),
    pytest.param([], [4, 5, 6, 7, 8], [*range(10, 20)], True, id="mixed"),
    pytest.param([1], [4, 5, 6, 7], [*range(10, 20)], True, id="mixed-without-rest"),
]


@pytest.mark.parametrize(("prompt", "text", "speech", "mixed"), CASES)
def test_sequences_are_those_of_the_definition(
    prompt: list[int], text: list[int], speech: list[int], mixed: bool
) -> None:
    rows = SpeechRows(100, CODEC, *RATIO)
    assert rows.can_mix(text, speech) or not mixed
    ids, labels = (rows.mixed if mixed else rows.whole)(prompt, text, speech).arrays()
    inputs, targets = by_definition(prompt, text, speech, mixed)
    assert ids[:-1].tolist() == [token + (100 if kind == "speech" else 0) for kind, token in inputs]
    assert ids[-1] == 100 + CODEC + cosyvoice_dataset.END
    assert labels[0] == -100
    assert labels[1:].tolist() == targets


def test_marks_stand_where_the_model_has_them() -> None:
    assert [*Mark] == [
        cosyvoice_dataset.START,
        cosyvoice_dataset.END,
        cosyvoice_dataset.SPEECH_FOLLOWS,
        cosyvoice_dataset.TEXT_FOLLOWS,
    ]


@pytest.mark.parametrize(("prompt", "text", "speech", "mixed"), CASES)
def test_loss_and_gradients_are_those_of_the_definition(
    prompt: list[int], text: list[int], speech: list[int], mixed: bool
) -> None:
    """In fp64, beside Qwen2 given embeddings that are put together row by row."""
    torch.manual_seed(0)
    model = CosyVoice3LM(config_of(100)).double().eval()
    rows = SpeechRows(100, CODEC, *RATIO)
    ids, labels = map(torch.from_numpy, (rows.mixed if mixed else rows.whole)(prompt, text, speech).arrays())
    logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits
    found = F.cross_entropy(logits[0, :-1], labels[1:])
    of_found = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)

    inputs, targets = by_definition(prompt, text, speech, mixed)
    tables = {"text": model.llm.model.get_input_embeddings().weight, "speech": model.speech_embedding.weight}
    embeds = torch.stack([tables[kind][token] for kind, token in inputs])[None]
    hidden = model.llm.model.model(inputs_embeds=embeds).last_hidden_state
    expected = F.cross_entropy((hidden @ model.llm_decoder.weight.T)[0], torch.tensor(targets))
    of_expected = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(of_found, of_expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


def test_names_and_shapes_are_the_released_ones() -> None:
    llm = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    config = CosyVoice3Config(llm_config=llm | {"num_key_value_heads": 2, "tie_word_embeddings": True})
    with torch.device("meta"):
        state = CosyVoice3LM(config).state_dict()
    assert {key: tuple(state[key].shape) for key in RELEASED} == RELEASED
    others = {key.split(".")[0] for key in state}
    assert others == {"llm", "speech_embedding", "llm_decoder"}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_become_sequences_and_take_turns_in_their_share(folder: Path) -> None:
    dataset = dataset_of(folder, mixed_share=0.5)
    tokenizer, rows = dataset.processor, SpeechRows(len(dataset.processor), CODEC, *RATIO)
    mixed = 0
    for index in range(len(dataset)):
        row = dataset.row(index)
        prompt = tokenizer(row["instruct"])["input_ids"] if "instruct" in row else []
        text = tokenizer(row["text"])["input_ids"]
        ways = [way(prompt, text, row["speech_token"]).arrays()[0].tolist() for way in (rows.whole, rows.mixed)]
        for epoch in range(20):
            given = dataset.item(index, epoch)["input_ids"].tolist()
            assert given in ways
            assert dataset.item(index, epoch)["input_ids"].tolist() == given
            mixed += given == ways[1]
    assert 0.35 < mixed / (20 * len(dataset)) < 0.65
    assert (
        dataset_of(folder, mixed_share=0.0)[0]["input_ids"].tolist()
        == dataset_of(folder, mixed_share=0)[0]["input_ids"].tolist()
    )


def test_parquet_of_the_recipes_is_read(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    told = [
        {key: row[key] for key in ("utt", "text", "speech_token")} | {"spk": "s", "audio_data": b"x"} for row in rows
    ]
    import datasets  # a second

    datasets.Dataset.from_list(told).to_parquet(tmp_path / "rows.parquet")
    found, expected = dataset_of(folder, tmp_path / "rows.parquet"), dataset_of(folder)
    assert found[0]["input_ids"].tolist() == expected[0]["input_ids"].tolist()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "hi", "speech_token": []}, "no speech tokens"),
        ({"text": "hi"}, "no speech tokens"),
        ({"text": "hi", "speech_token": [1.5]}, "no speech tokens"),
        ({"text": "hi", "speech_token": [[1], [2, 3]]}, "no speech tokens"),
        ({"text": "hi", "speech_token": [CODEC]}, "those of the codec from 0 to 49"),
        ({"text": " ", "speech_token": [1]}, "is not text"),
    ],
)
def test_bad_rows_are_told(folder: Path, tmp_path: Path, row: dict[str, Any], says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=says):
        dataset_of(folder, tmp_path / "rows.jsonl")[0]


def test_a_share_is_from_0_to_1(folder: Path) -> None:
    with pytest.raises(MMError, match="is not a share"):
        dataset_of(folder, mixed_share=2)


# --- training ---------------------------------------------------------------------------------------------------------


def test_it_trains_and_is_exported(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(folder, model={"model_id": "cosyvoice3_lm"})
    config["data"]["dataset_param"] |= {"dataset_type": "cosyvoice"}
    config["training"] |= {"train_iters": 12, "lr": 0.01, "save": str(tmp_path / "run")}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    checked = mm("check", path)
    assert checked.code == 0, checked.out + checked.err
    train(path, None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    exported = mm("export", tmp_path / "run", tmp_path / "hf")
    assert exported.code == 0, exported.err
    model = CosyVoice3LM.from_pretrained(tmp_path / "hf")
    before = CosyVoice3LM.from_pretrained(folder / "model")
    assert not torch.equal(model.speech_embedding.weight, before.speech_embedding.weight)
    assert model.llm.model.lm_head.weight is model.llm.model.model.embed_tokens.weight
