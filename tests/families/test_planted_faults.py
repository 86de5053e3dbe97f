"""What proves a family can fail: with a part of the model in disorder, or with media shown wrongly, the very tests that
its card names say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from tests.families import test_released_answers as answers
from tests.families import test_released_data as data
from tests.families import test_released_training as training
from tests.fsdp.models import test_bagel, test_janus_pro, test_lumina_mgpt
from tests.helpers import tiny_bagel
from tests.helpers.released_rows import ANSWERING, ROWS
from tests.helpers.runs import watched_steps

PARTS = {card.name: card.freeze for card in families()}
DEFAULT = ("whisper",)
"""Of the default run; the others are slow ones."""
WITHOUT_LAYERS = {"embedding", "drawing", "speaker_encoder"}
"""Parts without a linear layer that training uses."""
CONVOLVED = {"chameleon": {"tower"}, "lumina_mgpt": {"tower"}, "gemma3": {"projector"}}
"""Parts of a family that have none either: they make codes of pictures, or multiply by a bare matrix."""
SAME_ANSWER = {"chameleon"}
"""Its small model answers the same, whatever it reads."""


def marked(names: Sequence[str]) -> list[Any]:
    return [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in names]


def linear_layers(model: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Name → linear layer of a part of the model."""
    found = model.get_submodule(prefix).named_modules()
    return {f"{prefix}.{name}": each for name, each in found if isinstance(each, nn.Linear)}


def lose_order(model: nn.Module, prefix: str, reached: set[str]) -> None:
    """Fault: what the first linear layer that a part of the model uses makes of a token stands one token later."""

    def rolled(name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            later = output.roll(1, dims=[n for n, size in enumerate(output.shape[:-1]) if size > 1][-1:])
            if not reached and not torch.equal(later, output):
                reached.add(name)
            return later if name in reached else output

        return hook

    for name, layer in linear_layers(model, prefix).items():
        layer.register_forward_hook(rolled(name))


@contextmanager
def training_in_disorder(prefix: str, reached: set[str]) -> Iterator[None]:
    """The fault is planted in each model before its first step."""
    begun: list[TrainEngine] = []

    def begin(engine: TrainEngine, _batches: Any) -> None:
        if engine not in begun:
            begun.append(engine)
            lose_order(engine.model, prefix, reached)

    with watched_steps(before=begin):
        yield


def check_parts(name: str, prove: Callable[[], None]) -> None:
    """Each part of a family, in disorder, lets the proof of its training fail."""
    seen = set()
    for part, prefixes in PARTS[name].items():
        for prefix in prefixes:
            reached: set[str] = set()
            with training_in_disorder(prefix, reached):
                try:
                    prove()
                except AssertionError:
                    assert reached, (name, prefix)
                    seen.add(part)
                else:
                    assert not reached, f"{name}: {prefix} in disorder is not seen"
    assert seen >= PARTS[name].keys() - WITHOUT_LAYERS - CONVOLVED.get(name, set())


@pytest.mark.parametrize("name", marked([*ROWS]))
def test_a_part_in_disorder_is_seen_by_the_proof_of_training(name: str, tmp_path: Path) -> None:
    check_parts(name, lambda: training.test_two_steps_equal_a_bare_loop(name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("file", [test_janus_pro, test_lumina_mgpt], ids=["janus_pro", "lumina_mgpt"])
def test_a_part_in_disorder_is_seen_by_the_proof_of_a_family_that_draws(file: Any, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in count())

    def prove() -> None:
        folder = next(folders)
        folder.mkdir()
        if file is test_janus_pro:
            file.test_two_steps_equal_a_bare_loop(file.run_of(folder))
        else:
            file.test_two_steps_equal_a_bare_loop(file.run_of(folder), [])

    check_parts(file.__name__.rpartition(".test_")[2], prove)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["vit_model", "connector", "language_model.model.layers", "llm2vae"])
def test_a_part_of_bagel_in_disorder_is_seen_by_its_proof(prefix: str, tmp_path: Path) -> None:
    run, reached = tiny_bagel.run_of(tmp_path), set[str]()
    lose_order(test_bagel.double_model(run)[0], prefix, reached)
    with pytest.raises(AssertionError, match="not close"):
        test_bagel.test_both_terms_and_their_gradients_are_those_by_hand(run, (0, 1, 2, 3), False)
    assert reached


@pytest.mark.parametrize("name", marked([name for name in ANSWERING if ROWS[name].kinds]))
def test_media_turned_round_are_seen_by_the_proof_of_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: pictures are shown from right to left, and sounds from their end."""
    real = data.build_mm_dataset

    def turned(*args: Any) -> Any:
        dataset, *others = real(*args)
        plain = dataset.plugin.collate

        def collate(media: Any) -> dict[str, Any]:
            return {key: each.flip(-1) if each.is_floating_point() else each for key, each in plain(media).items()}

        monkeypatch.setattr(dataset.plugin, "collate", collate)
        return dataset, *others

    monkeypatch.setattr(data, "build_mm_dataset", turned)
    with pytest.raises(AssertionError, match=r"pixel_values|features|images"):
        data.test_rows_are_what_the_processor_makes_of_them(name, tmp_path)


@pytest.mark.parametrize("name", marked([name for name in ANSWERING if name not in SAME_ANSWER]))
def test_a_model_in_disorder_is_seen_by_the_proof_of_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: what the model reads stands one token later."""
    real, reached = answers.load_generator, set[str]()

    def spoilt(*args: Any) -> Any:
        generator = real(*args)
        prefixes = PARTS[name].get("language") or PARTS[name]["layers"]
        prefix = next(prefix for prefix in prefixes if linear_layers(generator.model, prefix))
        lose_order(generator.model, prefix, reached)
        return generator

    monkeypatch.setattr(answers, "load_generator", spoilt)
    with pytest.raises(AssertionError):
        answers.test_answers_are_those_of_transformers(name, tmp_path)
    assert reached
