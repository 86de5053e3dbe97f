"""Pictures as answers of Lumina-mGPT, by hand in fp64: labels, loss with z-loss, gradients and steps are those of
transformers' modules on the tokens that its encoder says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.language_objective import WithPictureLabels
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.released_rows import ROWS, dataset_of, write_run
from tests.helpers.runs import differing, mm, tensors, train

Z, LR = 1e-5, 1e-3
TOKENS = 16
"""Of a picture."""
BORDERS = 2
FP64 = "parallel.fsdp_plan.param_dtype=fp64"
Z_LOSS = f"features.loss_cfg.z_loss_coef={Z}"


@cache
def run_of(root: Path) -> Path:
    """Questions in words and pictures, answered by a picture, by words and a picture, or by words."""
    training = {"lr": LR, "lr_decay_style": "constant", "clip_grad": 0.5, "adam_fused": False}
    model = {"model_id": "lumina_mgpt", "freeze": ["model.vqmodel"]}
    data = {"dataset_param": {"dataset_type": "lumina_mgpt"}}
    run = write_run(ROWS["chameleon"], root, training=training, model=model, data=data)
    path = run.parent / "rows" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    answers = ["<image>", "one two <image>", "three", "<image>"]
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        asked = "" if number == 3 else "<image>"
        row["messages"] = [
            {"role": "user", "content": f"{asked}Which digit is this?"},
            {"role": "assistant", "content": answer},
        ]
        row["images"] = [f"{(number + n) % 4}.png" for n in range((asked + answer).count("<image>"))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("lumina"))


def built_rows(run: Path) -> Any:
    param = dataset_of(ROWS["chameleon"], run.parent / "rows" / "rows.jsonl", run.parent / "model")
    return build_mm_dataset(DatasetParam.model_validate(param | {"dataset_type": "lumina_mgpt"}))[0]


def batch_of(dataset: Any, *numbers: int) -> dict[str, Any]:
    batch: dict[str, Any] = dataset.build_collator(CollateParam())([dataset[number] for number in numbers])
    return batch | {"pixel_values": batch["pixel_values"].double()}


def reference(run: Path) -> Any:
    with InDouble():
        return transformers.ChameleonForConditionalGeneration.from_pretrained(
            run.parent / "model", dtype=torch.float64
        ).eval()


def by_hand(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Token by token: every labelled place, a picture's by what the encoder says, with log² Z."""
    mapping = model.model.vocabulary_mapping
    codes = iter(model.model.vqmodel.encode(batch["pixel_values"]).image_tokens.flatten().tolist())
    names = {name: number for name, number in mapping.vocab_map.items() if name.startswith("IMGIMG")}
    losses = []
    for row, own in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][row, :own].tolist()
        labelled = (batch["labels"][row, :own] != -100).tolist()
        for place, token in enumerate(ids):
            if token == mapping.image_token_id:
                letters = "".join(chr(ord("A") + int(digit)) for digit in str(next(codes)))
                ids[place] = names[f"IMGIMG{letters}Z"]
        hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        for place in range(1, own):
            if labelled[place]:
                logits = hidden[place - 1] @ model.lm_head.weight.T
                z = torch.logsumexp(logits, 0)
                losses.append(z - logits[ids[place]] + Z * z**2)
    assert next(codes, None) is None
    return torch.stack(losses).mean()


def test_labels_of_an_answer_are_its_words_and_its_picture(run: Path) -> None:
    dataset = built_rows(run)
    trained = [int((dataset[number]["labels"] != -100).sum()) for number in range(4)]
    picture = TOKENS + BORDERS
    words = len(dataset.processor.tokenizer("one two ")["input_ids"])
    assert trained[0] == trained[3] == picture + 1  # and the separator
    assert trained[1] == words + picture + 1
    assert trained[2] < picture
    first = dataset[0]
    assert (first["labels"][: picture + 1] == -100).all()  # the picture of the question
    assert dataset.measure(1).tokens == len(dataset[1]["input_ids"])


