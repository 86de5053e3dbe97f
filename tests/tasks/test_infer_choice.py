"""`mm infer`: how tokens are chosen, thoughts that are left out, and a command that was killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import GenerationConfig

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling, TokenChoice
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import ask, read_questions
from mindspeed_mm.tasks.answer import infer
from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator, load_model
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.helpers.greedy import greedy_answers
from tests.helpers.runs import mm
from tests.helpers.served import NAME, served
from tests.helpers.tiny_models import make_tiny_qwen3, without_template

TOKENS = 6
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"))
    path = folder / "generation_config.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, "do_sample": True, "temperature": 1.7, "top_k": 40}))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'one ' * (n % 5)}{n}", "id": f"q{n}"}) + "\n" for n in range(9)))
    return path


def answers(folder: Path, rows: Path, out: Path, **options: Any) -> list[str]:
    infer.run(InferRequest(folder, data=rows, out=out, max_new_tokens=TOKENS, **options))
    return [json.loads(line)["answer"] for line in out.read_text().splitlines()]


def test_the_generation_configuration_decides_and_rows_do_not_depend_on_their_batch(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    found = answers(folder, rows, tmp_path / "all.jsonl", batch_size=9)
    assert answers(folder, rows, tmp_path / "two.jsonl", batch_size=2) == found
    greedy = answers(folder, rows, tmp_path / "greedy.jsonl", temperature=0)
    other = answers(folder, rows, tmp_path / "other.jsonl", seed=1)
    assert len({tuple(each) for each in (found, greedy, other)}) == 3

    generator = load_generator(folder)
    encoder, media = generator.encoder, generator.encoder.media(rows.parent)
    for question, text in zip(read_questions(rows, needs_answers=False), found, strict=True):
        inputs = encoder.collate([encoder.encode(question.sample, media)])
        torch.manual_seed(Sampling(seed=0).of_row(question.row).seed or 0)
        with torch.inference_mode():
            ids = generator.model.generate(**inputs, max_new_tokens=TOKENS)[0, inputs["input_ids"].shape[1] :]
        assert encoder.tokenizer.decode(ids, skip_special_tokens=True).strip() == text


def test_a_configured_temperature_of_almost_nothing_takes_the_likeliest_token() -> None:
    """Published configurations have it so (Qwen2.5-VL: 0.000001), and logits that are divided by less overflow."""
    configured = GenerationConfig(do_sample=True, temperature=1e-6, repetition_penalty=1.05)
    choice = TokenChoice.of(Sampling(), configured)
    assert (choice.temperature, choice.repetition_penalty) == (0.0, 1.05)
    assert TokenChoice.of(Sampling(temperature=0.7), configured).temperature == 0.7


def test_other_settings_are_not_mixed_into_a_file(folder: Path, rows: Path, tmp_path: Path) -> None:
    answers(folder, rows, tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="with other settings"):
        answers(folder, rows, tmp_path / "a.jsonl", temperature=0)


def test_thoughts_are_left_out_where_that_is_asked(
    folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = "<think>it is\none</think>\n\none"
    monkeypatch.setattr(Generator, "answer_live", lambda _, rows: [Answer((1,), thinking, True) for _ in rows])
    assert set(answers(folder, rows, tmp_path / "shown.jsonl")) == {thinking}
    assert set(answers(folder, rows, tmp_path / "hidden.jsonl", hide_thoughts=True)) == {"one"}
    monkeypatch.setattr(Generator, "thinks", lambda *_: True)
    monkeypatch.setattr(Generator, "answer_live", lambda _, rows: [Answer((1,), "so</think>two", True) for _ in rows])
    assert set(answers(folder, rows, tmp_path / "begun.jsonl", hide_thoughts=True)) == {"two"}


def test_an_answer_ends_before_a_text_that_ends_it(folder: Path, rows: Path, tmp_path: Path) -> None:
    """The reference is transformers' own whole answer, cut by hand."""
    generator = load_generator(folder)
    encoder, media = generator.encoder, generator.encoder.media(rows.parent)
    whole = []
    for question in read_questions(rows, needs_answers=False):
        encoded = encoder.encode(question.sample, media)
        inputs = encoder.collate([encoded])
        with torch.inference_mode():
            ids = generator.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        whole.append(encoder.tokenizer.decode(ids[0, len(encoded.input_ids) :], skip_special_tokens=True).strip())
    stops = (whole[0][2:4], whole[1][3:4])
    cut = []
    for text in whole:
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        cut.append(text[: min(ends, default=len(text))].strip())
    assert cut != whole and any(cut)
    assert answers(folder, rows, tmp_path / "cut.jsonl", temperature=0, stops=stops) == cut
    assert answers(folder, rows, tmp_path / "beams.jsonl", beams=1, batch_size=2, temperature=0, stops=stops) == cut
    ended = [json.loads(line)["finished"] for line in (tmp_path / "cut.jsonl").read_text().splitlines()]
    assert all(end for end, one, other in zip(ended, cut, whole, strict=True) if one != other)
    with pytest.raises(DataError, match="with other settings"):
        answers(folder, rows, tmp_path / "cut.jsonl", temperature=0)
    words = ["infer", folder, "--data", rows, "--max-new-tokens", TOKENS, "--temperature", 0, "--nproc", 1]
    said = mm(*words, "--out", tmp_path / "typed.jsonl", *(f"--stop={stop}" for stop in stops))
    assert said.code == 0, said.err
    assert [json.loads(line)["answer"] for line in (tmp_path / "typed.jsonl").read_text().splitlines()] == cut


