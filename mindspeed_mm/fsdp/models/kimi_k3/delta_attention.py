"""Kimi delta attention (Kimi Linear, arXiv:2510.26692): a state that forgets by channel and is corrected by the delta
rule.

Of each head, with keys of K features and values of V, for token t:

    S_t = (I - beta_t k_t k_tᵀ) diag(exp g_t) S_(t-1) + beta_t k_t v_tᵀ        (K, V)
    o_t = S_tᵀ q_t / √K

g_t ≤ 0 is the logarithm of what each channel keeps. Token by token this is `recurrent_kimi_delta_attention`. In chunks
(section 3.2), all tokens of a chunk are computed at once: with G the sums of g since the chunk began, the corrected
values u solve a unit lower triangular system, (I + A) u = beta (v - (k exp G) S).

Shapes: B rows, T tokens, H heads, N chunks of C tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDeltaAttention,
    KimiLinearForgetGate,
    apply_mask_to_padding_states,
    causal_conv1d_fn,
    causal_conv1d_update,
)
from typing_extensions import override

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.kimi_k3.configuration_kimi_k3 import KimiK3TextConfig

CHUNK, BLOCK = 64, 16
"""Tokens that are computed at once, and those among them whose decays are related to their first one's."""
SAFE_LOWER_BOUND = -5.0
"""Over a block of 16 tokens exp(5 · 15) is far from the largest number in fp32."""
_EPS = 1e-6


def recurrent_kimi_delta_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token, in fp32.

    Args:
        query: (B, T, H, K).
        key: (B, T, H, K).
        value: (B, T, H, V).
        g: (B, T, H, K) logarithms of what is kept.
        beta: (B, T, H) between 0 and 1.
        initial_state: (B, H, K, V); None: zeros.
        output_final_state: Whether the state behind the last token is returned.
        use_qk_l2norm_in_kernel: Whether queries and keys are brought to length 1.

    Returns:
        (B, T, H, V) in the dtype of `query`, and the state (B, H, K, V).
    """
    dtype = query.dtype
    q, k, v, g, beta = _in_fp32(query, key, value, g, beta, unit_length=use_qk_l2norm_in_kernel)
    state = _first_state(initial_state, k, v)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        # What the state says of this key, after it has forgotten, is replaced by the value.
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * missing)[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    joined = torch.stack(outputs, dim=1).to(dtype)
    if output_final_state:
        return joined, state
    return joined, None


def chunk_kimi_delta_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    safe_gate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same in chunks of 64 tokens, in fp32.

    Args:
        query: As of `recurrent_kimi_delta_attention`; so are the other arguments.
        key: See there.
        value: See there.
        g: See there.
        beta: See there.
        initial_state: See there.
        output_final_state: See there.
        use_qk_l2norm_in_kernel: See there.
        safe_gate: No number of `g` is below -5, so that decays of neighbours may be multiplied apart: no table of
            (B, H, N, 16, 16, K) numbers is made then.

    Returns:
        As `recurrent_kimi_delta_attention`.
    """
    dtype, tokens = query.dtype, query.shape[1]
    q, k, v, g, beta = _in_fp32(query, key, value, g, beta, unit_length=use_qk_l2norm_in_kernel)
    state = _first_state(initial_state, k, v)
    # Tokens of zeros behind the last one, of which beta is 0 and g is 0, leave the state as it is.
    q, k, v, g, beta = (_chunks(each) for each in (q, k, v, g, beta[..., None]))  # (B, H, N, C, …)
    kept = g.cumsum(dim=3)
    among_keys, of_queries = _decayed_products(k, k, kept, safe_gate), _decayed_products(q, k, kept, safe_gate)
    solved = _inverse_of_unit_lower(beta * among_keys.tril(-1))
    values = solved @ (beta * v)
    from_state = solved @ (beta * k * kept.exp())
    asking, left = q * kept.exp(), kept[:, :, :, -1:]
    written, of_queries = (k * (left - kept).exp()).transpose(3, 4), of_queries.tril()
    outputs = []
    for n in range(q.shape[2]):
        new = values[:, :, n] - from_state[:, :, n] @ state
        outputs.append(asking[:, :, n] @ state + of_queries[:, :, n] @ new)
        state = state * left[:, :, n].exp().transpose(2, 3) + written[:, :, n] @ new
    joined = torch.cat(outputs, dim=2)[:, :, :tokens].transpose(1, 2).to(dtype)
    if output_final_state:
        return joined, state
    return joined, None


def _in_fp32(*tensors: torch.Tensor, unit_length: bool) -> list[torch.Tensor]:
    """Queries (over √K), keys, values, decays and betas."""
    q, k, v, g, beta = (tensor.to(torch.float32) for tensor in tensors)
    if unit_length:
        q, k = (each / (each.pow(2).sum(dim=-1, keepdim=True) + _EPS).sqrt() for each in (q, k))
    return [q / q.shape[-1] ** 0.5, k, v, g, beta]


def _first_state(given: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if given is not None:
        return given.to(v)
    return v.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])


def _chunks(tensor_BTHK: torch.Tensor) -> torch.Tensor:
    """(B, H, N, C, K), filled up with zeros."""
    filled = F.pad(tensor_BTHK, (0, 0, 0, 0, 0, -tensor_BTHK.shape[1] % CHUNK))
    return filled.transpose(1, 2).unflatten(2, (-1, CHUNK))


