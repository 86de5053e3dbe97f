"""`mm evaluate --loss`: the numbers of plain transformers, those that a run validated with, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mindspeed_mm
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

pytestmark = pytest.mark.edge("U7")
FP64 = "parallel.fsdp_plan.param_dtype=fp64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that validates with its own rows, a model and 24 rows, some with pictures."""
    folder = tmp_path_factory.mktemp("run")
    basic = {name: str(folder / "rows.jsonl") for name in ("dataset", "val_dataset")} | {"dataset_dir": str(folder)}
    dataset = {"dataset_type": "huggingface", "basic_parameters": basic}
    training = {"train_iters": 2, "val_interval": 2, "val_micro_batch_size": 5, "save": str(folder / "full")}
    make_tiny_run(folder, data={"dataset_param": dataset}, training=training)
    train(folder / "run.yaml", None, FP64, "features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=16")
    return folder


def measured(*words: object) -> dict[str, Any]:
    said = mm("evaluate", *words, "--loss", "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def validated(run: Path) -> float:
    return [line["val_loss"] for line in lines(run / "metrics.jsonl") if "val_loss" in line][-1]


def plain_losses(model: Any, processor: Any, rows: Path) -> list[tuple[float, int, float]]:
    """Of each row the summed cross-entropy of its answer and the end of its turn, the tokens, and the weight of the
    answer, by transformers."""
    from PIL import Image

    tokenizer = getattr(processor, "tokenizer", processor)
    found = []
    for row in lines(rows):
        question = row["messages"][0]["content"].replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        answer = row["messages"][1]["content"]
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        texts = [prompt, f"{prompt}{answer}<|im_end|>"]
        if row["images"]:
            images = [Image.open(rows.parent / name) for name in row["images"]]
            before, whole = (processor(text=[text], images=images, return_tensors="pt") for text in texts)
        else:
            before, whole = (tokenizer(text, return_tensors="pt") for text in texts)
        first = before["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(**whole).logits[0, first - 1 : -1].double()
        targets = whole["input_ids"][0, first:]
        total = -logits.log_softmax(-1)[range(len(targets)), targets].sum().item()
        found.append((total, len(targets), row["messages"][1].get("weight", 1.0)))
    return found


def weigh(path: Path, weights: dict[int, float]) -> None:
    rows = lines(path)
    for index, weight in weights.items():
        rows[index]["messages"][1]["weight"] = weight
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("sees", [True, False], ids=["pictures", "text"])
def test_it_is_what_plain_transformers_give_whatever_the_batch(tmp_path: Path, sees: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    make, auto = (make_tiny_qwen3_vl, AutoModelForImageTextToText) if sees else (make_tiny_qwen3, AutoModelForCausalLM)
    make(tmp_path / "model", dtype=torch.float64, initializer_range=0.4)
    rows = make_rows(tmp_path, count=7, images=(1, 0, 2) if sees else (0,))
    weigh(rows, {2: 0.375, 5: 2.5})
    processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(tmp_path / "model")
    model = auto.from_pretrained(tmp_path / "model", dtype=torch.float64).eval()
    plain = plain_losses(model, processor, rows)
    expected = sum(w * total for total, _, w in plain) / sum(w * tokens for _, tokens, w in plain)
    words = (tmp_path / "model", "--data", rows, "--out", tmp_path / "out", "--batch-size")
    for batch_size in (1, 3):
        found = measured(*words, batch_size)
        assert found["overall"]["loss"] == pytest.approx(expected, rel=1e-12)
        assert found["overall"]["perplexity"] == pytest.approx(math.exp(expected), rel=1e-11)
        assert (found["overall"]["tokens"], found["overall"]["rows"]) == (sum(n for _, n, _ in plain), 7)
        written = lines(tmp_path / "out" / "loss_rows.jsonl")
        assert [(row["id"], row["tokens"]) for row in written] == [(f"row{i}", n) for i, (_, n, _) in enumerate(plain)]
        assert [row["loss"] for row in written] == pytest.approx([total / n for total, n, _ in plain], rel=1e-11)
    assert json.loads((tmp_path / "out" / "loss.json").read_text()) == found


def test_it_is_the_loss_that_a_run_validated_with(folder: Path) -> None:
    own = measured(folder / "full")
    assert own["overall"]["loss"] == pytest.approx(validated(folder / "full"), rel=1e-12)
    named = measured(folder / "full" / "iter_0000002", "--data", folder / "rows.jsonl", "--batch-size", 3)
    assert named["overall"]["loss"] == pytest.approx(validated(folder / "full"), rel=1e-12)
    assert (folder / "full" / "eval" / "loss.json").is_file()
    assert not (folder / "full" / "exported").exists()  # the checkpoint itself is read


def test_adapters_average_and_cut_off_of_a_run_are_its_own(folder: Path) -> None:
    save = folder / "lora"
    lora = "training.lora={enable: true, target_modules: [q_proj, v_proj], init_lora_weights: false}"
    cut = "data.dataset_param.basic_parameters.cutoff_len=50"
    words = (lora, cut, "training.ema={enable: true, decay: 0.5}", "training.lr=0.1", FP64)
    train(folder / "run.yaml", save, *words)
    found = measured(save, "--data", folder / "rows.jsonl")
    assert found["overall"]["loss"] == pytest.approx(validated(save), rel=1e-12)
    assert found["weights"] == "ema" and 0 < len(found["left_out"]) < 24
    assert "more than cutoff_len 50" in found["left_out"][0]["reason"]
    assert found["overall"]["rows"] + len(found["left_out"]) == 24
    exported = folder / "adapters"
    assert mm("export", save, exported).code == 0
    beside = measured(folder / "model", "--lora", exported, "--config", save / "resolved.yaml", "--data",
                      folder / "rows.jsonl", "--out", folder / "out")  # fmt: skip
    assert beside["overall"]["loss"] == pytest.approx(found["overall"]["loss"], rel=1e-6)


def test_a_row_without_a_trained_token_is_told_and_counted(folder: Path, tmp_path: Path) -> None:
    rows = lines(folder / "rows.jsonl")[1:3]  # the first of them without pictures
    rows[0]["messages"][1]["train"] = False
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (folder / "model", "--data", tmp_path / "rows.jsonl", "--media-dir", folder, "--out", tmp_path / "out")
    said = mm("evaluate", *words, "--loss")
    assert said.code == 0, said.err
    first, last = said.out.splitlines()
    assert first.startswith("left out: row1: ") and "no trainable token" in first
    assert last.startswith("loss: ") and "(1 rows, " in last
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    said = mm("evaluate", *words, "--loss")
    assert said.code == 4 and "none of the 1 rows has a loss" in said.err


def test_a_row_that_is_bad_stops_it(folder: Path, tmp_path: Path) -> None:
    rows = lines(folder / "rows.jsonl")[:1]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0] | {"images": ["gone.png"]}) + "\n")
    said = mm("evaluate", folder / "model", "--loss", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out")
    assert said.code == 4 and "gone.png" in said.err and "rows.jsonl:1" in said.err


def test_what_has_no_such_loss_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux" / "model_index.json").write_text("{}")
    refusals = {
        ("is a generator", "--loss"): [tmp_path / "flux", "--loss", "--data", folder / "rows.jsonl"],
        ("--max-new-tokens",): [folder / "model", "--loss", "--max-new-tokens", 4, "--data", folder / "rows.jsonl"],
        ("no rows are given", "--data"): [folder / "model", "--loss"],
        ("no rows are given", "test.jsonl"): [folder / "model"],
    }
    for of_loss in (["--loss"], []):
        said = mm("evaluate", folder / "model", *of_loss, "--data", folder / "images", "--out", tmp_path / "out")
        assert said.code == 4 and str(folder / "images") in said.err and "is a folder" in said.err
    for words, arguments in refusals.items():
        said = mm("evaluate", *arguments, *(["--out", tmp_path / "out"]))
        assert said.code == 2 and all(word in said.err for word in words), said.err


OTHERS = {
    "text": ("loss.json", "MINE"),
    "text with our words": ("loss.json", 'on "tasks" and "perplexity"'),
    "results with our words": ("loss.json", '{"tasks": {}, "overall": {"perplexity": 2.0}, "mine": 1}'),
    "rows with one column more": ("loss_rows.jsonl", '{"id": 1, "task": "a", "loss": 2, "tokens": 3, "mine": 4}\n'),
}


@pytest.mark.parametrize(("name", "content"), OTHERS.values(), ids=OTHERS)
def test_files_of_others_are_not_written_over(name: str, content: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    said = mm("evaluate", folder / "model", "--loss", "--data", folder / "rows.jsonl", "--out", tmp_path)
    assert said.code == 2 and (tmp_path / name).read_text() == content
    assert name in said.err


def test_answers_do_not_continue_a_text_of_somebody_else(tmp_path: Path) -> None:
    from mindspeed_mm.tasks.answer.answering import AnswerFile

    (tmp_path / "answers.jsonl").write_text("my notes\nof today\n")
    with pytest.raises(mindspeed_mm.MMError, match="was not written by mm infer"):
        AnswerFile(tmp_path / "answers.jsonl", "one")
    ours = {"row": 1, "answer": "a\u2028b", "model": "one"}
    (tmp_path / "answers.jsonl").write_text(json.dumps(ours, ensure_ascii=False) + '\n{"row": 2, "ans')
    assert AnswerFile(tmp_path / "answers.jsonl", "one").records == {1: ours}


def test_a_row_whose_loss_is_no_number_ends_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_tiny_qwen3(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    model.save_pretrained(tmp_path / "model")
    rows = make_rows(tmp_path, count=2, images=(0,))
    said = mm("evaluate", tmp_path / "model", "--loss", "--data", rows, "--out", tmp_path / "out")
    assert said.code == 4 and "rows.jsonl:1" in said.err and "not a number" in said.err and "--batch-size" in said.err
    assert list((tmp_path / "out").iterdir()) == []


def test_experts_in_fp64_are_computed_as_a_run_computes_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_qwen3_moe(tmp_path / "model", dtype=torch.float64)
    rows = make_rows(tmp_path, count=2, images=(0,))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64, experts_implementation="eager"
    )
    plain = plain_losses(model.eval(), AutoTokenizer.from_pretrained(tmp_path / "model"), rows)
    found = mindspeed_mm.evaluate(tmp_path / "model", rows, loss=True, out=tmp_path / "out")
    expected = sum(total for total, _, _ in plain) / sum(tokens for _, tokens, _ in plain)
    assert found.loss == pytest.approx(expected, rel=1e-12)


def test_an_id_or_task_of_null_is_as_if_it_was_not_there(folder: Path, tmp_path: Path) -> None:
    row = lines(folder / "rows.jsonl")[1] | {"id": None, "task": None}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    measured(folder / "model", "--data", tmp_path / "rows.jsonl", "--out", tmp_path)
    (written,) = lines(tmp_path / "loss_rows.jsonl")
    assert (written["id"], written["task"]) == ("rows.jsonl:1", "all")
    (question,) = read_questions(tmp_path / "rows.jsonl", needs_answers=True)
    assert (question.id, question.task) == ("rows.jsonl:1", "all")


def test_python_measures_the_same(folder: Path) -> None:
    found = mindspeed_mm.evaluate(mindspeed_mm.load_run(folder / "full"), loss=True)
    assert found.loss == pytest.approx(validated(folder / "full"), rel=1e-12)
    assert found.perplexity == math.exp(found.loss) and len(found.samples) == 24
    rows = [{"messages": [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "red"}]}]
    assert mindspeed_mm.evaluate(folder / "full", rows, loss=True, batch_size=1).overall.rows == 1
    with pytest.raises(mindspeed_mm.MMError) as refused:
        mindspeed_mm.evaluate(folder / "full", rows, loss=True, max_new_tokens=4)
    assert refused.value.problems[0].key == "max_new_tokens"
    with pytest.raises(mindspeed_mm.MMError) as refused:
        mindspeed_mm.evaluate(folder / "full")
    assert refused.value.problems[0].key == "rows"
