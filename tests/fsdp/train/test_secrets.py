"""No secret of a configuration reaches a file, a log, a tracker or the screen, and a run resumes all the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.core import redaction
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.redaction import REDACTED, is_secret_name, redact
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import dataset_cards, model_cards
from mindspeed_mm.fsdp.params.loader import dump_resolved, load_config, resolved_dict
from mindspeed_mm.fsdp.params.schema_walk import is_open, section_of, walk_fields
from mindspeed_mm.fsdp.params.yaml.hidden_text import words_without_secrets, yaml_without_secrets
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.hostile import BEHAVIOURS, Hostile, hostile
from tests.helpers.runs import mm
from tests.helpers.tiny_run import make_tiny_run

CANARY = "canary-5d1c"
SECRETS = {
    "headers": {"X-Api-Key": f"{CANARY}-a", "Authorization": f"Bearer {CANARY}-b", "Anything": f"{CANARY}-c"},
    "api_key": f"{CANARY}-d",
    "passphrase": f"{CANARY}-e",
    "session-cookie": f"{CANARY}-f",
    "hfToken": f"{CANARY}-g",
    "db_password": {"of": [f"{CANARY}-h"]},
    "proxy": f"http://me:{CANARY}-i@host/?token={CANARY}-j",
    "extra_headers": {"n": f"{CANARY}-k"},
}


NAMES = re.findall(
    r"\S+",
    "api_key X-Api-Key apiKey apikey Ocp-Apim-Subscription-Key token hf_token hfToken wandb-token secret client_secret "
    "Authorization Proxy-Authorization Cookie set-cookie MY_SECRET password db-password passphrase auth_token key",
)
NO_SECRETS = (
    "eos_token",
    "image_token",
    "image_token_id",
    "max_new_tokens",
    "tokenizer",
    "num_key_value_heads",
    "text_key",
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test knows the secrets of its own configurations alone."""
    redaction._known.clear()
    yield
    redaction._known.clear()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.edge("BS2")
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_says_secret(name: str) -> None:
    assert is_secret_name(name) and redact({name: "x", "n": [{name: 5}]}) == {name: REDACTED, "n": [{name: REDACTED}]}


@pytest.mark.edge("BS2")
def test_no_key_of_the_schema_or_of_a_card_is_taken_for_a_secret() -> None:
    names = [key.rpartition(".")[2] for key, _ in walk_fields()]
    for cards in (model_cards(), dataset_cards()):
        names += [key.rpartition(".")[2] for card in cards.values() for key in card]
    names += [
        "eos_token",
        "image_token",
        "image_token_id",
        "max_new_tokens",
        "tokenizer",
        "num_key_value_heads",
        "image_key",
    ]
    assert len(names) > 300 and [name for name in names if is_secret_name(name)] == []


# --- the configuration ------------------------------------------------------------------------------------------------


def free_form_keys() -> list[str]:
    """The keys that take values of any name: sections that plugins add to, and mappings."""
    keys = [] if not is_open(Arguments) else [""]
    for key, info in walk_fields():
        section = section_of(info.annotation)
        takes_mapping = any("dict[" in str(part) for part in (info.annotation, *get_args(info.annotation)))
        if (section is not None and is_open(section)) or (section is None and takes_mapping):
            keys.append(key)
    return keys


@pytest.mark.edge("BS2")
def test_dumping_or_printing_the_tree_shows_no_secret() -> None:
    keys = free_form_keys()
    assert {"posttrain.rewards.settings", "model.transformer", "training.quantization_plan.extra_args"} <= {*keys}
    assert {"model", "data.dataset_param.basic_parameters"} <= {*keys} and len(keys) >= 8
    checked = 0
    for key in keys:
        tree: Any = SECRETS
        for name in reversed(key.split(".")):
            tree = [{"name": "http", **tree}] if name == "rewards" else tree
            tree = {name: tree}
        try:
            arguments = Arguments.model_validate(tree)
        except ValueError:  # mappings of sections or of numbers hold no secrets
            continue
        checked += 1
        section: Any = arguments
        for name in key.split("."):
            section = section[name][0] if name == "rewards" else section[name]
        assert section["headers"]["X-Api-Key"] == f"{CANARY}-a"  # whoever needs it has it
        values = redact(arguments.model_dump(mode="json"))
        for text in (str(arguments), repr(arguments), arguments.model_dump_json(), json.dumps(arguments.model_dump())):
            assert CANARY not in text.replace(f"me:{CANARY}-i@", "").replace(f"token={CANARY}-j", ""), key
        assert CANARY not in json.dumps(values)
    assert checked >= 6


@pytest.mark.edge("BS2")
def test_texts_as_they_were_written() -> None:
    text = (
        f"# the key is {CANARY}-1\nshared: &k {CANARY}-1\nposttrain:\n  rewards:\n  - name: http\n    settings:\n"
        f'      headers: {{X-Key: *k, "Cookie": "{CANARY}\\"2"}}  # mine\n'
        f"      api_key: |\n        {CANARY}\n        3\n"
        f"      password: 12345678\n      url: http://me:{CANARY}4@host/?api_key={CANARY}5&n=1\n      batch_size: 4\n"
    )
    hidden = yaml_without_secrets(text)
    assert CANARY not in hidden and "12345678" not in hidden
    assert "  # mine\n" in hidden and "      batch_size: 4\n" in hidden and "&n=1\n" in hidden
    assert YAML(typ="safe").load(hidden)["posttrain"]["rewards"][0]["settings"]["api_key"] == REDACTED
    words = [
        "mm",
        f"posttrain.rewards=[{{settings: {{headers: {{A: {CANARY}6}}}}}}]",
        f"model.hf_token={CANARY}7",
        "a=1",
    ]
    said = words_without_secrets(words)
    assert said == [
        "mm",
        f"posttrain.rewards=[{{settings: {{headers: {{A: {REDACTED}}}}}}}]",
        "model.hf_token=•••",
        "a=1",
    ]


