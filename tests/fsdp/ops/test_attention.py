"""`mm_varlen`: a packed row equals its documents one by one, gradients included; plain batches equal sdpa. In fp64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.ops import attention
from mindspeed_mm.fsdp.ops.attention import AttentionError, register_attention, varlen_attention, varlen_mask
from tests.helpers.parity import ParityError, compare_steps, record_step
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

TOLERANCE = 1e-12
LENGTHS = (5, 1, 11, 7)
IMAGES = (0, 1, 2, 0)
Document = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    sliding = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return {
        "qwen3": make_tiny_qwen3(base / "qwen3"),
        "qwen3 with a window": make_tiny_qwen3(base / "sliding", **sliding),
        "qwen3_vl": make_tiny_qwen3_vl(base / "qwen3_vl"),
    }


def load(folder: Path, attn_implementation: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3VLForConditionalGeneration

    cls = Qwen3VLForConditionalGeneration if "qwen3_vl" in folder.name else AutoModelForCausalLM
    model = cls.from_pretrained(folder, dtype=torch.float64, attn_implementation=attn_implementation).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # leaks show
    return model


def make_documents(config: Any) -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    documents = []
    for length, images in zip(LENGTHS, IMAGES, strict=True):
        ids = torch.randint(10, 300, (length,), generator=generator)
        document: Document = {}
        if images and hasattr(config, "image_token_id"):
            image = [config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id]
            ids = torch.cat([torch.tensor(image * images), ids])
            document["pixel_values"] = torch.randn(16 * images, 384, generator=generator).double()
            document["image_grid_thw"] = torch.tensor([[1, 4, 4]] * images)
        document["input_ids"] = ids[None]
        document["labels"] = torch.cat([ids[1:], torch.tensor([-100])])
        documents.append(document)
    return documents


def positions(model: Any, document: Document) -> torch.Tensor:
    text = torch.arange(document["input_ids"].shape[1])[None]
    if not hasattr(model.config, "image_token_id"):
        return text
    types = (document["input_ids"] == model.config.image_token_id).int()
    grids = document.get("image_grid_thw")
    three, _ = model.model.get_rope_index(document["input_ids"], mm_token_type_ids=types, image_grid_thw=grids)
    return torch.cat([text[None], three])


def pack(model: Any, documents: Sequence[Document], borders: Sequence[int] | None = None) -> Document:
    lengths = [document["input_ids"].shape[1] for document in documents]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if borders is None else borders, dtype=torch.int32)
    row = {
        "input_ids": torch.cat([d["input_ids"] for d in documents], dim=1),
        "labels": torch.cat([d["labels"] for d in documents]),
        "position_ids": torch.cat([positions(model, d) for d in documents], dim=-1),
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    for key in ("pixel_values", "image_grid_thw"):
        if any(key in document for document in documents):
            row[key] = torch.cat([d[key] for d in documents if key in d])
    return row


def run(model: Any, batches: Sequence[Document]) -> dict[str, Any]:
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**inputs, use_cache=False).logits
        total = total + F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss = total / 20
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return record_step(model, loss, torch.nn.utils.get_total_norm(gradients))


def one_by_one(folder: Path) -> dict[str, Any]:
    """Stock attention, every document alone in its batch."""
    model = load(folder, "sdpa")
    documents = make_documents(model.config)
    return run(model, [{**d, "position_ids": positions(model, d)} for d in documents])


def packed(folder: Path, borders: Sequence[int] | None = None) -> dict[str, Any]:
    model = load(folder, register_attention())
    apply_packed_rows(model)
    return run(model, [pack(model, make_documents(model.config), borders)])


@pytest.mark.parametrize("name", ["qwen3", "qwen3 with a window", "qwen3_vl"])
def test_packed_equals_one_by_one(folders, name):
    compare_steps(one_by_one(folders[name]), packed(folders[name]), TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "qwen3 with a window", "qwen3_vl"])
def test_a_leak_between_documents_is_seen(folders, name):
    model = load(folders[name], "sdpa")
    lengths = [d["input_ids"].shape[1] for d in make_documents(model.config)]
    second_and_third_joined = [0, lengths[0], sum(lengths[:3]), sum(lengths)]
    with pytest.raises(ParityError):
        compare_steps(one_by_one(folders[name]), packed(folders[name], second_and_third_joined), TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "qwen3 with a window"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch_equals_sdpa(folders, name, side):
    records = []
    for implementation in ("sdpa", register_attention()):
        model = load(folders[name], implementation)
        documents = make_documents(model.config)
        longest = max(LENGTHS)
        pads = [(0, longest - n) if side == "right" else (longest - n, 0) for n in LENGTHS]
        batch = {
            "input_ids": torch.stack([F.pad(d["input_ids"][0], p) for d, p in zip(documents, pads, strict=True)]),
            "labels": torch.stack([F.pad(d["labels"], p, value=-100) for d, p in zip(documents, pads, strict=True)]),
            "attention_mask": torch.stack([F.pad(torch.ones(n).long(), p) for n, p in zip(LENGTHS, pads, strict=True)]),
        }
        records.append(run(model, [batch]))
    compare_steps(records[0], records[1], TOLERANCE)


def test_generation_equals_sdpa(folders):
    """Left-padded prompts and a cache, with sliding layers."""
    answers = []
    for implementation in ("sdpa", register_attention()):
        model = load(folders["qwen3 with a window"], implementation).eval()
        ids = torch.arange(20, 32).reshape(2, 6)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        answers.append(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
    assert torch.equal(*answers)


def test_packed_positions_without_borders_are_refused(folders):
    model = load(folders["qwen3"], register_attention())
    row = pack(model, make_documents(model.config))
    with pytest.raises(AttentionError, match=r"no document borders\. .* its forward takes \*\*kwargs and passes them"):
        model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False)


@pytest.mark.parametrize("packed", [True, False])
def test_sliding_layer_that_brings_no_window_is_refused(folders, packed):
    """The masks of sdpa have the window; here it is an argument, which a model of one's own may forget."""
    model = load(folders["qwen3 with a window"], register_attention())
    documents = make_documents(model.config)
    row = pack(model, documents) if packed else {"input_ids": documents[0]["input_ids"]}
    model(**row, use_cache=False)
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(AttentionError, match=r"layer 0 is 'sliding_attention'.* Pass sliding_window="):
        model(**row, use_cache=False)


