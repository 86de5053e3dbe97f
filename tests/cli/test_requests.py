"""Commands are made of requests: what a command line says, a request says again in words."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

import mindspeed_mm
from mindspeed_mm.cli import requests as made
from mindspeed_mm.core.request import Request, RequestField, all_fields, words_of
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest, DataStatsRequest
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from mindspeed_mm.tasks.requests.export import ConvertRequest, ExportRequest, ExtractRequest, MergeRequest
from mindspeed_mm.tasks.requests.infer import ChatRequest, InferRequest
from mindspeed_mm.tasks.requests.init import InitRequest
from mindspeed_mm.tasks.requests.look import (
    CompletionRequest,
    ConfigRequest,
    ModelsRequest,
    ReportRequest,
    RouteRequest,
    SchemaRequest,
)
from mindspeed_mm.tasks.requests.measure import (
    DoctorRequest,
    DownloadRequest,
    FlopsRequest,
    ProfilingRequest,
    VerifyRequest,
)
from mindspeed_mm.tasks.requests.serve import ServeRequest
from mindspeed_mm.tasks.requests.train import (
    CheckRequest,
    ReferenceRequest,
    RolloutsRequest,
    ScoreRequest,
    TrainRequest,
)

REQUESTS: tuple[type[Request], ...] = (
    ChatRequest, CheckRequest, CompletionRequest, ConfigRequest, ConvertRequest, DataCheckRequest, DataPreviewRequest,
    DataStatsRequest, DoctorRequest, DownloadRequest, EvaluateRequest, ExportRequest, ExtractRequest, FlopsRequest,
    InferRequest, InitRequest, MergeRequest, ModelsRequest, ProfilingRequest, ReferenceRequest, ReportRequest,
    RolloutsRequest, RouteRequest, SchemaRequest, ScoreRequest, ServeRequest, TrainRequest, VerifyRequest,
)  # fmt: skip


def parsed(kind: type[Request], words: list[str]) -> Any:
    """What a command of this request is handed; no checkpoint is looked for."""
    found: list[Any] = []

    @click.command()
    @made.takes(kind)
    def command(request: Any) -> None:
        found.append(request)

    with mock.patch("mindspeed_mm.cli.sharing.at_checkpoint", lambda request: request):
        command.main(words, standalone_mode=False)
    return found[0]


def value_of(each: RequestField, random_numbers: random.Random) -> Any:
    """Some value that is not the default."""
    declared = each.declared
    if each.types == (bool,):
        return not each.default
    if each.choices:
        return random_numbers.choice([word for word in each.choices if word != each.default])
    if Path in each.types:
        return Path(f"-folder {random_numbers.randrange(100)}")
    if str in each.types:
        return f"--word {random_numbers.randrange(100)}="
    low, high = declared.least or 0, declared.most or (declared.least or 0) + 1000
    if int in each.types:
        return random_numbers.randint(int(low) + 1, int(high) - 1)
    return low + (high - low) * random_numbers.uniform(0.1, 0.9)


def written(each: RequestField, value: Any) -> Iterator[str]:
    if each.is_flag:
        yield each.flag
        return
    if each.declared.words is not None:
        value = each.declared.words[not value]
    yield f"{each.flag}={value}"


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_words_of_a_request_make_it_again(kind: type[Request]) -> None:
    """All options at once, written out here and not by `words_of`, reach the request, and it writes them again."""
    random_numbers, expected, words, arguments, needed = random.Random(5), {}, [], [], []
    for each in all_fields(kind):
        if each.declared.is_argument:
            one = each.choices[0] if each.choices else f"{each.name}-0"
            arguments += ["a", "section.key=b"] if each.is_multiple else [one]
            continue
        values = [value_of(each, random_numbers) for _ in range(2 if each.is_multiple else 1)]
        words += [word for value in values for word in written(each, value)]
        if each.default is MISSING:
            needed += list(written(each, values[0]))
        expected[each.name] = tuple(values) if each.is_multiple else values[0]
    request = parsed(kind, [*arguments, *words])
    flat = dict(vars(request))
    for inner in list(flat.values()):
        if isinstance(inner, Request):
            flat |= vars(inner)
    assert {name: flat[name] for name in expected} == expected
    assert parsed(kind, words_of(request)) == request
    assert words_of(parsed(kind, [*arguments, *needed])) == [*arguments, *needed]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (mindspeed_mm.train, TrainOptions),
        (mindspeed_mm.infer, InferRequest),
        (mindspeed_mm.evaluate, EvaluateRequest),
        (mindspeed_mm.export, ExportRequest),
    ],
)
def test_the_python_door_has_the_same_defaults(function: Callable[..., Any], kind: type[Request]) -> None:
    """Keywords that are options have their names and defaults; those that differ are known."""
    own = {"metric": "exact", "images": (), "videos": (), "audios": ()}
    parameters = inspect.signature(function).parameters
    options = {each.name: each for each in all_fields(kind) if not each.declared.is_argument}
    shared = [name for name in parameters if name in options]
    assert len(shared) > 3
    for name in shared:
        default = options[name].default
        expected = own.get(name, None if default is MISSING else default)
        assert parameters[name].default == expected, name


def test_an_option_may_stand_alone_or_have_a_short_form() -> None:
    given = {(): "true", ("--verify",): "true", ("--no-verify",): "false", ("--verify", "full"): "full"}
    assert {words: parsed(ConvertRequest, ["a", "b", *words]).verify for words in given} == given
