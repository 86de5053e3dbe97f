"""Janus-Pro that draws, by hand in fp64: both loss terms, gradients and steps are those of transformers' modules put
together in the test; what `mm infer` draws is what transformers' own `generate` draws."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.drawn_pictures import WithDrawnPictures
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.models.janus_pro.modeling_janus_pro import codes_of
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import differing, mm, tensors, train
from tests.helpers.tiny_janus import CODES, SIDE, TOKENS, make_tiny_janus, write_drawn_rows
from tests.helpers.tiny_run import STEADY

import transformers  # isort: skip  (after the guard of the lines above)

FP64 = "parallel.fsdp_plan.param_dtype=fp64"
LR = 1e-3
LORA = ["training.lora.enable=true", "training.lora.rank=2", "training.lr=0.1"]


@cache
def run_of(root: Path) -> Path:
    make_tiny_janus(root / "model")
    rows = write_drawn_rows(root / "rows")
    config: dict[str, Any] = {
        "model": {"model_id": "janus_pro", "model_name_or_path": str(root / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "janus_pro",
                "basic_parameters": {"dataset": str(rows), "dataset_dir": str(rows.parent)},
            },
            "dataloader_param": {"num_workers": 0, "shuffle": False},
        },
        "parallel": {},
        "training": {"lr": LR, "micro_batch_size": 2, "train_iters": 2, "seed": 7, "clip_grad": 0.5,
                     "adam_fused": False, **STEADY},
    }  # fmt: skip
    with (root / "run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return root / "run.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("janus"))


def built_rows(run: Path) -> Any:
    return build_mm_dataset(load_config(run).arguments.data.dataset_param)[0]


def batch_of(dataset: Any, *numbers: int) -> dict[str, Any]:
    batch: dict[str, Any] = dataset.build_collator(CollateParam())([dataset[number] for number in numbers])
    pixels = {name: batch[name].double() for name in ("pixel_values", "drawn_pixel_values") if name in batch}
    return batch | pixels


def reference(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    with InDouble():
        return transformers.JanusForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()


def codes_by_hand(model: Any, picture: torch.Tensor) -> torch.Tensor:
    """Of one picture (3, side, side): latent by latent the nearest entry of the code book, both of length 1."""
    vq = model.model.vqmodel
    latents = vq.quant_conv(vq.encoder(picture[None]))[0].flatten(1).T
    book = [entry / entry.norm() for entry in vq.quantize.embedding.weight]
    return torch.tensor(
        [min(range(CODES), key=lambda n: float((latent / latent.norm() - book[n]).norm())) for latent in latents]
    )


def by_hand(model: Any, dataset: Any, *numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over words and the mean over codes, row by row and token by token."""
    placeholder, words, codes = model.config.image_token_id, [], []
    for number in numbers:
        sample, batch = dataset[number], batch_of(dataset, number)
        ids, labels = torch.tensor(sample["input_ids"]), sample["labels"]
        weights = sample.get("loss_weights")
        embeds = model.get_input_embeddings()(ids).clone()
        places = (ids == placeholder).nonzero().squeeze(1).split(TOKENS)
        seen, drawn, said = iter(batch.get("pixel_values", ())), iter(batch.get("drawn_pixel_values", ())), {}
        for own, is_drawn in zip(places, batch.get("drawn_images", [False] * len(places)), strict=True):
            if is_drawn:
                picture = codes_by_hand(model, next(drawn))
                embeds[own] = model.model.generation_aligner(model.model.generation_embeddings(picture))
                said |= dict(zip(own.tolist(), picture.tolist(), strict=True))
            else:
                features = model.model.vision_model(next(seen)[None], return_dict=True).last_hidden_state
                embeds[own] = model.model.aligner(features)[0]
        assert next(seen, None) is None and next(drawn, None) is None
        hidden = model.model.language_model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0]
        for place in range(1, len(ids)):
            if labels[place] == -100:
                continue
            weight = 1.0 if weights is None else float(weights[place])
            if place in said:
                log_probs = model.model.generation_head(hidden[place - 1]).log_softmax(0)
                codes.append((weight, -log_probs[said[place]]))
            else:
                log_probs = model.lm_head(hidden[place - 1]).log_softmax(0)
                words.append((weight, -log_probs[ids[place]]))
    means = [
        sum((weight * loss for weight, loss in own), torch.zeros(())) / (sum(weight for weight, _ in own) or 1)
        for own in (words, codes)
    ]
    return means[0], means[1]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_an_answer_is_its_words_and_its_picture(run: Path) -> None:
    """A picture of an answer is trained with its two marks, one of a question is not; the drawn one is the square in
    the middle of the file, from -1 to 1."""
    dataset = built_rows(run)
    trained = [int((dataset[number]["labels"] != -100).sum()) for number in range(4)]
    here, three = (len(dataset.processor.tokenizer(text)["input_ids"]) for text in ("here: ", "three"))
    drawn = TOKENS + 2 + 1  # its marks, and the end of the turn
    assert trained == [drawn, here + drawn, three + 1, 2 * drawn]
    batch = batch_of(dataset, 0, 1, 2, 3)
    assert batch["drawn_images"].tolist() == [True, False, True, False, True, False, True]
    assert batch["pixel_values"].shape == (3, 3, SIDE, SIDE)
    first = torch.tensor(np.asarray(Image.open(run.parent / "rows" / "1.png")))[:, 8:40].permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(batch["drawn_pixel_values"][0].float(), first)
    assert "drawn_images" not in batch_of(dataset, 2)  # words alone: as any model takes them
    for number in range(4):
        assert dataset.measure(number).tokens == len(dataset[number]["input_ids"])
    shown = mm("data", "preview", run, "--rows", 2, "--json")
    assert shown.code == 0, shown.err


