"""Rows of `mm infer --data` that BAGEL answers in words and by pictures; sources in shares; how its weights begin."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.unified import Drawing, Words, load_unified
from tests.fsdp.data.buffered_data import loader
from tests.helpers.runs import mm
from tests.helpers.tiny_bagel import run_of

DRAW = ("--steps", 2, "--max-new-tokens", 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("bagel"))


def rows_file(run: Path, name: str, *rows: tuple[list[tuple[str, str]], list[str]]) -> Path:
    """Conversations of ("user" | "assistant", text) with pictures, beside those of the run."""
    lines = []
    for number, (turns, images) in enumerate(rows):
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"id": f"row-{number}", "messages": messages, "images": images}) + "\n")
    path = run.parent / "rows" / name
    path.write_text("".join(lines), encoding="utf-8")
    return path


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


READ = ([("user", "<image>Which?"), ("assistant", "three")], ["3.png"])
DRAWN = ([("user", "Draw one."), ("assistant", "<image>")], ["1.png"])
EDITED = ([("user", "<image>Turn."), ("assistant", "<image>")], ["0.png", "2.png"])
UNANSWERED: tuple[list[tuple[str, str]], list[str]] = ([("user", "Which?")], [])


def test_rows_are_answered_as_single_prompts_are(run: Path, tmp_path: Path) -> None:
    """A row draws with a seed of its own, from `--seed` and its number; its own answer is not looked at."""
    data, out, model = (
        rows_file(run, "asked.jsonl", READ, DRAWN, EDITED, UNANSWERED),
        tmp_path / "a.jsonl",
        run.parent / "model",
    )
    said = mm("infer", model, "--data", data, "--out", out, "--seed", 4, "--size", "8x12", *DRAW)
    assert said.code == 0 and "4 answered" in said.out, said.out + said.err
    read, drawn, edited, unanswered = records(out)
    assert [each.get("picture") for each in (read, drawn, edited, unanswered)] == [
        None,
        "a/00002.png",
        "a/00003.png",
        None,
    ]
    assert drawn["answer"] == edited["answer"] == "<image>" and read["id"] == "row-0"
    one = mm("infer", model, "--image", data.parent / "3.png", "--prompt", "Which?", "--max-new-tokens", 3, "--json")
    assert json.loads(one.out) == {"text": read["answer"], "finished": read["finished"]}, one.err
    for record, words in (
        (drawn, ["--prompt", "Draw one."]),
        (edited, ["--image", data.parent / "0.png", "--prompt", "Turn."]),
    ):
        seed = derive_seed(4, record["row"]) >> 1
        single = tmp_path / "single.png"
        said = mm("infer", model, *words, "--draw", single, "--size", "8x12", "--steps", 2, "--seed", seed)
        assert said.code == 0, said.err
        assert np.array_equal(pixels(single), pixels(tmp_path / record["picture"]))
    other = rows_file(run, "other.jsonl", (EDITED[0], ["0.png", "1.png"]))
    said = mm("infer", model, "--data", other, "--out", tmp_path / "b.jsonl", "--config", run, *DRAW)
    assert said.code == 0 and pixels(tmp_path / "b/00001.png").shape == (8, 8, 3), said.err  # as large as the source


def test_a_picture_of_no_given_size_is_as_large_as_was_trained(run: Path, tmp_path: Path) -> None:
    """The published size is more than the small model has places for."""
    data, out, model = rows_file(run, "sizeless.jsonl", DRAWN), tmp_path / "a.jsonl", run.parent / "model"
    said = mm("infer", model, "--data", data, "--out", out, "--config", run, *DRAW)
    assert said.code == 0 and pixels(tmp_path / "a/00001.png").shape == (16, 16, 3), said.err
    said = mm("infer", model, "--prompt", "Draw.", "--draw", tmp_path / "b.png", "--config", run, "--steps", 2)
    assert said.code == 0 and pixels(tmp_path / "b.png").shape == (16, 16, 3), said.err


def test_earlier_turns_are_shown_as_training_shows_them(run: Path, tmp_path: Path) -> None:
    """A picture that the model drew before is given and seen, in front of words as well; the answer itself is not
    shown. Compared with the same parts put together by hand."""
    before = [("user", "Draw."), ("assistant", "<image>"), ("user", "And now?")]
    asked = [
        ([*before, ("assistant", "<image>")], ["0.png", "2.png"]),
        ([*before, ("assistant", "nothing")], ["0.png"]),
    ]
    data, out = rows_file(run, "turns.jsonl", *asked), tmp_path / "a.jsonl"
    said = mm("infer", run.parent / "model", "--data", data, "--out", out, "--config", run, "--size", "8x8", *DRAW)
    assert said.code == 0, said.err
    sizes = load_config(run).arguments.data.dataset_param.preprocess_parameters
    with torch.inference_mode():
        sampler = load_unified(run.parent / "model", sizes, torch.device("cpu"))
        context = sampler.start()
        sampler.add_text(context, "Draw.")
        sampler.add_picture(context, Image.open(data.parent / "0.png").convert("RGB"), given=True)
        sampler.add_text(context, "And now?")
        drawn = sampler.draw(context, Drawing(8, 8, steps=2, seed=derive_seed(0, 1) >> 1))
        text, _ = sampler.answer(context, Words(3))
    assert np.array_equal(pixels(tmp_path / "a" / "00001.png"), drawn.permute(1, 2, 0).numpy())
    assert records(out)[1]["answer"] == text


def test_rows_are_continued(run: Path, tmp_path: Path) -> None:
    data, out, model = rows_file(run, "more.jsonl", READ, DRAWN), tmp_path / "a.jsonl", run.parent / "model"
    asked = ["infer", model, "--data", data, "--out", out, "--size", "8x8", *DRAW]
    assert mm(*asked).code == 0
    whole = records(out)
    out.write_text(json.dumps(whole[1]) + "\n")
    (tmp_path / "a" / "00002.png").write_bytes(b"kept")
    said = mm(*asked)
    assert said.code == 0 and "1 answered, 1 were already there" in said.out, said.out + said.err
    assert records(out) == whole and (tmp_path / "a" / "00002.png").read_bytes() == b"kept"
    said = mm(*asked, "--guidance-scale", 2)
    assert said.code != 0 and "with other settings" in said.err
    assert mm(*asked, "--guidance-scale", 2, "--overwrite").code == 0
    assert (tmp_path / "a" / "00002.png").read_bytes() != b"kept"


MIXED = ([("user", "<image>Turn."), ("assistant", "so: <image>")], ["0.png", "2.png"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data", "ROWS"], "--data needs --out"),
        (["--data", "ROWS", "--out", "a.jsonl", "--prompt", "a"], "is for one question"),
        (["--data", "ROWS", "--out", "a.jsonl", "--draw", "a.png"], "is for one question"),
        (["--data", "ROWS", "--out", "a"], "pictures go into a folder of this name"),
        (["--data", "ROWS", "--out", "a.jsonl", "--nproc", 2], "is not built for"),
        (["--data", "MIXED", "--out", "a.jsonl"], "answered by words or by a picture"),
        (["--prompt", "a", "--out", "a.jsonl"], "--out"),
    ],
)
def test_what_rows_are_not_asked_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"ROWS": rows_file(run, "few.jsonl", READ), "MIXED": rows_file(run, "mixed.jsonl", READ, MIXED)}
    said = mm("infer", run.parent / "model", *(named.get(word, word) for word in words))
    assert said.code != 0 and says in said.err and "Traceback" not in said.err, said.err
    assert not list(tmp_path.iterdir())


def test_sources_have_shares(run: Path) -> None:
    """`mix` counts for these rows as for others: of four samples one is drawn."""
    basic = "data.dataset_param.basic_parameters"
    paths = [rows_file(run, f"{name}.jsonl", *rows) for name, rows in (("read", [READ] * 2), ("drawn", [DRAWN] * 2))]
    sources = "[" + ", ".join(f"{{path: {path}, name: {path.stem}}}" for path in paths) + "]"
    config = load_config(run, [f"{basic}.dataset={sources}", f"{basic}.mix={{weights: {{read: 3, drawn: 1}}}}"])
    config.check_built()
    dataset, _ = build_mm_dataset(config.arguments.data.dataset_param)
    steps = islice(loader(dataset, micro=4), 50)
    drawn = [len(batch.get("picture_is_drawn", ())) for step in steps for batch in step]
    assert 35 < sum(drawn) < 65 and len(set(drawn)) > 1, drawn


def test_layers_between_pictures_and_words_begin_as_torch_has_them(run: Path) -> None:
    """As published: uniform up to one over the root of what goes in. Others are normal, and the last one is 0."""
    config = load_config(run, ["model.train_from_scratch=true"]).arguments
    model: Any = ModelHub.build(config.model, param_dtype=torch.float32)
    ModelHub.load_weights(model, config.model, seed=0, device=torch.device("cpu"))
    for layer in (model.vae2llm, model.connector.fc1, model.connector.fc2, model.time_embedder.mlp[0]):
        most = layer.in_features**-0.5
        for each in (layer.weight, layer.bias):
            assert 0.8 * most < float(each.detach().abs().max()) <= most
    assert 0.018 < float(model.language_model["lm_head"].weight.detach().std()) < 0.022
    assert not model.llm2vae.weight.any() and not model.llm2vae.bias.any()
