"""The tensors that we write are those that Megatron-Core reads: its own GPT model gives Hugging Face's logits. What it
writes itself as `torch_dist` becomes the Hugging Face folder again.

Runs where the package is installed (`pip install --no-deps megatron-core`, tried with 0.16.1), in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.megatron_models import save_tiny
from tests.helpers.runs import mm
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


ALONE = """
import contextlib, json, sys
from pathlib import Path
from unittest import mock
import torch, torch.distributed as dist, torch.nn.functional as F
folder = Path(sys.argv[1])
config = json.loads((folder / "hf/config.json").read_text())
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
import megatron.core.transformer.moe.moe_utils as moe_utils
moe_utils.te_general_gemm = None  # its name is missing where Transformer Engine is
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
parallel_state.initialize_model_parallel()
experts, number = {}, config.get("num_experts") or config.get("num_local_experts")
if number:
    experts = dict(
        num_moe_experts=number, moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_router_topk=config["num_experts_per_tok"], moe_router_load_balancing_type="none",
        moe_layer_freq=[int(n not in config["mlp_only_layers"]) for n in range(config["num_hidden_layers"])],
        moe_router_pre_softmax=not config["norm_topk_prob"],
    )
transformer = TransformerConfig(
    num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
    num_attention_heads=config["num_attention_heads"], num_query_groups=config["num_key_value_heads"],
    kv_channels=config["head_dim"], ffn_hidden_size=config["intermediate_size"], gated_linear_unit=True,
    activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=config["rms_norm_eps"],
    qk_layernorm=True, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
    attention_softmax_in_fp32=False, bias_activation_fusion=False, masked_softmax_fusion=False,
    persist_layer_norm=False, gradient_accumulation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
    **experts,
)
spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
if experts:
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization="RMSNorm")
cpu = mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
synchronize = mock.patch.object(torch.cuda, "synchronize", lambda: None)
fork = mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext())
with cpu, synchronize, fork, torch.no_grad():
    model = GPTModel(
        transformer, spec, vocab_size=config["vocab_size"], max_sequence_length=64, position_embedding_type="rope",
        rotary_base=config["rope_parameters"]["rope_theta"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
    )
    file = folder / "mm/release/mp_rank_00/model_optim_rng.pt"
    missing, surplus = model.load_state_dict(torch.load(file, weights_only=True)["model"], strict=False)
    assert not surplus and all(name.endswith("._extra_state") for name in missing), (missing, surplus)
    tokens = torch.load(folder / "tokens.pt")
    rows, length = tokens.shape
    hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    torch.save(model(tokens, torch.arange(length).expand(rows, length), hidden), folder / "logits.pt")
    step = folder / "run/iter_0000007"
    step.mkdir(parents=True)
    dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 7}, str(step))
(folder / "run/latest_checkpointed_iteration.txt").write_text("7")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_language_model_alone_gives_the_same_logits_and_comes_back_from_torch_dist(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf = save_tiny(name, tmp_path / "hf")
    assert mm("convert", hf, tmp_path / "mm", "--to", "megatron").code == 0
    tokens = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], check=True)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(input_ids=tokens).logits
    torch.testing.assert_close(
        torch.load(tmp_path / "logits.pt"), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max())
    )
    assert mm("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--model", hf).code == 0
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "hf"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


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
