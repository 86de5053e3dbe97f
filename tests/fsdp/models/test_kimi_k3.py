"""Kimi-K3 against its published formulas in plain torch, in fp64, on weights under the released names; and what its
folders may be."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.checkpoint.hf import hub_tensors, live_tensors
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import kimi_k3_by_hand as by_hand
from tests.helpers.decoder_logits import Weights
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.tiny_kimi_k3 import STATE_HEADS, make_tiny_kimi_k3
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "KimiLinearConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)
SIZES = [(62, 15), (16, 8)]
"""Of the two pictures, in pixels: one is padded, one is taken as it is. The table of 8 × 8 places is brought to 4 × 16
and 2 × 4 by weights that are exact in fp32, which transformers computes them in."""


@cache
def released(root: str) -> tuple[Path, Weights]:
    folder = Path(root) / "model"
    return folder, {name: tensor.double() for name, tensor in make_tiny_kimi_k3(folder).items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kimi_k3"))


def asked(folder: Path) -> dict[str, Any]:
    """Two pictures among words, as the processor has them; more tokens than a chunk of the state."""
    processor: Any = load_processor(folder)
    text = "one <|media_pad|> two <|media_pad|>, and so on, until there are a few more: 0 1 2 3 4 5 6 7 8 9?"
    made = dict(processor(images=random_pictures(SIZES), text=[text], return_tensors="pt"))
    assert made["image_grid_thw"].tolist() == [[1, 4, 16], [1, 2, 4]]
    return made | {"pixel_values": made["pixel_values"].double()}


def features(w: Weights, inputs: dict[str, Any]) -> torch.Tensor:
    pixels = inputs["pixel_values"]
    return torch.cat([by_hand.seen(w, pixels[:64], (4, 16)), by_hand.seen(w, pixels[64:], (2, 4))])


def expected_logits(w: Weights, inputs: dict[str, Any], token: int) -> torch.Tensor:
    return by_hand.logits(w, by_hand.embedded(w, inputs["input_ids"][0], token, features(w, inputs)))


# --- the formulas -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["ours", "eager"])
def test_equals_the_formulas(attention: str, root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    if attention == "eager":
        model.set_attn_implementation("eager")
    ids = inputs["input_ids"][0]
    assert len(ids) > 64
    with torch.no_grad(), keeping_double():
        expected = expected_logits(w, inputs, model.config.image_token_id)
        found = model(**inputs, labels=inputs["input_ids"])
    assert (found.logits[0] - expected).abs().max() < 1e-9
    # transformers' own loss comes in fp32
    assert found.loss.item() == pytest.approx(F.cross_entropy(expected[:-1], ids[1:]).item(), rel=1e-6)


def _decay_behind_the_update(model: Any) -> None:
    from mindspeed_mm.fsdp.models.kimi_k3 import delta_attention

    def shifted(query: Any, key: Any, value: Any, g: Any, **kwargs: Any) -> Any:
        return plain(query, key, value, g=torch.cat([g[:, :1] * 0, g[:, :-1]], dim=1), **kwargs)

    plain = delta_attention.chunk_kimi_delta_attention
    for layer in model.model.language_model.layers:
        if layer.is_linear:
            _exchange(layer.self_attn, "chunk_kimi_delta_attention", shifted)


def _exchange(layer: Any, name: str, function: Any) -> None:
    """What a layer's forward calls by a name of its module, for this layer alone."""
    from mindspeed_mm.fsdp.ops.forward_stack import rebind_globals

    rebind_globals(layer, {name: function})


def _beta_without_its_bound(model: Any) -> None:
    def twice(query: Any, key: Any, value: Any, beta: Any, **kwargs: Any) -> Any:
        return plain(query, key, value, beta=2 * beta, **kwargs)

    from mindspeed_mm.fsdp.models.kimi_k3 import delta_attention

    plain = delta_attention.chunk_kimi_delta_attention
    _exchange(model.model.language_model.layers[1].self_attn, "chunk_kimi_delta_attention", twice)


def _numbers_of_filling(model: Any) -> None:
    gate = model.model.language_model.layers[0].self_attn.forget_gate
    gate.A_log.data = gate.A_log.data.roll(1)


def _decay_without_its_bound(model: Any) -> None:
    model.model.language_model.layers[0].self_attn.forget_gate.lower_bound = None


def _latent_with_places(model: Any) -> None:
    """The shared part of keys is turned by its place, as other models of this attention do."""
    attention = model.model.language_model.layers[3].self_attn
    plain = attention.expand_kv

    def turned(latent: Any, shared: Any) -> Any:
        angles = torch.arange(shared.shape[2])[:, None] * torch.tensor([1.0, 0.01], dtype=shared.dtype)
        pairs = torch.view_as_complex(shared.unflatten(-1, (-1, 2)).contiguous())
        return plain(latent, torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2))

    attention.expand_kv = turned


def _experts_of_any_group(model: Any) -> None:
    gate = model.model.language_model.layers[1].block_sparse_moe.gate
    gate.num_group = gate.topk_group = 1


