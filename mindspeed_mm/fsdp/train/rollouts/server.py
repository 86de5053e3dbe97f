"""Rollouts that a server draws: vLLM or SGLang, asked over HTTP, which gets the new weights as a folder.

Neither is imported. vLLM is started with `VLLM_SERVER_DEV_MODE=1`, which opens `/collective_rpc`; the folder is in the
run folder, which the server must see under the same path.
"""

from __future__ import annotations

import base64
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.errors import DataError, MachineError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.outbound import RequestLimits, Server, key_header
from mindspeed_mm.core.outbound_words import one_line
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedPrompt, Sample
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawnAnswer, DrawRule
from mindspeed_mm.fsdp.train.rollouts.text import TextRollouts, check_lengths

T = TypeVar("T")

TIMEOUT_S = 600.0
CONCURRENCY = 64
_NEVER = -100.0
"""What is added to the logit of a token that is not to be drawn: the most that the interface of OpenAI takes."""
_UNKNOWN = float("nan")


class ServedPrompt(NamedTuple):
    """A prompt as servers are sent it."""

    token_ids: list[int]
    """As the model is trained on it: each picture is as many tokens as it has."""
    pictures: list[str]
    """Data URIs, in order of place."""
    messages: list[JsonObject]
    """The same conversation as the interface of OpenAI takes it; empty where there are no pictures."""
    tools: list[JsonObject] | None


class RolloutServer(ABC):
    """A server that draws answers.

    Args:
        base_url: Its address, without a path.
        timeout_s: For one request, from its beginning to the last byte of the answer.
        key_variable: The environment variable that holds the server's key; None: it wants none.

    Raises:
        ConfigError: The address is not of http, or the variable is not set.
    """

    def __init__(self, base_url: str, timeout_s: float = TIMEOUT_S, key_variable: str | None = None) -> None:
        key = key_header(key_variable, "posttrain.rollout.api_key_env")
        self._server = Server(
            base_url,
            RequestLimits(timeout_s),
            key,
            title="the server that draws answers",
            key="posttrain.rollout.base_url",
            way_out="Start it, or correct the address. It must serve this model and let its weights be replaced (vLLM: "
            "VLLM_SERVER_DEV_MODE=1). See its log.",
        )

    asked_for: str
    """What `check` asks for."""
    takes_weights: str
    """What new weights are told to."""

    def check(self) -> None:
        """Raise `MachineError` unless the server is there and lets its weights be replaced."""
        if self._status(self.asked_for) >= 400:
            raise self.failed(f"{self.asked_for} is not answered: another kind of server listens there")
        if self._status(self.takes_weights) == 404:  # asked the wrong way, a path that is there is refused otherwise
            raise self.failed(f"{self.takes_weights} is not there, by which it would get new weights")

    def _status(self, path: str) -> int:
        return self._server.ask("GET", path).status

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Take the weights of a Hugging Face folder, and forget what was computed with others.

        Raises:
            MachineError: The server does not, or cannot.
        """

    @abstractmethod
    def draw(self, prompt: ServedPrompt, seed: int, rule: DrawRule, end_ids: Sequence[int]) -> DrawnAnswer:
        """The answer to a prompt.

        Raises:
            MachineError: The server is away, answers with something else, or makes other tokens of the prompt.
        """

    def post(self, path: str, content: Mapping[str, object], read: Callable[[Any], T]) -> T:
        """What `read` takes from the JSON of an answer, an empty one being null.

        Raises:
            OutboundError: There is no such answer, or `read` meets another form of it.
        """
        reply = self._server.ask("POST", path, content)
        if not reply.is_ok:
            raise self.failed(f"{path}: {self._server.refusal(reply)}")
        if not reply.body.strip():
            reply = replace(reply, body=b"null")
        return self._server.read(reply, read)

    def failed(self, what: str) -> MachineError:
        """The error that reports it."""
        return self._server.failed(f"failed: {what}")

    def reads_otherwise(self, what: str) -> MachineError:
        """The error that tells that the server makes other tokens of a prompt than training does."""
        return MachineError(
            f"the server makes other tokens of a prompt with pictures than training does: {what}",
            where=self._server.shown,
            key="posttrain.rollout.base_url",
            way_out="Start it with the chat template and the limits of pixels that the run has, or set "
            "posttrain.rollout.backend: transformers.",
        )

    def _answer(self, tokens: Any, log_probs: Any, end_ids: Sequence[int]) -> DrawnAnswer:
        if not tokens or len(tokens) != len(log_probs):
            raise self.failed(f"{len(tokens or ())} tokens with {len(log_probs or ())} log-probabilities")
        if not all(type(token) is int for token in tokens):
            raise self.failed("tokens that are not whole numbers")
        if not all(isinstance(each, float | int) and math.isfinite(each) for each in log_probs):
            raise self.failed("tokens without log-probabilities")
        return DrawnAnswer(list(tokens), list(log_probs), _UNKNOWN, is_truncated=tokens[-1] not in end_ids)


class SglangServer(RolloutServer):
    """SGLang's own interface. It puts the tokens of pictures in anew, and tells how many the prompt has then."""

    asked_for, takes_weights = "/health", "/update_weights_from_disk"

    @override
    def load_weights(self, folder: Path) -> None:
        def read(told: Any) -> None:
            if not (told or {}).get("success"):
                raise self.failed(f"/update_weights_from_disk: {one_line(str((told or {}).get('message')))}")

        self.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True}, read)

    @override
    def draw(self, prompt: ServedPrompt, seed: int, rule: DrawRule, end_ids: Sequence[int]) -> DrawnAnswer:
        settings = {
            "temperature": rule.temperature,
            "top_p": rule.top_p,
            "top_k": rule.top_k or -1,
            "max_new_tokens": rule.max_new_tokens,
            "stop_token_ids": list(end_ids),
            "sampling_seed": seed % 2**31,
            "logit_bias": {str(token): _NEVER for token in rule.suppressed},
        }
        asked = {"input_ids": prompt.token_ids, "sampling_params": settings, "return_logprob": True}
        if prompt.pictures:
            asked["image_data"] = prompt.pictures

        def read(told: Any) -> DrawnAnswer:
            facts = (told or {}).get("meta_info") or {}
            if prompt.pictures and facts.get("prompt_tokens") != len(prompt.token_ids):
                raise self.reads_otherwise(f"{facts.get('prompt_tokens')} instead of {len(prompt.token_ids)}")
            tokens, log_probs = [], []
            for log_prob, token, *_ in facts.get("output_token_logprobs") or ():
                tokens.append(token)
                log_probs.append(log_prob)
            return self._answer(tokens, log_probs, end_ids)

        return self.post("/generate", asked, read)


