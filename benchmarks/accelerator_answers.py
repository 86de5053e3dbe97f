"""Answers of a Qwen3-VL with 0.5 to 2 B parameters in bf16, in batches: ours, and transformers' `generate` on the very
same inputs. Weights are random; the questions are those about digits.

`python -m benchmarks.accelerator_answers ATTEMPT WORKLOAD ROWS TOKENS` prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402

from benchmarks.accelerator_sizes import Attempt  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.generator import Generator, move_to  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions  # noqa: E402
from mindspeed_mm.fsdp.utils.device import current_device, peak_memory_bytes  # noqa: E402

ROUNDS = 3


def main(attempt: Attempt, workload: Path, rows: int, tokens: int) -> None:
    """Build, warm up, measure in turns, print."""
    model = build(attempt, workload / "model").to(current_device())
    generator = Generator(model, QuestionEncoder(workload / "model"))
    generator.end_ids = []  # all answers are as long as they may be
    data = workload / "data"
    asked = read_questions(data / "test.jsonl", needs_answers=False)[:rows]
    media = generator.encoder.media(data)
    encoded = [generator.encode(question.sample, media) for question in asked]
    inputs = move_to(generator.encoder.collate(encoded), model.device)
    width = inputs["input_ids"].shape[1]

    def ours() -> list[list[int]]:
        made = generator.answer_live([LiveAnswer(each, Sampling(tokens, temperature=0)) for each in encoded])
        return [list(answer.token_ids) for answer in made]

    def bare() -> list[list[int]]:
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        found: list[list[int]] = ids[:, width:].tolist()
        return found

    contenders: dict[str, Callable[[], list[list[int]]]] = {"ours": ours, "bare": bare}
    answers = {who: answer() for who, answer in contenders.items()}
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(ROUNDS):
        for who, answer in contenders.items():
            seconds[who].append(timed(answer))
    rates = {who: rows * tokens / statistics.median(each) for who, each in seconds.items()}
    told: dict[str, Any] = {
        "model": attempt.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": rows,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": rates["ours"],
        "bare_tokens_per_s": rates["bare"],
        "equal_tokens": answers["ours"] == answers["bare"],
        "peak_memory_gib": peak_memory_bytes() / 2**30,
    }
    print(json.dumps(told))


def build(attempt: Attempt, folder: Path) -> Any:
    """The digits' Qwen3-VL with a language model of another size, in bf16."""
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    config = AutoConfig.from_pretrained(folder)
    text = config.text_config
    text.hidden_size = config.vision_config.out_hidden_size = attempt.hidden
    text.intermediate_size, text.num_hidden_layers = attempt.intermediate, attempt.layers
    text.num_attention_heads, text.num_key_value_heads = attempt.heads, attempt.kv_heads
    text.head_dim, text.vocab_size = attempt.head_width, max(attempt.vocabulary, text.vocab_size)
    sections = [attempt.head_width // 2 - 2 * (attempt.head_width // 6), *[attempt.head_width // 6] * 2]
    text.rope_parameters = {**text.rope_parameters, "mrope_section": sections}
    torch.manual_seed(0)
    with torch.device(current_device()):
        return Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).eval()


def timed(answer: Callable[[], list[list[int]]]) -> float:
    """Seconds; the answers arrive on the host, so the device has finished."""
    begun_s = time.perf_counter()
    answer()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main(Attempt.from_json(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
