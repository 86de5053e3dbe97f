"""InternVL-U against a model written here from the published formulas, in fp64: both loss terms and their gradients;
prompts; training under its plans; drawing and answering without caches."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.internvlu.turns import GenerationSize
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.denoised_pictures import WithDenoisedPictures
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.internvlu import InternVLUSampler
from mindspeed_mm.fsdp.sampling.unified import Drawing, Words
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.internvlu_by_hand import OWN, State, language_states, linear, seen_features, state_of, velocity
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_internvlu import run_of

FP64 = "parallel.fsdp_plan.param_dtype=fp64"
BASIC = "data.dataset_param.basic_parameters"
NAME = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
OF_DRAWING = (
    "请通过详细描述图像中物体和背景的颜色、形状、大小、纹理、数量、文字内容以及空间位置关系等来对图像进行全面描述："
)
OF_EDITING = (
    "请描述输入图像的关键特征（颜色、形状、大小、纹理、物体、背景等），然后解释用户的文本指令应该如何改变或修改图像，"
    "从而生成一个满足用户要求的新图像，并适当保持与原始输入的一致性。："
)
PICTURE = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("internvlu"))


def built_rows(run: Path, *words: str) -> Any:
    return build_mm_dataset(load_config(run, list(words)).arguments.data.dataset_param)[0]


def toy_latents(pixels: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    """(4, H / 4, W / 4) of a picture: stands for the VAE; the likeliest ones are a little off."""
    small = pixels.double()[:, ::4, ::4] / 255
    return torch.cat([small, small.mean(dim=0, keepdim=True) - 0.5]) + (0.25 if seed is None else 0.0)


@cache
def double_model(run: Path) -> tuple[Any, Any]:
    config = load_config(run).arguments
    with InDouble():
        model = ModelHub.build(config.model, param_dtype=torch.float64)
        ModelHub.load_weights(model, config.model, seed=0, device=torch.device("cpu"))
    head = build_head_loss(model, "vlm.language_model.lm_head", FeatureArguments())
    words: Any = build_objective(None, model, head)
    loss, diffusion = config.features.loss_cfg, config.training.diffusion
    return model, WithDenoisedPictures(words, model.config, loss, diffusion, toy_latents, torch.float64)  # type: ignore[arg-type]


def batch_of(dataset: Any, *numbers: int) -> dict[str, Any]:
    batch: dict[str, Any] = dataset.build_collator(CollateParam(), packs=False)([dataset[n] for n in numbers])
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    return batch


def own_ids(dataset: Any) -> list[int]:
    return [dataset.processor.convert_tokens_to_ids(token) for token in OWN]


def pixels_of(run: Path, number: int, size: tuple[int, int]) -> torch.Tensor:
    """(3, H, W) uint8 of a file of the rows."""
    picture = Image.open(run.parent / "rows" / f"{number}.png").resize(size[::-1], Image.Resampling.BICUBIC)
    return torch.tensor(np.asarray(picture)).permute(2, 0, 1)


DRAWN: dict[int, list[tuple[int, tuple[int, int]]]] = {
    0: [(1, (8, 16))], 2: [(2, (16, 8)), (0, (8, 8))], 3: [(3, (8, 8))],
}  # fmt: skip
"""Row → its drawn picture, then those that are given: file, height and width of its latents' pixels."""


