"""Fun-ASR-Nano trains, with adapters too, on rows of FunASR's recipes, and says what transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, RowLocation
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.fsdp.sampling.answers.questions import ask, question_of
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.runs import mm, train
from tests.helpers.tiny_funasr import build_processor, make_tiny_funasr
from tests.helpers.tiny_run import tiny_config
from tests.helpers.tiny_sounds import sound_bytes, tone

ensure_torchvision()

import transformers  # noqa: E402  (the guard comes first)

pytestmark = pytest.mark.skipif(not hasattr(transformers, "FunAsrNanoConfig"), reason="this transformers lacks it")
SECONDS = {"low.wav": (0.5, 220.0), "high.wav": (0.9, 1760.0)}
PATH = "<|startofspeech|>!{}<|endofspeech|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers depend on what it hears, two sounds, and rows of each layout."""
    folder = tmp_path_factory.mktemp("funasr")
    make_tiny_funasr(folder / "model", spread=0.3)
    rows: list[dict[str, Any]] = []
    for name, (seconds, hertz) in SECONDS.items():
        (folder / name).write_bytes(sound_bytes(tone(seconds, 16000, hertz), 16000))
        rows.append({"key": name, "source": name, "target": "one two", "source_len": 9})
        said = [
            {"role": "user", "content": f"Transcribe: {PATH.format(name)}"},
            {"role": "assistant", "content": "two"},
        ]
        rows.append({"messages": said, "speech_length": 9})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_run(folder: Path, tmp_path: Path, **training: Any) -> Path:
    config = tiny_config(folder, model={"model_id": "funasr"})
    config["data"]["dataset_param"] |= {"dataset_type": "funasr"}
    config["training"] |= {"train_iters": 2, "save": str(tmp_path / "run"), **training}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def samples(path: Path) -> np.ndarray:
    return np.asarray(soundfile.read(path, dtype="float32")[0])


def plain(folder: Path, sound: Path) -> list[int]:
    """Of transformers alone."""
    processor, model_class = build_processor(), transformers.FunAsrNanoForConditionalGeneration
    model = model_class.from_pretrained(folder, dtype="auto").eval()
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "audio"}]}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=[text], audio=[samples(sound)])
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "input_features", "input_features_mask")}
    made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return list(made[0, inputs["input_ids"].shape[1] :].tolist())


def test_tokens_and_features_are_those_of_the_processor(folder: Path) -> None:
    basic = {"dataset": str(folder / "rows.jsonl"), "dataset_dir": str(folder)}
    preprocess = {"model_name_or_path": str(folder / "model")}
    param = {"dataset_type": "funasr", "basic_parameters": basic, "preprocess_parameters": preprocess}
    dataset = build_mm_dataset(DatasetParam.model_validate(param))[0]
    processor = build_processor()
    for index, (name, asked, said) in enumerate(
        [("low.wav", "", "one two"), ("low.wav", "Transcribe: ", "two"), ("high.wav", "", "one two")]
    ):
        parts = [*([{"type": "text", "text": asked}] if asked else []), {"type": "audio"}]
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": said}]
        text = processor.apply_chat_template(turns, tokenize=False)
        expected = processor(text=[text], audio=[samples(folder / name)])
        sample = dataset[index]
        assert sample["input_ids"].tolist() == expected["input_ids"][0].tolist()
        assert torch.equal(sample["media"][0].tensors["input_features"], expected["input_features"])
        labels = sample["labels"]
        assert processor.tokenizer.decode(labels[labels != -100]).strip() == f"{said}<|im_end|>"


def test_training_shows_what_is_asked(folder: Path, tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "<audio>Transcribe"}, {"role": "assistant", "content": "two"}],
        "audios": ["low.wav"],
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    basic = {"dataset": str(rows), "dataset_dir": str(folder)}
    param = {"dataset_type": "funasr", "basic_parameters": basic}
    param["preprocess_parameters"] = {"model_name_or_path": str(folder / "model")}
    sample = build_mm_dataset(DatasetParam.model_validate(param))[0][0]
    encoder = QuestionEncoder(folder / "model")
    question, _ = question_of(row, RowFormat(), RowLocation("rows", 1), needs_answer=True)
    asked = encoder.collate([encoder.encode(question, encoder.media(folder))])
    first = int(np.flatnonzero(sample["labels"] != -100)[0])
    assert sample["input_ids"][:first].tolist() == asked["input_ids"][0].tolist()
    assert torch.equal(sample["media"][0].tensors["input_features"], asked["input_features"])


def test_an_answer_does_not_depend_on_what_shares_its_batch(folder: Path) -> None:
    generator = load_generator(folder / "model")
    encoder, media = generator.encoder, generator.encoder.media(folder)
    asked = [ask("Transcribe", [MediaItem("audio", name)]).sample for name in SECONDS]
    questions = [encoder.encode(sample, media) for sample in asked]
    assert len({len(question.input_ids) for question in questions}) > 1, "one of them is padded"

    def next_scores(batch: list[Any]) -> torch.Tensor:
        with torch.inference_mode():
            scores: torch.Tensor = generator.model(**encoder.collate(batch)).logits[:, -1]
        return scores

    together, alone = next_scores(questions), torch.cat([next_scores([question]) for question in questions])
    assert torch.allclose(together, alone, atol=1e-4 * float(alone.abs().max()))


def test_two_steps_export_and_the_answers_of_transformers(folder: Path, tmp_path: Path) -> None:
    train(make_run(folder, tmp_path), None)
    assert mm("export", tmp_path / "run", tmp_path / "hf").code == 0
    answers = []
    for name in SECONDS:
        said = mm("infer", tmp_path / "hf", "--audio", folder / name, "--max-new-tokens", 6, "--json")
        assert said.code == 0, said.err
        answers.append(json.loads(said.out)["token_ids"])
    assert answers == [plain(tmp_path / "hf", folder / name) for name in SECONDS]
    assert answers[0] != answers[1]
    weights = [transformers.AutoModelForMultimodalLM.from_pretrained(each).state_dict() for each in
               (folder / "model", tmp_path / "hf")]  # fmt: skip
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0] if "audio_tower" in key)


def test_adapters_beside_frozen_ears(folder: Path, tmp_path: Path) -> None:
    lora = {"enable": True, "rank": 4, "alpha": 8, "target_modules": ["model.language_model.*.q_proj"]}
    train(make_run(folder, tmp_path, lora=lora), None)
    assert mm("export", tmp_path / "run", tmp_path / "adapters").code == 0
    words = ("--audio", folder / "low.wav", "--max-new-tokens", 6, "--json")
    said = mm("infer", folder / "model", "--lora", tmp_path / "adapters", *words)
    assert said.code == 0, said.err


def test_the_card_is_found() -> None:
    assert "FunAsrNanoForConditionalGeneration" in mm("models", "funasr").out
