"""`python -m benchmarks.bare_answers MODEL ROWS ROUNDS`: answers to questions about pictures by three contenders, who
take turns in one process; prints the seconds of each round, by the clock and of the processor, and what each has said.

They are `ours`, what `mm infer` does once its model is loaded; `bare`, transformers' processor and `generate` in
batches; and `single`, the same one row at a time. Reading, decoding and writing are part of all three. `make MODEL
FOLDER` writes the model with larger weights, whose answers depend on what it sees; `loop MODEL ROWS OUT` is `bare`
alone.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answering = Callable[[Path, Path], list[str]]
"""Answers a file of rows into another."""
TOKENS, BATCH = 16, 32


def ours(model: Path) -> Answering:
    """By the package."""
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
    from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
    from mindspeed_mm.tasks.answer.answering import AnswerFile, answer_all
    from mindspeed_mm.tasks.answer.generation import load_generator

    generator = load_generator(model)

    def answered(data: Path, out: Path) -> list[str]:
        questions = read_questions(data, needs_answers=False)
        answers, media = AnswerFile(out, "benchmark"), generator.encoder.media(data.parent)
        greedy = Sampling(TOKENS, temperature=0)
        for batch in answer_all(generator, questions, media, sampling=greedy, batch_size=BATCH):
            answers.append(batch)
        answers.sort()
        return [answers.records[row]["answer"] for row in sorted(answers.records)]

    return answered


def plain(model: Path, batch_size: int) -> Answering:
    """By transformers alone."""
    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

    prepare_for_transformers()
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    loaded = AutoModelForImageTextToText.from_pretrained(model).eval()

    def answered(data: Path, out: Path) -> list[str]:
        asked = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        said: list[str] = []
        for first in range(0, len(asked), batch_size):
            batch = asked[first : first + batch_size]
            pictures = [[Image.open(data.parent / row["images"][0]).convert("RGB")] for row in batch]
            texts = [processor.apply_chat_template(turns(row), add_generation_prompt=True) for row in batch]
            inputs = processor(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt")
            with torch.inference_mode():
                ids = loaded.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
            said += processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        out.write_text("".join(json.dumps({"answer": text}) + "\n" for text in said), encoding="utf-8")
        return [text.strip() for text in said]

    return answered


def make(model: Path, folder: Path) -> None:
    """Write the model with larger weights."""
    import shutil

    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

    prepare_for_transformers()
    import torch
    from transformers import AutoModelForImageTextToText

    shutil.copytree(model, folder, dirs_exist_ok=True)
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    with torch.no_grad():
        for weight in loaded.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    loaded.save_pretrained(folder)


def turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's question as a chat template takes it."""
    text = row["messages"][0]["content"].replace("<image>", "")
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def timed(answered: Answering, rows: Path) -> tuple[dict[str, float], list[str]]:
    """Seconds by the clock, those of the processor, which leave the load of others out, and the answers."""
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()  # nobody pays for what another has left
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        said = answered(rows, Path(folder) / "answers.jsonl")
        return {"wall_s": time.perf_counter() - begun_s, "cpu_s": time.process_time() - begun_cpu_s}, said


def compare(model: Path, rows: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each round, after one that warms up, and the answers. One row at a time takes part in every third."""
    everyone = {"ours": ours(model), "bare": plain(model, BATCH), "single": plain(model, 1)}
    answers = {who: timed(answered, rows)[1] for who, answered in everyone.items()}
    seconds = []
    for number in range(rounds):
        order = ["ours", "bare"] if number % 2 else ["bare", "ours"]
        if number % 3 == 0:
            order.append("single")
        seconds.append({who: timed(everyone[who], rows)[0] for who in order})
    return {"rounds": seconds, "answers": answers}


def main(words: list[str]) -> None:
    """Print seconds and answers."""
    if words[0] == "make":
        make(Path(words[1]), Path(words[2]))
        return
    if words[0] == "loop":
        model, rows, out = map(Path, words[1:])
        plain(model, BATCH)(rows, out)
        return
    model, rows, rounds = words
    print(json.dumps(compare(Path(model), Path(rows), int(rounds))))


if __name__ == "__main__":
    main(sys.argv[1:])
