"""BAGEL against a model written here from the formulas, token by token in fp64: both loss terms and their gradients;
who sees whom; training under its plans; drawing and answering without caches."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.bagel.bagel_dataset import size_rules
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.denoised_pictures import WithDenoisedPictures
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.unified import Drawing, UnifiedSampler, Words
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import differing, mm, tensors, train
from tests.helpers.tiny_bagel import LATENT_SIDE, PATCH, SIZES, TOWER_SIDE, make_tiny_bagel, picture_bytes, write_rows
from tests.helpers.tiny_run import STEADY

FP64 = "parallel.fsdp_plan.param_dtype=fp64"
KEEP_ALL = {"text_cond_dropout_prob": 0.0, "vit_cond_dropout_prob": 0.0, "vae_cond_dropout_prob": 0.0}
PICTURES = ("seen", "given", "drawn", "noisy")
ROWS: list[list[tuple[str, Any]]] = [
    [("text", "Draw one."), ("drawn", 1)],
    [("seen", 3), ("text", "Which?"), ("said", "three")],
    [("given", 0), ("seen", 0), ("text", "Turn."), ("said", "so: "), ("drawn", 2)],
    [("text", "Draw."), ("drawn", 1), ("given", 1), ("seen", 1), ("text", "Like"), ("given", 3), ("seen", 3),
     ("text", "?"), ("drawn", 2), ("given", 2), ("seen", 2), ("said", "done")],
]  # fmt: skip
"""What the rows of `write_rows` are, by hand."""


@cache
def run_of(root: Path) -> Path:
    (root / "model").mkdir()
    make_tiny_bagel(root / "model")
    rows = write_rows(root / "rows")
    config: dict[str, Any] = {
        "model": {"model_id": "bagel", "model_name_or_path": str(root / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "bagel",
                "basic_parameters": {"dataset": str(rows), "dataset_dir": str(rows.parent), **KEEP_ALL},
                "preprocess_parameters": dict(SIZES),
            },
            "dataloader_param": {"num_workers": 0, "shuffle": False},
        },
        "parallel": {},
        "training": {"lr": 1e-3, "micro_batch_size": 2, "train_iters": 2, "seed": 7, "clip_grad": 0.5,
                     "adam_fused": False, **STEADY},
    }  # fmt: skip
    with (root / "run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return root / "run.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("bagel"))


def built_rows(run: Path, *words: str) -> Any:
    return build_mm_dataset(load_config(run, list(words)).arguments.data.dataset_param)[0]


# --- the model by hand ------------------------------------------------------------------------------------------------


def toy_latents(pixels: torch.Tensor, _seed: int = 0) -> torch.Tensor:
    """(4, H / 2, W / 2) of a picture: stands for the VAE."""
    small = pixels.double()[:, ::2, ::2] / 255
    return torch.cat([small, small.mean(dim=0, keepdim=True) - 0.5])


def pixels_of(run: Path, number: int, stride: int) -> torch.Tensor:
    """(3, H, W) uint8 of a file, its sides the nearest multiples of the stride."""
    picture = Image.open(run.parent / "rows" / f"{number}.png")
    width, height = (round(side / stride) * stride for side in picture.size)
    return torch.tensor(np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC))).permute(2, 0, 1)


def squares(planes: torch.Tensor, side: int) -> list[torch.Tensor]:
    """Row by row, each flattened over its rows, columns, planes."""
    rows, columns = planes.shape[1] // side, planes.shape[2] // side
    return [
        planes[:, r * side : (r + 1) * side, c * side : (c + 1) * side].permute(1, 2, 0).flatten()
        for r in range(rows)
        for c in range(columns)
    ]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def linear(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(()))


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """A head's numbers turned by RoPE, base 1e6: number i with number i + half."""
    half = x.shape[-1] // 2
    angles = position / 1e6 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def table_row(state: dict[str, torch.Tensor], name: str, place: tuple[int, int], side: int) -> torch.Tensor:
    """Of a place (row, column), in a table that is stored in fp32."""
    return state[f"{name}.pos_embed"][place[0] * side + place[1]]


