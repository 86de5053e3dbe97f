"""The tensors that we write are those that Megatron-Core reads: its own GPT model gives Hugging Face's logits.

Runs where the package is installed (`pip install --no-deps megatron-core`, tried with 0.16.1), in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_models import make_tiny_qwen3_vl

CHILD = """
import contextlib, json, os, sys
from pathlib import Path
from unittest import mock
import torch, torch.distributed as dist, torch.nn.functional as F
folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())["text_config"]
saved = torch.load(folder / "mm/release/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
start = "text_decoder."
state = {name.removeprefix(start): tensor for name, tensor in saved.items() if name.startswith(start)}
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
parallel_state.initialize_model_parallel()
transformer = TransformerConfig(
    num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
    num_attention_heads=config["num_attention_heads"], num_query_groups=config["num_key_value_heads"],
    kv_channels=config["head_dim"], ffn_hidden_size=config["intermediate_size"], gated_linear_unit=True,
    activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=config["rms_norm_eps"],
    qk_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float64,
    use_cpu_initialization=True, attention_softmax_in_fp32=False, bias_activation_fusion=False,
    masked_softmax_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
    bias_dropout_fusion=False, apply_rope_fusion=False,
)
model = GPTModel(
    transformer, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
    vocab_size=config["vocab_size"], max_sequence_length=64, position_embedding_type="rope",
    rotary_base=config["rope_parameters"]["rope_theta"], share_embeddings_and_output_weights=True,
).double()
model.load_state_dict(state, strict=True)
tokens = torch.load(folder / "tokens.pt")
rows, length = tokens.shape
hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
cpu = mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
fork = mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext())
with cpu, fork:
    logits = model(tokens, torch.arange(length).expand(rows, length), hidden)
torch.save(logits.detach(), folder / "logits.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_its_gpt_model_gives_the_logits_of_hugging_face(tmp_path: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    from mindspeed_mm.cli.mm_convert import run

    folder = make_tiny_qwen3_vl(tmp_path / "model", dtype=torch.float64)
    words = ["Qwen3VLMegatronConverter", "hf_to_mm", "--cfg.mm_dir", tmp_path / "mm", "--cfg.hf_config.hf_dir", folder]
    words += ["--cfg.parallel_config.llm_pp_layers", "[2]", "--cfg.parallel_config.vit_pp_layers", "[2]"]
    assert run([str(word) for word in words]) == 0
    (folder / "mm").symlink_to(tmp_path / "mm")
    tokens = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, folder / "tokens.pt")
    subprocess.run([sys.executable, "-c", CHILD, str(folder)], check=True)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    # Megatron's rotary angles are of single precision.
    torch.testing.assert_close(torch.load(folder / "logits.pt"), model(input_ids=tokens).logits, rtol=0, atol=1e-6)
