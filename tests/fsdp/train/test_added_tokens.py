"""Tokens that a run adds to a vocabulary: it computes what plain transformers and PEFT compute with rows that are added
by hand, in fp64: losses, gradients and weights of full training and of adapters, also under parallel plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.added_tokens import ADDED, IDS, make_run, plain_model, plain_steps
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import ONE_F_ONE_B, PP, TP
from tests.helpers.planned_steps import train_steps

pytestmark = pytest.mark.edge("BR16")

UNTIED, TIED = "text, untied", "text, tied"
KINDS = {
    "text, untied": ("text", False, 320),
    "text, tied, spare rows": ("text", True, 384),
    "vlm, tied": ("vlm", True, 320),
    "text, tied": ("text", True, 320),
    "vlm, untied, spare rows": ("vlm", False, 384),
}
SLOW_KINDS = ("text, tied", "vlm, untied, spare rows")
EVERY_KIND = [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW_KINDS else []) for kind in KINDS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("added")
    return {kind: make_run(root / kind, name, tie=tie, rows=rows) for kind, (name, tie, rows) in KINDS.items()}


def hub_model(folder: Path, **section: Any) -> Any:
    arguments = ModelArguments(model_name_or_path=str(folder), **section)
    with keeping_double():
        model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    return model


def steps_of(yaml: Path, *words: str) -> list[Any]:
    with keeping_double():
        return train_steps(str(yaml), list(words))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_model_is_the_one_whose_rows_are_added_by_hand(kind: str, made: dict[str, Path]) -> None:
    folder = made[kind].parent / "model"
    ours, theirs, before = hub_model(folder, **ADDED), plain_model(folder), plain_model(folder, grown=False)
    own = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-15, msg=name)
    assert ours.config.get_text_config().vocab_size == 384
    tokens = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        hidden, logits = [], []
        for model in (ours, before):
            output = model(input_ids=tokens, output_hidden_states=True)
            hidden.append(output.hidden_states[-1])
            logits.append(output.logits[..., :320])
    # To the bit: rows of other tokens, and what the decoder computes of them. A product with a head of more rows may
    # round its sums in another order.
    assert torch.equal(own[name_of_embedding(own)][:320], before.get_input_embeddings().weight[:320])
    assert torch.equal(*hidden)
    if "spare rows" in kind:
        assert torch.equal(*logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-14)


def name_of_embedding(state: dict[str, Any]) -> str:
    return next(name for name in state if name.endswith("embed_tokens.weight"))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_full_training(kind: str, made: dict[str, Path]) -> None:
    folder = made[kind].parent / "model"
    theirs = plain_steps(plain_model(folder), folder)
    assert_same_steps(steps_of(made[kind]), theirs)
    assert theirs[0]["gradients"][name_of_embedding(theirs[0]["gradients"])][IDS].abs().sum(-1).all()


def assert_same_steps(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own["loss"], other["loss"], rtol=0, atol=1e-9)
        for part in ("gradients", "weights"):
            for name, tensor in other[part].items():
                torch.testing.assert_close(own[part][name], tensor, rtol=1e-8, atol=1e-9, msg=f"{part} {name}")


# --- adapters ---------------------------------------------------------------------------------------------------------

LORA = ["training.lora.enable=true", "training.lora.rank=4", "training.lora.alpha=12"]


def peft_model(folder: Path, base: Any) -> Any:
    """PEFT's adapters that train the new rows, which have some random start."""
    from peft import LoraConfig, get_peft_model  # once torchvision is importable

    names = {name for name, _ in base.named_modules() if name.endswith(("embed_tokens", "lm_head"))}
    tied = base.get_input_embeddings().weight is base.get_output_embeddings().weight
    indices = {name: IDS for name in names if not (tied and name == "lm_head")}
    targets = [
        f"{name}" for name, _ in base.named_modules() if "visual" not in name and name.endswith(("q_proj", "v_proj"))
    ]
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, trainable_token_indices=indices)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_adapters_train_the_new_rows_in_full_and_no_other(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    folder = made[kind].parent / "model"
    model = peft_model(tmp_path / "adapters", plain_model(folder))
    theirs = plain_steps(model, folder, undecayed=("trainable_tokens",))
    targets = "training.lora.target_modules=['*q_proj','*v_proj']"
    start = f"training.lora.pretrained_lora_path={tmp_path / 'adapters'}"
    ours = steps_of(made[kind], *LORA, targets, start)
    grown = plain_model(folder).state_dict()
    compared = 0
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own["loss"], other["loss"], rtol=0, atol=1e-9)
        for part in ("gradients", "weights"):
            for name, tensor in other[part].items():
                found, what = own_part(own[part], name)
                torch.testing.assert_close(found, tensor, rtol=1e-8, atol=1e-9, msg=f"{part} {name}")
                compared += what
        others = [row for row in range(384) if row not in IDS]
        for name in own["weights"]:
            if name in grown and len(grown[name]) == 384:
                assert torch.equal(own["weights"][name][others], grown[name][others]), name
                assert not own["gradients"][name][others].any()
    assert compared == (4 if "untied" in kind else 2) * 2


