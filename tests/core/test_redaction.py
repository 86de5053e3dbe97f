"""Secrets are taken out, and nothing that only looks like one."""

from __future__ import annotations

import pytest

from mindspeed_mm.core.redaction import redact, without_secrets


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("  api_key: abc123  # from the hub", "  api_key: •••  # from the hub"),
        ("model.hf_token=abc", "model.hf_token=•••"),
        ("token: abc", "token: •••"),
        ('"password": "a b, c", "lr": 1', '"password": •••, "lr": 1'),
        ("{wandb_token: 'x y'}", "{wandb_token: •••}"),
        ("MY_SECRET=1", "MY_SECRET=•••"),
        ("note: hf_abcdefghijklmnopqrst", "note: •••"),
        ("http://user:word@host/path", "http://•••@host/path"),
        ("https:/user:word@host/path", "https:/•••@host/path"),
    ],
)
def test_secret_is_taken_out(text: str, clean: str) -> None:
    assert without_secrets(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "eos_token: <|im_end|>",
        "split_special_tokens: false",
        "loss_type: per_token_loss",
        "max_new_tokens: 16",
        "sampler_type: TokenBudgetSampler",
        "hf_token: null",
        "no_decay_params: [bias]",
        "http://host:8080/path",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_nested_values() -> None:
    value = {"api_key": "abc", "nested": [{"token": "abc", "eos_token": "x"}], "n": 3, "empty": {"password": ""}}
    assert redact(value) == {
        "api_key": "•••",
        "nested": [{"token": "•••", "eos_token": "x"}],
        "n": 3,
        "empty": {"password": ""},
    }