def by_hand(run: Path, state: State, dataset: Any, samples: dict[int, Any], noise: Any) -> Any:
    """Σ −log p over words, Σ squared errors of latents, and how many there are of each; of samples by their row."""
    words, squares, counts = torch.zeros(()), torch.zeros(()), [0, 0]
    for number, sample in samples.items():
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        features = torch.zeros(0, 32)
        if "pixel_values" in sample:
            features = torch.cat([seen_features(state, each) for each in sample["pixel_values"].double()])
        last, before = language_states(state, ids, own_ids(dataset), features)
        for place, follows in enumerate(labels[1:]):
            if follows != -100:
                logits = linear(state, "vlm.language_model.lm_head", last[place])
                words, counts[0] = words - logits.log_softmax(-1)[follows], counts[0] + 1
        if number not in DRAWN:
            continue
        start, context = (dataset.processor.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<IMG_CONTEXT>"))
        begin = [place for place, token in enumerate(ids) if token == start][1]
        states = torch.cat([last, before], dim=1)[begin:]
        (file, size), *given = DRAWN[number]
        clean, (time, epsilon) = toy_latents(pixels_of(run, file, size), 0), next(noise)
        shown = [(1 - time) * clean + time * epsilon, *[toy_latents(pixels_of(run, *each)) for each in given]]
        made = velocity(state, shown, time, states, [token == context for token in ids[begin:]])
        squares = squares + (made - (epsilon - clean)).square().sum()
        counts[1] += clean.numel()
    return words, squares, counts


def noise_in(prepared: dict[str, Any], run: Path, numbers: tuple[int, ...]) -> Any:
    """Time and ε (C, h, w) of each drawn picture of a prepared batch, by its own formulas turned round."""
    at = start = 0
    for number in numbers:
        if number not in DRAWN:
            continue
        (file, size), *given = DRAWN[number]
        at += sum(h * w // 64 for _, (h, w) in given)
        rows, columns = size[0] // 8, size[1] // 8
        clean = toy_latents(pixels_of(run, file, size), 0)
        target = prepared["_velocities"][start : start + rows * columns]  # over rows, columns, channels
        target = target.view(rows, columns, 2, 2, 4).permute(4, 0, 2, 1, 3).reshape(clean.shape)
        yield float(prepared["latent_times"][at]), target + clean
        at, start = at + rows * columns, start + rows * columns


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (1,), (2,)])
def test_both_terms_and_their_gradients_are_those_by_hand(run: Path, numbers: tuple[int, ...]) -> None:
    model, objective = double_model(run)
    dataset = built_rows(run)
    model.zero_grad()
    prepared = objective.prepare(batch_of(dataset, *numbers))
    state, samples = state_of(run.parent / "released"), {number: dataset[number] for number in numbers}
    watched = {
        "generation_decoder.decoder.transformer_blocks.0.attn.to_q.weight": 1,
        "generation_decoder.decoder.img_in.weight": 1,
        "vlm.language_model.model.layers.1.mlp.up_proj.weight": 1,
        "vlm.mlp1.1.weight": 1,
        "vlm.special_token_embedding.weight": 1,
    }
    for name in watched:
        state[name].requires_grad_()
    with keeping_double(), InDouble():
        torch.set_default_dtype(torch.float64)
        try:
            terms, counts = objective.terms(model, prepared), objective.count([prepared])
            noise = noise_in(prepared, run, numbers)
            words, squares, (of_words, of_latents) = by_hand(run, state, dataset, samples, noise)
        finally:
            torch.set_default_dtype(torch.float32)
        assert counts == {"loss": of_words, "picture": of_latents}
        torch.testing.assert_close(terms["loss"], 0.25 * words, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(terms["picture"], squares, rtol=1e-9, atol=1e-12)
        (terms["loss"] / (of_words or 1) + terms["picture"] / (of_latents or 1)).backward()
        whole = 0.25 * words / (of_words or 1) + squares / (of_latents or 1)
        whole.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in watched:
        expected = state[name].grad
        expected = torch.zeros_like(state[name]) if expected is None else expected
        torch.testing.assert_close(gradients[name], expected, rtol=1e-7, atol=1e-10)
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert not [name for name in missing if not name.startswith("vlm.vision_model")]


# --- rows -------------------------------------------------------------------------------------------------------------


def published(dataset: Any, task: str, question: str, answer: str) -> list[int]:
    """Tokens of the published prompt, as its one text."""
    system = {"answer": NAME, "draw": NAME + OF_DRAWING, "edit": NAME + OF_EDITING}[task]
    asked = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return [
        *dataset.processor(asked, add_special_tokens=False)["input_ids"],
        *dataset.processor(answer, add_special_tokens=False)["input_ids"],
    ]


def test_rows_read_as_the_published_prompts(run: Path) -> None:
    """System prompts of the three tasks; a capital and a stop; a line for a picture; what is trained; what guidance
    leaves out."""
    dataset = built_rows(run)
    assert dataset[0]["input_ids"].tolist() == published(dataset, "draw", "Draw one.", "<img>")
    assert dataset[2]["input_ids"].tolist() == published(dataset, "edit", f"{PICTURE}\nturn it.", "<img>")
    assert dataset[3]["input_ids"].tolist() == published(dataset, "draw", "Draw four.", "so: <img>")
    spoken = "three<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
    assert dataset[1]["input_ids"].tolist() == published(dataset, "answer", f"{PICTURE}\nWhich?", spoken)
    trained = [
        dataset.processor.decode(row["labels"][row["labels"] != -100]) for row in map(dataset.__getitem__, range(4))
    ]
    assert trained == ["", "three<|im_end|>four<|im_end|>", "", "so: <img>"]
    read = dataset[2]["input_ids"][dataset[2]["part_ids"] == 1]
    asked = f"<|im_start|>user\n{PICTURE}\nturn it.<|im_end|>\n<|im_start|>assistant\n<img>"
    assert dataset.processor.decode(read) == asked
    no_words = built_rows(run, f"{BASIC}.text_cond_dropout_prob=1.0")
    left = f"{PICTURE}\nGenerate an image based on reference images."
    nothing = "Here is a random image <img_uncond>:"
    assert no_words[2]["input_ids"].tolist() == published(dataset, "edit", left, "<img>")
    assert no_words[3]["input_ids"].tolist() == published(dataset, "draw", nothing, "<img>")
    assert not any(no_words[3]["labels"] != -100)
    no_question = built_rows(run, f"{BASIC}.all_cond_dropout_prob=1.0")
    assert no_question[2]["input_ids"].tolist() == published(dataset, "edit", nothing, "<img>")
    assert "pixel_values" not in no_question[2] and no_question[2]["picture_is_drawn"].tolist() == [True]
    assert no_question[1]["input_ids"].tolist() == dataset[1]["input_ids"].tolist()
    for rows in (dataset, no_words, no_question):
        assert all(dataset.measure(number).tokens >= len(rows[number]["input_ids"]) for number in range(4))


def test_questions_are_left_out_in_their_shares(run: Path) -> None:
    """Three of ten lose all, the others their words."""
    dataset = built_rows(run, f"{BASIC}.text_cond_dropout_prob=0.7", f"{BASIC}.all_cond_dropout_prob=0.3")
    rows = [dataset.item(2, epoch) for epoch in range(100)]
    nothing = [len(row["picture_is_drawn"]) == 1 for row in rows]
    no_words = ["Generate" in dataset.processor.decode(row["input_ids"]) for row in rows]
    assert 15 < sum(nothing) < 45 and all(one != other for one, other in zip(nothing, no_words, strict=True))


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([turn("user", "a"), turn("assistant", "<image> b")], "words behind a picture"),
        (
            [turn("user", "a"), turn("assistant", "<image>"), turn("user", "b"), turn("assistant", "c")],
            "neither a question",
        ),
        (
            [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "<image>")],
            "several questions",
        ),
        ([turn("system", "<image>"), turn("user", "c"), turn("assistant", "d")], "neither a question"),
        ([turn("user", "a"), turn("assistant", "<image>", weight=0.5)], "drawn pictures count 0 or 1"),
    ],
)
def test_rows_that_cannot_be_used_are_named(run: Path, tmp_path: Path, turns: list[dict[str, Any]], says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns, "images": ["0.png"]}) + "\n", encoding="utf-8")
    dataset = built_rows(run, f"{BASIC}.dataset={tmp_path / 'rows.jsonl'}", f"{BASIC}.on_bad_sample=skip",
                         f"{BASIC}.max_bad_fraction=1.0")  # fmt: skip
    with pytest.raises(DataError, match=f"rows.jsonl:1.*{says}"):
        dataset[0]
    with pytest.raises(DataError, match=f"rows.jsonl:1.*{says}"):
        dataset.measure(0)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(100, 100, (512, 512)), (600, 900, (608, 896)), (2048, 1024, (1024, 512)), (1000, 1000, (992, 992)),
     (3000, 3000, (1024, 1024)), (100, 900, (112, 1024))],
)  # fmt: skip
def test_pictures_that_have_latents_are_as_large_as_published(
    height: int, width: int, expected: tuple[int, int]
) -> None:
    """What the published code gives with its settings: a stride of 16, 512² to 1024² pixels, sides up to 1024."""
    assert GenerationSize(16, 512**2, 1024**2, 1024)(height, width) == expected