def test_loss_and_gradients_are_those_by_hand(run: Path) -> None:
    arguments = ModelArguments(
        model_id="lumina_mgpt", model_name_or_path=str(run.parent / "model"), freeze=["model.vqmodel"]
    )
    with InDouble():
        model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    head = build_head_loss(model, "lm_head", FeatureArguments.model_validate({"loss_cfg": {"z_loss_coef": Z}}))
    objective = WithPictureLabels(build_objective(None, model, head))  # type: ignore[arg-type]
    theirs, dataset = reference(run), built_rows(run)
    with keeping_double(), InDouble():
        expected = by_hand(theirs, batch_of(dataset, 0, 1, 2, 3))
        expected.backward()
        batch = objective.prepare(batch_of(dataset, 0, 1, 2, 3))
        terms, counts = objective.terms(model, batch), objective.count([batch])
        found = sum((terms[name] / counts[name] for name in terms), torch.zeros(()))
        found.backward()
    assert set(terms) == {"loss", "z_loss"} and terms["z_loss"] > 0
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=0)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert own.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-7, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


@cache
def bare_steps(run: Path) -> list[dict[str, Any]]:
    """Of two steps of a plain loop: the loss, the gradients before they are clipped, and the weights after."""
    with keeping_double(), InDouble():
        model, dataset = reference(run), built_rows(run)
        model.model.vqmodel.requires_grad_(False)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        steps = []
        for rows in ((0, 1), (2, 3)):
            loss = by_hand(model, batch_of(dataset, *rows))
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
            torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            weights = {name: p.detach().clone() for name, p in trained.items()}
            steps.append({"loss": loss.detach(), "gradients": gradients, "weights": weights})
    return steps


@pytest.mark.parametrize("words", [[], ["features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=7"]])
def test_two_steps_equal_a_bare_loop(run: Path, words: list[str]) -> None:
    measured, bare = steps_of(str(run), words), bare_steps(run)
    for step, expected in zip(measured, bare, strict=True):
        torch.testing.assert_close(step["loss"], expected["loss"], rtol=1e-9, atol=0)
    for name, weight in bare[-1]["weights"].items():
        torch.testing.assert_close(measured[-1]["weights"][name], weight, rtol=1e-8, atol=1e-9)


def steps_of(yaml: str, words: list[str], packs: bool = False) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, [FP64, Z_LOSS, *words], packs=packs)


@pytest.mark.slow
def test_two_shards_equal_one_process(run: Path) -> None:
    expected = steps_of(str(run), [])
    for measured in run_ranks(2, steps_of, str(run), ["training.micro_batch_size=1"]):
        compare_steps(expected, measured, 1e-8)