def seen_features(state: dict[str, torch.Tensor], patches: list[torch.Tensor], columns: int) -> list[torch.Tensor]:
    """SigLIP's two layers on one picture, the connector, and the table of places."""
    side = TOWER_SIDE // PATCH
    name = "vit_model.vision_model."
    places = [divmod(number, columns) for number in range(len(patches))]
    x = linear(state, f"{name}embeddings.patch_embedding", torch.stack(patches))
    x = x + torch.stack([state[f"{name}embeddings.position_embedding.weight"][r * side + c] for r, c in places])

    def norm(x: torch.Tensor, own: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{own}.weight"], state[f"{own}.bias"], 1e-6)

    for layer in range(2):
        own = f"{name}encoder.layers.{layer}."
        y = norm(x, f"{own}layer_norm1")
        q, k, v = (linear(state, f"{own}self_attn.{each}_proj", y).view(len(y), 2, 12) for each in "qkv")
        heads = [(q[:, h] @ k[:, h].T / math.sqrt(12)).softmax(-1) @ v[:, h] for h in range(2)]
        x = x + linear(state, f"{own}self_attn.out_proj", torch.cat(heads, dim=-1))
        y = linear(state, f"{own}mlp.fc1", norm(x, f"{own}layer_norm2"))
        x = x + linear(state, f"{own}mlp.fc2", F.gelu(y, approximate="tanh"))
    x = F.gelu(linear(state, "connector.fc1", norm(x, f"{name}post_layernorm")), approximate="tanh")
    return [
        f + table_row(state, "vit_pos_embed", place, side)
        for f, place in zip(linear(state, "connector.fc2", x), places, strict=True)
    ]


def latent_embedding(state: dict[str, torch.Tensor], latent: torch.Tensor, time: float, place: Any) -> torch.Tensor:
    speeds = 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    waves = torch.cat([(time * speeds).cos(), (time * speeds).sin()])
    told = linear(state, "time_embedder.mlp.2", F.silu(linear(state, "time_embedder.mlp.0", waves)))
    return linear(state, "vae2llm", latent) + told + table_row(state, "latent_pos_embed", place, LATENT_SIDE)


class Hand:
    """A row, part by part: embeddings, positions, who belongs to which part, and what is asked of which token."""

    def __init__(self, run: Path, state: dict[str, torch.Tensor], tokenizer: Any) -> None:
        self.run, self.state, self.tokenizer = run, state, tokenizer
        self.embeds: list[torch.Tensor] = []
        self.positions: list[int] = []
        self.part: list[int] = []
        self.is_noise: list[bool] = []
        self.is_latent: list[bool] = []
        self.is_picture: list[bool] = []
        self.words: list[tuple[int, int]] = []
        self.targets: list[tuple[int, torch.Tensor]] = []

    def _put(self, embed: torch.Tensor, position: int, part: int, kind: str, *, latent: bool = False) -> None:
        self.embeds.append(embed)
        self.positions.append(position)
        self.part.append(part)
        self.is_noise.append(kind in ("drawn", "noisy"))
        self.is_picture.append(kind in PICTURES)
        self.is_latent.append(latent)

    def embed(self, token: str | int) -> torch.Tensor:
        number = token if isinstance(token, int) else self.tokenizer.convert_tokens_to_ids(token)
        return self.state["language_model.model.embed_tokens.weight"][number]

    def read(self, parts: list[tuple[str, Any]], noise: Any) -> None:
        """`noise`: gives, for each drawn picture in turn, its time and ε of each token."""
        position = 0
        for number, (kind, content) in enumerate(parts):
            if kind in ("text", "said"):
                ids = self.tokenizer(content, add_special_tokens=False)["input_ids"]
                end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
                for token, follows in zip(["<|im_start|>", *ids], [*ids, end], strict=True):
                    if kind == "said":
                        self.words.append((len(self.embeds), follows))
                    self._put(self.embed(token), position, number, kind)
                    position += 1
                self._put(self.embed("<|im_end|>"), position, number, kind)
                position += 1
                continue
            if kind == "begun":  # an answer so far
                for token in content:
                    self._put(self.embed(token), position, number, kind)
                    position += 1
                continue
            self._put(self.embed("<|vision_start|>"), position, number, kind)
            if kind == "seen":
                shown_in_fp32 = np.float32(pixels_of(self.run, content, PATCH)) / np.float32(127.5) - np.float32(1)
                pixels = torch.tensor(shown_in_fp32.astype(np.float64))
                for feature in seen_features(self.state, squares(pixels, PATCH), pixels.shape[2] // PATCH):
                    self._put(feature, position, number, kind)
            elif kind == "noisy":
                time, columns, tokens = content
                for index, token in enumerate(tokens):
                    self.targets.append((len(self.embeds), token))
                    embed = latent_embedding(self.state, token, time, divmod(index, columns))
                    self._put(embed, position, number, kind, latent=True)
            else:
                latents = toy_latents(pixels_of(self.run, content, 4))
                time, noise_of_picture = next(noise) if kind == "drawn" else (0.0, None)
                for index, latent in enumerate(squares(latents, 2)):
                    place = divmod(index, latents.shape[2] // 2)
                    shown = latent
                    if noise_of_picture is not None:
                        shown = (1 - time) * latent + time * noise_of_picture[index]
                        self.targets.append((len(self.embeds), noise_of_picture[index] - latent))
                    embed = latent_embedding(self.state, shown, time, place)
                    self._put(embed, position, number, kind, latent=True)
            self._put(self.embed("<|vision_end|>"), position, number, kind)
            position += kind != "drawn"

    def sees(self, one: int, other: int) -> bool:
        if self.part[one] == self.part[other]:
            return self.is_picture[one] or other <= one
        return other < one and not self.is_noise[other]

    def states(self) -> torch.Tensor:
        """(L, H) normed states of the whole row."""
        state, ends = self.state, ["_moe_gen" if latent else "" for latent in self.is_latent]
        count = len(ends)
        x = torch.stack(self.embeds)
        mask = torch.tensor([[self.sees(one, other) for other in range(count)] for one in range(count)])

        def each(make: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([make(x[token], ends[token]) for token in range(count)])

        for layer in range(2):
            own = f"language_model.model.layers.{layer}."

            def heads(name: str, x: torch.Tensor, count: int, own: str = own) -> torch.Tensor:
                made = each(lambda t, end: linear(state, f"{own}self_attn.{name}_proj{end}", t), x).unflatten(
                    1, (count, 8)
                )
                if name == "v":
                    return made
                made = each(lambda t, end: rms(t, state[f"{own}self_attn.{name}_norm{end}.weight"]), made)
                return torch.stack([turned(t, p) for t, p in zip(made, self.positions, strict=True)])

            y = each(lambda t, end, own=own: rms(t, state[f"{own}input_layernorm{end}.weight"]), x)
            q, k, v = heads("q", y, 4), heads("k", y, 2), heads("v", y, 2)
            attended = []
            for head in range(4):
                scores = (q[:, head] @ k[:, head // 2].T / math.sqrt(8)).masked_fill(~mask, -math.inf)
                attended.append(scores.softmax(-1) @ v[:, head // 2])
            y = torch.cat(attended, dim=-1)
            x = x + each(lambda t, end, own=own: linear(state, f"{own}self_attn.o_proj{end}", t), y)

            def mlp(t: torch.Tensor, end: str, own: str = own) -> torch.Tensor:
                t = rms(t, state[f"{own}post_attention_layernorm{end}.weight"])
                gate, up = (linear(state, f"{own}mlp{end}.{name}_proj", t) for name in ("gate", "up"))
                return linear(state, f"{own}mlp{end}.down_proj", F.silu(gate) * up)

            x = x + each(mlp, x)
        return each(lambda t, end: rms(t, state[f"language_model.model.norm{end}.weight"]), x)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ −log p over words, Σ squared error over numbers of latents."""
        states, words, squares_ = self.states(), torch.zeros(()), torch.zeros(())
        for place, follows in self.words:
            logits = linear(self.state, "language_model.lm_head", states[place])
            words = words - logits.log_softmax(-1)[follows]
        for place, target in self.targets:
            squares_ = squares_ + (linear(self.state, "llm2vae", states[place]) - target).square().sum()
        return words, squares_


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
    for epoch in range(150):
        prepared = objective.prepare(dataset.build_collator(CollateParam())([dataset.item(3, epoch)]))
        drawn = dict.fromkeys(prepared["latent_times"].tolist())
        assert drawn.pop(0.0, "missing") is None and len(drawn) == 2
        times += drawn
    assert len(set(times)) == 300
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


# --- training ---------------------------------------------------------------------------------------------------------


def steps_of(yaml: str, words: list[str], packs: bool = False) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, [FP64, *words], packs=packs)


@cache
def whole_steps(yaml: str) -> Any:
    return steps_of(yaml, [])


def test_packed_rows_are_the_same(run: Path) -> None:
    compare_steps(whole_steps(str(run)), steps_of(str(run), [], packs=True), 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["features.recompute=true"], ["parallel.fsdp_plan.num_to_forward_prefetch=1"]])
def test_two_ranks_equal_one_process(run: Path, more: list[str]) -> None:
    """One rank draws and the other sees, in turn: both sets of parameters have gradients on both."""
    words = ["training.micro_batch_size=1", *more]
    for measured in run_ranks(2, steps_of, str(run), words, timeout_s=180):
        compare_steps(whole_steps(str(run)), measured, 1e-8)


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


# --- runs -------------------------------------------------------------------------------------------------------------

ONE_SET = "training.lora.target_modules=[q_proj_moe_gen, o_proj_moe_gen, 'language_model.*mlp_moe_gen.down_proj']"
LORA = ["training.lora.enable=true", "training.lora.rank=2", "training.lr=0.05", ONE_SET]


def drawn(folder: Path, out: Path, *words: object) -> np.ndarray:
    said = mm("infer", folder, "--prompt", "Draw.", "--draw", out, "--size", "8x12", "--steps", 2, *words)
    assert said.code == 0, said.err
    return np.asarray(Image.open(out))


def test_a_run_resumes_to_the_bit_and_is_exported_as_released(run: Path, tmp_path: Path) -> None:
    """The understanding half is frozen by the card's patterns; the exported folder has the released names and its VAE,
    draws like the run, and edits."""
    (card,) = (card for card in families() if card.name == "bagel")
    words = [f"model.freeze=[{', '.join(map(repr, [*card.freeze['understanding'], *card.freeze['tower']]))}]"]
    train(run, tmp_path / "whole", *words)
    train(run, tmp_path / "broken", *words, "training.train_iters=1")
    train(run, tmp_path / "broken", *words)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "broken")) == []
    said = mm("export", tmp_path / "broken", tmp_path / "hf")
    assert said.code == 0, said.err
    before = load_file(run.parent / "model" / "ema.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    of_pictures = {"llm2vae", "vae2llm", "time_embedder", "connector"}
    assert changed and all("_moe_gen" in name or name.split(".")[0] in of_pictures for name in changed)
    assert any("_moe_gen" in name for name in changed) and {"llm2vae.weight", "vae2llm.bias"} <= changed
    assert (tmp_path / "hf" / "ae.safetensors").read_bytes() == (run.parent / "model" / "ae.safetensors").read_bytes()
    whole = drawn(tmp_path / "hf", tmp_path / "a.png")
    assert whole.shape == (8, 12, 3)
    assert np.array_equal(whole, drawn(tmp_path / "broken", tmp_path / "b.png"))
    assert not np.array_equal(whole, drawn(run.parent / "model", tmp_path / "c.png"))
    picture = run.parent / "rows" / "1.png"
    edited = mm("infer", tmp_path / "broken", "--image", picture, "--prompt", "Turn.", "--draw", tmp_path / "d.png",
                "--steps", 2, "--json")  # fmt: skip
    assert edited.code == 0 and json.loads(edited.out)["width"] == 12, edited.err  # as large as what is edited
    said = mm("infer", tmp_path / "hf", "--image", picture, "--prompt", "Which?", "--max-new-tokens", 3, "--json")
    assert said.code == 0 and set(json.loads(said.out)) == {"text", "finished"}, said.err


def test_adapters_of_one_set_leave_the_other_alone(run: Path, tmp_path: Path) -> None:
    train(run, tmp_path / "run", *LORA)
    said = mm("export", tmp_path / "run", tmp_path / "merged", "--merge")
    assert said.code == 0, said.err
    before = load_file(run.parent / "model" / "ema.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name.split("layers.")[-1][2:] for name in before if not torch.equal(before[name], after[name])}
    expected = {"self_attn.q_proj_moe_gen", "self_attn.o_proj_moe_gen", "mlp_moe_gen.down_proj"}
    assert changed == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.ulysses_parallel_size=2"], "no decoder whose attention"),
        (["parallel.ring_attention_size=2"], "no decoder whose attention"),
        (["parallel.tensor_parallel_size=2"], "not built for models that answer and draw"),
        (["parallel.pipeline_parallel_size=2", "training.gradient_accumulation_steps=2"], "cannot be cut into stages"),
        (["posttrain.method=dpo", "data.dataset_param.basic_parameters.stage=rm"], "for these rows"),
        (["features.loss_cfg.loss_type=raw"], "models that answer and draw"),
        (["training.diffusion.shift=resolution"], "a shift of generators"),
        (["training.diffusion.caption_dropout=0.1"], "text_cond_dropout_prob"),
        (["data.dataset_param.preprocess_parameters.vae_max_image_size=64"], "places for"),
        (["data.dataset_param.basic_parameters.train_on_prompt=true"], "for these rows"),
        (["data.dataset_param.basic_parameters.vit_cond_dropout_prob=1.5"], "is not a share"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, words: list[str], says: str) -> None:
    said = mm("check", run, *words, "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out + said.err


def test_weights_of_two_terms_are_for_such_models_alone(run: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_run import make_tiny_run

    said = mm("check", make_tiny_run(tmp_path), "features.loss_cfg.text_loss_weight=1")
    assert said.code != 0 and "models that answer and draw by denoising" in said.out + said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "a", "--steps", 2], "nothing is drawn"),
        (["--prompt", "a", "--draw", "a.png", "--temperature", 1], "the answer is a picture"),
        (["--prompt", "a", "--draw", "a.png", "--size", "8x13"], "no size of its pictures"),
        (["--prompt", "a", "--audio", "a.wav"], "--audio  is for language models"),
        (["--data", "rows.jsonl", "--out", "b"], "--data  is for language models"),
        (["--prompt", "a", "--image", "none.png"], "no such file"),
        (["--prompt", "a", "--lora", "x"], "is not built for"),
        (["--prompt", "a", "--frames", 4], "this model is a model that answers and draws"),
    ],
)
def test_questions_that_make_no_sense_are_refused(run: Path, words: list[Any], says: str) -> None:
    said = mm("infer", run.parent / "model", *words)
    assert said.code != 0 and says in said.err and "Traceback" not in said.err, said.err