class VllmServer(RolloutServer):
    """vLLM's server, by the interface of OpenAI. It draws from the logits divided by the temperature, and tells
    log-probabilities of these with `--logprobs-mode processed_logprobs`. It takes pictures in a chat alone, which it
    renders itself, and tells the tokens that it made of it."""

    asked_for, takes_weights = "/v1/models", "/collective_rpc"

    @override
    def load_weights(self, folder: Path) -> None:
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.post("/collective_rpc", asked, lambda _: None)
        # Keys and values that are cached are of the old weights.
        self.post("/reset_prefix_cache", {}, lambda _: None)

    @override
    def draw(self, prompt: ServedPrompt, seed: int, rule: DrawRule, end_ids: Sequence[int]) -> DrawnAnswer:
        settings = {
            "max_tokens": rule.max_new_tokens,
            "temperature": rule.temperature,
            "top_p": rule.top_p,
            "top_k": rule.top_k or -1,
            "seed": seed % 2**31,
            "return_token_ids": True,
            "stop_token_ids": list(end_ids),
            "logit_bias": {str(token): _NEVER for token in rule.suppressed},
        }
        if prompt.pictures:
            return self._drawn_in_chat(prompt, settings, end_ids)

        def read(told: object) -> DrawnAnswer:
            choice = _first_choice(told)
            log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            return self._answer(choice.get("token_ids"), log_probs, end_ids)

        return self.post("/v1/completions", {**settings, "prompt": prompt.token_ids, "logprobs": 0}, read)

    def _drawn_in_chat(
        self, prompt: ServedPrompt, settings: Mapping[str, object], end_ids: Sequence[int]
    ) -> DrawnAnswer:
        asked = {**settings, "messages": prompt.messages, "logprobs": True, "top_logprobs": 0}
        if prompt.tools:
            # The prompt names the tools; the answer stays text.
            asked["tools"], asked["tool_choice"] = prompt.tools, "none"

        def read(told: Any) -> DrawnAnswer:
            seen = (told or {}).get("prompt_token_ids") or []
            if seen != prompt.token_ids:
                raise self.reads_otherwise(_first_difference(seen, prompt.token_ids))
            choice = _first_choice(told)
            content = (choice.get("logprobs") or {}).get("content") or []
            return self._answer(choice.get("token_ids"), [each.get("logprob") for each in content], end_ids)

        return self.post("/v1/chat/completions", asked, read)


def _first_choice(told: Any) -> JsonObject:
    choice: JsonObject = ((told or {}).get("choices") or [{}])[0]
    return choice