# One layer.

LAYER = SimpleNamespace(is_causal=True)


def heads(tokens: int, count: int, width: int = 6) -> torch.Tensor:
    return torch.randn(1, count, tokens, width, dtype=torch.float64, requires_grad=True)


def softmax_attention(q, k, v, allowed, sinks=None):
    """Written out: scores, sink column, softmax, values."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], dim=-1)
    return (scores.softmax(-1)[..., : v.shape[2]] @ v).transpose(1, 2)


def allowed_pairs(borders: Sequence[int], causal: bool, window: int | None) -> torch.Tensor:
    position = torch.arange(borders[-1])
    document = torch.bucketize(position, torch.tensor(borders[1:]), right=True)
    distance = position[:, None] - position[None, :]
    allowed = document[:, None] == document[None, :]
    if causal:
        allowed &= distance >= 0
    if causal and window is not None:
        allowed &= distance < window
    return allowed


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("borders", [[0, 4, 5, 12], [0, 4, 8, 12], [0, 12]], ids=["lengths", "one length", "alone"])
def test_one_layer_equals_the_formula(borders, with_sinks, window, causal):
    torch.manual_seed(0)
    q, k, v = heads(12, 4), heads(12, 2), heads(12, 2, width=5)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    inputs = [t for t in (q, k, v, sinks) if t is not None]
    cu = torch.tensor(borders, dtype=torch.int32)
    expected = softmax_attention(q, k, v, allowed_pairs(borders, causal, window), sinks)
    measured, _ = varlen_attention(
        LAYER, q, k, v, None, is_causal=causal, sliding_window=window, s_aux=sinks, cu_seq_lens_q=cu, cu_seq_lens_k=cu
    )
    seed = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(expected, inputs, seed), torch.autograd.grad(measured, inputs, seed), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(expected, measured, rtol=0, atol=TOLERANCE)


class Copies(TorchDispatchMode):
    """Names of operations that copy whole tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if name in ("cat", "clone", "copy_", "_to_copy", "index_select", "split_with_sizes_copy"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("borders", "splits"), [([0, 4, 8, 12], False), ([0, 4, 5, 12], True)])
