"""`python -m benchmarks.serving_load ADDRESS ROWS CLIENTS REQUESTS`: clients that ask a server at once, each one
question after the other, and stream the answers. Prints times as JSON. It imports no torch: it is not what is measured.
With a further word, the name of a model, requests name that and show no pictures.

`python -m benchmarks.serving_load direct MODEL ROWS CLIENTS REQUESTS` asks the engine of such a server without HTTP;
`widen MODEL FOLDER` writes a model with more weights.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKENS = 32


def questions_of(rows: Path) -> list[dict[str, Any]]:
    """Picture and text of each row."""
    found = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = next(turn["content"] for turn in row["messages"] if turn["role"] == "user")
        found.append({"image": row["images"][0], "text": text.replace("<image>", "")})
    return found


async def ask(address: str, question: dict[str, Any], seed: int, model: str) -> dict[str, float]:
    """One streamed answer; with a model's name, to the text alone."""
    parts = urlsplit(address)
    picture = {"type": "image_url", "image_url": {"url": question["image"]}}
    text = question["text"].strip()
    content: Any = text if model else [picture, {"type": "text", "text": text}]
    asked = {"max_tokens": TOKENS, "temperature": 1, "seed": seed, "stream": True}
    asked |= {"messages": [{"role": "user", "content": content}], **({"model": model} if model else {})}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
    begun_s, first_s, tokens = time.perf_counter(), None, 0
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    while line := await reader.readline():
        if first_s is not None and b'"completion_tokens"' not in line:
            continue
        event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
        if first_s is None and any(choice["delta"].get("content") for choice in event.get("choices", ())):
            first_s = time.perf_counter() - begun_s
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    writer.close()
    if not tokens:
        raise RuntimeError("an answer broke off")
    whole_s = time.perf_counter() - begun_s
    return {"first_s": whole_s if first_s is None else first_s, "whole_s": whole_s, "tokens": tokens}


async def load(
    address: str, questions: list[dict[str, Any]], clients: int, requests: int, model: str
) -> dict[str, Any]:
    """All requests, `clients` at a time."""
    turn, begun_s = asyncio.Semaphore(clients), time.perf_counter()

    async def one(number: int) -> dict[str, float]:
        async with turn:
            return await ask(address, questions[number % len(questions)], number, model)

    answers = await asyncio.gather(*(one(number) for number in range(requests)))
    return summary(answers, time.perf_counter() - begun_s)


def summary(answers: list[dict[str, float]], seconds: float) -> dict[str, Any]:
    """Percentiles and rates."""
    tokens = sum(answer["tokens"] for answer in answers)
    told: dict[str, Any] = {
        "requests": len(answers),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }
    for name in ("first_s", "whole_s"):
        if times := sorted(answer[name] for answer in answers if name in answer):
            told[name] = {"p50": times[len(times) // 2], "p99": times[min(len(times) - 1, len(times) * 99 // 100)]}
    return told


def direct(model: Path, rows: Path, clients: int, requests: int) -> dict[str, Any]:
    """The same questions to the engine, as many under way, encoded by its own thread."""
    from concurrent.futures import ThreadPoolExecutor

    from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
    from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer
    from mindspeed_mm.fsdp.sampling.answers.questions import ask as question_about
    from mindspeed_mm.tasks.answer.engine import AnswerEngine
    from mindspeed_mm.tasks.answer.generation import load_generator

    engine = AnswerEngine(load_generator(model))
    media = engine.generator.encoder.media(rows.parent)
    questions = questions_of(rows)

    def one(number: int) -> dict[str, float]:
        asked = questions[number % len(questions)]
        begun_s = time.perf_counter()
        sample = question_about(asked["text"], [MediaItem("image", asked["image"])]).sample
        row = LiveAnswer(
            engine.encode(sample, media).result(),
            Sampling(TOKENS, temperature=1.0, seed=number),
            lambda _: None,
            (),
            0.05,
        )
        tokens = len(engine.submit(row).result().token_ids)
        return {"whole_s": time.perf_counter() - begun_s, "tokens": tokens}

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        answers = list(pool.map(one, range(requests)))
    seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    return {**summary(answers, seconds), "cpu_s": cpu_s}


def widen(model: Path, folder: Path) -> None:
    """Write a Qwen3-VL of the same kind with eleven million random weights."""
    import shutil

    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

    prepare_for_transformers()
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(model)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = 384
    text.intermediate_size, text.num_hidden_layers = 1024, 6
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


def main(words: list[str]) -> None:
    """Do what is asked, and print it."""
    if words[0] == "widen":
        widen(Path(words[1]), Path(words[2]))
        return
    if words[0] == "direct":
        model, rows, clients, requests = words[1:]
        told = direct(Path(model), Path(rows), int(clients), int(requests))
    else:
        address, rows, clients, requests, *name = words
        model = name[0] if name else ""
        told = asyncio.run(load(address, questions_of(Path(rows)), int(clients), int(requests), model))
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