def _decayed_products(rows: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor, safe_gate: bool) -> torch.Tensor:
    """(B, H, N, C, C): of token i's row and token j's key, Σ rowᵢ keyⱼ exp(Gᵢ - Gⱼ). Right where j ≤ i; what stands
    above the diagonal is finite, and means nothing.

    exp(Gᵢ - Gⱼ) is taken apart at the first token of i's block of 16: of keys in front of the block both parts are at
    most 1, whatever decays are. Inside the block the second part may be large, exp(75) with a safe gate; without one,
    every pair of the block is computed by itself.
    """
    lines = []
    for start in range(0, CHUNK, BLOCK):
        own = slice(start, start + BLOCK)
        first = kept[..., start : start + 1, :]
        near = rows[..., own, :] * (kept[..., own, :] - first).exp()
        seen = slice(0, start)
        if safe_gate:
            seen = slice(0, start + BLOCK)
        line = near @ (keys[..., seen, :] * (first - kept[..., seen, :]).exp()).transpose(-1, -2)
        if not safe_gate:
            apart = (kept[..., own, None, :] - kept[..., None, own, :]).clamp(max=0).exp()
            inside = torch.einsum("...ik,...jk,...ijk->...ij", rows[..., own, :], keys[..., own, :], apart)
            line = torch.cat([line, inside], dim=-1)
        lines.append(F.pad(line, (0, CHUNK - start - BLOCK)))
    return torch.cat(lines, dim=-2)


def _inverse_of_unit_lower(strict: torch.Tensor) -> torch.Tensor:
    """(…, C, C): the inverse of I + a strictly lower triangular matrix, C a power of 2. By halves, in products of
    matrices alone: [[X, 0], [-Y L X, Y]] with X and Y the inverses of the blocks on the diagonal."""
    half = strict.shape[-1] // 2
    if half == 0:
        return torch.ones_like(strict)
    blocks = torch.stack([strict[..., :half, :half], strict[..., half:, half:]])
    upper, lower = _inverse_of_unit_lower(blocks)
    corner = -lower @ strict[..., half:, :half] @ upper
    return torch.cat([F.pad(upper, (0, half)), torch.cat([corner, lower], dim=-1)], dim=-2)


class KimiK3ForgetGate(KimiLinearForgetGate):  # type: ignore[misc]
    """What each channel forgets, bounded from below.

    Args:
        config: Of the text model.
    """

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.lower_bound = config.linear_gate_lower_bound

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, H, K) logarithms, in fp32: bound · σ(exp(A) (f + b)), or without a bound -exp(A) softplus(f + b)."""
        raised = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        raised, rate = raised.unflatten(-1, (-1, self.head_dim)), self.A_log.float().exp()[:, None]
        if self.lower_bound is None:
            return -rate * F.softplus(raised)
        return self.lower_bound * torch.sigmoid(rate * raised)


class KimiK3DeltaAttention(KimiLinearDeltaAttention):  # type: ignore[misc]
    """Kimi Linear's layer with its forget gate bounded, and an output gate that is one matrix.

    Args:
        config: Of the text model.
        layer_idx: Number of the layer.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.g_a_proj, self.g_b_proj
        self.activation = "silu"  # of the convolutions; hidden_act is that of MLPs
        self.forget_gate = KimiK3ForgetGate(config)
        self.g_proj = nn.Linear(config.hidden_size, self.qkv_dim, bias=False)
        lower = config.linear_gate_lower_bound
        self.safe_gate = lower is not None and lower >= SAFE_LOWER_BOUND

    @override
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, T, features) of the same shape.

        Args:
            hidden_states: (B, T, features).
            cache_params: Cache of transformers, with the inputs of the convolutions and the state.
            attention_mask: (B, T), 1 on real tokens.
            kwargs: What other layers are told.
        """
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        tokens = hidden_states.shape[1]
        mixed = [projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        parts = self._convolved(torch.cat(mixed, dim=-1).transpose(1, 2), cache_params).split(self.qkv_dim, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        state = None
        if cache_params is not None:
            state = cache_params.get_recurrent_state(self.layer_idx, state_idx=0)
        asked: JsonObject = {
            "g": self.forget_gate(hidden_states),
            "beta": torch.sigmoid(self.b_proj(hidden_states).float()),
            "initial_state": state,
            "output_final_state": cache_params is not None,
            "use_qk_l2norm_in_kernel": True,
        }
        if state is not None and tokens == 1:
            output, state = recurrent_kimi_delta_attention(query, key, value, **asked)
        else:
            output, state = chunk_kimi_delta_attention(query, key, value, **asked, safe_gate=self.safe_gate)
        if state is not None:
            cache_params.update_recurrent_state(state.to(torch.float32), self.layer_idx)
        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.o_norm(output, gate).flatten(2))  # type: ignore[no-any-return]

    def _convolved(self, mixed_BCT: torch.Tensor, cache: Any) -> torch.Tensor:
        """(B, T, channels) out of (B, channels, T): each channel of a token with those of the tokens before it."""
        weight, tokens = self.conv1d.weight.squeeze(1), mixed_BCT.shape[2]
        before = None
        if cache is not None:
            before = cache.get_conv_state(self.layer_idx, state_idx=0)
        if before is not None and tokens == 1:
            mixed_BCT = causal_conv1d_update(mixed_BCT, before, weight=weight, bias=None, activation=self.activation)
            return mixed_BCT.transpose(1, 2)
        if cache is not None:
            mixed_BCT = cache.update_conv_state(mixed_BCT, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        mixed_BCT = causal_conv1d_fn(mixed_BCT, weight=weight, bias=None, activation=self.activation)
        return mixed_BCT[:, :, -tokens:].transpose(1, 2)
