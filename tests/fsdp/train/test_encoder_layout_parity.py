"""Towers laid out otherwise than their decoder, and media shared over ranks by cost: through the trainer equal to one
process, in fp64, on rows with 0, 1 and 2 uneven images, with videos beside them, and with text alone on some ranks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.distributed.towers import media as encoder_media
from mindspeed_mm.fsdp.distributed.towers.travel import Leg, Media, feature_legs
from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.helpers.parity import StepRecord
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import FP64, RING, TP, ULYSSES
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_models import MERGE_SIZE, SPECIAL_TOKENS, build_tokenizer
from tests.helpers.tiny_run import make_tiny_run

BALANCE = "parallel.encoder_plan.balance=true"
WHOLE_TOWER = "parallel.encoder_plan.tensor_parallel_size=1"
WHOLE_MEDIA = ("parallel.encoder_plan.ring_attention_size=1", "parallel.encoder_plan.ulysses_parallel_size=1")
TEAM_ULYSSES, TEAM_RING = (f"parallel.encoder_plan.{key}=2" for key in ("ulysses_parallel_size", "ring_attention_size"))
RECOMPUTE, COPIES = "features.recompute=true", "parallel.fully_shard_parallel_size=1"

CASES = {
    "balance, dp2": Case("pictures", 2, 2, 1, (BALANCE,)),
    "balance, dp2, videos, copies": Case("videos", 2, 2, 4, (BALANCE, COPIES)),
    "balance, dp2, text": Case("text", 2, 2, 1, (BALANCE,)),
    "tp2, whole tower": Case("pictures", 2, 1, 8, (TP, WHOLE_TOWER, RECOMPUTE)),
    "ring2, whole media": Case("pictures", 2, 1, 2, (RING, *WHOLE_MEDIA)),
    "dp2, tower ulysses2": Case("pictures", 2, 2, 4, (BALANCE, TEAM_ULYSSES)),
}
SLOW = {
    "balance, dp2, a row at a time": Case("pictures", 2, 2, 4, (BALANCE,)),
    "balance, dp2 × ulysses2, whole media": Case("videos", 4, 2, 4, (BALANCE, ULYSSES, *WHOLE_MEDIA)),
    "balance, dp2 × tp2, whole tower": Case("pictures", 4, 2, 2, (BALANCE, TP, WHOLE_TOWER)),
    "balance, dp2 × tp2": Case("pictures", 4, 2, 2, (BALANCE, TP)),
    "balance, dp2 × ring2": Case("pictures", 4, 2, 4, (BALANCE, RING)),
    "balance, dp2, recompute": Case("videos", 2, 2, 2, (BALANCE, RECOMPUTE)),
    "balance, dp2, lora": Case("pictures lora", 2, 2, 2, (BALANCE,)),
    "balance, dp2, frozen": Case("pictures frozen", 2, 2, 2, (BALANCE,)),
    "balance, dp4": Case("videos", 4, 4, 2, (BALANCE,)),
    "balance, dp4, hsdp": Case("pictures", 4, 4, 2, (BALANCE, "parallel.fully_shard_parallel_size=2")),
    "hsdp, dp2 × tp2, whole tower": Case("pictures", 4, 2, 4, (TP, WHOLE_TOWER, COPIES)),
    "tp2, whole tower, lora": Case("pictures lora", 2, 1, 2, (TP, WHOLE_TOWER)),
    "tp2, tower ring2": Case("pictures", 2, 1, 8, (TP, WHOLE_TOWER, TEAM_RING)),
    "dp4, tower ring2 × ulysses2": Case("videos", 4, 4, 2, (BALANCE, TEAM_RING, TEAM_ULYSSES)),
    "dp4, tower ring2, recompute": Case("pictures", 4, 4, 2, (BALANCE, TEAM_RING, RECOMPUTE)),
    "tp2 × ring2, whole tower, whole media": Case("pictures", 4, 1, 4, (TP, RING, WHOLE_TOWER, *WHOLE_MEDIA)),
    "tp2 × ring2, whole tower": Case("pictures", 4, 1, 4, (TP, RING, WHOLE_TOWER)),
    "balance, dp2 × tp2 × ring2, whole tower, whole media":
        Case("videos", 8, 2, 2, (BALANCE, TP, RING, WHOLE_TOWER, *WHOLE_MEDIA)),
}  # fmt: skip
SIZES = ((32, 32), (64, 32), (48, 64), (16, 32))


def make_media_run(folder: Path, counts: tuple[int, ...]) -> Path:
    """Rows that hold, one after the other, so many uneven images."""
    draw = random.Random(3)
    (folder / "media").mkdir(parents=True)
    rows = []
    for number in range(16):
        images = []
        for image in range(counts[number % len(counts)]):
            images.append(f"media/{number}_{image}.png")
            width, height = SIZES[(number + image // 2) % len(SIZES)]
            pixels = bytes(draw.randrange(256) for _ in range(width * height * 3))
            Image.frombytes("RGB", (width, height), pixels).save(folder / images[-1])
        question = "<image>" * len(images) + "What is it like?"
        answer = " ".join(draw.choice(("red", "flat", "far")) for _ in range(draw.randint(1, 9)))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"row{number}", "messages": messages, "images": images})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_tiny_run(folder, **FP64)


def with_videos(batch: Batch) -> Batch:
    """The batch with the pictures of every other row as videos, neighbours of one size as frames of one."""
    if "pixel_values" not in batch:
        return batch
    grids, ids = batch["image_grid_thw"].tolist(), batch["input_ids"].clone()
    pixels = list(batch["pixel_values"].split([h * w for _, h, w in grids]))
    types = batch["mm_token_type_ids"].clone()
    found: dict[str, tuple[list[Any], list[Any]]] = {"image": ([], []), "video": ([], [])}
    for row, name in enumerate(batch["sample_ids"]):
        is_video = int(re.findall(r"\d+", str(name))[-1]) % 2 == 0
        own_pixels, own_grids = found["video" if is_video else "image"]
        tokens, last = int((types[row] == 1).sum()), None
        while tokens:
            _, height, width = grids.pop(0)
            own_pixels.append(pixels.pop(0))
            tokens -= height * width // MERGE_SIZE**2
            if is_video and last == (height, width):
                own_grids[-1][0] += 1
            else:
                own_grids.append([1, height, width])
            last = height, width
        if is_video:
            ids[row][types[row] == 1] = build_tokenizer().convert_tokens_to_ids(SPECIAL_TOKENS["video_token"])
            types[row][types[row] == 1] = 2
    media: Batch = {"input_ids": ids, "mm_token_type_ids": types}
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if found[kind][0]:
            media |= {key: torch.cat(found[kind][0]), f"{kind}_grid_thw": torch.tensor(found[kind][1])}
    others = {key: value for key, value in batch.items() if key not in ("pixel_values", "image_grid_thw")}
    return others | media


def steps_of(yaml: str, words: list[str]) -> list[StepRecord]:
    """Two steps; pictures of rows called `videos` are made into clips."""
    if Path(yaml).parent.name != "videos":
        return train_steps(yaml, words)
    step = TrainEngine.train_step

    def train_step(self: Any, micro_batches: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, [with_videos(batch) for batch in micro_batches], *args, **kwargs)

    with mock.patch.object(TrainEngine, "train_step", train_step):
        return train_steps(yaml, words)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One process trains each of these rows without any layout."""
    folder = tmp_path_factory.mktemp("encoders")
    counts = {"pictures": (1, 0, 2, 1, 0), "videos": (1, 0, 2, 1, 0), "text": (0,)}
    return {name: str(make_media_run(folder / name, images)) for name, images in counts.items()}


