"""What a recomputed module keeps is not computed again; loss and gradients stay the same to the bit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory import kept_results
from mindspeed_mm.fsdp.features.memory.kept_results import ATTENTION, SELECTIVE, is_kept
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.fsdp.features.dropout_models import KINDS, build, differing, kept_bytes, loss_and_gradients
from tests.helpers.packed_families import FAMILIES
from tests.helpers.tiny_models import make_tiny_qwen3_vl

ATEN = torch.ops.aten
FLASH = ATEN._scaled_dot_product_flash_attention_for_cpu.default


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def recomputed(model: nn.Module, mode: str = "full", blocks: Any = None, **skips: bool) -> nn.Module:
    features = FeatureArguments.model_validate({"recompute": True, "recompute_plan": {"mode": mode}})
    keys = ModelArguments.model_validate({f"skip_{name}_recompute": value for name, value in skips.items()})
    return FeaturesApplier(features, find_blocks(model) if blocks is None else blocks, model_args=keys)(model)


class Operations(TorchDispatchMode):
    """Counts operations below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def operations(model: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> Counter[str]:
    """Of a forward and backward pass."""
    # Under the contexts of checkpoint, so that what it hands out is not counted.
    with Operations() as seen:
        step(model).backward()
    return seen.counts


def sdpa(kind: str, folder: Path) -> Any:
    """A model whose attention is a kernel: without dropout inside of it, but with dropout elsewhere."""
    model, step = build(kind, folder)
    if kind == "qwen3_vl":
        model.set_attn_implementation("sdpa")
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        for layer in model.model.language_model.layers:
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    return model.train(), step


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_selective_is_the_same_to_the_bit(kind: str, folder: Path) -> None:
    for make in (build, sdpa):
        plain = loss_and_gradients(*make(kind, folder))
        model, step = make(kind, folder)
        assert differing(plain, loss_and_gradients(recomputed(model, "selective"), step)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_kept_attention_is_the_same_to_the_bit(kind: str, folder: Path) -> None:
    plain = loss_and_gradients(*sdpa(kind, folder))
    model, step = sdpa(kind, folder)
    assert differing(plain, loss_and_gradients(recomputed(model, flash_attn=True), step)) == []


def test_a_result_that_is_handed_out_wrongly_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loss_and_gradients(*sdpa("wan", folder))
    real = kept_results._passes

    def forgetful(*given: Any) -> Any:
        first, second = real(*given)
        take = second.__class__.__torch_dispatch__

        class Wrong(second.__class__):  # type: ignore[misc, name-defined]
            def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = take(self, operation, types, args, kwargs)
                return (result[0] * 1.01, *result[1:]) if operation is FLASH else result

        second.__class__ = Wrong
        return first, second

    monkeypatch.setattr(kept_results, "_passes", forgetful)
    model, step = sdpa("wan", folder)
    assert len(differing(plain, loss_and_gradients(recomputed(model, flash_attn=True), step))) > 10


# --- what runs again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_which_operations_run_again(kind: str, folder: Path) -> None:
    counts = {
        name: operations(*change(sdpa(kind, folder)))
        for name, change in {
            "off": lambda pair: pair,
            "full": lambda pair: (recomputed(pair[0]), pair[1]),
            "attention": lambda pair: (recomputed(pair[0], flash_attn=True), pair[1]),
            "selective": lambda pair: (recomputed(pair[0], "selective"), pair[1]),
        }.items()
    }
    attention = {name: count[str(FLASH)] for name, count in counts.items()}
    assert attention["off"] > 0
    assert attention["full"] == 2 * attention["off"]
    assert attention["attention"] == attention["selective"] == attention["off"]

    products = {
        name: sum(count[f"aten.{op}.default"] for op in ("mm", "addmm", "bmm")) for name, count in counts.items()
    }
    assert products["full"] >= products["attention"] > products["off"] == products["selective"]


def test_the_order_of_what_is_kept(folder: Path) -> None:
    off, full, attention, selective = (
        held_bytes(lambda change=change: change(sdpa("wan", folder)))
        for change in (
            lambda pair: pair,
            lambda pair: (recomputed(pair[0]), pair[1]),
            lambda pair: (recomputed(pair[0], flash_attn=True), pair[1]),
            lambda pair: (recomputed(pair[0], "selective"), pair[1]),
        )
    )
    assert full < attention < selective < off


def held_bytes(make: Callable[[], Any]) -> int:
    """Of activations between forward and backward, kept results among them."""
    kept: dict[int, int] = {}
    held = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operation(*args, **(kwargs or {}))
            if is_kept(chosen, operation, args, kwargs):
                for tensor in result if isinstance(result, tuple) else (result,):
                    if isinstance(tensor, torch.Tensor):
                        held.append(tensor)
                        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return result

    model, step = make()
    context = getattr(getattr(next(iter(model.blocks)).forward, "_contexts", None), "args", ())
    chosen = context[0] if context else frozenset()
    with Watch():
        saved = kept_bytes(model, step)
    return saved + sum(kept.values())


# --- layers whose kernel is many operations ---------------------------------------------------------------------------


@contextmanager
def counted(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    real, calls = getattr(module, name), []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, watched)
        yield calls


def kimi_linear() -> nn.Module:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, num_experts=4, num_experts_per_token=2, linear_head_dim=16, linear_num_heads=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, attn_implementation="sdpa",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    )  # fmt: skip
    return KimiLinearForCausalLM(config).train()


def delta_net(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    model = kimi_linear() if name == "kimi_linear" else FAMILIES[name].build(attention="sdpa")
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: F.dropout(args[0], 0.1))
        layer.input_layernorm.register_forward_hook(lambda _, args, output: F.dropout(output, 0.1))
    tokens = torch.randint(20, 200, (2, 70), generator=torch.Generator().manual_seed(0))
    return model, lambda model: model(input_ids=tokens, use_cache=False).logits.square().mean()


LAYERS = {
    "qwen3_next": ("gdn", "torch_chunk_gated_delta_rule"),
    "kimi_linear": ("kda", "chunk_kimi_delta_attention"),
}


@pytest.mark.parametrize("flash_attn", [False, True], ids=["", "and attention"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", LAYERS)
def test_delta_nets_run_once(family: str, mode: str, flash_attn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    key, kernel = LAYERS[family]
    plain = loss_and_gradients(*delta_net(family))
    for skips, again in (({}, 2), ({key: True}, 1)):
        model, step = delta_net(family)
        source = sys.modules[type(model).__module__]
        recomputed(model, mode, flash_attn=flash_attn, **skips)
        with counted(source, kernel, monkeypatch) as calls:
            assert differing(plain, loss_and_gradients(model, step)) == []
        layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
        assert len(calls) == again * layers > 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_layers_that_are_not_there_are_named(folder: Path) -> None:
    for name in ("gdn", "kda"):
        with pytest.raises(ConfigError, match="has no layers of") as caught:
            recomputed(build("wan", folder)[0], **{name: True})
        assert f"model.skip_{name}_recompute" in str(caught.value)


def test_attention_without_a_kernel_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'eager'"):
        recomputed(build("qwen3_vl", folder)[0], flash_attn=True)
    model, _ = build("qwen3_vl", folder)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"dropout of 0\.3 in its attention"):
        recomputed(model, flash_attn=True)


def test_packed_rows_keep_the_attention_of_every_document(folder: Path) -> None:
    """`mm_varlen` calls the kernel once a document."""
    borders = torch.tensor([0, 4, 9, 12], dtype=torch.int32)
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 5, "max_length_k": 5}
    positions = torch.cat([torch.arange(4), torch.arange(5), torch.arange(3)])[None]

    def step(model: nn.Module) -> torch.Tensor:
        tokens = torch.arange(20, 32)[None]
        return model(input_ids=tokens, position_ids=positions, use_cache=False, **packed).logits.square().mean()

    counts = []
    for changes in (None, {"mode": "full"}, {"flash_attn": True}, {"mode": "selective"}):
        model, _ = sdpa("qwen3_vl", folder)
        model = Text(model.model.language_model, model.lm_head)
        apply_packed_rows(model.model)
        if changes is not None:
            recomputed(model, blocks=[f"model.layers.{number}" for number in range(3)], **changes)  # type: ignore[arg-type]
        counts.append(operations(model, step)[str(FLASH)])
    assert counts == [9, 18, 9, 9]


class Text(nn.Module):
    """A decoder with its head."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head, self.config = model, head, model.config

    def forward(self, **batch: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.model(**batch).last_hidden_state))


def test_what_is_kept() -> None:
    assert is_kept(SELECTIVE, ATEN.mm.default)
    assert not is_kept(ATTENTION, ATEN.mm.default)
    assert not is_kept(SELECTIVE, ATEN.mm.out), "its argument would not be written the second time"
    assert not is_kept(SELECTIVE, ATEN.mul.Tensor)
    assert is_kept(ATTENTION, FLASH, (1, 2, 3, 0.0))
    assert not is_kept(ATTENTION, FLASH, (1, 2, 3, 0.1)), "its random numbers would not be drawn the second time"
    assert not is_kept(ATTENTION, FLASH, (1, 2, 3), {"dropout_p": 0.1})
    assert is_kept(ATTENTION, torch.ops.higher_order.flex_attention)
