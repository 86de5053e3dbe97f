"""BAGEL against a model written here from the formulas, token by token in fp64: both loss terms and their gradients;
who sees whom; training under its plans; drawing and answering without caches."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.bagel.bagel_dataset import size_rules
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.denoised_pictures import WithDenoisedPictures
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.models.bagel.mixture import Samples, attend, attend_across
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.layout import build_layout
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.unified import Drawing, UnifiedSampler, Words
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.bagel_by_hand import Hand, linear, squares, table_row, toy_latents
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_bagel import (
    KEEP_ALL,
    LATENT_SIDE,
    PATCH,
    TOWER_SIDE,
    picture_bytes,
    run_of,
)

FP64 = "parallel.fsdp_plan.param_dtype=fp64"
ROWS: list[list[tuple[str, Any]]] = [
    [("text", "Draw one."), ("drawn", 1)],
    [("seen", 3), ("text", "Which?"), ("said", "three")],
    [("given", 0), ("seen", 0), ("text", "Turn."), ("said", "so: "), ("drawn", 2)],
    [("text", "Draw."), ("drawn", 1), ("given", 1), ("seen", 1), ("text", "Like"), ("given", 3), ("seen", 3),
     ("text", "?"), ("drawn", 2), ("given", 2), ("seen", 2), ("said", "done")],
]  # fmt: skip
"""What the rows of `write_rows` are, by hand."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("bagel"))


def built_rows(run: Path, *words: str) -> Any:
    return build_mm_dataset(load_config(run, list(words)).arguments.data.dataset_param)[0]


def noise_in(prepared: dict[str, Any]) -> Any:
    """Time and ε of each drawn picture of a prepared batch, by its own formulas turned round."""
    latents = [toy_latents(pixels) for pixels in pictures_in(prepared)]
    times, velocities = iter(prepared["latent_times"].split([len(squares(each, 2)) for each in latents])), 0
    for own, drawn in zip(latents, prepared["picture_is_drawn"].tolist(), strict=True):
        time, tokens = float(next(times)[0]), torch.stack(squares(own, 2))
        if not drawn:
            assert time == 0
            continue
        yield time, prepared["_velocities"][velocities : velocities + len(tokens)] + tokens
        velocities += len(tokens)


def pictures_in(batch: dict[str, Any]) -> list[torch.Tensor]:
    pieces = batch["picture_pixels"].split([3 * int(h * w) for h, w in batch["picture_sizes"]])
    return [piece.view(3, *size) for piece, size in zip(pieces, batch["picture_sizes"].tolist(), strict=True)]


@cache
def double_model(run: Path) -> tuple[Any, Any]:
    config = load_config(run).arguments
    with InDouble():
        model = ModelHub.build(config.model, param_dtype=torch.float64)
        ModelHub.load_weights(model, config.model, seed=0, device=torch.device("cpu"))
    head = build_head_loss(model, "language_model.lm_head", FeatureArguments())
    words: Any = build_objective(None, model, head)
    loss, diffusion = config.features.loss_cfg, config.training.diffusion
    return model, WithDenoisedPictures(words, model.config, loss, diffusion, toy_latents, torch.float64)  # type: ignore[arg-type]


def batch_of(dataset: Any, *numbers: int, packs: bool = False) -> dict[str, Any]:
    batch: dict[str, Any] = dataset.build_collator(CollateParam(), packs=packs)([dataset[number] for number in numbers])
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    return batch


