"""Adapters that start from data have PEFT's values on the same batches."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.lora.calibration import Directions, calibration
from mindspeed_mm.fsdp.models.lora.first_values import adapted_layers
from mindspeed_mm.fsdp.models.lora.names import ADAPTER, AdaptedLinear
from tests.helpers.adapters import adapted_model, logits


def batches(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(3):
        mask = torch.ones(size, 24, dtype=torch.long)
        mask[-1, 17:] = 0 if size > 1 else 1
        made.append({"input_ids": torch.randint(0, 300, (size, 24), generator=generator), "attention_mask": mask})
    return made


def started(folder: Path, kind: str, size: int) -> Any:
    model = adapted_model(folder, random=False, init_lora_weights=kind)
    with calibration(model, kind) as seen, torch.no_grad():
        for batch in batches(size):
            model(**batch)
    seen.start_adapters(7)
    return model


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


TARGETS = ["q_proj", "k_proj", "v_proj"]


def test_eva_is_pefts(folders: dict[str, Path]) -> None:
    """Two batches, after which PEFT is made to take every direction for settled."""
    from peft import EvaConfig, LoraConfig
    from peft.tuners.lora.eva import get_eva_state_dict

    ours = adapted_model(folders["text"], random=False, init_lora_weights="eva")
    with calibration(ours, "eva") as seen, torch.no_grad():
        for batch in batches(4)[:2]:
            ours(**batch)
    seen.start_adapters(7)
    eva = EvaConfig(rho=1.0, tau=0.0, use_label_mask=False)
    eva.tau = -1.0  # every direction, whichever way it turned
    config = LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, init_lora_weights="eva", eva_config=eva)
    model = plain(folders["text"])
    expected = get_eva_state_dict(model, batches(4)[:2], config, show_progress_bar=False)
    for name, layer in adapted_layers(ours):
        torch.testing.assert_close(layer.lora_A[ADAPTER].weight, expected[name].float(), rtol=0, atol=1e-4)
        assert not layer.lora_B[ADAPTER].weight.any()
    assert torch.equal(logits(ours), logits(model))


def test_corda_is_pefts(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # PEFT's module takes a decorator from a package that it does not bring.
    monkeypatch.setitem(sys.modules, "attr", SimpleNamespace(dataclass=dataclasses.dataclass))  # type: ignore[arg-type]
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    ours = started(folders["text"], "corda", 1)
    model = plain(folders["text"])
    corda = CordaConfig(corda_method="ipm")
    config = LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, init_lora_weights="corda", corda_config=corda)
    preprocess_corda(model, config, run_model=lambda: [model(**batch) for batch in batches(1)])
    expected = {n.removeprefix("base_model.model."): p for n, p in get_peft_model(model, config).named_parameters()}
    for name, layer in adapted_layers(ours):
        torch.testing.assert_close(
            layer.base_layer.weight, expected[f"{name}.base_layer.weight"], rtol=0, atol=1e-5, msg=name
        )
        delta, other = (
            b @ a
            for a, b in (
                (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight),
                (expected[f"{name}.lora_A.default.weight"], expected[f"{name}.lora_B.default.weight"]),
            )
        )
        torch.testing.assert_close(delta, other, rtol=0, atol=1e-5)
        assert delta.any()


def test_padding_is_not_looked_at(folders: dict[str, Path]) -> None:
    clean = started(folders["text"], "corda", 4)
    other = batches(4)
    for batch in other:
        batch["input_ids"][batch["attention_mask"] == 0] = 5
    model = adapted_model(folders["text"], random=False, init_lora_weights="corda")
    with calibration(model, "corda") as seen, torch.no_grad():
        for batch in other:
            model(**batch)
    seen.start_adapters(7)
    for (_, found), (_, expected) in zip(adapted_layers(model), adapted_layers(clean), strict=True):
        torch.testing.assert_close(found.lora_A[ADAPTER].weight, expected.lora_A[ADAPTER].weight, rtol=0, atol=1e-5)


def test_eva_joins_batches_of_fewer_tokens_than_the_rank() -> None:
    rows = torch.randn(12, 16, generator=torch.Generator().manual_seed(3))
    at_once, in_parts, short = Directions(8), Directions(8), Directions(8)
    at_once.add([rows])
    in_parts.add([rows[:5]])
    in_parts.add([rows[5:8], rows[8:]])
    short.add([rows[:5]])
    assert torch.equal(in_parts._pca.components_, at_once._pca.components_)
    with pytest.raises(ConfigError, match=r"'eva' looked at 5 tokens, fewer than the rank 8"):
        short.start(torch.zeros(4, 16), cast("AdaptedLinear", nn.Linear(16, 4)), seed=0)


def test_nothing_to_look_at(folders: dict[str, Path]) -> None:
    model = adapted_model(folders["text"], random=False, init_lora_weights="eva")
    with calibration(model, "eva") as seen:
        pass
    with pytest.raises(ConfigError, match=r"'eva' saw nothing go into .*init_batches"):
        seen.start_adapters(7)
