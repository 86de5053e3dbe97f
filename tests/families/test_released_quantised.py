"""Releases in few bits, in their released keys: they load as the numbers that they stand for, train and answer as a
folder of these numbers does, and are exported as one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from tests.families.test_released_training import exported, outline
from tests.helpers.released_rows import ROWS, write_run
from tests.helpers.runs import differing, mm, tensors, train
from tests.helpers.written_families import loaded

Tensors = dict[str, torch.Tensor]
BLOCK, GROUP = 16, 8


def in_fp8(key: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """DeepSeek-V3's way, in blocks of 16 × 16: what is stored, and the numbers that it stands for."""
    rows, columns = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, -columns % BLOCK, 0, -rows % BLOCK))
    grid = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = grid.abs().amax(dim=(1, 3)) / 448
    codes = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    back = (codes.float() * scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    stored = codes.float().flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return {key: stored, f"{key}_scale_inv": scales}, back.contiguous()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(key: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """GPT-OSS's way, of (E, K, N)."""
    groups = numbers.transpose(1, 2).unflatten(2, (-1, 32))  # (E, N, K / 32, 32)
    exponents = (groups.abs().amax(dim=-1).log2().floor() - 2).int()
    scaled = groups / torch.exp2(exponents[..., None].float())
    codes = (scaled[..., None] - E2M1).abs().argmin(dim=-1)
    back = (E2M1[codes] * torch.exp2(exponents[..., None].float())).flatten(2).transpose(1, 2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{key}_blocks": blocks, f"{key}_scales": (exponents + 127).to(torch.uint8)}, back.contiguous()


def in_mxfp4_rows(key: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Kimi-K3's way: the same along the rows of a matrix, codes of a row one behind the other."""
    stored, back = in_mxfp4("", numbers.T[None])
    return {f"{key}_packed": stored["_blocks"][0].flatten(1), f"{key}_scale": stored["_scales"][0]}, back[
        0
    ].T.contiguous()


def in_int4(key: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Kimi-K2.5's way, in groups of 8."""
    groups = numbers.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(dim=2) / 7
    whole = (groups / scales[..., None]).round().int()
    back = (whole.float() * scales[..., None]).flatten(1)
    shifts = torch.arange(8) * 4
    words = ((whole.flatten(1).unflatten(1, (-1, 8)).long() + 8) << shifts).sum(dim=2)
    codes = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = torch.tensor(numbers.shape)
    return {f"{key}_packed": codes, f"{key}_scale": scales, f"{key}_shape": shape}, back


class Kept(NamedTuple):
    """How a release is quantised."""

    row: str
    write: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
    section: Mapping[str, Any]
    is_kept: Callable[[str], bool]
    """Of a key, whether it is in few bits."""
    inside: str = ""
    """Section of config.json that says it."""


_INT4 = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True, "type": "int", "actorder": None}
_FP4 = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "float"}
FORMATS = {
    "fp8": Kept(
        "deepseek_v3", in_fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        lambda key: key.endswith("proj.weight") or "kv_a_proj" in key,
    ),
    "mxfp4": Kept(
        "gpt_oss", in_mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        lambda key: key.endswith(("experts.gate_up_proj", "experts.down_proj")),
    ),
    "int4": Kept(
        "kimik2_5", in_int4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}}},
        lambda key: ".mlp.experts." in key, "text_config",
    ),
    "mxfp4 rows": Kept(
        "kimi_k3", in_mxfp4_rows,
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["re:.*self_attn.*"],
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FP4}}},
        lambda key: ".experts." in key, "text_config",
    ),
}  # fmt: skip


class Folders(NamedTuple):
    """Runs from the same weights: in few bits, and as numbers."""

    kept: Path
    plain: Path


@pytest.fixture(scope="module", params=FORMATS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The YAML of each."""
    kept = FORMATS[request.param]
    root = tmp_path_factory.mktemp("quantised")
    plain = write_run(ROWS[kept.row], root / "plain", training={"lr_decay_style": "constant"})
    shutil.copytree(root / "plain", root / "kept")
    few, numbers = {}, {}
    for key, tensor in load_file(root / "plain/model/model.safetensors").items():
        stored, numbers[key] = kept.write(key, tensor) if kept.is_kept(key) else ({key: tensor}, tensor)
        few |= stored
    assert len(few) > len(numbers)
    save_file(numbers, root / "plain/model/model.safetensors", metadata={"format": "pt"})
    save_file(few, root / "kept/model/model.safetensors", metadata={"format": "pt"})
    path = root / "kept/model/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    (config[kept.inside] if kept.inside else config)["quantization_config"] = kept.section
    path.write_text(json.dumps(config), encoding="utf-8")
    yaml = root / "kept/run.yaml"
    content = YAML().load(plain.read_text(encoding="utf-8").replace(str(root / "plain"), str(root / "kept")))
    with yaml.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)
    return Folders(yaml, plain)


def test_they_are_the_numbers_that_they_stand_for(runs: Folders) -> None:
    ours, expected = (loaded(yaml.parent / "model", torch.float32).state_dict() for yaml in runs)
    assert differing(ours, expected) == []


def test_they_train_and_are_exported_as_numbers(runs: Folders, tmp_path: Path) -> None:
    for name, yaml in runs._asdict().items():
        train(yaml, tmp_path / name)
    assert differing(tensors(tmp_path / "kept"), tensors(tmp_path / "plain")) == []
    out = [exported(tmp_path / name, tmp_path / f"{name}-hf") for name in ("kept", "plain")]
    assert outline(out[0]) == outline(out[1])
    assert differing(*(load_file(folder / "model.safetensors") for folder in out)) == []
    assert "quantization_config" not in (out[0] / "config.json").read_text(encoding="utf-8")


def test_adapters_merge_into_the_numbers(runs: Folders, tmp_path: Path) -> None:
    lora = ["training.lora.enable=true", "training.lora.rank=2", "training.lr=0.1", "training.train_iters=1"]
    lora.append("training.lora.target_modules=[o_proj]")
    merged = []
    for name, yaml in runs._asdict().items():
        train(yaml, tmp_path / name, *lora)
        merged.append(exported(tmp_path / name, tmp_path / f"{name}-hf", "--merge"))
    assert differing(*(load_file(folder / "model.safetensors") for folder in merged)) == []


def test_they_answer(runs: Folders) -> None:
    said = [
        mm("infer", yaml.parent / "model", "--prompt", "Which digit?", "--max-new-tokens", "8", "--json")
        for yaml in runs
    ]
    assert said[0].code == said[1].code == 0, said[0].err + said[1].err
    assert json.loads(said[0].out)["text"] == json.loads(said[1].out)["text"]