def _routed_norm_left_out(model: Any) -> None:
    model.model.language_model.layers[2].block_sparse_moe.routed_expert_norm = torch.nn.Identity()


def _one_source_less(model: Any) -> None:
    model.model.language_model.config.attn_res_block_size = 4


def _gate_left_out(model: Any) -> None:
    model.model.language_model.layers[3].self_attn.g_proj.weight.data.zero_()


def _up_without_its_bound(model: Any) -> None:
    mlp = model.model.language_model.layers[0].mlp
    mlp.bounds = (mlp.bounds[0], 1e9)


def _exchanged_rows_and_columns(model: Any) -> None:
    places = model.model.vision_tower.patch_embed.pos_emb.position_embeddings
    places.data = places.data.transpose(0, 1).contiguous()


@pytest.mark.parametrize(
    "fault",
    [
        _decay_behind_the_update, _beta_without_its_bound, _numbers_of_filling, _decay_without_its_bound,
        _latent_with_places, _experts_of_any_group, _routed_norm_left_out, _one_source_less, _gate_left_out,
        _up_without_its_bound, _exchanged_rows_and_columns,
    ],
)  # fmt: skip
def test_a_planted_fault_is_seen(fault: Any, root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    fault(model)
    with torch.no_grad(), keeping_double():
        expected = expected_logits(w, inputs, model.config.image_token_id)
        assert (model(**inputs).logits[0] - expected).abs().max() > 1e-5


def test_a_row_that_is_filled_up_is_the_row(root: str) -> None:
    """On the left, as before an answer, and on the right, as in training."""
    folder, w = released(root)
    model = loaded(folder)
    rows = [torch.arange(20, 100), torch.arange(40, 47)]
    with torch.no_grad(), keeping_double():
        expected = [by_hand.logits(w, by_hand.embedded(w, row, -1, None)) for row in rows]
        for side in ("left", "right"):
            ids, mask = torch.full((2, 80), 3), torch.zeros(2, 80, dtype=torch.long)
            for row, own in zip(rows, range(2), strict=True):
                place = slice(80 - len(row), None) if side == "left" else slice(0, len(row))
                ids[own, place], mask[own, place] = row, 1
            found = model(input_ids=ids, attention_mask=mask).logits
            for own in range(2):
                assert (found[own][mask[own] == 1] - expected[own]).abs().max() < 1e-9


# --- the state --------------------------------------------------------------------------------------------------------


def state_by_hand(given: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one head: (T, K), (T, K), (T, V), (T, K), (T,), and (K, V)."""
    q, k, v, g, beta = given
    q, k = (each / (each.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    said = []
    for t in range(len(q)):
        erased = torch.eye(len(k[t]), dtype=q.dtype) - beta[t] * torch.outer(k[t], k[t])
        state = erased @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(k[t], v[t])
        said.append(state.T @ q[t] / len(q[t]) ** 0.5)
    return torch.stack(said), state


@pytest.mark.parametrize(
    ("tokens", "least", "safe"), [(1, -5, True), (100, -5, True), (100, -5, False), (70, -60, False)]
)
def test_the_state_token_by_token_and_in_chunks(tokens: int, least: float, safe: bool) -> None:
    """Both forms, with a state to begin with, and their gradients."""
    from mindspeed_mm.fsdp.models.kimi_k3.delta_attention import (
        chunk_kimi_delta_attention,
        recurrent_kimi_delta_attention,
    )

    draw = torch.Generator().manual_seed(tokens)
    q, k, v, g, beta = (torch.randn(2, tokens, 3, n, generator=draw, dtype=torch.float64) for n in (8, 8, 6, 8, 1))
    given = [q, k, v, least * g.sigmoid(), beta[..., 0].sigmoid()]
    q, k, v, g, beta = given = [each.requires_grad_() for each in given]
    state = torch.randn(2, 3, 8, 6, generator=draw, dtype=torch.float64)
    weight = torch.randn(2, tokens, 3, 6, generator=draw, dtype=torch.float64)
    with keeping_double():
        made = [
            recurrent_kimi_delta_attention(q, k, v, g, beta, state, True, True),
            chunk_kimi_delta_attention(q, k, v, g, beta, state, True, True, safe),
        ]
    heads = []
    for row in range(2):
        of_row = [[each[row, :, head] for each in given] for head in range(3)]
        heads.append([state_by_hand(own, state[row, head]) for head, own in enumerate(of_row)])
    output = torch.stack([torch.stack([said for said, _ in row], dim=1) for row in heads])
    last = torch.stack([torch.stack([left for _, left in row]) for row in heads])
    wanted = torch.autograd.grad((output * weight).sum() + last.sum(), given)
    for said, left in made:
        assert left is not None
        torch.testing.assert_close(said, output, rtol=0, atol=1e-11)
        torch.testing.assert_close(left, last, rtol=0, atol=1e-11)
        found = torch.autograd.grad((said * weight).sum() + left.sum(), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_the_strongest_decay_stays_finite_in_fp32() -> None:
    """-5 everywhere: within a block of 16 tokens numbers of 75 powers of e are multiplied, and none is lost."""
    from mindspeed_mm.fsdp.models.kimi_k3.delta_attention import chunk_kimi_delta_attention

    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 64, 2, 128, generator=draw, requires_grad=True) for _ in range(3))
    g = torch.full((1, 64, 2, 128), -5.0, requires_grad=True)
    beta = torch.rand(1, 64, 2, generator=draw)
    ours, _ = chunk_kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, safe_gate=True)
    plain, _ = chunk_kimi_delta_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    for gradient in torch.autograd.grad(ours.square().sum(), (q, k, v, g)):
        assert gradient.isfinite().all()


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_a_loop_without_a_cache(root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    ids, shown, token = inputs["input_ids"][0], features(w, inputs), model.config.image_token_id
    with torch.no_grad(), keeping_double():
        said = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1)[0, len(ids) :]
        for _ in range(6):
            ids = torch.cat([ids, by_hand.logits(w, by_hand.embedded(w, ids, token, shown))[-1].argmax()[None]])
    assert said.tolist() == ids[-6:].tolist()


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_released_size() -> None:
    """Experts are released in 4 bits, two of them a byte."""
    from mindspeed_mm.fsdp.models.kimi_k3.modeling_kimi_k3 import KimiK3ForConditionalGeneration, tell_transformers

    tell_transformers()
    model, differing = model_of_record(KimiK3ForConditionalGeneration, "kimi-k3")
    assert billions(model) == pytest.approx(2780, rel=0.001)
    assert {entry["key"].rsplit(".", 1)[1] for entry in differing} == {"weight_packed", "weight_scale"}
    made = hub_tensors(model, live_tensors(model))
    for entry in differing:
        rows, *columns = entry["shape"]
        name = entry["key"].replace("layers.N", "layers.1").replace("experts.N", "experts.895")
        if name.endswith("_packed"):
            assert made[name.removesuffix("_packed")].shape == (rows, 2 * columns[0])


def test_names_on_the_way_out_are_those_on_the_way_in(root: str) -> None:
    """Every tensor of a folder, with its numbers, the filling of A_log among them."""
    folder, w = released(root)
    model = loaded(folder)
    made = hub_tensors(model, live_tensors(model))
    assert made.keys() == w.keys()
    for name, tensor in w.items():
        assert torch.equal(made[name].read(), tensor), name


def test_numbers_of_filling_are_left_out(root: str) -> None:
    folder, w = released(root)
    stored = w["language_model.model.layers.0.self_attn.A_log"]
    gate = loaded(folder).model.language_model.layers[0].self_attn.forget_gate
    assert len(stored) > STATE_HEADS
    assert torch.equal(gate.A_log.data, stored[:STATE_HEADS])


def test_fewer_layers_than_the_lists_name(tmp_path: Path, root: str) -> None:
    """As MindSpeed-MM's guide has it: `num_hidden_layers` is lowered, and the lists of layers stay."""
    from mindspeed_mm.fsdp.models.kimi_k3.configuration_kimi_k3 import KimiK3Config

    config = json.loads((released(root)[0] / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_hidden_layers"] = 4
    assert KimiK3Config(**config).text_config.layer_types == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        ("text_config", {"hidden_act": "silu"}, "text_config.hidden_act is 'silu'; known is 'situ' only"),
        ("text_config", {"mla_use_nope": False}, "text_config.mla_use_nope is False"),
        ("vision_config", {"norm_type": "layernorm"}, "vision_config.norm_type is 'layernorm'"),
        ("text_config", {"linear_attn_config": {"kda_layers": "all"}}, "linear_attn_config.kda_layers is 'all'"),
        ("text_config", {"linear_attn_config": {"kda_layers": [0, 1]}}, "by their numbers, which begin at 1"),
        ("text_config", {"attn_res_block_size": 0}, "attn_res_block_size is 0; it is a whole number above 0"),
        ("text_config", {"routed_expert_hidden_size": 8.5}, "routed_expert_hidden_size is 8.5; it is a whole number"),
        ("text_config", {"activation_situ_beta": -1}, "activation_situ_beta is -1; it is a number above 0"),
        ("text_config", {"num_expert_group": 3}, "num_expert_group is 3, and num_experts 8: groups are equal"),
        ("text_config", {"num_expert_group": 8}, "num_expert_group is 8, and num_experts 8: groups are equal, of two"),
        ("text_config", {"topk_group": 3}, "topk_group is 3, of 2 groups"),
        ("text_config", {"num_experts_per_token": 5}, "num_experts_per_token is 5; the chosen groups have 4 experts"),
    ],
)
def test_what_was_never_released_is_refused(
    section: str, change: dict[str, Any], says: str, tmp_path: Path, root: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(released(root)[0], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config[section] |= change
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=says):
        loaded(folder)