def test_options(folder: Path, rows: Path, tmp_path: Path) -> None:
    words = ["infer", folder, "--data", rows, "--max-new-tokens", TOKENS]
    for number, options in enumerate(
        (["--beams", 2], ["--temperature", 0.5, "--top-p", 0.5, "--top-k", 3, "--seed", 4])
    ):
        said = mm(*words, "--out", tmp_path / f"{number}.jsonl", *options)
        assert said.code == 0, said.err
    for refused, option in (
        (["--temperature", 0, "--top-p", 0.5], "--top-p"),
        (["--beams", 2, "--temperature", 1], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
    ):
        said = mm(*words, "--out", tmp_path / "no.jsonl", *refused)
        assert said.code == 2 and option in said.err, said.err
    said = mm(*words, "--out", tmp_path / "no.jsonl", "--stop", "")
    assert said.code == 2 and "--stop  an empty text would end every answer" in said.err, said.err


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on(folder: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "many.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} one two", "id": f"q{n}"}) + "\n" for n in range(60)))
    words = ["infer", str(folder), "--data", str(rows), "--out", str(out), "--batch-size", "2", "--max-new-tokens", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "mindspeed_mm", *words], env=environment)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (out.exists() and out.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = out.read_text().splitlines()
    assert 6 <= len(kept) < 60
    said = mm(*words, "--json")
    assert said.code == 0, said.err
    outcome = json.loads(said.out)
    assert outcome["answered"] + outcome["kept"] == 60 and outcome["kept"] >= len(kept) - 1
    lines = out.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"q{n}" for n in range(60)]
    whole = answers(folder, rows, tmp_path / "whole.jsonl")
    assert [json.loads(line)["answer"] for line in lines] == whole


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two folders of random adapters, as PEFT writes them."""
    import peft

    folders = {}
    for seed, name in enumerate(("warm", "cold")):
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folders[name] = tmp_path_factory.mktemp(name)
        peft.get_peft_model(load_model(folder), settings).save_pretrained(folders[name])
    return folders


def by_peft(folder: Path, adapters: Path | None, prompts: list[str]) -> list[str]:
    """Greedy answers of plain transformers and PEFT, one prompt after the other, with these adapters alone."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapters))
    said = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            ids = model.eval().generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0]
        said.append(tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return said


def named(adapters: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={folder}" for name, folder in adapters.items())


def test_rows_say_what_peft_says_with_their_adapters_alone(
    folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    names = ["warm", None, "cold", "cold", None, "warm", "warm"]
    prompts = [f"{'one ' * number}{number}" for number in range(len(names))]
    rows = [{"prompt": prompt, "adapter": name} for prompt, name in zip(prompts, names, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = {name: by_peft(folder, path, prompts) for name, path in [(None, None), *adapters.items()]}
    # Each row tells the three apart: a row with the adapters of another one is seen.
    assert all(len({alone[name][number] for name in alone}) == 3 for number in range(len(names)))
    found = answers(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", adapters=named(adapters), temperature=0)
    assert found == [alone[name][number] for number, name in enumerate(names)]
    swapped = {"warm": adapters["cold"], "cold": adapters["warm"]}
    other = answers(folder, tmp_path / "rows.jsonl", tmp_path / "other.jsonl", adapters=named(swapped), temperature=0)
    differs = [one != two for one, two in zip(found, other, strict=True)]
    assert differs == [name is not None for name in names]


def test_requests_name_adapters_as_their_model(folder: Path, adapters: dict[str, Path]) -> None:
    generator = load_generator(folder, adapters=adapters)
    alone = {name: load_generator(folder, path) for name, path in adapters.items()} | {NAME: load_generator(folder)}
    question = generator.encoder.encode(ask("one two").sample, generator.encoder.media(folder))
    expected = {name: greedy_answers(each, [question], TOKENS)[0].text for name, each in alone.items()}
    assert len(set(expected.values())) == 3
    with served(AnswerEngine(generator)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        assert {model.id for model in client.models.list()} == set(expected)

        def said(name: str) -> tuple[str, str | None]:
            messages: Any = [{"role": "user", "content": "one two"}]
            asked: dict[str, Any] = {"model": name, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
            answer = client.chat.completions.create(**asked)
            return answer.model, answer.choices[0].message.content

        with ThreadPoolExecutor(6) as pool:
            assert dict(pool.map(said, [*expected, *expected])) == expected
            assert [name for name, _ in pool.map(said, expected)] == list(expected)


def test_adapters_that_are_not_there(folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "one", "adapter": "hot"}) + "\n")
    words = ["infer", folder, "--data", rows, "--out", tmp_path / "out.jsonl"]
    for options, code, part in (
        ([], 4, "there are no adapters 'hot'"),
        (["--adapter", f"warm={adapters['warm']}"], 4, "Known: warm."),
        (["--adapter", "warm"], 2, "does not name adapters"),
        (["--adapter", f"hot={folder}"], 4, "no adapters"),
        (["--adapter", f"hot={adapters['warm']}", "--lora", adapters["cold"]], 2, "for all rows as well"),
    ):
        said = mm(*words, *options)
        assert said.code == code and part in said.err, said.err
    assert mm(*words, "--adapter", f"hot={adapters['warm']}").code == 0


@pytest.mark.parametrize(
    ("setting", "message"), [({"temperature": 1e-40}, "below 0.001"), ({"beams": 1_000_000}, "1,000,000 beams")]
)
def test_settings_that_cannot_be_are_refused(folder: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(TOKENS, **setting)
    ((option, value),) = setting.items()
    said = mm("infer", folder, "--prompt", "one", f"--{option}", value)
    assert said.code == 2 and f"--{option}" in said.err and message in said.err, said.err
    Sampling(TOKENS, temperature=0.001, beams=1024)


def test_a_key_that_is_needed_is_named_with_the_option_that_sets_it(folder: Path, tmp_path: Path) -> None:
    base = without_template(tmp_path / "base", folder)
    (tmp_path / "view.yaml").write_text("data: {dataset_param: {basic_parameters: {template: default}}}\n")
    infers = ["infer", str(base), "--prompt", "one?", "--max-new-tokens", "2"]
    turns = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    evaluates = ["evaluate", str(base), "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    for words in (infers, evaluates, ["chat", str(base)], ["serve", str(base)]):
        said = mm(*words)
        assert said.code == 4 and "has no chat template" in said.err, said
        assert "This is a key of a YAML: --config YAML names it." in said.err
    assert mm(*infers, "--config", str(tmp_path / "view.yaml")).code == 0


def test_what_only_training_takes_is_said_to_be_for_training(folder: Path, tmp_path: Path) -> None:
    lacking = shutil.copytree(folder, tmp_path / "lacking")
    next(lacking.glob("*.safetensors")).unlink()
    said = mm("infer", lacking, "--prompt", "one?")
    assert said.code == 4 and "Only training starts without: model.train_from_scratch" in said.err
    said = mm("export", folder, tmp_path / "out")
    assert said.code == 4 and "Name a run, or one of its steps." in said.err
    said = mm("infer", folder, "--prompt", "one?", "--image", tmp_path / "a.png")
    assert said.code == 4 and "model_name_or_path" not in said.err
