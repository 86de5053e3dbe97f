"""Towers laid out otherwise than their decoder, and media shared over ranks by cost: through the trainer equal to one
process, in fp64, on rows with 0, 1 and 2 uneven images, with videos beside them, and with text alone on some ranks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.distributed.towers import media as encoder_media
from mindspeed_mm.fsdp.distributed.towers.travel import Leg, Media, feature_legs
from mindspeed_mm.fsdp.params.sizes.encoder import EncoderSizes
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_models import MERGE_SIZE, SPECIAL_TOKENS, build_tokenizer
from tests.helpers.tiny_run import make_tiny_run

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
TP = "parallel.tensor_parallel_size=2"
RING, ULYSSES = "parallel.ring_attention_size=2", "parallel.ulysses_parallel_size=2"
BALANCE = "parallel.encoder_plan.balance=true"
WHOLE_TOWER = "parallel.encoder_plan.tensor_parallel_size=1"
WHOLE_MEDIA = ("parallel.encoder_plan.ring_attention_size=1", "parallel.encoder_plan.ulysses_parallel_size=1")
TEAM_ULYSSES, TEAM_RING = (f"parallel.encoder_plan.{key}=2" for key in ("ulysses_parallel_size", "ring_attention_size"))
RECOMPUTE, COPIES = "features.recompute=true", "parallel.fully_shard_parallel_size=1"
LORA = ("training.lora.enable=true", "training.lora.target_modules=[qkv, q_proj, linear_fc1]")
FROZEN = 'model.freeze=["model.visual.*"]'

CASES = {  # name → (rows, ranks, data ranks, accumulation, overrides)
    "balance, dp2": ("pictures", 2, 2, 1, (BALANCE,)),
    "balance, dp2, a row at a time": ("pictures", 2, 2, 4, (BALANCE,)),
    "balance, dp2, videos, copies": ("videos", 2, 2, 4, (BALANCE, COPIES)),
    "balance, dp2, text": ("text", 2, 2, 1, (BALANCE,)),
    "tp2, whole tower": ("pictures", 2, 1, 8, (TP, WHOLE_TOWER, RECOMPUTE)),
    "ring2, whole media": ("pictures", 2, 1, 2, (RING, *WHOLE_MEDIA)),
    "dp2, tower ulysses2": ("pictures", 2, 2, 4, (BALANCE, TEAM_ULYSSES)),
    "balance, dp2 × tp2, whole tower": ("pictures", 4, 2, 2, (BALANCE, TP, WHOLE_TOWER)),
    "balance, dp2 × ulysses2, whole media": ("videos", 4, 2, 4, (BALANCE, ULYSSES, *WHOLE_MEDIA)),
}
SLOW = {
    "balance, dp2 × tp2": ("pictures", 4, 2, 2, (BALANCE, TP)),
    "balance, dp2 × ring2": ("pictures", 4, 2, 4, (BALANCE, RING)),
    "balance, dp2, recompute": ("videos", 2, 2, 2, (BALANCE, RECOMPUTE)),
    "balance, dp2, lora": ("pictures", 2, 2, 2, (BALANCE, *LORA)),
    "balance, dp2, frozen": ("pictures", 2, 2, 2, (BALANCE, FROZEN)),
    "balance, dp4": ("videos", 4, 4, 2, (BALANCE,)),
    "balance, dp4, hsdp": ("pictures", 4, 4, 2, (BALANCE, "parallel.fully_shard_parallel_size=2")),
    "hsdp, dp2 × tp2, whole tower": ("pictures", 4, 2, 4, (TP, WHOLE_TOWER, COPIES)),
    "tp2, whole tower, lora": ("pictures", 2, 1, 2, (TP, WHOLE_TOWER, *LORA)),
    "tp2, tower ring2": ("pictures", 2, 1, 8, (TP, WHOLE_TOWER, TEAM_RING)),
    "dp4, tower ring2 × ulysses2": ("videos", 4, 4, 2, (BALANCE, TEAM_RING, TEAM_ULYSSES)),
    "dp4, tower ring2, recompute": ("pictures", 4, 4, 2, (BALANCE, TEAM_RING, RECOMPUTE)),
    "tp2 × ring2, whole tower, whole media": ("pictures", 4, 1, 4, (TP, RING, WHOLE_TOWER, *WHOLE_MEDIA)),
    "tp2 × ring2, whole tower": ("pictures", 4, 1, 4, (TP, RING, WHOLE_TOWER)),
    "balance, dp2 × tp2 × ring2, whole tower, whole media":
        ("videos", 8, 2, 2, (BALANCE, TP, RING, WHOLE_TOWER, *WHOLE_MEDIA)),
}  # fmt: skip
FAULTS = {
    "features in another order": "balance, dp2",
    "gradients counted on every tensor rank": "tp2, whole tower",
    "gradients of one context rank alone": "ring2, whole media",
    "tower not summed over tensor ranks": "tp2, whole tower",
}
FP64 = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}
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


def steps_of(yamls: dict[str, str], rows: str, words: list[str]) -> list[StepRecord]:
    """Two steps on rows of this name, of which `videos` are pictures made into clips."""
    if rows != "videos":
        return train_steps(yamls[rows], words)
    step = TrainEngine.train_step

    def train_step(self: Any, micro_batches: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, [with_videos(batch) for batch in micro_batches], *args, **kwargs)

    with mock.patch.object(TrainEngine, "train_step", train_step):
        return train_steps(yamls["pictures"], words)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ...]:
    folder = tmp_path_factory.mktemp("encoders")
    counts = {"pictures": (1, 0, 2, 1, 0), "text": (0,)}
    return tuple((name, str(make_media_run(folder / name, images))) for name, images in counts.items())


def reference_of(case: tuple[Any, ...]) -> tuple[str, tuple[str, ...]]:
    """What one process trains for a case: the rows, and those overrides that are no layout."""
    rows, *_, words = case
    return rows, tuple(word for word in words if not word.startswith(("parallel.", "features.")))


def words_of(data_ranks: int, accumulation: int, words: tuple[str, ...]) -> list[str]:
    micro = GLOBAL_BATCH // data_ranks // accumulation
    return [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}", *words]


def run_cases(ranks: int, yamls: dict[str, str], slow: bool) -> dict[Any, list[StepRecord]]:
    """Every case that takes this many ranks; 1: the references."""
    cases = SLOW if slow else CASES
    with mock.patch.object(torch.Tensor, "float", float_unless_double):
        if ranks == 1:
            references = {reference_of(case) for case in cases.values()}
            return {str(each): steps_of(yamls, each[0], words_of(1, 1, each[1])) for each in sorted(references)}
        measured = {}
        for name, (rows, needed, data_ranks, accumulation, words) in cases.items():
            if needed == ranks:
                measured[name] = steps_of(yamls, rows, words_of(data_ranks, accumulation, words))
        for fault, name in FAULTS.items():
            if not slow and cases[name][1] == ranks:
                rows, _, data_ranks, accumulation, words = cases[name]
                with planted(fault):
                    measured[fault] = steps_of(yamls, rows, words_of(data_ranks, accumulation, words))
    return measured


def planted(fault: str) -> Any:
    """The fault as a patch of the one function that it would be a bug in."""
    if fault == "features in another order":
        places = Media.places

        def swapped(self: Media, items: Any, unit: int = 1) -> dict[int, range]:
            found = places(self, items, unit)
            pairs = [(a, b) for a in found for b in found if a < b and unit == 1 and len(found[a]) == len(found[b])]
            for a, b in pairs[:1]:
                found[a], found[b] = found[b], found[a]
            return found

        return mock.patch.object(Media, "places", swapped)
    if fault == "gradients counted on every tensor rank":

        def from_all(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
            return (Leg(item, target, source) for item, source, target in feature_legs(media, sizes))

        return mock.patch.object(encoder_media, "gradient_legs", from_all)
    if fault == "gradients of one context rank alone":

        def from_first(media: Media, sizes: EncoderSizes) -> Iterator[Leg]:
            return (Leg(item, target, source) for item, source, target in feature_legs(media, sizes) if not target % 2)

        return mock.patch.object(encoder_media, "gradient_legs", from_first)
    return mock.patch.object(torch_parallelize, "on_tower_mesh", lambda model, units, *_: units)


def float_unless_double(tensor: torch.Tensor) -> torch.Tensor:
    """Models round to fp32 here and there, which would be all that could be seen in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...], slow: bool = False) -> list[dict[Any, list[StepRecord]]]:
    return run_ranks(ranks, run_cases, ranks, dict(yamls), slow, timeout_s=400)


def check(name: str, yamls: tuple[tuple[str, str], ...], slow: bool) -> None:
    case = (SLOW if slow else CASES)[name]
    expected = results_of(1, yamls, slow)[0][str(reference_of(case))]
    for measured in results_of(case[1], yamls, slow):
        compare_steps(expected, measured[name], TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_layout_equals_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_layouts_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yamls: tuple[tuple[str, str], ...]) -> None:
    case = CASES[FAULTS[fault]]
    measured = results_of(case[1], yamls)[0][fault]
    with pytest.raises(ParityError):
        compare_steps(results_of(1, yamls)[0][str(reference_of(case))], measured, TOLERANCE)