# --- a run ------------------------------------------------------------------------------------------------------------


def _scores(_: Hostile, request: bytes) -> Iterator[bytes]:
    if request.startswith(b"POST"):
        samples = json.loads(request.partition(b"\r\n\r\n")[2])["samples"]
        body = json.dumps({"scores": [len(set(sample["completion"])) for sample in samples]}).encode()
        yield b"HTTP/1.1 200 OK\r\n\r\n" + body


@pytest.fixture
def server() -> Iterator[Hostile]:
    BEHAVIOURS["scores"] = _scores
    with hostile("scores") as serving:
        yield serving
    del BEHAVIOURS["scores"]


def configured(folder: Path, server: Hostile, **more: Any) -> Path:
    url = f"http://me:{CANARY}-pw@127.0.0.1:{server.port}/score?token={CANARY}-q"
    settings = {"url": url, "headers": {"X-Api-Key": f"{CANARY}-a", "Cookie": f"c={CANARY}-b"}, "retries": 0} | more
    posttrain = {
        "method": "grpo",
        "grpo": {"num_generations": 4},
        "rollout": {"max_completion_length": 4},
        "rewards": [{"name": "http", "settings": settings}],
    }
    training = {"micro_batch_size": 4, "train_iters": 2, "save_interval": 1, "save": str(folder / "run")}
    path = make_tiny_run(folder, training=training, posttrain=posttrain)
    path.write_text(f"# password: {CANARY}-c\n{path.read_text()}")
    return path


def where(folder: Path) -> list[str]:
    """The files that hold a canary."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and CANARY.encode() in path.read_bytes():
            found.append(str(path.relative_to(folder)))
    return found


@pytest.mark.edge("BS2")
def test_no_file_of_a_run_holds_a_secret_and_it_resumes_with_another(
    server: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, save = configured(tmp_path, server), tmp_path / "run"
    override = f"posttrain.rewards=[{{name: http, settings: {{url: '{server.url}', headers: {{A: {CANARY}-w}}}}}}]"
    monkeypatch.setattr("sys.argv", ["mm", "train", str(path), override])  # what run.json records
    said = mm("train", path, "training.train_iters=1")
    assert said.code == 0 and CANARY not in said.out + said.err, said.err
    (first, *_) = [request for request in server.asked if request.startswith(b"POST")]
    for sent in (f"X-Api-Key: {CANARY}-a", f"Cookie: c={CANARY}-b", f"?token={CANARY}-q", "Authorization: Basic "):
        assert sent.encode() in first
    for made in (["export", save, tmp_path / "exported"], ["report", save, "--out", tmp_path / "report.html"]):
        assert (done := mm(*made)).code == 0, done.err
    shown = mm("config", path)
    assert CANARY not in shown.out + shown.err + done.out
    assert where(save) == [] and where(tmp_path / "exported") == [] and where(tmp_path) == [path.name]
    assert REDACTED in (save / "resolved.yaml").read_text() and REDACTED in (save / "config.yaml").read_text()

    monkeypatch.setenv("REWARD_KEY", f"{CANARY}-env")
    headers = {"headers": {"X-Api-Key": f"{CANARY}-other"}, "api_key_env": "REWARD_KEY", "api_key_header": "X-Key"}
    said = mm("train", configured(tmp_path, server, **headers))
    assert said.code == 0, said.err
    last = server.asked[-1].decode()
    assert f"X-Api-Key: {CANARY}-other" in last and f"X-Key: {CANARY}-env" in last
    assert where(save) == []


@pytest.mark.edge("BS2")
def test_a_recorded_configuration_asks_for_its_secrets(server: Hostile, tmp_path: Path) -> None:
    path = configured(tmp_path, server)
    config = load_config(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config))
    assert CANARY not in resolved.read_text() + json.dumps(resolved_dict(config))
    with pytest.raises(ConfigError, match="a secret was hidden here when the run was recorded") as caught:
        Trainer(str(resolved)).train()
    (problem,) = caught.value.problems
    assert problem.key == "posttrain.rewards" and problem.where.startswith(f"{resolved}:")
    for words in (["check", resolved], ["train", resolved]):
        said = mm(*words)
        assert said.code == 2 and "a secret was hidden here" in said.out + said.err
    settings = f"{{url: '{server.url}/score', headers: {{X-Api-Key: {CANARY}}}, retries: 0}}"
    given = load_config(resolved, [f"posttrain.rewards=[{{name: http, settings: {settings}}}]"])
    given.check_revealed()


@pytest.mark.edge("BS2")
def test_a_failing_server_shows_no_secret(tmp_path: Path) -> None:
    BEHAVIOURS["echo"] = lambda _server, request: iter(
        [b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(request), request]
    )
    try:
        with hostile("echo") as server:
            said = mm("train", configured(tmp_path, server))
    finally:
        del BEHAVIOURS["echo"]
    assert said.code == 3 and "refuses (401)" in said.err and CANARY not in said.out + said.err
    assert where(tmp_path / "run") == []