def _first_difference(read: Sequence[int], trained: Sequence[int]) -> str:
    """Where two lists of tokens part, in words."""
    for place, (one, other) in enumerate(zip(read, trained, strict=False)):
        if one != other:
            return f"token {place} is {one} instead of {other} ({len(read)} tokens, {len(trained)} in training)"
    return f"{len(read)} instead of {len(trained)}"


SERVERS: dict[str, type[RolloutServer]] = {"vllm": VllmServer, "sglang": SglangServer}


class ServedRollouts(TextRollouts):
    """Answers that a server draws; each data rank asks for its own. A seed of the sample goes along, but what is drawn
    depends on the server, too. Prompts of words and pictures."""

    server: RolloutServer
    write_weights: Callable[[nn.Module], Path]
    """Writes the model as the server reads it; called by all ranks."""
    speaks: bool
    """Whether this rank tells the server of new weights."""

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """See `RolloutSource`: the server gets the weights of this moment."""
        folder = self.write_weights(self._model)
        if self.speaks:
            self.server.load_weights(folder)
        if dist.is_initialized() and dist.get_world_size() > 1:
            # No rank may ask before the weights are new.
            dist.barrier()
        yield

    def draw(self, prompts: Sequence[EncodedPrompt], keys: Sequence[str]) -> list[DrawnAnswer]:
        """Ask the server for one answer to each prompt, up to `CONCURRENCY` requests at a time.

        Raises:
            DataError: A prompt has media other than pictures, or with its answer is longer than the model takes.
            MachineError: The server fails, or answers with a token that the trained model never gives.
        """
        check_lengths(prompts, self._rule.max_new_tokens, self._longest)
        check_media_served(prompts)
        served = self._served(prompts)
        never, words = set(self._rule.suppressed), int(self._model.config.get_text_config().vocab_size)

        def ask(prompt: EncodedPrompt, key: str) -> DrawnAnswer:
            seed = derive_seed(self._rule.seed, key)
            answer = self.server.draw(served[id(prompt)], seed, self._rule, self._end_ids)
            for token in answer.token_ids:
                if token in never or not 0 <= token < words:
                    raise self.server.failed(
                        f"the token {token}, which the trained model does not have or never gives: another model "
                        "answers"
                    )
            return answer

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(ask, prompts, keys))

    def _served(self, prompts: Sequence[EncodedPrompt]) -> dict[int, ServedPrompt]:
        """By `id` of each prompt: those of a group are one object, whose pictures are opened once."""
        served: dict[int, ServedPrompt] = {}
        for prompt in prompts:
            if id(prompt) not in served:
                served[id(prompt)] = served_prompt(prompt, self._dataset.media)
        return served

    def facts(self, samples: Sequence[DrawnAnswer]) -> dict[str, float]:
        """Return the sums of `TextRollouts.facts` without the entropy, which a server does not report."""
        facts = super().facts(samples)
        facts.pop("entropy")
        return facts


# --- prompts as they are sent -----------------------------------------------------------------------------------------


def check_media_served(prompts: Sequence[EncodedPrompt]) -> None:
    """Raise `DataError` where a prompt has other media than pictures: servers cut videos and sounds their own way."""
    for prompt in prompts:
        for item in prompt["question"].media:
            if item.kind != "image":
                raise DataError(
                    f"the prompt has media of the kind '{item.kind}', and servers are sent words and pictures alone",
                    where=prompt["sample_id"],
                    key="posttrain.rollout.backend",
                    way_out="Set it to transformers.",
                )


def served_prompt(prompt: EncodedPrompt, loader: MediaLoader | None) -> ServedPrompt:
    """The prompt as servers are sent it, its pictures as training decodes them."""
    question, pictures = prompt["question"], []
    for item in question.media:
        assert loader is not None  # a data set whose rows have media opens them
        file = io.BytesIO()
        loader.load_image(item.source).save(file, "PNG")
        pictures.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    messages = _chat_of(question, pictures) if pictures else []
    return ServedPrompt(prompt["input_ids"].tolist(), pictures, messages, question.tools)


def _chat_of(question: Sample, pictures: Sequence[str]) -> list[JsonObject]:
    """The messages of a conversation with its pictures in their places."""
    coming = iter(pictures)
    messages = []
    for message in question.messages:
        content = message["content"]
        if not isinstance(content, str):
            parts = []
            for part in content:
                if part["type"] != "text":
                    part = {"type": "image_url", "image_url": {"url": next(coming)}}
                parts.append(part)
            content = parts
        messages.append({**message, "content": content})
    return messages
