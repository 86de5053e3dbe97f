"""Samples of a plugin's data set in every form: training, `mm check` and `mm data` take the same ones, and refuse the
others in the same words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.dataloader.fetch import completed
from mindspeed_mm.fsdp.utils.register import data_register
from mindspeed_mm.tasks.check import check
from mindspeed_mm.tasks.data import check as data_check
from mindspeed_mm.tasks.data import preview, stats
from mindspeed_mm.tasks.data.micro_batch import view_batch
from mindspeed_mm.tasks.data.opening import open_data
from mindspeed_mm.tasks.data.words import Paint, check_lines
from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest, DataStatsRequest
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3

from transformers import AutoTokenizer  # isort: skip  (after tests.helpers, which guards torchvision)

IDS = [[5, 6, 7], [8, 9, 10, 11]]
LABELS = [[-100, 6, 7], [-100, -100, 10, 11]]
PLUGIN = """
from mindspeed_mm.fsdp.utils.register import data_register

@data_register.register("given_samples")
class GivenSamples:
    samples = []

    def __init__(self, basic_param, preprocess_param, dataset_param):
        pass

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture
def yaml(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on what `give` puts into the plugin."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(data_register, "_entries", dict(data_register.loaded()))
    (tmp_path / "given_samples.py").write_text(PLUGIN)
    path = tmp_path / "run.yaml"
    path.write_text(f"""\
model: {{model_name_or_path: {model}}}
data:
  dataset_param:
    {{dataset_type: given_samples, preprocess_parameters: {{model_name_or_path: {model}}}}}
  dataloader_param: {{num_workers: 0, shuffle: false}}
training: {{plugin: [{tmp_path / "given_samples.py"}], micro_batch_size: 2, train_iters: 1, save: {tmp_path / "run"}}}
""")
    open_data_class(path)
    yield path
    sys.modules.pop("given_samples", None)


def open_data_class(yaml: Path) -> Any:
    from mindspeed_mm.fsdp.utils.register import import_plugin

    import_plugin((str(yaml.parent / "given_samples.py"),))
    return data_register.get("given_samples")


def give(yaml: Path, samples: list[Any], collate_fn: Any = None) -> None:
    found = open_data_class(yaml)
    found.samples = samples
    if collate_fn is not None:
        found.collate_fn = staticmethod(collate_fn)


def first_batch(yaml: Path) -> dict[str, Any]:
    return next(iter(open_data(yaml).loader()))[0]


FORMS: dict[str, Any] = {
    "lists": lambda row: row,
    "arrays": lambda row: np.array(row, dtype=np.int32),
    "tensors": lambda row: torch.tensor(row),
    "a row axis": lambda row: torch.tensor([row]),
    "lists in a list": lambda row: [row],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_say_the_same(yaml: Path, form: str) -> None:
    """Also with what processors return beside the ids."""
    made = FORMS[form]
    samples = []
    for ids, labels in zip(IDS, LABELS, strict=True):
        samples.append({"input_ids": made(ids), "labels": made(labels), "attention_mask": made([1] * len(ids))})
    give(yaml, samples)
    batch = first_batch(yaml)
    assert batch["input_ids"][0, :3].tolist() == IDS[0] and batch["input_ids"][1].tolist() == IDS[1]
    assert batch["shift_labels"].tolist() == [[6, 7, -100, -100], [-100, 10, 11, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    shown = preview.run(DataPreviewRequest(yaml)).shown
    assert [(row.fault, [answer.ids for answer in row.answers]) for row in shown] == [("", [ids]) for ids in IDS]
    assert [row.answers[0].trained for row in shown] == [2, 2]
    found = stats.run(DataStatsRequest(yaml))
    assert (found.usable, found.tokens["max"]) == (2, 4)
    looked_at = data_check.run(DataCheckRequest(yaml))
    assert looked_at.errors == 0 and looked_at.to_dict()["decoded"] is None  # nobody knows what the data set does
    assert "(whole samples, as the data set makes them, " in check_lines(looked_at, Paint(colour=False))[1]


def sample(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS[0], "labels": LABELS[0]} | changes


BAD: dict[str, tuple[Any, str]] = {
    "float ids": (sample(input_ids=torch.tensor([5.0, 6.0, 7.0])), "input_ids are float32, not whole numbers"),
    "several rows": (sample(input_ids=[IDS[0], IDS[0]]), "input_ids are an array of int64 of shape (2, 3)"),
    "ragged": (sample(input_ids=[[1], [2, 3]]), "input_ids are no array"),
    "text": (sample(input_ids="what?"), "input_ids are 'what?', not numbers"),
    "fewer labels": (sample(labels=[6, 7]), "labels has shape (2,), and input_ids has shape (3,)"),
    "a short mask": (sample(attention_mask=[1, 1]), "attention_mask has shape (2,), and input_ids has shape (3,)"),
    "no labels": ({"input_ids": IDS[0]}, "labels the sample has no labels"),
    "no ids": ({"text": "what?"}, "input_ids the sample has no input_ids; its keys: text"),
    "a tensor": (torch.tensor(IDS[0]), "input_ids the sample is a Tensor, not a dict"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_training_refuses_is_refused_everywhere(yaml: Path, case: str) -> None:
    bad, said = BAD[case]
    give(yaml, [sample(), bad])
    with pytest.raises(DataError) as caught:
        first_batch(yaml)
    (problem,) = caught.value.problems
    assert said in f"{problem.key} {problem.what}" and problem.where == "1" and "collate_fn" in problem.way_out
    (finding,) = [each for each in check.run(yaml).findings if each.stage == "first samples"]
    assert finding.problem.what == problem.what and finding.exit_code == 4
    good, shown = preview.run(DataPreviewRequest(yaml)).shown
    assert good.fault == "" and problem.what in shown.fault
    (row,) = data_check.run(DataCheckRequest(yaml)).bad
    assert row.fault.what == problem.what and row.fault.kind == "samples of the plugin"
    assert stats.run(DataStatsRequest(yaml)).usable == 1


def test_bad_samples_of_a_plugin_can_be_left_out(yaml: Path) -> None:
    open_data_class(yaml).on_bad_sample = "skip"
    open_data_class(yaml).max_bad_fraction = 1.0
    give(yaml, [sample(), BAD["float ids"][0]])
    assert first_batch(yaml)["input_ids"].tolist() == [IDS[0], IDS[0]]


def test_arrays_that_cannot_be_joined_are_named(yaml: Path) -> None:
    give(yaml, [sample(caption="what?"), sample(caption="that")])
    with pytest.raises(DataError, match="cannot be joined along their first axis") as caught:
        first_batch(yaml)
    assert caught.value.problems[0].key == "caption"


def joined(samples: list[Any]) -> dict[str, torch.Tensor]:
    """One row of two rows of a sample: what no collator here makes."""
    ids = torch.cat([each["input_ids"].flatten() for each in samples])[None]
    return {"input_ids": ids, "labels": ids.clone()}


def test_a_collator_of_a_plugin_takes_what_it_takes(yaml: Path) -> None:
    give(yaml, [{"input_ids": torch.tensor([IDS[0], IDS[0]])} for _ in range(2)], joined)
    assert first_batch(yaml)["input_ids"].shape == (1, 12)
    found = preview.run(DataPreviewRequest(yaml))
    (answer,) = found.shown[0].answers
    assert found.shown[0].fault == "" and (answer.ids, answer.trained) == ([*IDS[0], *IDS[0]], 5)
    assert found.batch is not None and [each.sample_id for each in found.batch.documents] == ["0, 1"]
    assert data_check.run(DataCheckRequest(yaml)).errors == 0
    assert mm("train", yaml).code == 0


def first_seen(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Tokens and labels of texts, padded on the left; the last one only is trained."""
    width = max(len(each["text"].split()) for each in samples)
    ids, mask = torch.zeros(len(samples), width, dtype=torch.long), torch.zeros(len(samples), width, dtype=torch.long)
    for row, each in enumerate(samples):
        numbers = torch.tensor([int(word) for word in each["text"].split()])
        ids[row, width - len(numbers) :], mask[row, width - len(numbers) :] = numbers, 1
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def test_tokens_that_a_collator_makes_are_shown_and_counted(yaml: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer(words)["input_ids"] for words in ("red green blue", "old new")]
    give(yaml, [{"text": " ".join(map(str, ids))} for ids in texts], first_seen)
    shown = preview.run(DataPreviewRequest(yaml)).shown
    assert [[answer.ids for answer in row.answers] for row in shown] == [[ids] for ids in texts]
    for row, ids in zip(shown, texts, strict=True):
        (answer,) = row.answers
        assert "".join(stretch.text for stretch in answer.stretches) == tokenizer.decode(ids)
        assert answer.labels == [-100] * (len(ids) - 1) + [ids[-1]] and answer.trained == 1
        assert row.notes == ["as the data set's collator makes a batch of this row alone"] and not row.fault
    said = mm("data", "preview", yaml)
    assert f"{len(texts[0])} tokens, 1 trained" in said.out and "«" in said.out
    found = data_check.run(DataCheckRequest(yaml))
    assert found.errors == 0 and sum(each.rows for each in found.tokens) == 2
    assert stats.run(DataStatsRequest(yaml)).tokens["max"] == max(map(len, texts))


def test_labels_that_a_collator_adds_are_those_that_are_trained(yaml: Path) -> None:
    give(
        yaml,
        [{"input_ids": ids} for ids in IDS],
        lambda samples: first_seen([{"text": " ".join(map(str, each["input_ids"]))} for each in samples]),
    )
    assert [row.answers[0].trained for row in preview.run(DataPreviewRequest(yaml)).shown] == [1, 1]
    assert data_check.run(DataCheckRequest(yaml)).errors == 0


def test_a_collator_that_wants_several_rows_is_named(yaml: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        if len(samples) < 2:
            raise ValueError("one is not enough")
        return first_seen(samples)

    give(yaml, [{"text": "5 6"}, {"text": "7 8"}], collate)
    row = preview.run(DataPreviewRequest(yaml)).shown[0]
    assert not row.fault and not row.answers
    assert "fails on a batch of this row alone: ValueError: one is not enough" in row.notes[0]
    assert data_check.run(DataCheckRequest(yaml)).errors == 0


def test_a_data_set_that_fails_is_shown_as_such(yaml: Path) -> None:
    class Failing(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise KeyError("answer")

    give(yaml, Failing([0, 0]), joined)
    assert "the data set failed: KeyError: 'answer'" in preview.run(DataPreviewRequest(yaml)).shown[0].fault


def test_labels_that_do_not_fit_the_logits(yaml: Path) -> None:
    """Their places would be counted in rows of another length."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([IDS[1], IDS[1]])
        return {"input_ids": ids, "labels": ids[:, :3]}

    give(yaml, [sample(), sample()], collate)
    for verb in ("check", "train"):
        said = mm(verb, yaml)
        assert said.code == 4, said
        assert "labels of shape (2, 3) do not fit the model's outputs, of shape (2, 4)" in said.err + said.out


@pytest.mark.parametrize("where", ["sample", "batch"])
@pytest.mark.parametrize("key", ["attention_mask", "mm_token_type_ids", "position_ids"])
def test_arrays_of_other_lengths_are_refused_with_their_row(yaml: Path, key: str, where: str) -> None:
    """Also where the data set joins its samples itself: no collator of ours looks at them."""
    ids, short = torch.tensor([IDS[1]]), torch.ones(3, 1, 3, dtype=torch.long)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        return batch | ({key: short} if where == "batch" else {})

    bad = {"input_ids": ids, "labels": ids} | ({key: short} if where == "sample" else {})
    give(yaml, [{"input_ids": ids, "labels": ids}, bad], collate)
    place = "1" if where == "sample" else "0, 1"
    said = "has shape (3, 1, 3), and input_ids has shape (1, 4)"
    (finding,) = [each for each in check.run(yaml).findings if each.stage == "first samples"]
    assert (finding.problem.key, finding.problem.where, finding.exit_code) == (key, place, 4)
    assert finding.problem.what == said
    trained = mm("train", yaml)
    assert trained.code == 4 and said in trained.err
    assert len(data_check.run(DataCheckRequest(yaml)).bad) == (where == "sample")


def test_labels_that_a_collator_of_a_plugin_may_move_are_a_warning(yaml: Path) -> None:
    ids = torch.tensor([IDS[1]])
    give(yaml, [{"input_ids": ids, "labels": ids[:, 1:]}] * 2, lambda _: {"input_ids": ids, "labels": ids})
    result = check.run(yaml)
    assert result.exit_code == 0
    assert any("sample 0 has labels of shape (1, 3) and input_ids of shape (1, 4)" in each for each in result.warnings)


def test_a_data_set_that_is_smaller_than_a_step_is_a_warning(yaml: Path) -> None:
    give(yaml, [sample(), sample()])
    words = ["training.gradient_accumulation_steps=4", "data.dataloader_param.drop_last=false"]
    said = "an epoch fills only 25% of a step, so each step reads the data about 4 times"
    assert [each for each in check.run(yaml, words).warnings if said in each]
    assert not [each for each in check.run(yaml).warnings if "an epoch fills only" in each]
    trained = mm("train", yaml, *words)
    assert trained.code == 0 and said in trained.out + trained.err


def test_batches_of_arrays_are_batches_of_tensors() -> None:
    batch = completed({"input_ids": np.array(IDS[:1]), "labels": np.array(LABELS[:1]), "scores": np.ones(1)}, ["0"])
    assert batch["shift_labels"].tolist() == [[6, 7, -100]] and isinstance(batch["scores"], torch.Tensor)
    assert view_batch(batch).length == 3
    for ids in ([IDS[0]], torch.ones(1, 3)):
        with pytest.raises(DataError, match=r"input_ids are a .*not a tensor of whole numbers"):
            completed({"input_ids": ids, "labels": torch.tensor(LABELS[:1])}, ["0"])