@pytest.mark.parametrize(("numbers", "packs"), [((0, 1, 2, 3), False), ((3, 1, 0), True), ((1,), False)])
def test_both_terms_and_their_gradients_are_those_by_hand(run: Path, numbers: tuple[int, ...], packs: bool) -> None:
    model, objective = double_model(run)
    dataset = built_rows(run)
    model.zero_grad()
    prepared = objective.prepare(batch_of(dataset, *numbers, packs=packs))
    state = {name: each.double() for name, each in load_file(run.parent / "model" / "ema.safetensors").items()}
    for name in (
        "language_model.model.layers.0.self_attn.k_proj_moe_gen.weight",
        "vae2llm.weight",
        "connector.fc1.weight",
    ):
        state[name].requires_grad_()
    with keeping_double(), InDouble():
        torch.set_default_dtype(torch.float64)
        try:
            terms, counts = objective.terms(model, prepared), objective.count([prepared])
            noise, words, pictures, numbers_of_words, numbers_of_latents = iter(()), 0.0, 0.0, 0, 0
            if "picture_sizes" in prepared:
                noise = noise_in(prepared)
            for number in numbers:
                hand = Hand(run, state, dataset.processor)
                hand.read(ROWS[number], noise)
                own = hand.sums()
                words, pictures = words + own[0], pictures + own[1]
                numbers_of_words += len(hand.words)
                numbers_of_latents += 16 * len(hand.targets)
        finally:
            torch.set_default_dtype(torch.float32)
        assert counts == {"loss": numbers_of_words, "picture": numbers_of_latents}
        torch.testing.assert_close(terms["loss"], 0.25 * words, rtol=1e-9, atol=0)
        if numbers_of_latents:
            torch.testing.assert_close(terms["picture"], pictures, rtol=1e-9, atol=0)
        (terms["loss"] / counts["loss"] + terms["picture"] / (counts["picture"] or 1)).backward()
        (0.25 * words / numbers_of_words + pictures / (numbers_of_latents or 1)).backward()
    own_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, each in state.items():
        if each.requires_grad:
            expected = torch.zeros_like(each) if each.grad is None else each.grad
            torch.testing.assert_close(own_gradients[name], expected, rtol=1e-7, atol=1e-12)


def test_times_are_shifted_logit_normal_and_differ_by_picture_and_epoch(run: Path) -> None:
    """The folder's shift is 2: the median of sigmoid(N(0, 1)), a half, comes to 2/3. Clean copies have no noise."""
    _, objective = double_model(run)
    dataset = built_rows(run)
    times = []
    for epoch in range(60):
        prepared = objective.prepare(dataset.build_collator(CollateParam())([dataset.item(3, epoch)]))
        drawn = dict.fromkeys(prepared["latent_times"].tolist())
        assert drawn.pop(0.0, "missing") is None and len(drawn) == 2
        times += drawn
    assert len(set(times)) == 120
    assert abs(float(np.median(times)) - 2 / 3) < 0.05
    again = objective.prepare(batch_of(dataset, 3), training=False)
    assert torch.equal(again["latent_tokens"], objective.prepare(batch_of(dataset, 1, 3))["latent_tokens"])