def features_swapped() -> AbstractContextManager[Any]:
    places = Media.places

    def swapped(self: Media, items: Any, unit: int = 1) -> dict[int, range]:
        found = places(self, items, unit)
        pairs = [(a, b) for a in found for b in found if a < b and unit == 1 and len(found[a]) == len(found[b])]
        for a, b in pairs[:1]:
            found[a], found[b] = found[b], found[a]
        return found

    return mock.patch.object(Media, "places", swapped)


def gradients_from_all() -> AbstractContextManager[Any]:
    def from_all(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
        return (Leg(item, target, source) for item, source, target in feature_legs(media, sizes))

    return mock.patch.object(encoder_media, "gradient_legs", from_all)


def gradients_from_the_first() -> AbstractContextManager[Any]:
    def from_first(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
        return (Leg(item, target, source) for item, source, target in feature_legs(media, sizes) if not target % 2)

    return mock.patch.object(encoder_media, "gradient_legs", from_first)


def tower_not_summed() -> AbstractContextManager[Any]:
    def mesh_of_the_model(*_: Any) -> Any:
        return get_parallel_state().axis_mesh("fsdp")

    return mock.patch.object(torch_parallelize, "build_tower_mesh", mesh_of_the_model)


RUNS = ParityRuns(
    __file__,
    CASES,
    SLOW,
    slow_faults={
        "features in another order": Fault("balance, dp2", features_swapped),
        "gradients counted on every tensor rank": Fault("tp2, whole tower", gradients_from_all),
        "gradients of one context rank alone": Fault("ring2, whole media", gradients_from_the_first),
        "tower not summed over tensor ranks": Fault("tp2, whole tower", tower_not_summed),
    },
    kinds={
        "lora": ("training.lora.enable=true", "training.lora.target_modules=[qkv, q_proj, linear_fc1]"),
        "frozen": ('model.freeze=["model.visual.*"]',),
    },
    steps=steps_of,
)


@pytest.mark.parametrize("name", RUNS.case_params())
def test_layout_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
