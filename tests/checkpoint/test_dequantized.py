"""Weights in few bits as numbers: by each format's formula, number by number, and by code that somebody else wrote; any
region of them; what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mindspeed_mm.checkpoint.dequantized import dequantized, read_quantization, without_quantization
from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor
from mindspeed_mm.core.errors import ModelFolderError

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed_config(bits: int = 4, **weights: Any) -> dict[str, Any]:
    """As Kimi-K2.5's config.json has it."""
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def packed_mxfp4(**weights: Any) -> dict[str, Any]:
    """As Kimi-K3's config.json has it."""
    config = packed_config(4, type="float", group_size=32, scale_dtype="torch.uint8", **weights)
    return config | {"format": "mxfp4-pack-quantized"}


def numbers_of(stored: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
    held = {key: HeldTensor(tensor) for key, tensor in stored.items()}
    return dequantized(held, {"text_config": {"quantization_config": section}}, "folder")


def fp8() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Codes and scales, and the numbers; the last blocks are cut off."""
    codes = torch.randn(40, 20).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) + 0.5
    numbers = [[float(codes[r, c]) * float(scales[r // 16, c // 8]) for c in range(20)] for r in range(40)]
    return {"a.weight": codes, "a.weight_scale_inv": scales}, torch.tensor(numbers, dtype=torch.float64)


def e2m1(code: int) -> float:
    """By the table in the specification."""
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2))


def mxfp4() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(2 experts, 6 rows, 3 groups of 32)."""
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 131, (2, 6, 3), dtype=torch.uint8)
    numbers = torch.empty(2, 96, 6, dtype=torch.float64)
    for expert in range(2):
        for row in range(6):
            for at in range(96):
                byte = int(blocks[expert, row, at // 32, at % 32 // 2])
                code = byte >> 4 if at % 2 else byte & 15
                numbers[expert, at, row] = e2m1(code) * 2.0 ** (int(scales[expert, row, at // 32]) - 127)
    return {"a_blocks": blocks, "a_scales": scales}, numbers


def mxfp4_rows() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Five rows of three groups of 32, as Kimi-K3's experts lie."""
    codes = torch.randint(256, (5, 48), dtype=torch.uint8)
    scales = torch.randint(120, 131, (5, 3), dtype=torch.uint8)
    numbers = torch.empty(5, 96, dtype=torch.float64)
    for row in range(5):
        for at in range(96):
            byte = int(codes[row, at // 2])
            numbers[row, at] = e2m1(byte >> 4 if at % 2 else byte & 15) * 2.0 ** (int(scales[row, at // 32]) - 127)
    return {"a.weight_packed": codes, "a.weight_scale": scales}, numbers


def packed(bits: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Five rows of 24 whole numbers in groups of 8."""
    draw = random.Random(0)
    whole = [[draw.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1)) for _ in range(24)] for _ in range(5)]
    scales = (torch.rand(5, 3) + 0.5).bfloat16()
    words, per_word = [], 32 // bits
    for row in whole:
        for start in range(0, 24, per_word):
            word = sum((n + 2 ** (bits - 1)) << bits * at for at, n in enumerate(row[start : start + per_word]))
            words.append(word - 2**32 if word >= 2**31 else word)
    codes = torch.tensor(words, dtype=torch.int32).view(5, -1)
    stored = {"a.weight_packed": codes, "a.weight_scale": scales, "a.weight_shape": torch.tensor([5, 24])}
    numbers = [[n * float(scales[r, c // 8]) for c, n in enumerate(row)] for r, row in enumerate(whole)]
    return stored, torch.tensor(numbers, dtype=torch.float64)


CASES = {
    "fp8": (fp8, FP8, "a.weight"),
    "mxfp4": (mxfp4, MXFP4, "a"),
    "4 bits": (lambda: packed(4), packed_config(), "a.weight"),
    "8 bits": (lambda: packed(8), packed_config(8), "a.weight"),
    "mxfp4 rows": (mxfp4_rows, packed_mxfp4(), "a.weight"),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_formula_and_any_region_can_be_read(name: str) -> None:
    torch.manual_seed(0)
    make, section, key = CASES[name]
    stored, expected = make()
    made = numbers_of(stored | {"norm.weight": torch.ones(3, dtype=torch.bfloat16)}, section)
    assert made.keys() == {key, "norm.weight"}
    assert made["norm.weight"].dtype == torch.bfloat16
    tensor = made[key]
    assert tensor.shape == tuple(expected.shape) and tensor.dtype == torch.float32
    # One rounding of the product to fp32, and none where the scale is a power of two.
    torch.testing.assert_close(tensor.read().double(), expected, rtol=0 if "mxfp4" in name else 2**-24, atol=0)
    whole, draw = tensor.read(), random.Random(1)
    for _ in range(50):
        region = []
        for size in expected.shape:
            start = draw.randrange(size)
            region.append((start, draw.randint(1, size - start)))
        out = torch.empty([length for _, length in region], dtype=torch.float64)
        tensor.copy_to(out, tuple(region))
        slices = tuple(slice(start, start + length) for start, length in region)
        assert torch.equal(out, whole[slices].double())


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    stored, _ = mxfp4()
    theirs = convert_moe_packed_tensors(stored["a_blocks"], stored["a_scales"], dtype=torch.float32)
    assert torch.equal(numbers_of(stored, MXFP4)["a"].read(), theirs)


def test_scales_of_stacked_experts() -> None:
    torch.manual_seed(0)
    codes, scales = torch.randn(3, 20, 9).to(torch.float8_e4m3fn), torch.rand(3, 2, 2)
    made = numbers_of({"a.weight": codes, "a.weight_scale_inv": scales}, FP8)["a.weight"].read()
    for expert in range(3):
        alone = {"a.weight": codes[expert], "a.weight_scale_inv": scales[expert]}
        assert torch.equal(made[expert], numbers_of(alone, FP8)["a.weight"].read())


def test_a_configuration_of_numbers_says_nothing_of_formats() -> None:
    config = {"a": 1, "quantization_config": FP8, "text_config": {"b": 2, "quantization_config": MXFP4}}
    assert without_quantization(config) == {"a": 1, "text_config": {"b": 2}}
    held = {"a.weight": HeldTensor(torch.ones(2, 2))}
    assert dequantized(held, {}, "folder") == held


@pytest.mark.parametrize(
    "section",
    [
        "awq",
        {"quant_method": "awq"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "fmt": "e4m3"},
        packed_config(3),
        packed_config(4, symmetric=False),
        packed_config(4, type="float"),
        packed_config(4, actorder="group"),
        packed_config() | {"format": "marlin-24"},
        packed_config() | {"config_groups": {}},
        packed_mxfp4() | {"config_groups": {}},
        packed_config() | {"format": "mxfp4-pack-quantized"},
    ],
)
def test_other_formats_are_refused_by_name(section: Any) -> None:
    method = section if isinstance(section, str) else section["quant_method"]
    with pytest.raises(ModelFolderError, match=rf"quantised \({method}") as caught:
        read_quantization(section, "folder/config.json", "quantization_config")
    (problem,) = caught.value.problems
    assert problem.key == "quantization_config" and "unquantised weights" in problem.way_out


@pytest.mark.parametrize("name", CASES)
def test_scales_of_another_shape_are_refused(name: str) -> None:
    make, section, _ = CASES[name]
    stored, _ = make()
    key = next(key for key in stored if "scale" in key)
    stored[key] = stored[key][:-1] if stored[key].dim() == 2 else stored[key][:, :-1]
    with pytest.raises(ModelFolderError, match=r"should be|groups"):
        numbers_of(stored, section)


@pytest.mark.parametrize("name", CASES)
def test_codes_without_scales_are_not_made_up(name: str) -> None:
    """They come out as they lie there, and the model has no place for them, or for bytes."""
    make, section, key = CASES[name]
    stored, _ = make()
    lost = next(each for each in stored if "scale" in each)
    kept = {each: tensor for each, tensor in stored.items() if each != lost}
    made = numbers_of(kept, section)
    assert key not in made or made[key].dtype.itemsize == 1


def test_bits_are_read_from_the_lowest_on() -> None:
    """By hand: 0x…21 is 1 and 2, less 8, times a half."""
    stored = {
        "a.weight_packed": torch.tensor([[0x76543210]], dtype=torch.int32),
        "a.weight_scale": torch.tensor([[0.5]]),
        "a.weight_shape": torch.tensor([1, 8]),
    }
    assert numbers_of(stored, packed_config())["a.weight"].read().tolist() == [[(n - 8) / 2 for n in range(8)]]
