"""Rollouts that a server draws, against one of the standard library that speaks vLLM's and SGLang's words."""

import base64
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError, MachineError
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawRule, draw_answers
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.rollouts.server import SERVERS, ServedPrompt
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.runs import mm
from tests.helpers.tiny_run import make_rows, make_tiny_run


class _Server(ThreadingHTTPServer):
    model: Any = None
    processor: Any = None
    lock: threading.Lock
    asked: list[tuple[str, Any]]
    loaded: list[str]
    """Of the files of weights."""
    sleeps_on_weights = False


class _Words(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """As servers answer: what takes new weights is there, and wants another method."""
        there = {"/v1/models": 200, "/health": 200}
        wants_post = hasattr(self, self.path.strip("/").replace("/", "_"))
        self.send_response(there.get(self.path, 405 if wants_post else 404))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, content))
            known = getattr(self, self.path.strip("/").replace("/", "_").replace("v1_", ""), None)
            told = known(content) if known is not None else None
        if known is None:
            self.send_error(404)
            return
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def load(self, folder: str) -> None:
        from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

        weights = next(Path(folder).glob("*.safetensors")).read_bytes()
        self.server.loaded.append(hashlib.sha256(weights).hexdigest())
        if self.server.model is None or not self.server.sleeps_on_weights:
            self.server.model = Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()
        self.server.processor = self.server.processor or AutoProcessor.from_pretrained(folder)

    def drawn(self, inputs: dict[str, Any], seed: int, content: dict[str, Any]) -> Any:
        never = tuple(int(token) for token in content["logit_bias"])
        most = content.get("max_tokens") or content["max_new_tokens"]
        rule = DrawRule(seed, most, content["temperature"], suppressed=never)
        return draw_answers(self.server.model, inputs, [""], rule, end_ids=content["stop_token_ids"], pad_id=0)[0]

    def update_weights_from_disk(self, content: Any) -> Any:
        self.load(content["model_path"])
        return {"success": True, "message": ""}

    def generate(self, content: Any) -> Any:
        settings = content["sampling_params"]
        inputs = of_ids(content["input_ids"])
        if "image_data" in content:  # as SGLang: words again, each picture one token, which the processor makes many
            text = self.server.processor.tokenizer.decode(content["input_ids"])
            text = re.sub(r"(?:<\|image_pad\|>)+", "<|image_pad|>", text)
            pictures = list(map(picture_of, content["image_data"]))
            inputs = dict(self.server.processor(text=[text], images=pictures, return_tensors="pt"))
        answer = self.drawn(inputs, settings["sampling_seed"], settings)
        pairs = zip(answer.log_probs, answer.token_ids, strict=True)
        found = [[value, token, None] for value, token in pairs]
        return {"meta_info": {"prompt_tokens": inputs["input_ids"].shape[1], "output_token_logprobs": found}}

    def collective_rpc(self, content: Any) -> Any:
        assert content["method"] == "reload_weights"
        self.load(content["kwargs"]["weights_path"])

    def reset_prefix_cache(self, content: Any) -> Any:
        return {}

    def completions(self, content: Any) -> Any:
        answer = self.drawn(of_ids(content["prompt"]), content["seed"], content)
        return {"choices": [{"token_ids": answer.token_ids, "logprobs": {"token_logprobs": answer.log_probs}}]}

    def chat_completions(self, content: Any) -> Any:
        """As vLLM: the chat is rendered here, by transformers' processor."""
        pictures = [
            picture_of(part["image_url"]["url"])
            for message in content["messages"]
            for part in message["content"]
            if isinstance(part, dict) and part["type"] == "image_url"
        ]
        shown = json.loads(json.dumps(content["messages"]).replace('"type": "image_url"', '"type": "image"'))
        text = self.server.processor.apply_chat_template(shown, add_generation_prompt=True, tokenize=False)
        inputs = dict(self.server.processor(text=[text], images=pictures, return_tensors="pt"))
        answer = self.drawn(inputs, content["seed"], content)
        told = [{"token": "", "logprob": value} for value in answer.log_probs]
        choice = {"token_ids": answer.token_ids, "logprobs": {"content": told}}
        return {"prompt_token_ids": inputs["input_ids"][0].tolist(), "choices": [choice]}

    def log_message(self, *_: object) -> None:
        pass


def of_ids(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def picture_of(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))


@pytest.fixture
def server() -> Iterator[_Server]:
    serving = _Server(("127.0.0.1", 0), _Words)
    serving.asked, serving.loaded, serving.lock = [], [], threading.Lock()
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield serving
    serving.shutdown()
    serving.server_close()


