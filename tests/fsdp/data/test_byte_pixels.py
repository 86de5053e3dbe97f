"""Pictures that travel as bytes: the numbers on the device are those that the processor gave, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils import byte_pixels
from mindspeed_mm.fsdp.data.data_utils.byte_pixels import as_bytes, bytes_of, tables_of, with_stand_ins
from mindspeed_mm.fsdp.data.dataloader.transport import moved
from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()
import transformers  # noqa: E402  (after the guard)

CPU = torch.device("cpu")
EIGHTH = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil")
QUARTER = tuple(
    f"{family}ImageProcessor{backend}"
    for family in ("CLIP", "Siglip", "LlavaNext", "Gemma3", "Pixtral", "GotOcr2", "ViT")
    for backend in ("", "Pil")
)


def pictures() -> list[Image.Image]:
    """Every byte at every place, about."""
    draw = np.random.default_rng(0)
    return [Image.fromarray(draw.integers(0, 256, (60 + 28 * n, 84, 3), dtype=np.uint8)) for n in range(2)]


def arrived(batch: dict[str, Any], tables: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A batch as the training process has it, and its tensors on the device."""
    held = with_stand_ins(as_bytes(dict(batch), tables), tables)
    return held, {key: moved(value, CPU) for key, value in held.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize(
    ("name", "share"), [(name, share) for names, share in ((EIGHTH, 8), (QUARTER, 4)) for name in names]
)
def test_numbers_of_a_processor_come_back(name: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_pixels, "LEAST_BYTES", 1)
    images = getattr(transformers, name)()
    pixels = torch.as_tensor(np.asarray(images(pictures()[:1], return_tensors="np")["pixel_values"]))
    held, on_device = arrived({"pixel_values": pixels}, tables_of(SimpleNamespace(image_processor=images)))
    coded = bytes_of(held["pixel_values"])
    assert coded is not None and coded[0].dtype == torch.uint8
    assert pixels.nbytes == share * coded[0].nbytes
    assert held["pixel_values"].shape == pixels.shape
    assert same_bits(on_device["pixel_values"], pixels)
    with pytest.raises(NotImplementedError, match="meta"):
        held["pixel_values"].tolist()


def test_numbers_that_are_no_bytes_travel_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number that the table does not give, a zero of the other sign, what is not a number, another type."""
    monkeypatch.setattr(byte_pixels, "LEAST_BYTES", 1)
    images = transformers.SiglipImageProcessor(image_mean=[0.0] * 3)
    tables = tables_of(SimpleNamespace(image_processor=images))
    pixels = images(pictures()[:1], return_tensors="pt")["pixel_values"]
    pixels[0, 0, 0, 0] = 0.0
    assert bytes_of(arrived({"pixel_values": pixels}, tables)[0]["pixel_values"]) is not None
    for wrong in (0.1234567, -0.0, float("nan"), float("inf"), 1e9):
        changed = pixels.clone()
        changed[0, 0, 0, 0] = wrong
        held, on_device = arrived({"pixel_values": changed}, tables)
        assert bytes_of(held["pixel_values"]) is None and same_bits(on_device["pixel_values"], changed)
    for other in (pixels.double(), pixels.bfloat16()):
        held, on_device = arrived({"pixel_values": other}, tables)
        assert on_device["pixel_values"] is other


def test_a_processor_that_does_not_normalise_has_no_table() -> None:
    images = transformers.CLIPImageProcessor(do_normalize=False)
    assert tables_of(SimpleNamespace(image_processor=images)) == {} == tables_of(None)


def test_bytes_of_other_numbers_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that were changed after they were made of bytes are sought again, and travel as they are."""
    monkeypatch.setattr(byte_pixels, "LEAST_BYTES", 1)
    images = transformers.Qwen2VLImageProcessor()
    tables = tables_of(SimpleNamespace(image_processor=images))
    codes = torch.randint(0, 256, (20, 3, 196), dtype=torch.uint8)
    numbers = byte_pixels.Levels(tables["pixel_values"][0], (20, 1176), 2).numbers(codes)
    known = byte_pixels.made_of(numbers.clone(), codes, 2)
    held, on_device = arrived({"pixel_values": known}, tables)
    assert bytes_of(held["pixel_values"])[0] is codes and same_bits(on_device["pixel_values"], numbers)  # type: ignore[index]
    changed = byte_pixels.made_of(numbers * 1.5, codes, 2)
    held, on_device = arrived({"pixel_values": changed}, tables)
    assert bytes_of(held["pixel_values"]) is None and same_bits(on_device["pixel_values"], changed)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_real_rows(
    workers: int,
    make_rows: Callable[..., Path],
    param: Callable[..., DatasetParam],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As without bytes; where no worker sends them, nothing is changed into bytes."""
    monkeypatch.setattr(byte_pixels, "LEAST_BYTES", 1)
    split = {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 5}
    dataset, _ = build_mm_dataset(param(make_rows(12)))
    plain, coded = (
        build_mm_dataloader(dataset, DataloaderParam(num_workers=workers), **split, pixels_as_bytes=wanted)
        for wanted in (False, True)
    )
    found = 0
    for step, other in islice(zip(plain, coded, strict=True), 3):
        for batch, sent in zip(step, other, strict=True):
            assert batch.keys() == sent.keys() and batch["sample_ids"] == sent["sample_ids"]
            found += bytes_of(sent["pixel_values"]) is not None
            assert same_bits(moved(sent["pixel_values"], CPU), batch["pixel_values"])
    assert found == (3 if workers else 0)
