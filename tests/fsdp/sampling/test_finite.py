"""Numbers that are not finite are refused wherever a model answers or draws, a row that has them alone, at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.fsdp.loss.sde_steps import SdeSteps
from mindspeed_mm.fsdp.models.diffusion.components import load_component, load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawRule, draw_answers
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import Question, ask
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError, rows_are_finite
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler
from mindspeed_mm.fsdp.sampling.trajectories import SampleNoise, noise_grid, roll_out
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.synchronisations import counted
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_qwen3

TOKENS = 5
NAN, INF = float("nan"), float("inf")
GREEDY = Sampling(TOKENS, temperature=0)
DRAWN = Sampling(TOKENS, temperature=1.0, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.2, seed=3)
pytestmark = pytest.mark.edge("BS1")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return load_generator(make_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=3, initializer_range=0.4))


@contextmanager
def damaged(weight: torch.Tensor, value: float, place: Any = ...) -> Iterator[None]:
    """A weight that holds something else for so long."""
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[place] = value
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def row_of(generator: Generator, text: str, sampling: Sampling = GREEDY, **fields: Any) -> LiveAnswer:
    return LiveAnswer(generator.encode(ask(text).sample, generator.encoder.media(Path.cwd())), sampling, **fields)


def test_scores_that_a_token_can_be_chosen_by() -> None:
    fine, masked = [0.0, -3.0, 1e30], [0.0, -INF, 2.0]
    bad = [[0.0, NAN, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF], [NAN, NAN, INF]]
    assert rows_are_finite(torch.tensor([fine, masked, *bad])).tolist() == [True, True] + [False] * 4


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(TOKENS, beams=2)])
def test_weights_that_are_not_finite_are_named(generator: Generator, sampling: Sampling, value: float) -> None:
    weight = generator.model.model.layers[1].mlp.up_proj.weight
    with damaged(weight, value), pytest.raises(NotFiniteError, match="not finite") as caught:
        generator.answer_live([row_of(generator, "one", sampling), row_of(generator, "two words", sampling)])
    (problem,) = caught.value.problems
    assert problem.what.startswith("the scores of token 1 of the answer")
    assert "'model.layers.1.mlp.up_proj.weight'" in problem.what and "checkpoint" in problem.way_out
    assert caught.value.exit_code == ExitCode.DATA
    assert len(generator.answer_live([row_of(generator, "one", sampling)])) == 1


def test_a_bad_row_fails_alone_and_its_neighbours_stream_on(generator: Generator) -> None:
    texts = ["one", "zebra", "two"]
    expected = [answer.token_ids for answer in generator.answer_live([row_of(generator, text) for text in texts])]
    pieces: list[str] = []
    rows = [row_of(generator, text, tell=pieces.append) for text in texts]
    (of_zebra,) = set(rows[1].question.input_ids.tolist()) & set(generator.tokenizer.encode("z"))
    with (
        damaged(generator.model.get_input_embeddings().weight, NAN, of_zebra),
        pytest.raises(NotFiniteError),
    ):
        generator.answer_live(rows)
    assert [row.answer and row.answer.token_ids for row in rows] == [expected[0], None, expected[2]]
    assert [type(row.failure) for row in rows] == [type(None), NotFiniteError, type(None)]
    assert "".join(pieces)  # of the others


def test_a_token_behind_the_first_is_named(generator: Generator) -> None:
    (answer,) = generator.answer_live([row_of(generator, "one")])
    third, before = answer.token_ids[2], answer.token_ids[:2]
    assert third not in before
    row = row_of(generator, "one")
    assert third not in row.question.input_ids
    with damaged(generator.model.get_input_embeddings().weight, NAN, third), pytest.raises(NotFiniteError) as caught:
        generator.answer_live([row])
    assert "token 4 of the answer" in str(caught.value) and row.token_ids == list(answer.token_ids[:3])


def test_a_file_of_questions_names_the_row_and_keeps_the_others(generator: Generator) -> None:
    questions = []
    for number, text in enumerate(["one", "zebra", "two"]):
        asked = ask(text)
        questions.append(Question(number, str(number), "all", asked.sample, None))
    media, kept = generator.encoder.media(Path.cwd()), []
    with (
        damaged(generator.model.get_input_embeddings().weight, NAN, generator.tokenizer.encode("z")[0]),
        pytest.raises(NotFiniteError) as caught,
    ):
        for batch in generator.answer(questions, media, sampling=GREEDY, batch_size=3):
            kept += [question.id for question, _ in batch]
    assert sorted(kept) == ["0", "2"] and caught.value.problems[0].where == str(questions[1].sample.place)


def test_the_host_waits_no_more_than_it_did(generator: Generator) -> None:
    """Tokens and the finding are one reading of a token."""
    rows = [row_of(generator, text, DRAWN) for text in ("one", "two words")]
    with counted(generator.model) as found:
        answers = generator.answer_live(rows)
    tokens = max(len(answer.token_ids) for answer in answers)
    ours = {
        place: count for place, count in found.items() if place.split(":")[0] in ("generator", "choosing", "finite")
    }
    assert ours == {"generator:is_over": tokens}


@pytest.mark.parametrize("value", [NAN, INF])
def test_rollouts_of_language_models(generator: Generator, value: float) -> None:
    inputs = {"input_ids": torch.arange(8).view(2, 4) + 5, "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    rule = DrawRule(seed=1, max_new_tokens=3, top_k=5, top_p=0.9)
    with damaged(generator.model.lm_head.weight, value, 7), pytest.raises(NotFiniteError) as caught:
        draw_answers(generator.model, inputs, ["0/a/0", "0/a/1"], rule, end_ids=[], pad_id=0)
    assert "0/a/0" in str(caught.value) and "'lm_head.weight'" in str(caught.value)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> DiffusionSampler:
    adapter = find_adapter(make_tiny_flux(tmp_path_factory.mktemp("flux")))
    encoders = load_encoders(adapter, torch.device("cpu"))
    return DiffusionSampler(adapter, load_component(adapter, "transformer"), encoders)


def bad_transformer(sampler: DiffusionSampler) -> nn.Parameter:
    return sampler.pipeline.transformer.proj_out.weight


def bad_text(sampler: DiffusionSampler) -> nn.Parameter:
    return next(sampler.pipeline.text_encoder_2.parameters())


def bad_decoder(sampler: DiffusionSampler) -> nn.Parameter:
    return sampler.pipeline.vae.decoder.conv_in.weight


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("weight", "seen", "name"),
    [
        (bad_transformer, "the predictions at step 1 of 2", "'transformer.proj_out.weight'"),
        (bad_text, "the predictions at step 1 of 2", "'text_encoder_2."),
        (bad_decoder, "the decoded samples", "'vae.decoder.conv_in.weight'"),
    ],
)
def test_samples_of_generators(sampler: DiffusionSampler, weight: Any, seen: str, name: str, value: float) -> None:
    sampling = SamplingArguments(height=32, width=32, num_inference_steps=2)
    prompts = [Prompt(number, "a cat", f"p:{number + 1}") for number in range(2)]
    with damaged(weight(sampler), value), pytest.raises(NotFiniteError) as caught:
        list(sampler.sample(prompts, sampling))
    (problem,) = caught.value.problems
    assert problem.where == "p:1" and problem.what.startswith(seen) and name in problem.what
    assert caught.value.exit_code == ExitCode.DATA
    assert len(next(iter(sampler.sample(prompts, sampling)))) == 1 and "decode" not in vars(sampler.pipeline.vae)


def test_latents_that_overflow_are_seen_though_the_picture_is_cut_to_white(sampler: DiffusionSampler) -> None:
    """Infinity in a picture becomes white: looking at pixels alone would let it pass."""
    sampling = SamplingArguments(height=32, width=32, num_inference_steps=2)
    plain = sampler.pipeline.scheduler.step

    def step(*arguments: Any, **named: Any) -> Any:
        (latents, *rest) = plain(*arguments, **named)
        return (latents + (INF if sampler.pipeline.scheduler._step_index == 2 else 0), *rest)

    sampler.pipeline.scheduler.step = step
    try:
        with pytest.raises(NotFiniteError, match="the latents behind the last step"):
            list(sampler.sample([Prompt(0, "a cat", "p:1")], sampling))
    finally:
        del sampler.pipeline.scheduler.step


def test_rollouts_of_generators(sampler: DiffusionSampler) -> None:
    adapter, model, shape = sampler.adapter, sampler.pipeline.transformer, (4, 8, 8)
    features, _ = adapter.encode_text(sampler.pipeline, ["a red box", ""])
    batch = adapter.pad_text([features] * 2) | {"latents": torch.zeros(2, *shape)}
    noise = [SampleNoise(7, "0/a", member) for member in range(2)]
    steps = SdeSteps("flow", 0.7, noise_grid(adapter, shape, 3, 3.0))
    for drawn in ((), (0, 1)):
        with damaged(model.proj_out.weight, NAN), pytest.raises(NotFiniteError) as caught:
            roll_out(Denoiser(adapter, torch.float32, 3.5), model, batch, steps, noise, drawn)
        assert "0/a/0" in str(caught.value) and "step 1 of 3" in str(caught.value)