def run_of(folder: Path, port: int, backend: str, *, images: tuple[int, ...] = (0,), **rollout: Any) -> Path:
    make_rows(folder, images=images)
    posttrain = {
        "method": "grpo",
        "grpo": {"num_generations": 4},
        "rollout": {"backend": backend, "base_url": f"http://127.0.0.1:{port}", "max_completion_length": 4, **rollout},
        "rewards": [{"name": "length", "settings": {"max_tokens": 4, "soft_tokens": 4}}, {"name": "repetition"}],
    }
    training = {"micro_batch_size": 8, "train_iters": 2, "lr": 1e-2, "save": str(folder / "run")}
    return make_tiny_run(folder, posttrain=posttrain, training=training)


def logged(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def gaps(folder: Path) -> list[float]:
    return [line["log_prob_gap"] for line in logged(folder)]


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_server_draws_with_the_weights_of_the_step(backend: str, server: _Server, tmp_path: Path) -> None:
    """For rows with one picture, none and two. What transformers' own processor and model make of a row's files and an
    answer is what is stored, and training finds the same log-probabilities."""
    Trainer(str(run_of(tmp_path, server.server_port, backend, images=(1, 0, 2)))).train()
    assert max(gaps(tmp_path)) < 1e-5
    assert len(server.asked) == 2 * (8 + (1 if backend == "sglang" else 2))
    asked = [content for path, content in server.asked if path in ("/generate", "/v1/chat/completions")]
    assert sum("image_data" in content or "messages" in content for content in asked) > 4
    first = min((tmp_path / "run" / "rollouts").glob("rollout_*.jsonl"))
    text = first.read_text(encoding="utf-8")
    records = [record for record in map(json.loads, text.splitlines()) if "token_ids" in record]
    assert len(records) == 8
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
    rows = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    never = suppressed(server.asked[-1][1])
    for record in records:
        row = json.loads(rows[record["row"]])
        pictures = [Image.open(tmp_path / name) for name in row["images"]]
        expected = recomputed(model, processor, pictures, record["token_ids"], never)
        assert record["log_probs"] == pytest.approx(expected, abs=1e-5)


def suppressed(content: dict[str, Any]) -> list[int]:
    return [int(token) for token in content.get("sampling_params", content)["logit_bias"]]


def recomputed(model: Any, processor: Any, pictures: list[Any], token_ids: list[int], never: list[int]) -> list[float]:
    """Log-probabilities of an answer, by transformers alone."""
    parts: list[dict[str, str]] = [{"type": "image"} for _ in pictures]
    parts.append({"type": "text", "text": "What is it like?"})
    chat = [{"role": "user", "content": parts}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = dict(processor(text=[text], images=pictures or None, return_tensors="pt"))
    answer, length = torch.tensor([token_ids]), inputs["input_ids"].shape[1]
    for name, fill in (("input_ids", answer), ("attention_mask", torch.ones_like(answer))):
        inputs[name] = torch.cat([inputs[name], fill], 1)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    with torch.no_grad():
        logits = model(**inputs).logits[0, length - 1 : -1].double()
    logits[:, never] = -torch.inf
    found: list[float] = logits.log_softmax(-1).gather(1, answer[0, :, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("backend", "told", "said"),
    [
        ("sglang", {"meta_info": {"prompt_tokens": 4}}, "4 instead of 3"),
        ("vllm", {"prompt_token_ids": [1, 9, 3]}, r"token 1 is 9 instead of 2 \(3 tokens, 3 in training\)"),
        ("vllm", {"prompt_token_ids": [1, 2, 3, 3]}, "4 instead of 3"),
    ],
)
def test_a_server_that_reads_pictures_otherwise_is_named(
    backend: str, told: dict[str, Any], said: str, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("generate", "chat_completions"):
        monkeypatch.setattr(_Words, name, lambda self, content: told)
    asked = SERVERS[backend](f"http://127.0.0.1:{server.server_port}", 5)
    prompt = ServedPrompt([1, 2, 3], ["data:image/png;base64,"], [{"role": "user", "content": ""}], None)
    with pytest.raises(MachineError, match=f"with pictures than training does: {said}") as caught:
        asked.draw(prompt, 0, DrawRule(0, 4, 1.0), [0])
    assert "limits of pixels that the run has" in str(caught.value)


def test_a_video_is_refused(server: _Server, tmp_path: Path) -> None:
    path = run_of(tmp_path, server.server_port, "sglang", images=(1,))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["videos"] = [row.pop("images") * 2]
        row["messages"][0]["content"] = "<video>What is it like?"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = "the prompt has media of the kind 'video', and servers are sent words and pictures alone"
    with pytest.raises(DataError, match=said):
        Trainer(str(path)).train()
    checked = mm("check", path)
    assert checked.code != 0 and said in checked.out


def test_a_server_with_old_weights_is_seen_and_corrected(server: _Server, tmp_path: Path) -> None:
    server.sleeps_on_weights = True
    Trainer(str(run_of(tmp_path, server.server_port, "sglang"))).train()
    first, second = gaps(tmp_path)
    assert first < 1e-5 < 1e-3 < second


def test_what_a_server_cannot_do_is_named(server: _Server, tmp_path: Path) -> None:
    away = run_of(tmp_path / "away", server.server_port, "sglang")
    said = mm("check", away)
    assert said.code == 0, said.out + said.err
    server.shutdown()
    server.server_close()
    said = mm("check", away)
    assert said.code != 0 and "the server that draws answers cannot be reached: Connection refused" in said.out
    assert "Start it, or correct the address" in said.out
    with pytest.raises(MachineError, match="the server that draws answers cannot be reached"):
        Trainer(str(away)).train()


@pytest.mark.parametrize("backend", SERVERS)
def test_a_server_that_cannot_get_weights_is_found_before_training(
    backend: str, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SERVERS[backend](f"http://127.0.0.1:{server.server_port}", 5)
    asked.check()
    for name in ("collective_rpc", "update_weights_from_disk"):
        monkeypatch.delattr(_Words, name)
    with pytest.raises(MachineError, match=f"{asked.takes_weights} is not there"):
        asked.check()


LORA = ("training.lora.enable=true", "training.lora.rank=4", "training.lr=0.05")


PISSA = pytest.param((*LORA, "training.lora.init_lora_weights=pissa"), marks=pytest.mark.slow)


@pytest.mark.parametrize("words", [LORA, PISSA], ids=["lora", "pissa"])
def test_a_server_gets_adapters_added_to_the_base(words: tuple[str, ...], server: _Server, tmp_path: Path) -> None:
    """It draws what the trained model would: the second rollout, by adapters that have moved, is as near as the
    first."""
    Trainer(load_with_plugins(run_of(tmp_path, server.server_port, "sglang"), words)).train()
    assert max(gaps(tmp_path)) < 1e-4
    assert server.loaded[0] != server.loaded[1]


def test_a_server_draws_while_the_step_before_is_trained(server: _Server, tmp_path: Path) -> None:
    """The second rollout is begun before the first step: it is of the weights before it, and the third of those before
    the second step."""
    words = ("training.train_iters=3", "posttrain.rollout.ahead=1")
    Trainer(load_with_plugins(run_of(tmp_path, server.server_port, "sglang"), words)).train()
    first, *later = gaps(tmp_path)
    assert first < 1e-5 < 1e-3 < min(later)
    assert [line["rollout_steps_behind"] for line in logged(tmp_path)] == [0, 1, 1]
    assert server.loaded[0] == server.loaded[1] != server.loaded[2]


def test_a_failure_of_a_server_that_draws_ahead_is_told(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = _Words.generate, []

    def failing(self: _Words, content: Any) -> Any:
        calls.append(1)
        return real(self, content) if len(calls) <= 8 else {"meta_info": {}}

    monkeypatch.setattr(_Words, "generate", failing)
    words = ("training.train_iters=3", "posttrain.rollout.ahead=1")
    with pytest.raises(MachineError, match="0 tokens with 0 log-probabilities"):
        Trainer(load_with_plugins(run_of(tmp_path, server.server_port, "sglang"), words)).train()


@pytest.mark.parametrize("backend", SERVERS)
def test_a_server_that_takes_no_weights_is_named(
    backend: str, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = {"success": False, "message": "another shape"}
    monkeypatch.setattr(_Words, "update_weights_from_disk", lambda self, content: refusing)
    monkeypatch.delattr(_Words, "collective_rpc")
    said = {"sglang": "/update_weights_from_disk: another shape", "vllm": r"/collective_rpc: refuses \(404\)"}[backend]
    with pytest.raises(MachineError, match=said) as caught:
        SERVERS[backend](f"http://127.0.0.1:{server.server_port}").load_weights(Path("a"))
    assert "posttrain.rollout.base_url" in str(caught.value) and "serve this model" in str(caught.value)


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ([[-0.5, 100_000, None]], "the token 100000, which the trained model does not have or never gives"),
        ([[None, 5, None]], "tokens without log-probabilities"),
        ([], "0 tokens with 0 log-probabilities"),
    ],
)
def test_a_server_of_another_model_is_named(
    drawn: list[Any], said: str, server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Words, "generate", lambda self, content: {"meta_info": {"output_token_logprobs": drawn}})
    monkeypatch.setattr(_Words, "update_weights_from_disk", lambda self, content: {"success": True})
    with pytest.raises(MachineError, match=said):
        Trainer(str(run_of(tmp_path, server.server_port, "sglang"))).train()