@pytest.mark.slow
def test_packed_rows_are_the_same(run: Path) -> None:
    compare_steps(steps_of(str(run), []), steps_of(str(run), [], packs=True), 1e-8)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.pipeline_parallel_size=2"], "cannot be cut into stages"),
        (["parallel.ulysses_parallel_size=2"], "no decoder whose attention"),
        (["parallel.tensor_parallel_size=2"], "weights of its own for each head"),
        (["model.model_id=null"], "which model.model_id: lumina_mgpt alone is trained on"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, words: list[str], says: str) -> None:
    said = mm("check", run, *words, "training.gradient_accumulation_steps=2", "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out + said.err


# --- adapters, answers ------------------------------------------------------------------------------------------------

LORA = ["training.lora.enable=true", "training.lora.rank=2", "training.lora.alpha=6"]


def test_the_gradients_of_adapters_are_those_by_hand(run: Path) -> None:
    """The gradient of B is (alpha / rank) · ∂W · Aᵀ, with ∂W of the plain model: B is zero in the first step."""
    first, bare = steps_of(str(run), LORA)[0], bare_steps(run)[0]
    torch.testing.assert_close(first["loss"], bare["loss"], rtol=1e-9, atol=0)
    adapted = [name for name in first["gradients"] if name.endswith(".lora_B.default.weight")]
    assert any("q_proj" in name for name in adapted)
    for name in adapted:
        weight = name.removesuffix(".lora_B.default.weight")
        a = first["weights"][f"{weight}.lora_A.default.weight"]  # without a gradient yet
        expected = 3 * bare["gradients"][f"{weight}.weight"] @ a.T
        torch.testing.assert_close(first["gradients"][name], expected, rtol=1e-7, atol=1e-10)


@pytest.fixture(scope="module")
def adapted(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters that was broken off after one of two steps, and resumed."""
    folder = tmp_path_factory.mktemp("adapted")
    words = [*LORA, "training.lr=0.1", "training.lr_decay_style=constant"]
    train(run, folder / "whole", *words)
    train(run, folder / "broken", *words, "training.train_iters=1")
    train(run, folder / "broken", *words)
    assert differing(tensors(folder / "whole"), tensors(folder / "broken")) == []
    return folder / "broken"


def test_adapters_resume_to_the_bit_and_merge(run: Path, adapted: Path, tmp_path: Path) -> None:
    """The merged folder is the released one with W + (alpha / rank) · B · A; PEFT's folder answers as it does."""
    for out, words in (("merged", ["--merge"]), ("peft", [])):
        said = mm("export", adapted, tmp_path / out, *words)
        assert said.code == 0, said.err
    before, after = (load_file(f / "model.safetensors") for f in (run.parent / "model", tmp_path / "merged"))
    peft = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    changed = {f"base_model.model.{name}": name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) * 2 == len(peft) and before.keys() == after.keys()
    for name, plain in ((key.removesuffix(".weight"), value) for key, value in changed.items()):
        update = 3 * peft[f"{name}.lora_B.weight"] @ peft[f"{name}.lora_A.weight"]
        torch.testing.assert_close(after[plain], before[plain] + update)
    picture = run.parent / "rows" / "0.png"
    asked = ["--image", picture, "--prompt", "Which digit is this?", "--max-new-tokens", 5, "--temperature", 0]
    answers = [
        mm("infer", tmp_path / "merged", *asked),
        mm("infer", run.parent / "model", "--lora", tmp_path / "peft", *asked),
        mm("infer", adapted, *asked),
    ]
    assert {(each.code, each.out) for each in answers} == {(0, answers[0].out)}, answers


def words_by_hand(model: Any, processor: Any, question: str, pictures: list[Any], tokens: int) -> str:
    """Word by word, the likeliest that is no code of a picture: what it says next is read from the whole text."""
    made = processor(text=question, images=pictures or None, return_tensors="pt", return_for_text_completion=True)
    ids, asked = made["input_ids"], made["input_ids"].shape[1]
    pixels = {} if "pixel_values" not in made else {"pixel_values": made["pixel_values"].double()}
    for _ in range(tokens):
        with torch.no_grad():
            hidden = model.model(input_ids=ids, use_cache=False, **pixels).last_hidden_state[0, -1]
        logits = model.lm_head.weight @ hidden
        logits[model.model.vocabulary_mapping.image_tokens] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
        if ids[0, -1] == processor.tokenizer.eos_token_id:
            break
    return str(processor.tokenizer.decode(ids[0, asked:], skip_special_tokens=True)).strip()


def test_a_run_answers_in_words_and_is_scored(run: Path, adapted: Path, tmp_path: Path) -> None:
    """Of a run that learned pictures as answers, too: what it says is said word by word, and `mm evaluate` counts it.
    Rows that expect a picture are refused by name."""
    folder, rows = mm_exported(adapted, tmp_path / "out"), run.parent / "rows" / "asked.jsonl"
    with InDouble():
        model = transformers.ChameleonForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    said = []
    for number in range(2):
        picture = Image.open(run.parent / "rows" / f"{number}.png")
        said.append(words_by_hand(model, processor, f"<image>Number {number}?<reserved08706>", [picture], tokens=4))
    lines = [
        {"messages": [{"role": "user", "content": f"<image>Number {number}?"},
                      {"role": "assistant", "content": [said[0], "other"][number]}],
         "images": [f"{number}.png"]}
        for number in range(2)
    ]  # fmt: skip
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answered = mm("infer", adapted, "--data", rows, "--out", tmp_path / "answers.jsonl",
                  "--max-new-tokens", 4, "--temperature", 0)  # fmt: skip
    assert answered.code == 0, answered.err
    answers = [json.loads(line)["answer"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert answers == said and all(said)
    scored = mm("evaluate", adapted, "--data", rows, "--out", tmp_path / "scores", "--json",
                "--max-new-tokens", 4)  # fmt: skip
    assert scored.code == 0, scored.err
    counted = json.loads(scored.out)["overall"]
    assert counted["n"] == 2 and counted["correct"] == 1, counted
    drawn = ["--data", run.parent / "rows" / "rows.jsonl"]  # rows 1, 2 and 4 expect pictures
    refused = mm("evaluate", adapted, *drawn, "--out", tmp_path / "no")
    assert refused.code != 0 and "3 of 4 rows are bad" in refused.err and "scored as words" in refused.err, refused.err
    asked = mm("infer", adapted, *drawn, "--out", tmp_path / "words.jsonl", "--max-new-tokens", 2)
    shown = [json.loads(line)["images"] for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert asked.code == 0 and list(map(len, shown)) == [1, 1, 1, 0], asked.err  # never what is to be drawn


def mm_exported(run: Path, out: Path) -> Path:
    said = mm("export", run, out, "--merge")
    assert said.code == 0, said.err
    return out