def test_tables_hold_sines_and_cosines_of_columns_and_rows(run: Path) -> None:
    """By the formula of arXiv:2212.09748: of a place the sines, then the cosines of its column; then of its row."""
    stored = load_file(run.parent / "model" / "ema.safetensors")
    speeds = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    for name, side in (("vit_pos_embed", TOWER_SIDE // PATCH), ("latent_pos_embed", LATENT_SIDE)):
        for place in ((0, 0), (1, 3), (side - 1, 2)):
            row, column = (number * speeds for number in place)
            expected = torch.cat([column.sin(), column.cos(), row.sin(), row.cos()])
            torch.testing.assert_close(table_row(stored, name, place, side).double(), expected, rtol=0, atol=1e-7)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_conditions_are_left_out_in_their_share(run: Path) -> None:
    """A text that is left out takes no position, a picture does; what is trained stays, and so do questions of rows in
    which nothing is drawn."""
    words = [f"data.dataset_param.basic_parameters.{name}=1.0" for name in KEEP_ALL]
    kept, left = built_rows(run), built_rows(run, *words)
    assert left[0]["input_ids"].tolist() == kept[0]["input_ids"][-8:].tolist()
    assert left[0]["position_ids"].tolist() == [0] * 8
    assert left[1]["input_ids"].tolist() == kept[1]["input_ids"].tolist()
    assert left[2]["position_ids"][0] == 2 and "image_grid_thw" not in left[2]
    assert left[2]["picture_is_drawn"].tolist() == [True]
    half = built_rows(run, *[word.replace("=1.0", "=0.5") for word in words])
    lengths = [len(half.item(0, epoch)["input_ids"]) == 8 for epoch in range(200)]
    assert 70 < sum(lengths) < 130
    for number in range(4):
        assert kept.measure(number).tokens == len(kept[number]["input_ids"])


def test_the_published_layouts_are_read(run: Path, tmp_path: Path) -> None:
    """Parquet with captions by name, parquet with chains of edits, JSON lines of conversations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = [picture_bytes(number, 8, 8) for number in range(3)]
    captions = json.dumps({"a": "one", "b": "a much longer one"})
    pq.write_table(pa.table({"image": pictures[:1], "captions": [captions]}), tmp_path / "t2i.parquet")
    told = [[["turn it"], ["make it red"]]]
    pq.write_table(pa.table({"image_list": [pictures], "instruction_list": told}), tmp_path / "edit.parquet")
    said = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "three"}]
    (tmp_path / "a.png").write_bytes(pictures[0])
    (tmp_path / "vlm.jsonl").write_text(json.dumps({"image": "a.png", "conversations": said}) + "\n", encoding="utf-8")
    files = ",".join(str(tmp_path / name) for name in ("t2i.parquet", "edit.parquet", "vlm.jsonl"))
    of_files = f"data.dataset_param.basic_parameters.dataset=[{files}]"
    dataset = built_rows(run, of_files, f"data.dataset_param.basic_parameters.dataset_dir={tmp_path}")
    texts = {dataset.processor.decode(dataset.item(0, epoch)["input_ids"][1:-7]) for epoch in range(20)}
    assert texts == {"one", "a much longer one"}
    drawn = {tuple(dataset.item(1, epoch)["picture_is_drawn"].tolist()) for epoch in range(30)}
    assert drawn == {(False, True), (False, True, False, True)}  # one edit or two at once; two after one another
    assert dataset.measure(1).tokens >= max(len(dataset.item(1, epoch)["input_ids"]) for epoch in range(30))
    whole = dataset[2]
    assert whole["part_ids"].max() == 1 and "picture_sizes" not in whole
    assert dataset.processor.decode(whole["labels"][whole["labels"] != -100]) == "three<|im_end|>"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"image": "none.png", "captions": ["a"]}, "rows.jsonl:1.*'none.png' not found"),
        ({"image": None, "captions": ["a"]}, "rows.jsonl:1.*not a media item"),
        ({"image_list": ["0.png", "1.png"], "instruction_list": [[5]]}, "rows.jsonl:1.*no chain of edits"),
        ({"image_list": ["0.png", "1.png"], "instruction_list": [[" "]]}, "rows.jsonl:1.*no chain of edits"),
        ({"image_list": None, "instruction_list": None}, "rows.jsonl:1.*no chain of edits"),
    ],
)
def test_rows_that_cannot_be_used_are_named(run: Path, tmp_path: Path, row: dict[str, Any], says: str) -> None:
    dataset = rows_of(run, tmp_path, row)
    with pytest.raises(DataError, match=says):
        dataset[0]
    with pytest.raises(DataError, match=says):
        dataset.measure(0)


def test_an_instruction_may_be_one_text(run: Path, tmp_path: Path) -> None:
    dataset = rows_of(run, tmp_path, {"image_list": ["0.png", "1.png"], "instruction_list": ["turn it"]})
    for epoch in range(5):
        assert "<|im_start|>turn it<|im_end|>" in dataset.processor.decode(dataset.item(0, epoch)["input_ids"])


def test_an_edit_without_words_is_told(run: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "<image>"}]
    dataset = rows_of(run, tmp_path, {"messages": turns, "images": ["0.png", "1.png"]})
    with pytest.warns(UserWarning, match="some rows: a picture is drawn though its turn has no words"):
        dataset.item(0, 0)


def rows_of(run: Path, folder: Path, row: dict[str, Any]) -> Any:
    """One row that names pictures of the run."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    basic = "data.dataset_param.basic_parameters"
    return built_rows(run, f"{basic}.dataset={folder / 'rows.jsonl'}", f"{basic}.on_bad_sample=skip",
                      f"{basic}.max_bad_fraction=1.0")  # fmt: skip


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
    """One rank draws and the other sees, in turn: both sets of parameters have gradients on both."""
    words = ["training.micro_batch_size=1", *more]
    for measured in run_ranks(2, steps_of, str(run), words):
        compare_steps(whole_steps(str(run)), measured, 1e-8)


SPREAD = {
    "ulysses 2": (2, ["parallel.ulysses_parallel_size=2"]),
    "ulysses 4, more ranks than key heads": (4, ["parallel.ulysses_parallel_size=4"]),
    "ring 2": (2, ["parallel.ring_attention_size=2"]),
    "ring 2 × ulysses 2": (4, ["parallel.ring_attention_size=2", "parallel.ulysses_parallel_size=2"]),
    "fsdp 2 × ulysses 2": (4, ["parallel.ulysses_parallel_size=2", "training.micro_batch_size=1"]),
    "ulysses 2, recomputed": (2, ["parallel.ulysses_parallel_size=2", "features.recompute=true"]),
}
SPREAD_CASES = [pytest.param("ulysses 2", True, id="ulysses 2, packed")]
SPREAD_CASES += [
    pytest.param(plan, packs, marks=pytest.mark.slow)
    for plan in SPREAD
    for packs in (True, False)
    if (plan, packs) != ("ulysses 2", True)
]


@pytest.mark.parametrize(("plan", "packs"), SPREAD_CASES)
def test_spread_rows_equal_one_process(run: Path, plan: str, packs: bool) -> None:
    """Loss terms, gradients and their norm; in the packed rows of the second step, a seen picture and drawn ones lie on
    several ranks."""
    ranks, words = SPREAD[plan]
    packed = batch_of(built_rows(run), 2, 3, packs=True)
    parts, kinds = packed["part_ids"][0], packed["token_kinds"][0]
    cut = [len(parts) * number // 4 for number in (1, 2, 3)]
    assert [(int(kinds[at]), bool(parts[at - 1] == parts[at])) for at in cut] == [(2, True), (1, True), (2, True)]
    for measured in run_ranks(ranks, steps_of, str(run), words, packs):
        compare_steps(whole_steps(str(run)), measured, 1e-8)


def spread_heads(heads: int, key_heads: int) -> float:
    """How far attention over this rank's share, and the gradient of its keys, are from those of one process."""
    everyone = torch.distributed.group.WORLD
    draw = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, 7, count, 4, generator=draw, dtype=torch.float64).requires_grad_()
        for count in (heads, key_heads, key_heads)
    )
    parts = torch.tensor([[0, 1, 1, 1, 0, -2, -2], [0, 0, -1, -1, -1, 2, 2]])
    share = ContextShare(ContextGroups(ulysses=everyone, everyone=everyone), build_layout(7, 1, 2))
    samples = Samples.of_rows(parts, None, None)
    whole = attend(*(each.flatten(0, 1)[None] for each in (query, key, value)), samples).view(2, 7, -1)
    own = [share.take(each, 1).flatten(0, 1)[None] for each in (query, key, value)]
    found = attend_across(*own, samples, share).view(2, len(share.positions), -1)
    off = (found - share.take(whole, 1)).abs().max()
    (expected,) = torch.autograd.grad(share.take(whole, 1).square().sum(), key, retain_graph=True)
    (gradient,) = torch.autograd.grad(found.square().sum(), key)
    torch.distributed.all_reduce(gradient)
    torch.distributed.all_reduce(expected)
    return float(max(off, (gradient - expected).abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 3)])
