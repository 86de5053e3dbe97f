"""One class says what a data set may tell: a part, a cache and a wrapper pass all of it on."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import MMDataset, build_mm_dataloader
from mindspeed_mm.fsdp.data.build import DatasetPart, split_dataset
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataset import DatasetView, as_mm_dataset
from mindspeed_mm.fsdp.params.data_args import CollateParam, DataloaderParam

ATTRIBUTES = set(MMDataset.__annotations__)
METHODS = {name for name, member in vars(MMDataset).items() if inspect.isfunction(member) and name[0] != "_"}
OF_THE_WHOLE_ONLY = {"known_sizes", "has"}
"""A part numbers its samples anew: these are found out for it again."""
GIVEN = {"collate_param": CollateParam(), "seed": 3, "epoch": 0}


def answers(**attributes: Any) -> MMDataset:
    """A data set of ten samples, each of whose members answers with its name and what it was called with."""

    def method(name: str) -> Any:
        return lambda self, *args, **kwargs: {"name": name, "args": args}

    members: dict[str, Any] = {name: method(name) for name in METHODS} | {name: f"its {name}" for name in ATTRIBUTES}
    members |= {"parts": [], "sizes": None, "__len__": lambda self: 10, "__getitem__": lambda self, i: f"sample {i}"}
    return type("Answers", (MMDataset,), members | attributes)()


def call(dataset: Any, name: str, index: int) -> Any:
    parameters = inspect.signature(getattr(MMDataset, name)).parameters
    known = GIVEN | {"index": index}
    return getattr(dataset, name)(*(known[each] for each in parameters if each in known))


@pytest.mark.parametrize("name", sorted(METHODS - OF_THE_WHOLE_ONLY - {"fingerprint", "item"}))
def test_a_part_asks_the_whole_by_the_number_that_the_sample_has_there(name: str) -> None:
    whole = answers()
    part = DatasetPart(whole, np.array([2, 5, 7]), "training")
    asked = call(part, name, 1)
    assert asked == (None if name in {"draw_captions", "check_encoders"} else call(whole, name, 5))


def test_a_view_has_the_attributes_of_the_whole() -> None:
    whole = answers()
    for name in ATTRIBUTES:
        assert getattr(DatasetView(whole), name) == getattr(whole, name), name
    assert DatasetView(whole).origin is whole


def test_a_part_numbers_samples_sizes_and_entries_anew() -> None:
    whole = answers(sizes=list("abcdefghij"), parts=[Part("x", 0, 5), Part("y", 5, 10)])
    part = DatasetPart(whole, np.array([2, 5, 7]), "training")
    assert (part[2], part.item(2, 4), list(part.sizes or ())) == (
        "sample 7",
        {"name": "item", "args": (7, 4)},
        list("cfh"),
    )
    assert list(part.parts) == [Part("x", 0, 1), Part("y", 1, 3)]
    assert part.fingerprint() == {**whole.fingerprint(), "part": "training", "rows": 3}


def test_what_a_foreign_data_set_has_takes_the_place_of_the_defaults() -> None:
    class Own:
        on_bad_sample = "skip"
        vocabulary = 7

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return 10 * index

        def place(self, index: int) -> str:
            return f"own:{index}"

    own = Own()
    wrapped = as_mm_dataset(own)
    assert (len(wrapped), wrapped[2], wrapped.item(2, 1), wrapped.place(2)) == (4, 20, 20, "own:2")
    assert (wrapped.on_bad_sample, wrapped.max_bad_fraction, wrapped.measure(1), wrapped.has_rows) == (
        "skip",
        0.0,
        None,
        False,
    )
    assert wrapped.origin is own and wrapped.origin.vocabulary == 7
    assert as_mm_dataset(wrapped) is wrapped
    assert wrapped.fingerprint() == {"class": Own.__qualname__, "rows": 4}


def test_a_part_of_a_foreign_data_set_can_be_told_from_the_other() -> None:
    training, validation = split_dataset(as_mm_dataset(list(range(10))), 0.3, seed=1)
    assert sorted([*map(training.__getitem__, range(7)), *map(validation.__getitem__, range(3))]) == list(range(10))
    assert training.fingerprint() == {"class": "list", "rows": 7, "part": "training"}
    assert [str(validation.place(i)) for i in range(3)] == [str(validation[i]) for i in range(3)]


def test_messages_name_the_sample_and_the_code_of_the_author() -> None:
    class Broken:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise ValueError("no such thing")

        collate_fn = list

    split = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
    with pytest.raises(DataError, match=r"^0  the data set failed: ValueError: no such thing.* at test_dataset\.py"):
        next(iter(build_mm_dataloader(Broken(), DataloaderParam(num_workers=0), **split)))


@pytest.mark.parametrize("packs", [None, True, False])
def test_a_loader_asks_for_the_packing_that_it_is_told(packs: bool | None) -> None:
    asked = []

    def build_collator(self: Any, collate_param: Any, *, packs: bool | None = None) -> Any:
        asked.append(packs)
        return list

    defaults = {name: getattr(MMDataset, name) for name in ATTRIBUTES | {"known_sizes"}}
    dataset = answers(**defaults, build_collator=build_collator)
    split = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
    before = dict(vars(dataset))
    build_mm_dataloader(dataset, DataloaderParam(num_workers=0), packs=packs, **split)
    assert asked == [packs] and vars(dataset) == before
