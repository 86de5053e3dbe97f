"""Heads for further tokens: their losses and gradients equal a straightforward computation, sample by sample, with
transformers' modules; and they are the same packed, sharded, recomputed, with the loss in slices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.loss import language_objective
from mindspeed_mm.fsdp.models.behaviour.multi_token import MultiTokenHeads
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import FAMILIES as TINY
from tests.helpers.packed_more_families import MORE
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.plan_matrix import EP, FP64
from tests.helpers.planned_steps import GLOBAL_BATCH, overrides, train_steps
from tests.helpers.tiny_models import build_tokenizer, make_tiny_qwen3, make_tiny_qwen3_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

DEPTHS = 2
FACTOR = 0.3
ON = (f"model.mtp_num_layers={DEPTHS}", f"model.mtp_loss_scaling_factor={FACTOR}")
IN_ORDER = "data.dataloader_param.shuffle=false"
SLICES = ("features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=3")
WEIGHTS = "model.safetensors"


def make(folder: Path, family: str) -> str:
    """A run whose folder holds `mtp.*`, as released ones do."""
    if family == "qwen3":
        make_tiny_qwen3(folder / "model", num_hidden_layers=2)
    elif family == "qwen3_moe":
        make_tiny_qwen3_moe(folder / "model", initializer_range=0.3)
    elif family == "qwen3_next":
        model, tokenizer = TINY["qwen3_next"].build(), build_tokenizer()
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    make_rows(folder, **({} if family == "vlm" else {"images": (0,)}))
    yaml = str(make_tiny_run(folder, **FP64))
    if family in ("qwen3", "qwen3_next"):
        heads = heads_of(load_plain(folder), DEPTHS)
        stored = load_file(folder / "model" / WEIGHTS)
        save_file(
            stored | {f"mtp.{k}": v.contiguous() for k, v in heads.state_dict().items()},
            folder / "model" / WEIGHTS,
            metadata={"format": "pt"},
        )
    return yaml


def load_plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="sdpa")
    model.set_experts_implementation("eager")  # grouped products have no fp64
    return model


def heads_of(model: Any, depths: int) -> MultiTokenHeads:
    """With random weights."""
    torch.manual_seed(3)
    kinds = getattr(model.config, "layer_types", None)
    like = max(i for i, kind in enumerate(kinds or ["full_attention"] * 2) if kind == "full_attention")
    heads = MultiTokenHeads(model.model.layers[like], model.model.norm, model.config.hidden_size, depths).double()
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.2)
    return heads


def by_hand(yaml: str) -> dict[str, torch.Tensor]:
    """Losses and gradients of the first step: one sample at a time, no padding, every position's formula."""
    folder = Path(yaml).parent
    config = load_with_plugins(Path(yaml), [])
    dataset, _ = build_mm_dataset(config.arguments.data.dataset_param, seed=7)
    model = load_plain(folder).train()
    stored = {
        k.removeprefix("mtp."): v for k, v in load_file(folder / "model" / WEIGHTS).items() if k.startswith("mtp.")
    }
    heads = heads_of(model, DEPTHS)
    heads.load_state_dict(stored)
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(DEPTHS + 1)], [0] * (DEPTHS + 1)
    for index in range(GLOBAL_BATCH):
        ids, labels = (torch.as_tensor(dataset[index][name]) for name in ("input_ids", "labels"))
        for k, logits in enumerate(logits_by_hand(model, heads, ids)):
            trained = labels[k + 1 :] != -100
            counts[k] += int(trained.sum())
            targets = labels[k + 1 :][trained]
            sums[k] = sums[k] + F.cross_entropy(logits[: len(ids) - k - 1][trained], targets, reduction="sum")
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    (means[0] + FACTOR / DEPTHS * sum(means[1:])).backward()
    named = [*model.named_parameters(), *((f"mtp.{name}", p) for name, p in heads.named_parameters())]
    return {name: p.grad for name, p in named if p.grad is not None} | {
        "loss": means[0] + FACTOR / DEPTHS * sum(means[1:])
    }


def logits_by_hand(model: Any, heads: MultiTokenHeads, ids: torch.Tensor) -> list[torch.Tensor]:
    """(L, V) of the model and of each depth."""
    length = len(ids)
    embedded = model.model.embed_tokens(ids)[None]
    hidden = model.model(inputs_embeds=embedded).last_hidden_state
    places = torch.arange(length)[None]
    rotary = model.model.rotary_emb(embedded, places)
    causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    found = [model.lm_head(hidden)[0]]
    for k, layer in enumerate(heads.layers, start=1):
        ahead = torch.cat([embedded[:, k:], torch.zeros_like(embedded[:, :k])], dim=1)
        joined = torch.cat([heads.pre_fc_norm_embedding(ahead), heads.pre_fc_norm_hidden(hidden)], dim=-1)
        out = layer(heads.fc(joined), position_embeddings=rotary, attention_mask=causal, position_ids=places)
        hidden = heads.norm(out[0] if isinstance(out, tuple) else out)
        found.append(model.lm_head(hidden)[0])
    return found


def steps(yaml: str, words: list[str], packs: bool | None = None, fault: str = "") -> Any:
    whole_rows = mock.patch.object(
        language_objective, "_documents", lambda batch: torch.zeros_like(batch["shift_labels"])
    )
    with keeping_double(), whole_rows if fault == "leak" else mock.MagicMock():
        return train_steps(yaml, words, packs=packs)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("further")
    return {name: make(folder / name, name) for name in ("qwen3", "qwen3_next", "qwen3_moe", "vlm")}