def test_any_number_of_heads_goes_over_two_ranks(heads: tuple[int, int]) -> None:
    """With one head, a rank has none; with three key heads, both read the middle one."""
    assert max(run_ranks(2, spread_heads, *heads)) < 1e-12


# --- drawing and answering --------------------------------------------------------------------------------------------


class ToyVAE:
    """Latents as the hand makes them, and decoding that shows them."""

    encode = staticmethod(toy_latents)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


@cache
def sampler_of(run: Path) -> tuple[Any, dict[str, torch.Tensor], Any]:
    dataset, (model, _) = built_rows(run), double_model(run)
    vae: Any = ToyVAE()
    rules = size_rules(load_config(run).arguments.data.dataset_param.preprocess_parameters, run.parent / "model")
    state = {name: each.double() for name, each in load_file(run.parent / "model" / "ema.safetensors").items()}
    return UnifiedSampler(model, dataset.processor, vae, run.parent / "model", *rules), state, dataset.processor


def velocity_by_hand(run: Path, parts: list[tuple[str, Any]], time: float, tokens: torch.Tensor) -> torch.Tensor:
    _, state, tokenizer = sampler_of(run)
    hand = Hand(run, state, tokenizer)
    hand.read([*parts, ("noisy", (time, 3, list(tokens)))], iter(()))
    states = hand.states()
    return torch.stack([linear(state, "llm2vae", states[place]) for place, _ in hand.targets])