def test_documents_of_one_length_are_copied_on_their_way_out_alone(borders, splits):
    """Heads lie behind tokens, as projections leave them."""
    q, k, v = (torch.randn(1, 12, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with Copies() as found:
        output, _ = varlen_attention(
            LAYER, *(each.transpose(1, 2) for each in (q, k, v)), None, cu_seq_lens_q=torch.tensor(borders)
        )
        output.sum().backward()
    assert (set(found.names) > {"clone"}) == splits, found.names


def test_sinks_with_a_mask_equal_the_formula():
    torch.manual_seed(0)
    q, k, v = heads(6, 4), heads(6, 2), heads(6, 2)
    sinks, allowed = torch.randn(4, dtype=torch.float64), torch.ones(6, 6).tril().bool()
    allowed[:, 0] = False
    allowed[0, 0] = True
    measured, _ = varlen_attention(LAYER, q, k, v, allowed[None, None], s_aux=sinks)
    torch.testing.assert_close(softmax_attention(q, k, v, allowed, sinks), measured, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("borders", [[0, 4, 7], [1, 4, 8], [0, 4, 9]])
def test_borders_of_another_row_are_refused(borders):
    q = heads(8, 2)
    with pytest.raises(AttentionError, match="do not span"):
        varlen_attention(LAYER, q, q, q, None, cu_seq_lens_q=torch.tensor(borders, dtype=torch.int32))


def test_borders_beside_a_mask_are_refused():
    q, cu = heads(4, 2), torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(AttentionError, match="came with a mask"):
        varlen_attention(LAYER, q, q, q, torch.ones(1, 1, 4, 4).bool(), cu_seq_lens_q=cu)


def test_two_way_attention_keeps_its_padding_mask():
    from transformers.masking_utils import bidirectional_mask_function

    mask = varlen_mask(
        1,
        3,
        3,
        attention_mask=torch.tensor([[True, True, False]]),
        mask_function=bidirectional_mask_function,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
    )
    assert mask is not None and not mask[..., 2].any()


@pytest.mark.edge("D3")
@pytest.mark.parametrize("takes_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize(
    ("causal", "window", "expected"), [(True, None, (-1, 0)), (True, 3, (2, 0)), (False, 3, (-1, -1))]
)
def test_flash_kernel_is_called_as_it_wants(monkeypatch, causal, window, expected, takes_groups):
    """The kernel needs an accelerator: a stand-in takes its call and answers by the formula."""
    from torch.nn.attention import varlen

    calls: list[tuple[int, int]] = []

    def older(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        assert q.shape == k.shape == v.shape == (12, 4, 6) and (max_q, max_k) == (7, 7)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        calls.append(window_size)
        one_row = (t.transpose(0, 1)[None] for t in (q, k, v))
        return softmax_attention(*one_row, allowed_pairs(cu_q.tolist(), causal, window))[0]

    def newer(q, k, v, *lengths, scale, window_size, enable_gqa=False):
        assert k.shape == v.shape == (12, 2, 6) and enable_gqa, "keys and values as they are, each for two heads"
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        return older(q, k, v, *lengths, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", newer if takes_groups else older)
    q, k, v = heads(12, 4), heads(12, 2), heads(12, 2)
    arguments = {"is_causal": causal, "sliding_window": window, "cu_seq_lens_q": torch.tensor([0, 4, 5, 12])}
    loop, _ = varlen_attention(LAYER, q, k, v, None, **arguments)
    monkeypatch.setattr(attention._Layer, "fits_flash", lambda *_: True)
    for longest in (7, None):
        flash, _ = varlen_attention(LAYER, q, k, v, None, max_length_q=longest, max_length_k=longest, **arguments)
        torch.testing.assert_close(flash, loop, rtol=0, atol=TOLERANCE)
    assert calls == [expected] * 2


def test_modules_decide_the_order_when_the_call_does_not():
    q = heads(5, 2)
    two_way, _ = varlen_attention(nn.Module(), q, q, q, None, is_causal=False)
    asked, _ = varlen_attention(SimpleNamespace(is_causal=False), q, q, q, None)
    assert torch.equal(two_way, asked)