# transformers runs delta nets in fp32, and our rows are padded.
@pytest.mark.parametrize(("family", "bound"), [("qwen3", 1e-12), ("qwen3_next", 1e-7)])
def test_losses_and_gradients_equal_those_by_hand(yamls: dict[str, str], family: str, bound: float) -> None:
    with keeping_double():
        expected = by_hand(yamls[family])
    step = steps(yamls[family], overrides(1, 2, *ON, IN_ORDER))[0]
    assert abs(float(step["loss"] - expected.pop("loss"))) < 1e-12
    assert {name for name, gradient in step["gradients"].items() if gradient is not None} == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            step["gradients"][name], gradient, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_label_too_near_is_seen(yamls: dict[str, str]) -> None:
    real = language_objective.further
    with mock.patch.object(
        language_objective, "further", lambda batch, depth: real(batch, depth) if depth > 1 else batch
    ):
        wrong = steps(yamls["qwen3"], overrides(1, 2, *ON, IN_ORDER))
    with pytest.raises(ParityError):
        compare_steps(steps(yamls["qwen3"], overrides(1, 2, *ON, IN_ORDER)), wrong, 1e-9)


def test_labels_and_weights_move_together_and_stay_in_their_document() -> None:
    batch = {
        "shift_labels": torch.tensor([[1, 2, 3, 4, 5, 6]]),
        "loss_weights": torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]),
        "cu_seq_lens_q": torch.tensor([0, 4, 6], dtype=torch.int32),
    }
    moved = language_objective.further(batch, 1)
    assert moved["shift_labels"].tolist() == [[2, 3, 4, -100, 6, -100]]
    labelled = moved["shift_labels"] != -100
    assert moved["loss_weights"][labelled].tolist() == batch["loss_weights"][0, [1, 2, 3, 5]].tolist()
    rows = {"shift_labels": batch["shift_labels"]}
    assert language_objective.further(rows, 2)["shift_labels"].tolist() == [[3, 4, 5, 6, -100, -100]]


@pytest.fixture(scope="module")
def padded(yamls: dict[str, str]) -> dict[str, Any]:
    return {name: steps(yamls[name], overrides(1, 2, *ON), packs=False) for name in ("vlm", "qwen3_moe")}


@pytest.mark.parametrize(
    ("family", "words", "packs"),
    [
        ("vlm", (), True),
        (
            "vlm",
            ("features.recompute=true", "features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=3"),
            False,
        ),
        ("qwen3_moe", (EP,), False),
    ],
)
def test_the_same_on_two_ranks(
    yamls: dict[str, str], padded: dict[str, Any], family: str, words: tuple[str, ...], packs: bool
) -> None:
    for measured in run_ranks(2, steps, yamls[family], overrides(2, 2, *ON, *words), packs):
        compare_steps(padded[family], measured, 1e-9)


def test_documents_keep_to_themselves(yamls: dict[str, str]) -> None:
    """With every token trained, so that a document's first tokens would be labels of the one before."""
    words = overrides(1, 2, *ON, "data.dataset_param.basic_parameters.train_on_prompt=true")
    expected = steps(yamls["vlm"], words, packs=False)
    compare_steps(expected, steps(yamls["vlm"], words, packs=True), 1e-9)
    with pytest.raises(ParityError):
        compare_steps(expected, steps(yamls["vlm"], words, packs=True, fault="leak"), 1e-9)


def test_a_folder_that_keeps_them_as_a_layer(tmp_path: Path) -> None:
    """DeepSeek-V3's keys come in under ours and go out as they were."""
    from mindspeed_mm.fsdp.checkpoint.hf import save_hf
    from mindspeed_mm.fsdp.models.modelhub import ModelHub
    from mindspeed_mm.fsdp.params.model_args import ModelArguments

    family = MORE["deepseek_v3"]
    source = tmp_path / "source"
    family.build().save_pretrained(source)
    stored = load_file(source / WEIGHTS)
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    draw = torch.Generator().manual_seed(0)
    width = config["hidden_size"]
    as_a_layer = {extra + key.removeprefix(last): t.clone() for key, t in stored.items() if key.startswith(last)}
    as_a_layer |= {
        f"{extra}{name}.weight": torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in {
            "enorm": (width,),
            "hnorm": (width,),
            "shared_head.norm": (width,),
            "eh_proj": (width, 2 * width),
        }.items()
    }
    shared = {f"{extra}embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(stored | as_a_layer | shared, source / WEIGHTS, metadata={"format": "pt"})

    args = ModelArguments(model_name_or_path=str(source), mtp_num_layers=1)
    model = ModelHub.build(args, param_dtype=torch.float64)
    report = ModelHub.load_weights(model, args, seed=0, device=torch.device("cpu"))
    assert not report.initialized and report.ignored == ("mtp.layers.0.embed_tokens.weight",)
    torch.testing.assert_close(model.mtp.fc.weight, as_a_layer[f"{extra}eh_proj.weight"], rtol=0, atol=0)

    save_hf(model, tmp_path / "out", source)
    out = {key: t for file in (tmp_path / "out").glob("*.safetensors") for key, t in load_file(file).items()}
    assert out.keys() == (stored | as_a_layer).keys()
    assert all(torch.equal(out[key], tensor) for key, tensor in (stored | as_a_layer).items())


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((*ON, "training.lora.enable=true"), "training.lora.enable"),
        ((*ON, "features.loss_cfg.loss_type=raw"), "features.loss_cfg.loss_type"),
        ((*ON, "parallel.tensor_parallel_size=2"), "parallel.tensor_parallel_size"),
    ],
)
def test_what_does_not_go_with_them_is_refused(yamls: dict[str, str], words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.mtp_num_layers") as refused:
        load_with_plugins(Path(yamls["qwen3"]), list(words))
    assert [problem.key for problem in refused.value.problems] == [key]