@pytest.mark.parametrize(
    ("picture", "drawing"),
    [
        (None, Drawing(8, 12, steps=3, seed=4)),
        (1, Drawing(8, 12, steps=3, seed=4, picture_guidance=2.0)),
        (1, Drawing(8, 12, steps=2, seed=5, picture_guidance=1.0, guided=(0.0, 1.0))),
        (1, Drawing(8, 12, steps=2, seed=5, text_guidance=1.0)),
    ],
)
def test_a_picture_is_that_of_a_loop_without_caches(run: Path, picture: int | None, drawing: Drawing) -> None:
    """The published rule, computed anew for every step and context: guidance by the text, then by the picture, and the
    length of what comes out at most that of what the whole prompt says."""
    sampler, _, _ = sampler_of(run)
    tokens = torch.randn(6, 16, generator=torch.Generator().manual_seed(drawing.seed)).double()
    shown: list[tuple[str, Any]] = [] if picture is None else [("given", picture), ("seen", picture)]
    with torch.no_grad(), keeping_double(), InDouble():
        context = sampler.start()
        if picture is not None:
            sampler.add_picture(context, Image.open(run.parent / "rows" / f"{picture}.png"), given=True)
        sampler.add_text(context, "Turn.")
        found = sampler.draw(context, drawing)
        torch.set_default_dtype(torch.float64)
        try:
            for step in range(drawing.steps):
                early, late = (1 - number / drawing.steps for number in (step, step + 1))
                early, late = (3 * each / (1 + 2 * each) for each in (early, late))
                whole = velocity_by_hand(run, [*shown, ("text", "Turn.")], early, tokens)
                made = whole
                if drawing.text_guidance > 1 and early > drawing.guided[0]:
                    base = velocity_by_hand(run, shown, early, tokens)
                    made = base + drawing.text_guidance * (whole - base)
                    if picture is not None and drawing.picture_guidance > 1:
                        base = velocity_by_hand(run, [("text", "Turn.")], early, tokens)
                        made = base + drawing.picture_guidance * (made - base)
                    made = made * min(1.0, float(whole.norm() / made.norm()))
                tokens = tokens - (early - late) * made
        finally:
            torch.set_default_dtype(torch.float32)
    assert found.shape == (4, 4, 6)
    torch.testing.assert_close(torch.stack(squares(found, 2)), tokens, rtol=1e-6, atol=1e-7)


def test_an_answer_is_that_of_a_loop_without_caches(run: Path) -> None:
    sampler, state, tokenizer = sampler_of(run)
    with torch.no_grad(), keeping_double(), InDouble():
        context = sampler.start()
        sampler.add_picture(context, Image.open(run.parent / "rows" / "1.png"), given=False)
        sampler.add_text(context, "Which?")
        found, finished = sampler.answer(context, Words(6))
        said = [tokenizer.convert_tokens_to_ids("<|im_start|>")]
        torch.set_default_dtype(torch.float64)
        try:
            for _ in range(6):
                hand = Hand(run, state, tokenizer)
                hand.read([("seen", 1), ("text", "Which?"), ("begun", said)], iter(()))
                said.append(int(linear(state, "language_model.lm_head", hand.states()[-1]).argmax()))
        finally:
            torch.set_default_dtype(torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    own = said[1 : said.index(end)] if end in said else said[1:]
    assert (found, finished) == (tokenizer.decode(own), end in said)