def test_codes_are_those_of_the_published_rule(run: Path) -> None:
    """transformers' own `encode` does not scale to length 1 first, and finds others."""
    model, pixels = reference(run.parent / "model"), batch_of(built_rows(run), 0, 1, 3)["drawn_pixel_values"]
    with torch.no_grad():
        expected = torch.stack([codes_by_hand(model, picture) for picture in pixels])
        found = codes_of(model.model.vqmodel, pixels)
        theirs = model.model.vqmodel.encode(pixels).image_tokens.view_as(found)
    assert torch.equal(found, expected) and len(expected.unique()) > 4
    assert not torch.equal(found, theirs)


# --- training ---------------------------------------------------------------------------------------------------------


def test_both_terms_are_those_by_hand(run: Path) -> None:
    arguments = load_config(run).arguments.model
    with InDouble():
        model = ModelHub.build(arguments, param_dtype=torch.float64)
        ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    head = build_head_loss(model, "lm_head", FeatureArguments())
    objective = WithDrawnPictures(build_objective(None, model, head), model.picture_placeholder)  # type: ignore[arg-type]
    theirs, dataset = reference(run.parent / "model"), built_rows(run)
    for numbers in ((0, 1, 2, 3), (3, 0), (2,)):
        batch = objective.prepare(batch_of(dataset, *numbers))
        with keeping_double(), InDouble(), torch.no_grad():
            terms, counts = objective.terms(model, batch), objective.count([batch])
            expected = by_hand(theirs, dataset, *numbers)
        for name, value in zip(("loss", "picture"), expected, strict=True):
            torch.testing.assert_close(terms[name] / (counts[name] or 1), value, rtol=1e-8, atol=0, check_dtype=False)
        assert (counts["picture"] == 0) == (numbers == (2,))


@cache
def whole_steps(yaml: str) -> Any:
    """Of one process, whose rows stand apart."""
    return steps_of(yaml, [])


def test_two_steps_equal_a_bare_loop(run: Path) -> None:
    measured = whole_steps(str(run))
    with keeping_double(), InDouble():
        model, dataset = reference(run.parent / "model"), built_rows(run)
        model.model.vqmodel.requires_grad_(False)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for step, rows in zip(measured, ((0, 1), (2, 3)), strict=True):
            loss = sum(by_hand(model, dataset, *rows), torch.zeros(()))
            loss.backward()
            torch.testing.assert_close(step["loss"], loss.detach(), rtol=1e-9, atol=0)
            for name, parameter in trained.items():
                torch.testing.assert_close(step["gradients"][name], parameter.grad, rtol=1e-7, atol=1e-10)
            torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in trained.items():
            torch.testing.assert_close(measured[-1]["weights"][name], parameter.detach(), rtol=1e-8, atol=1e-9)


def steps_of(yaml: str, words: list[str], packs: bool = False) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, [FP64, *words], packs=packs)


def test_packed_rows_are_the_same(run: Path) -> None:
    compare_steps(whole_steps(str(run)), steps_of(str(run), [], packs=True), 1e-8)