# --- training ---------------------------------------------------------------------------------------------------------


def steps_of(yaml: str, words: list[str], packs: bool = False) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, [FP64, *words], packs=packs)


@cache
def whole_steps(yaml: str) -> Any:
    return steps_of(yaml, [])


def test_packed_rows_are_the_same(run: Path) -> None:
    one = ["training.train_iters=1"]
    compare_steps(steps_of(str(run), one), steps_of(str(run), one, packs=True), 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["features.recompute=true"], ["parallel.fsdp_plan.num_to_forward_prefetch=1"]])
def test_two_ranks_equal_one_process(run: Path, more: list[str]) -> None:
    """One rank draws and the other sees, in turn: what draws has gradients on both."""
    words = ["training.micro_batch_size=1", *more]
    for measured in run_ranks(2, steps_of, str(run), words):
        compare_steps(whole_steps(str(run)), measured, 1e-8)


# --- drawing and answering --------------------------------------------------------------------------------------------


class ToyVAE:
    """Latents as the hand makes them, and decoding that shows them."""

    encode = staticmethod(toy_latents)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


def sampler_of(run: Path) -> tuple[Any, State, Any]:
    dataset, (model, _) = built_rows(run), double_model(run)
    vae: Any = ToyVAE()
    preprocess = load_config(run).arguments.data.dataset_param.preprocess_parameters
    sampler = InternVLUSampler(model, dataset.processor, vae, run.parent / "model", preprocess)
    return sampler, state_of(run.parent / "released"), dataset


