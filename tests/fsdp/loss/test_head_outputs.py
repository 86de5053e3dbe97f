"""What models do behind their output heads is found, and done slice by slice: the same numbers as from logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.build_head_loss import AUTO_VOCABULARY, build_head_loss, resolve_head
from mindspeed_mm.fsdp.loss.head_outputs import LogitSteps, find_logit_steps
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

import transformers  # noqa: E402  (the guard comes first)

WORDS = 41
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARPER = {"initializer_range": 0.5}
"""Logits that a soft cap bends."""
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {  # class → configuration, its keys, steps
    "Qwen3ForCausalLM": ("Qwen3Config", {}, []),
    "Gemma2ForCausalLM": ("Gemma2Config", {"final_logit_softcapping": 2.0}, ["div", "tanh", "mul"]),
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.3}, ["mul"]),
    "GraniteForCausalLM": ("GraniteConfig", {"logits_scaling": 3.0}, ["div"]),
    "HyperCLOVAXForCausalLM": ("HyperCLOVAXConfig", {"logits_scaling": 3.0}, ["mul"]),
    "GPTJForCausalLM": ("GPTJConfig", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, []),
}
"""GPT-J's head has a bias."""


def build(name: str) -> nn.Module:
    config, keys, _ = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SMALL, **SHARPER, **keys)
    model: nn.Module = getattr(transformers, name)(made).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_and_gradients(name: str, **features: Any) -> dict[str, torch.Tensor]:
    model = build(name)
    arguments = FeatureArguments.model_validate({"loss_cfg": {"z_loss_coef": 0.01}, **features})
    head = build_head_loss(model, resolve_spec(model).head, arguments)
    assert head is not None
    objective = TokenCrossEntropy(model, head)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (2, 7), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(2, 7, generator=generator) < 0.3, -100)
    terms = objective.terms(model, objective.prepare({"input_ids": ids, "shift_labels": labels}))
    sum(terms.values()).backward()  # type: ignore[union-attr]
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {key: value.detach() for key, value in (*terms.items(), *gradients.items())}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_in_slices_equal_whole_logits(name: str) -> None:
    head = resolve_spec(build(name)).head
    plan = {"apply_module": head, "chunk_size": 3}
    whole, sliced = loss_and_gradients(name), loss_and_gradients(name, enable_chunk_loss=True, chunkloss_plan=plan)
    assert whole.keys() == sliced.keys() and {"loss", "z_loss"} < whole.keys()
    for key, expected in whole.items():
        torch.testing.assert_close(sliced[key], expected, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_steps_are_found_before_there_are_weights(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    steps = find_logit_steps(model, resolve_spec(model).head)
    assert [step.name for step in steps.steps] == FAMILIES[name][2]
    assert "forward" not in vars(model.get_submodule("model" if hasattr(model, "model") else "transformer"))


class Own(nn.Module):
    """A model whose logits something is done with."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.model, self.lm_head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.change = change

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.model(input_ids)
        hidden = hidden if isinstance(hidden, torch.Tensor) else hidden[0]
        return SimpleNamespace(logits=self.change(self.lm_head(hidden)))


def written(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 0] = -1e9
    return logits


CHUNKED = FeatureArguments.model_validate({"enable_chunk_loss": True})


@pytest.mark.parametrize(
    ("change", "word"),
    [(lambda logits: logits + 1, "add"), (written, "__setitem__"), (lambda logits: logits[..., :5], "__getitem__")],
    ids=["added", "written", "cut"],
)
def test_what_slices_cannot_follow_is_refused_before_training(change: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"Own changes the logits behind its output head \(.*{word}.*\)") as caught:
        build_head_loss(Own(change), "lm_head", CHUNKED)
    assert caught.value.problems[0].key == "features.enable_chunk_loss"


def test_what_could_not_be_asked_is_seen_in_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.loss.build_head_loss.find_logit_steps", lambda *_: LogitSteps())
    model = Own(lambda logits: logits * 2)
    head = build_head_loss(model, "lm_head", CHUNKED)
    assert head is not None
    objective = TokenCrossEntropy(model, head)
    batch = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "shift_labels": torch.ones(1, 3, dtype=torch.long)}
    with pytest.raises(ConfigError, match=r"Own changes the logits behind its output head \(mul\)"):
        objective.terms(model, objective.prepare(batch))


# --- what is asked of the wrong model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["model", "lm_haed"])
def test_a_module_that_is_not_the_head(named: str) -> None:
    arguments = FeatureArguments.model_validate({"enable_chunk_loss": True, "chunkloss_plan": {"apply_module": named}})
    with pytest.raises(ConfigError, match="is not the output head of Own") as caught:
        build_head_loss(Own(lambda logits: logits), "lm_head", arguments)
    (problem,) = caught.value.problems
    assert (problem.key, problem.way_out) == ("features.chunkloss_plan.apply_module", "The head is 'lm_head'.")
    assert ("lm_head" in problem.what) == (named == "lm_haed")


@pytest.mark.parametrize(
    "asked", [{"enable_chunk_loss": True}, {"enable_dynamic_chunk_loss": True}, {"loss_cfg": {"z_loss_coef": 0.1}}]
)
def test_a_model_without_a_head(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Linear has no output head"):
        build_head_loss(nn.Linear(1, 1), "", FeatureArguments.model_validate(asked))
    assert build_head_loss(nn.Linear(1, 1), "", FeatureArguments()) is None


# --- auto ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A language model of two layers of nothing, with a vocabulary that counts as large."""

    def __init__(self, vocabulary: int = AUTO_VOCABULARY, change: Any = None) -> None:
        super().__init__()
        self.model = nn.Embedding(vocabulary, 4)
        self.lm_head = nn.Linear(4, vocabulary, bias=False)
        self.change = change

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        hidden = self.model(input_ids)
        hidden = getattr(hidden, "last_hidden_state", hidden)
        logits = self.lm_head(hidden)
        return SimpleNamespace(logits=logits if self.change is None else self.change(logits))


class Opaque(Small):
    """Its code runs with its own arguments alone, so that it cannot be asked before training."""

    def forward(self, input_ids: torch.Tensor, *, mine: int, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


def is_sliced(model: nn.Module, *, may_slice: bool = True, **features: Any) -> bool:
    plan = resolve_head(model, "lm_head", FeatureArguments(**features), may_slice=may_slice)
    assert plan is not None
    return plan.slices is not None


@pytest.mark.edge("BU9")
def test_large_vocabularies_are_sliced_by_themselves() -> None:
    assert is_sliced(Small()) and not is_sliced(Small(AUTO_VOCABULARY - 1))
    assert is_sliced(Small(8), enable_chunk_loss=True) and not is_sliced(Small(), enable_chunk_loss=False)
    assert not is_sliced(Small(), may_slice=False) and not is_sliced(Small(), loss_cfg={"loss_type": "raw"})
    assert not is_sliced(Small(), chunkloss_plan={"apply_module": "other"})
    adapted = Small()
    adapted.lm_head.forward = adapted.lm_head.forward  # as an adapter replaces it
    assert not is_sliced(adapted)


@pytest.mark.edge("BU9")
def test_by_itself_no_model_is_sliced_that_slices_cannot_follow() -> None:
    assert is_sliced(Small(change=lambda logits: (logits / 30).tanh() * 30))
    assert not is_sliced(Small(change=lambda logits: logits + logits.roll(1, -1)))
    assert not is_sliced(Opaque()) and is_sliced(Opaque(), enable_chunk_loss=True)


@pytest.mark.edge("BU9")
def test_sliced_by_itself_the_loss_and_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SMALL, "vocab_size": AUTO_VOCABULARY})
    model = transformers.Qwen3ForCausalLM(config).double()
    head = build_head_loss(model, "lm_head", FeatureArguments())
    assert head is not None and "slices of 1024 rows" in head.describe()
    objective = TokenCrossEntropy(model, head)
    ids = torch.randint(3, AUTO_VOCABULARY, (1, 9))
    labels = ids.roll(-1, 1).masked_fill(torch.arange(9) % 4 == 0, -100)
    loss = objective.terms(model, objective.prepare({"input_ids": ids, "shift_labels": labels}))["loss"]
    loss.backward()
    own = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = torch.nn.functional.linear(model.model(ids).last_hidden_state, model.lm_head.weight)
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name], parameter.grad, rtol=1e-9, atol=1e-11)