def test_the_best_checkpoint_is_that_of_words_and_pictures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are made up: that of words alone is lowest at the first step, their sum at the second."""
    losses = iter([{"loss": 1.0, "picture": 5.0}, {"loss": 1.5, "picture": 2.0}])
    monkeypatch.setattr(TrainEngine, "validate", lambda self, batches: next(losses))
    rows = f"data.dataset_param.basic_parameters.val_dataset={run.parent / 'rows' / 'rows.jsonl'}"
    train(run, tmp_path / "run", rows, "training.val_interval=1", "training.save_interval=1")
    best = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (best["metric"], best["step"], best["value"]) == ("val_total", 2, 3.5)
    assert best["history"] == [[1, 6.0], [2, 3.5]]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["val_total"] for record in records if "val_total" in record] == [6.0, 3.5]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["features.recompute=true"], ["parallel.tensor_parallel_size=2"]])
def test_two_ranks_equal_one_process(run: Path, more: list[str]) -> None:
    """One rank draws and sees, the other does neither, and the other way round."""
    expected = whole_steps(str(run))
    micro = 2 if "tensor" in "".join(more) else 1
    words = [f"training.micro_batch_size={micro}", *more]
    for measured in run_ranks(2, steps_of, str(run), words):
        compare_steps(expected, measured, 1e-8)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.pipeline_parallel_size=2"], "cannot be cut into stages"),
        (["parallel.ulysses_parallel_size=2"], "no decoder whose attention"),
        (["model.model_id=null"], "which model.model_id: janus_pro alone is trained on"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, words: list[str], says: str) -> None:
    said = mm("check", run, *words, "training.gradient_accumulation_steps=2", "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out + said.err


def test_a_loss_that_knows_only_words_is_refused(run: Path) -> None:
    said = mm("train", run, "features.loss_cfg.loss_type=raw")
    assert said.code != 0 and "pictures in answers are learned by cross-entropy" in said.err, said.err


# --- drawing ----------------------------------------------------------------------------------------------------------


def drawn_by_transformers(folder: Path, prompt: str, **settings: Any) -> np.ndarray:
    """(side, side, 3) uint8 of `generate(generation_mode="image")` after the published prompt."""
    model, processor = reference(folder, torch.float32), transformers.AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    inputs = processor(text=[text], generation_mode="image", return_tensors="pt")
    torch.manual_seed(3)
    try:
        codes = model.generate(**inputs, generation_mode="image", **settings)
    except TypeError as error:
        if "prefill_chunk_size" not in str(error):
            raise
        pytest.skip("the drawing of this release of transformers does not run")
    pixels = model.decode_image_tokens(codes)[0]
    return ((pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--temperature", 0], {"do_sample": False, "guidance_scale": 5.0}),
        ([], {"do_sample": True, "guidance_scale": 5.0}),
        (["--guidance-scale", 2], {"do_sample": True, "guidance_scale": 2.0}),
    ],
)
def test_mm_infer_draws_what_transformers_draws(
    run: Path, tmp_path: Path, words: list[Any], settings: dict[str, Any]
) -> None:
    folder, out = run.parent / "model", tmp_path / "seven.png"
    said = mm("infer", folder, "--prompt", "Draw a seven.", "--draw", out, "--seed", 3, *words)
    assert said.code == 0, said.err
    found = np.asarray(Image.open(out))
    assert found.shape == (SIDE, SIDE, 3)
    assert np.array_equal(found, drawn_by_transformers(folder, "Draw a seven.", **settings))
    words = [*words, "--seed", 3, "--json"]
    other = mm("infer", folder, "--prompt", "Draw a two.", "--draw", tmp_path / "two.png", *words)
    facts = json.loads(other.out)
    assert facts["width"] == SIDE and facts["codes"] == TOKENS
    assert not np.array_equal(found, np.asarray(Image.open(tmp_path / "two.png")))


def test_guidance_of_one_and_pictures_in_the_prompt(run: Path, tmp_path: Path) -> None:
    """Without guidance the likeliest code after the prompt alone, by hand; a picture in the prompt changes it."""
    folder, picture = run.parent / "model", run.parent / "rows" / "0.png"
    words = ["--temperature", 0, "--guidance-scale", 1, "--prompt"]
    assert mm("infer", folder, *words, "Draw.", "--draw", tmp_path / "a.png").code == 0
    twice = tmp_path / "made" / "b.png"  # in a folder that is made, and over a picture
    for _ in range(2):
        assert mm("infer", folder, *words, "Draw.", "--draw", twice, "--image", picture).code == 0
    twice.rename(tmp_path / "b.png")
    model, processor = reference(folder, torch.float32), transformers.AutoProcessor.from_pretrained(folder)
    for name, content in (("a", "Draw."), ("b", "<image_placeholder>Draw.")):
        text = f"<s><|User|>:\n{content}\n\n<|Assistant|>:\n"
        shown = {"images": [Image.open(picture)]} if name == "b" else {}
        inputs = processor(text=[text], generation_mode="image", return_tensors="pt", **shown)
        codes: list[torch.Tensor] = []
        for _ in range(TOKENS):
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            if shown:
                features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
                embeds[inputs["input_ids"] == model.config.image_token_id] = features[0]
            if codes:
                drawn = model.prepare_embeddings_for_image_generation(torch.stack(codes)[None])
                embeds = torch.cat([embeds, drawn], dim=1)
            hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[0, -1]
            codes.append(model.model.generation_head(hidden).argmax())
        pixels = model.decode_image_tokens(torch.stack(codes)[None])[0]
        expected = ((pixels + 1) / 2 * 255).clamp(0, 255).to(torch.uint8).numpy()
        assert np.array_equal(np.asarray(Image.open(tmp_path / f"{name}.png")), expected)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--guidance-scale", 3, "--prompt", "a"], "nothing is drawn"),
        (["--draw", "a.png", "--prompt", "a", "--guidance-scale", 0.5], "0.5 is below 1"),
        (["--draw", "a.png", "--prompt", "a", "--guidance-scale", 1e38], "too large"),
        (["--draw", "a.png", "--prompt", "a", "--temperature", 1e-9], "below 0.001"),
        (["--draw", "a.png", "--prompt", "a", "--seed", 2**63], "not in the range"),
        (["--draw", "a.png", "--prompt", "x" * 480], "the model takes 512"),
        (["--draw", "a.jpg", "--prompt", "a"], "what is written is PNG"),
        (["--draw", "a.png", "--prompt", "a", "--beams", 2], "the answer is a picture"),
        (["--draw", "a.png", "--prompt", "a", "--max-new-tokens", 9], "as many codes as the model says"),
        (["--draw", "a.png", "--image", "IMAGE"], "nothing says what to draw"),
        (["--draw", "a.png", "--data", "ROWS", "--out", "b"], "only the answer to --prompt is drawn"),
    ],
)
def test_drawing_that_makes_no_sense_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = run.parent / "rows"
    named = {"IMAGE": rows / "0.png", "ROWS": rows / "rows.jsonl"}
    said = mm("infer", run.parent / "model", *(named.get(word, word) for word in words))
    assert said.code != 0 and says in said.err and "Traceback" not in said.err, said.err
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_draw_is_named(tmp_path: Path) -> None:
    from tests.helpers.tiny_models import make_tiny_qwen3_vl

    make_tiny_qwen3_vl(tmp_path / "model")
    said = mm("infer", tmp_path / "model", "--prompt", "a", "--draw", tmp_path / "a.png")
    assert said.code != 0 and "the model does not draw" in said.err and not (tmp_path / "a.png").exists(), said.err


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`broken`: a run of adapters that was broken off after one of two steps, and resumed; `merged`, and `peft` beside
    the weights, are what is exported of it."""
    folder = tmp_path_factory.mktemp("adapted")
    train(run, folder / "whole", *LORA)
    train(run, folder / "broken", *LORA, "training.train_iters=1")
    train(run, folder / "broken", *LORA)
    assert differing(tensors(folder / "whole"), tensors(folder / "broken")) == []
    for out, words in (("merged", ["--merge"]), ("peft", [])):
        said = mm("export", folder / "broken", folder / out, *words)
        assert said.code == 0, said.err
    return folder