def own_part(own: dict[str, Any], name: str) -> tuple[torch.Tensor, int]:
    """Our tensor for one of PEFT's, and whether it is one of new rows."""
    plain = name.removeprefix("base_model.model.")
    layer, _, rest = plain.partition(".token_adapter.trainable_tokens_delta")
    if rest:
        return own[f"{layer}.weight"][IDS], 1
    return own[plain], 0


OPTIMIZERS = {
    "int8 states": "training.optimizer_state_dtype=int8",
    "bf16 states": "training.optimizer_state_dtype=bf16",
    "swapped": "training.optimizer=adamw_swap",
    "gradients on the host": "features.enable_gradient_offload=true",
    "a base in four bits": "training.lora.quantize=nf4",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_other_rows_stay_under_every_optimizer(words: str, made: dict[str, Path]) -> None:
    stored = plain_model(made[UNTIED].parent / "model", torch.float32, grown=False).state_dict()
    first, last = train_steps(str(made[UNTIED]), [*LORA, "parallel.fsdp_plan.param_dtype=bf16", words])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(last["weights"][name][:320], stored[name])
        assert (last["weights"][name][IDS] != first["weights"][name][IDS]).any(dim=1).all()


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    cases={
        "lora fsdp2": Case("untied lora", 2, 2, 1),
        "lora tp2": Case("tied lora", 2, 1, 1, (TP,)),
    },
    slow={
        "fsdp2": Case("untied", 2, 2, 1),
        "fsdp2, tied": Case("tied", 2, 2, 1),
        "tp2": Case("untied", 2, 1, 1, (TP,)),
        "pp2": Case("untied", 2, 1, 4, (PP, ONE_F_ONE_B)),
        "pp2, tied": Case("tied", 2, 1, 4, (PP, ONE_F_ONE_B)),
        "lora pp2": Case("untied lora", 2, 1, 4, (PP, ONE_F_ONE_B)),
        "lora pp2, tied": Case("tied lora", 2, 1, 4, (PP, ONE_F_ONE_B)),
        "lora fsdp2, tied": Case("tied lora", 2, 2, 1),
        "lora tp2, untied": Case("untied lora", 2, 1, 1, (TP,)),
        "lora fsdp2 × tp2": Case("untied lora", 4, 2, 1, (TP,)),
        "lora fsdp2, vlm": Case("vlm lora", 2, 2, 1),
        "lora replicated": Case("untied lora", 2, 2, 1, ("parallel.fully_shard_parallel_size=1",)),
        "lora fsdp2, read by rank 0": Case("untied lora", 2, 2, 1, ("training.load_rank0_and_broadcast=true",)),
        "lora fsdp2, gradients on the host": Case("untied lora", 2, 2, 1, ("features.enable_gradient_offload=true",)),
    },
    faults={"wrong-divisor": Fault("lora fsdp2", "wrong-divisor")},
    kinds={"lora": tuple(LORA)},
)


@pytest.fixture(scope="module")
def yamls(made: dict[str, Path]) -> dict[str, str]:
    names = {"untied": UNTIED, "tied": TIED, "vlm": "vlm, tied"}
    return {short: str(made[kind]) for short, kind in names.items()}


@pytest.mark.parametrize("name", RUNS.case_params())
def test_a_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("name", RUNS.fault_params())
def test_a_fault_is_found(name: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(name, yamls)