@pytest.mark.parametrize("edits", [False, True])
def test_a_picture_is_drawn_as_by_hand(run: Path, edits: bool) -> None:
    """Three prompts and DPM-Solver++ by its formulas (arXiv:2211.01095, multistep of second order, on a flow): steps of
    noise levels that are shifted by 3, the last of first order; above a level of 0.93 guidance is tamed."""
    sampler, state, dataset = sampler_of(run)
    picture = Image.open(run.parent / "rows" / "0.png")
    features = seen_features(state, dataset[2]["pixel_values"][0].double())
    with keeping_double(), InDouble(), torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            context = sampler.start()
            if edits:
                assert sampler.add_picture(context, picture, given=True) == (8, 8)
            sampler.add_text(context, "turn it")
            made = sampler.draw(context, Drawing(8, 16, steps=3, text_guidance=3.0, picture_guidance=1.5, seed=11))
            nothing = "Here is a random image <img_uncond>:"
            asked = ["Turn it.", nothing, nothing]
            if edits:
                asked = [f"{PICTURE}\nturn it.", f"{PICTURE}\nGenerate an image based on reference images.", nothing]
            prompts = [published(dataset, "edit" if edits else "draw", each, "<img>") for each in asked]
            expected = drawn_by_hand(state, dataset, prompts, features, toy_latents(pixels_of(run, 0, (8, 8))))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)


def drawn_by_hand(
    state: State, dataset: Any, prompts: list[list[int]], features: torch.Tensor, given: torch.Tensor
) -> torch.Tensor:
    from mindspeed_mm.fsdp.loss.denoising import noise_of

    context = dataset.processor.convert_tokens_to_ids("<IMG_CONTEXT>")
    begin = dataset.processor.convert_tokens_to_ids("<|im_start|>")
    known = []
    for ids in prompts:
        last, before = language_states(state, ids, own_ids(dataset), features)
        start = [place for place, token in enumerate(ids) if token == begin][1]
        seen = [token == context for token in ids[start:]]
        known.append((torch.cat([last, before], dim=1)[start:], seen))
    noise = noise_of(11, (2, 16)).double().view(1, 2, 2, 2, 4)
    x = noise.permute(4, 0, 2, 1, 3).reshape(4, 2, 4)
    levels = [3 * level / (1 + 2 * level) for level in (0.999, 0.666, 0.333)] + [0.0]
    clean: list[torch.Tensor] = []
    logs = [math.log((1 - level) / level) for level in levels[:3]] + [math.inf]
    for step, level in enumerate(levels[:3]):
        time = int(level * 1000) / 1000
        whole, part, none = (
            velocity(state, [x, given] if any(seen) else [x], time, states, seen) for states, seen in known
        )
        changes = [part - none, whole - part]
        if time > 0.93:
            changes = [each / each.norm(dim=0, keepdim=True).clamp(min=1) ** 0.4 for each in changes]
        clean.append(x - level * (none + 1.5 * changes[0] + 3.0 * changes[1]))
        following = levels[step + 1]
        if following == 0:
            return clean[-1]
        h = logs[step + 1] - logs[step]
        estimate = clean[-1]
        if step:
            ratio = (logs[step] - logs[step - 1]) / h
            estimate = estimate + (clean[-1] - clean[-2]) / (2 * ratio)
        x = following / level * x - (1 - following) * np.expm1(-h) * estimate
    raise AssertionError


def test_an_answer_is_the_likeliest_without_a_cache(run: Path) -> None:
    sampler, state, dataset = sampler_of(run)
    features = seen_features(state, dataset[1]["pixel_values"][0].double())
    with keeping_double(), InDouble(), torch.no_grad():
        context = sampler.start()
        sampler.add_picture(context, Image.open(run.parent / "rows" / "3.png"), given=False)
        sampler.add_text(context, "Which?")
        said = sampler.answer(context, Words(max_new_tokens=4))
        torch.set_default_dtype(torch.float64)
        try:
            ids = published(dataset, "answer", f"{PICTURE}\nWhich?", "")
            expected: list[int] = []
            for _ in range(4):
                last, _ = language_states(state, [*ids, *expected], own_ids(dataset), features)
                expected.append(int(linear(state, "vlm.language_model.lm_head", last[-1]).argmax()))
        finally:
            torch.set_default_dtype(torch.float32)
    stops = {dataset.processor.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<img>")}
    assert not stops & set(expected)
    assert said == (dataset.processor.decode(expected), False)