def test_adapters_resume_to_the_bit_merge_and_draw(run: Path, adapted: Path, tmp_path: Path) -> None:
    """Merged, beside the weights, and from the run itself they draw the same picture, and another than without."""
    base = run.parent / "model"
    drawn = {}
    sources = {
        "merged": [adapted / "merged"],
        "peft": [base, "--lora", adapted / "peft"],
        "run": [adapted / "broken"],
        "base": [base],
    }
    for name, source in sources.items():
        out = tmp_path / f"{name}.png"
        said = mm("infer", *source, "--prompt", "Draw one.", "--draw", out, "--temperature", 0)
        assert said.code == 0, said.err
        drawn[name] = np.asarray(Image.open(out))
    assert np.array_equal(drawn["merged"], drawn["peft"]) and np.array_equal(drawn["merged"], drawn["run"])
    assert not np.array_equal(drawn["merged"], drawn["base"])


def test_a_run_that_draws_still_answers(run: Path, adapted: Path, tmp_path: Path) -> None:
    """In words it says what transformers' `generate` says; rows that expect pictures are not scored."""
    model = reference(adapted / "merged", torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(adapted / "merged")
    text = "<s><|User|>:\n<image_placeholder>Which is it?\n\n<|Assistant|>:\n"
    inputs = processor(text=text, images=[Image.open(run.parent / "rows" / "3.png")], return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
    rows = run.parent / "rows" / "asked.jsonl"
    question = {"role": "user", "content": "<image>Which is it?"}
    rows.write_text(
        json.dumps({"messages": [question, {"role": "assistant", "content": expected or "-"}], "images": ["3.png"]})
    )
    scored = mm("evaluate", adapted / "broken", "--data", rows, "--out", tmp_path / "scores", "--json",
                "--max-new-tokens", 5)  # fmt: skip
    assert scored.code == 0, scored.err
    assert json.loads(scored.out)["overall"]["correct"] == int(bool(expected))
    refused = mm("evaluate", adapted / "broken", "--data", run.parent / "rows" / "rows.jsonl", "--out", tmp_path / "no")
    assert refused.code != 0 and "3 of 4 rows are bad" in refused.err, refused.err
