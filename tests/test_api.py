"""The Python door: what may be given in place of files, what is refused and how, and what a call leaves behind."""

from __future__ import annotations

import gc
import inspect
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mindspeed_mm as mm
from mindspeed_mm.cli.main import VERBS
from mindspeed_mm.core.errors import StoppedAfterSave
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import STEADY, make_tiny_run, tiny_config

pytestmark = pytest.mark.edge("U2")

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
    for word in ("red", "green", "blue", "old", "new", "far")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door")
    make_tiny_run(folder)
    return folder


@pytest.fixture
def config(folder: Path) -> dict[str, Any]:
    return tiny_config(folder, training={"train_iters": 2})


def losses(run: Any) -> list[float]:
    return [float(loss) for loss in run.metrics["loss"]]


def test_a_file_a_mapping_and_the_trainer_train_the_same(folder: Path, config: dict[str, Any]) -> None:
    expected = losses(mm.train(config))
    assert losses(mm.train(folder / "run.yaml", training={"train_iters": 2})) == expected
    assert losses(mm.train(str(folder / "run.yaml"), overrides=["training.train_iters=2"])) == expected
    engine = Trainer(config).train()
    assert engine is not None and engine.iteration == 2


def test_rows_of_every_kind_are_the_same_rows(config: dict[str, Any], tmp_path: Path) -> None:
    import datasets
    import pandas

    mm_rows = [ROWS, datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS)]
    first, *others = [losses(mm.train(config, rows=rows)) for rows in mm_rows]
    assert all(other == first for other in others)
    changed = losses(mm.train(config, rows=ROWS[::-1]))
    assert changed != first  # the rows are read, not the file of the configuration


def test_rows_in_memory_are_kept_with_the_run_and_resumed(config: dict[str, Any], tmp_path: Path) -> None:
    training = {"save": str(tmp_path / "run"), "train_iters": 4}
    whole = losses(mm.train(config, rows=ROWS, training={"train_iters": 4}))
    mm.train(config, rows=ROWS, training=training, steps=2)
    assert losses(mm.train(config, rows=ROWS, training=training)) == whole
    with pytest.raises(mm.MMError, match="data"):
        mm.train(config, rows=ROWS[::-1], training=training | {"train_iters": 6})


class Successor(nn.Module):
    """A model that nobody registered, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.table[input_ids].flatten(0, 1), labels.flatten())}


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([(index + 1) % 8])}

    @staticmethod
    def collate_fn(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
        return batch | {"shift_labels": batch["labels"]}


def test_a_module_and_a_torch_data_set_of_the_callers_own() -> None:
    model = Successor()
    training = {"lr": 0.1, "train_iters": 30, "micro_batch_size": 8, "clip_grad": 0.0, **STEADY}
    run = mm.train(model=model, rows=Counting(), training=training, features={"loss_cfg": {"loss_type": "raw"}})
    assert run.model is model and model.table.argmax(1).tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    reference = Successor()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.0)
    batch = {name: Counting.collate_fn([Counting()[i] for i in range(8)])[name] for name in ("input_ids", "labels")}
    expected = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = reference(**batch)["loss"]
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.table, reference.table, rtol=1e-4, atol=1e-5)


def test_a_function_ends_the_run_and_the_state_is_saved(config: dict[str, Any], tmp_path: Path) -> None:
    seen: list[int] = []

    def stop_at_two(result: Any) -> bool:
        seen.append(result.step)
        return result.step == 2

    training = {"save": str(tmp_path / "run"), "train_iters": 9, "log_interval": 5, "save_interval": 0}
    run = mm.train(config, training=training, callbacks=[stop_at_two])
    assert seen == [1, 2] and run.status == "stopped"
    assert run.last is not None and run.last.name == "iter_0000002"
    assert list(run.metrics["step"]) == [1, 2]  # the last line is logged though its turn had not come


def test_an_interrupt_saves_and_raises(config: dict[str, Any], tmp_path: Path) -> None:
    import signal

    def interrupt(result: Any) -> None:
        if result.step == 1:
            signal.raise_signal(signal.SIGINT)

    training = {"save": str(tmp_path / "run"), "train_iters": 9}
    with pytest.raises(StoppedAfterSave) as stopped:
        mm.train(config, training=training, callbacks=[interrupt])
    assert stopped.value.exit_code == 75
    assert mm.load_run(tmp_path / "run").last is not None


def test_a_second_interrupt_raises_and_leaves_the_process_alive(config: dict[str, Any]) -> None:
    import signal
    import time

    def twice(_result: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        mm.train(config, callbacks=[twice])
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "key", "way_out"),
    [
        ({"lr": 1e-3}, "lr", "training={'lr': 0.001}"),
        ({"learning": 1}, "learning", "help(mm.train)"),
        ({"training": 3}, "training", "mapping"),
        ({"training": {"lrr": 1}}, "training.lrr", "Did you mean 'lr'?"),
        ({"training": {"report_to": [3]}}, "training.report_to[0]", ""),
        ({"rows": []}, "train rows", "at least one"),
        ({"rows": {"messages": []}}, "train rows", "list of dicts"),
        ({"rows": [3]}, "", "A row is a dict"),
        ({"rows": [{"messages": object()}]}, "", "Rows hold"),
        ({"model": 3}, "model", "folder"),
        ({"config": 3}, "config", "name of a file"),
        ({"resume": "nevr"}, "resume", "resume=False"),
        ({"resume": 1}, "resume", "resume=True"),
        ({"weights_only": "no"}, "weights_only", "=True or "),
        ({"allow_fresh": 1}, "allow_fresh", "=True or "),
        ({"accept_data_change": "false"}, "accept_data_change", "=True or "),
        ({"steps": 0}, "steps", ""),
        ({"callback": print}, "callback", "Did you mean 'callbacks'?"),
    ],
)
def test_what_is_refused_says_the_way_out(
    config: dict[str, Any], arguments: dict[str, Any], key: str, way_out: str
) -> None:
    with pytest.raises(mm.MMError) as refused:
        mm.train(**{"config": config} | arguments)
    problem = refused.value.problems[0]
    assert problem.key == key and way_out in problem.way_out and refused.value.exit_code == 2


def test_a_model_object_without_a_processor_is_asked_for_one(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    make_tiny_qwen3_vl(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    model.config._name_or_path = ""
    del config["model"]
    with pytest.raises(mm.MMError, match="processor"):
        mm.train(config, model=model)


def test_a_run_without_a_folder_cannot_be_asked(config: dict[str, Any]) -> None:
    with pytest.raises(mm.MMError, match=r"training\.save"):
        mm.infer(mm.train(config), "a question")


def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss(tmp_path: Path) -> None:
    from mindspeed_mm.tasks.given.run_view import Run

    for step in (2, 4, 6):
        (tmp_path / f"iter_{step:07d}").mkdir()
    records = [{"step": step, "loss": 1.0, "val_loss": loss} for step, loss in ((2, 0.5), (3, 0.1), (4, 0.3), (6, 0.4))]
    run = Run(tmp_path, records)
    assert (run.best, run.last) == (tmp_path / "iter_0000004", tmp_path / "iter_0000006")
    assert Run(tmp_path, []).best is None


def test_every_name_of_the_face_is_there_and_documented() -> None:
    for name in mm.__all__:
        assert getattr(mm, name) is not None
    for verb in ("train", "check", "infer", "evaluate", "export"):
        assert verb in VERBS and inspect.getdoc(getattr(mm, verb))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mm.no_such_name


def test_a_picture_in_memory_is_the_picture_of_its_file(tmp_path: Path) -> None:
    import numpy
    from PIL import Image

    from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
    from mindspeed_mm.tasks.given.rows import write_rows

    pixels = numpy.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=numpy.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation: turned by a quarter
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=turned)
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "print.jpg")
    Image.fromarray(pixels).convert("RGBA").resize((9, 7)).save(tmp_path / "clear.png")
    loader = MediaLoader(tmp_path)
    for name in ("turned.jpg", "print.jpg", "clear.png"):
        stored = write_rows([{"image": Image.open(tmp_path / name)}], tmp_path / "rows", name)
        path = json.loads(stored.read_text())["image"]
        assert loader.load_image(path).tobytes() == loader.load_image(str(tmp_path / name)).tobytes(), name


def bad_rows() -> dict[str, dict[str, Any]]:
    itself: dict[str, Any] = {"id": 1}
    itself["self"] = itself
    return {"lone surrogate": {"text": "\ud800"}, "itself": itself, "no number": {"weights": [1.0, float("nan")]}}


@pytest.mark.parametrize("row", bad_rows().values(), ids=bad_rows())
def test_a_row_in_memory_that_no_file_can_hold_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    from mindspeed_mm.tasks.given.rows import listed_rows, write_rows

    with pytest.raises(mm.MMError, match=r"train rows, row 1 .*cannot be stored"):
        write_rows(listed_rows([{"id": 0}, row], "train"), tmp_path, "train")


def test_cells_of_tables_are_plain_values_and_missing_ones_are_absent(tmp_path: Path) -> None:
    from types import SimpleNamespace

    import numpy

    from mindspeed_mm.tasks.given.rows import listed_rows, with_ids, write_rows

    missing = {name: type(name, (), {})() for name in ("NAType", "NaTType")}  # as pandas calls them
    rows = [
        {"id": numpy.int64(7), "weight": numpy.float32(0.5), "images": numpy.array(["a.png"], dtype=object)},
        {"id": float("nan"), "weight": numpy.float32("nan"), "counts": numpy.arange(2), **missing},
    ]
    table = SimpleNamespace(columns=list(rows[0]), to_dict=lambda orient: rows)
    stored = write_rows(with_ids(listed_rows(table, "train")), tmp_path, "train")
    assert [json.loads(line) for line in stored.read_text().splitlines()] == [
        {"id": 7, "weight": 0.5, "images": ["a.png"]},
        {"id": "1", "counts": [0, 1]},
    ]


def test_adapters_over_a_model_object_are_not_kept_without_its_weights(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(config["model"]["model_name_or_path"])
    lora = {"lora": {"enable": True, "target_modules": ["q_proj"]}}
    with pytest.raises(mm.MMError, match="save_pretrained"):
        mm.train(config, model=model, training=lora | {"save": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_objects_are_not_stored_over_files_of_somebody_else(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = config["model"]["model_name_or_path"]
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    del config["model"]
    save = tmp_path / "mine"
    (save / "model").mkdir(parents=True)
    (save / "model" / "model.safetensors").write_text("MY WEIGHTS")
    (save / "run.json").write_text("MINE")
    with pytest.raises(mm.MMError, match=r"run\.json"):
        mm.train(config, model=model, processor=processor, rows=ROWS, training={"save": str(save)})
    assert (save / "model" / "model.safetensors").read_text() == "MY WEIGHTS"
    assert sorted(path.name for path in save.iterdir()) == ["model", "run.json"]


def test_refused_rows_leave_nothing_behind(config: dict[str, Any], tmp_path: Path) -> None:
    for rows in ([], [3], {"a": 1}):
        with pytest.raises(mm.MMError):
            mm.train(config, rows=rows, training={"save": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_validation_by_a_data_set_of_the_callers_own(tmp_path: Path) -> None:
    training = {"lr": 0.1, "train_iters": 2, "micro_batch_size": 8, "val_interval": 1, "save": str(tmp_path / "run")}
    features = {"loss_cfg": {"loss_type": "raw"}}
    run = mm.train(model=Successor(), rows=Counting(), val_rows=Counting(), training=training, features=features)
    assert run.metrics["val_loss"].notna().all()
    again = mm.train(model=Successor(), rows=Counting(), val_rows=Counting(), training=training, features=features)
    assert again.model is None  # no step was left: the fresh object has not been trained
    with pytest.raises(mm.MMError, match="kind"):
        mm.train(model=Successor(), rows=Counting(), val_rows=ROWS, training=training, features=features)


def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    from mindspeed_mm.tasks.given.run_view import Run

    for step in (2, 4):
        (tmp_path / f"iter_{step:07d}").mkdir()
    records = [{"step": 2, "val_loss": float("nan")}, {"step": 4, "val_loss": 0.3}]
    assert Run(tmp_path, records).best == tmp_path / "iter_0000004"


def test_words_and_pictures_are_compared_together(tmp_path: Path) -> None:
    from mindspeed_mm.tasks.given.run_view import Run

    for step in (2, 4):
        (tmp_path / f"iter_{step:07d}").mkdir()
    records = [{"step": 2, "val_loss": 0.2, "val_total": 1.5}, {"step": 4, "val_loss": 0.3, "val_total": 1.0}]
    assert Run(tmp_path, records).best == tmp_path / "iter_0000004"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"batch_size": -1}, "batch_size"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"images": [3]}, "images"),
    ],
)
def test_infer_refuses_by_name(folder: Path, arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(mm.MMError) as refused:
        mm.infer(folder / "model", "a question", **arguments)
    assert refused.value.problems[0].key == key


def test_one_function_needs_no_list_and_what_cannot_be_called_is_refused(config: dict[str, Any]) -> None:
    steps: list[int] = []
    mm.train(config, callbacks=lambda result: steps.append(result.step))
    assert steps == [1, 2]
    with pytest.raises(mm.MMError, match="cannot be called"):
        mm.train(config, callbacks=["x"])


def test_records_of_rows_in_memory_name_nothing_that_is_gone(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "red"}]
    rows = [{"messages": turns, "images": [Image.new("RGB", (32, 32), (200, 9, 9))]}, ROWS[0] | {"id": "mine"}]
    records = mm.infer(folder / "model", rows=rows, max_new_tokens=2)
    assert [(record["id"], record["images"]) for record in records] == [("0", ["(embedded)"]), ("mine", [])]
    for loss in (False, True):
        given = {} if loss else {"max_new_tokens": 2}
        result = mm.evaluate(folder / "model", rows, out=tmp_path / "eval", loss=loss, **given)
        assert [sample["id"] for sample in result.samples] == ["0", "mine"]
        assert result.to_dict()["data"] == "(given in Python)"
    told = "".join(path.read_text() for path in (tmp_path / "eval").iterdir())
    assert "/mm-" not in told and "questions-" not in told


def test_what_is_refused_names_arguments(config: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    import re

    def refused(function: Any, *args: Any, **kwargs: Any) -> str:
        with pytest.raises(mm.MMError) as caught:
            function(*args, **kwargs)
        assert not re.search(r"(^|\s)--[a-z]", str(caught.value)), str(caught.value)
        return str(caught.value)

    (tmp_path / "answers.jsonl").write_text('{"row": 0, "model": "another"}\n')
    answers = {"rows": ROWS[:1], "out": tmp_path / "answers.jsonl"}
    assert "overwrite=True" in refused(mm.infer, folder / "model", **answers)
    assert "a.png" in refused(mm.infer, folder / "model", "What is it?", images=["a.png"])
    assert "question rows, row 0" in refused(mm.evaluate, folder / "model", [{"messages": [], "images": []}])
    training = {"save": str(tmp_path / "run"), "train_iters": 1}
    mm.train(config, rows=ROWS, training=training)
    assert "accept_data_change=True" in refused(mm.train, config, rows=ROWS[::-1], training=training)
    assert "resume=True" in refused(mm.train, config, rows=ROWS, training=training, resume=False)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "mine.txt").write_text("mine")
    refused(mm.export, tmp_path / "run", tmp_path / "exported")


@pytest.mark.parametrize("key", ["config", "rows", "model", "out", "lora", "images", "folder", "target"])
def test_a_name_with_a_nul_is_refused_kindly(config: dict[str, Any], folder: Path, key: str) -> None:
    calls: dict[str, Any] = {
        "config": lambda: mm.train("run\0.yaml"),
        "rows": lambda: mm.train(config, rows="rows\0.jsonl"),
        "model": lambda: mm.evaluate("runs\0", ROWS),
        "out": lambda: mm.infer(folder / "model", rows=ROWS, out="out\0"),
        "lora": lambda: mm.infer(folder / "model", "Say red.", lora="lora\0"),
        "images": lambda: mm.infer(folder / "model", "Say red.", images=["a\0.png"]),
        "folder": lambda: mm.load_run("runs\0"),
        "target": lambda: mm.export(folder, "to\0"),
    }
    with pytest.raises(mm.MMError, match="NUL") as refused:
        calls[key]()
    assert refused.value.problems[0].key == key


def test_files_of_others_in_a_run_folder_are_told_once(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"save": str(tmp_path / "run"), "train_iters": 2}
    (tmp_path / "run").mkdir()
    for name in ("notes.txt", "paper.pdf"):
        (tmp_path / "run" / name).write_text("mine")
    mm.train(config, training=training, steps=1)
    assert "; 2 other files lie there and will be left alone" in capsys.readouterr().out
    mm.train(config, training=training)
    assert "other file" not in capsys.readouterr().out
    mm.train(config, rows=ROWS, training=training | {"save": str(tmp_path / "clean")})
    assert "other file" not in capsys.readouterr().out


@pytest.mark.edge("U6")
def test_a_trainer_takes_the_name_of_a_file_and_says_how_rows_are_padded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Trainer(str(folder / "run.yaml"), TrainOptions(dry_run=True)).train() is None
    assert "rows padded to multiples of 1 tokens (no pad_to_multiple_of; device cpu)" in capsys.readouterr().out


def test_a_run_that_is_over_can_be_collected(config: dict[str, Any]) -> None:
    engine = Trainer(config).train()
    assert engine is not None
    model = weakref.ref(engine.model)
    del engine
    gc.collect()
    assert model() is None


def test_resume_takes_the_words_of_the_command_line(config: dict[str, Any], tmp_path: Path) -> None:
    training = {"save": str(tmp_path / "run"), "train_iters": 1}
    mm.train(config, training=training)
    mm.train(config, training=training, resume="auto")
    with pytest.raises(mm.MMError, match="resume=True"):
        mm.train(config, training=training, resume="never")


def test_export_and_the_others_refuse_by_name(folder: Path, tmp_path: Path) -> None:
    def refused(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
        with pytest.raises(mm.MMError) as caught:
            function(*args, **kwargs)
        problem = caught.value.problems[0]
        assert caught.value.exit_code == 2
        return problem.key, str(problem)

    target = tmp_path / "out"
    for arguments in ({"dtype": "int8"}, {"weights": "best"}, {"step": "last"}, {"merge": 1}, {"overwrite": "yes"}):
        assert refused(mm.export, folder, target, **arguments)[0] == next(iter(arguments))
    assert "bf16, fp16, fp32, fp64" in refused(mm.export, folder, target, dtype="int8")[1]
    overwrites = [(mm.export, (folder, target)), (mm.infer, (folder / "model", "a question"))]
    for function, args in overwrites:
        key, said = refused(function, *args, overwrites=True)
        assert key == "overwrites" and "Did you mean 'overwrite'?" in said
    assert "Did you mean 'loss'?" in refused(mm.evaluate, folder / "model", ROWS, los=True)[1]
    assert "Did you mean 'nproc'?" in refused(mm.check, folder / "run.yaml", nprocs=2)[1]
    assert "training={'lr': 1}" in refused(mm.check, folder / "run.yaml", lr=1)[1]
    assert refused(mm.infer, folder / "model", "a question", overwrite="no")[0] == "overwrite"
    assert refused(mm.evaluate, folder / "model", ROWS, loss="no")[0] == "loss"
    assert refused(mm.check, folder / "run.yaml", nproc=0)[0] == "nproc"
    assert not target.exists()


def test_rows_in_memory_are_checked_and_nothing_is_written(config: dict[str, Any], tmp_path: Path) -> None:
    training = {"save": str(tmp_path / "run")}
    result = mm.check(config, rows=ROWS, val_rows=ROWS[:2], training=training | {"val_interval": 1})
    assert not result.problems and not (tmp_path / "run").exists()
    bad = mm.check(config, rows=[ROWS[0] | {"messages": 3}], training=training).problems
    assert bad and not any("/mm-" in str(problem) for problem in bad)


@pytest.mark.edge("BR20")
def test_media_of_rows_in_memory_start_where_the_configuration_says(
    folder: Path, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ROWS[0] | {"images": ["images/0_0.png"]}] * 4
    rows[0]["messages"] = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "red"}]
    monkeypatch.chdir(tmp_path)
    assert mm.check(config, rows=rows).problems == []
    basic = config["data"]["dataset_param"]["basic_parameters"]
    del basic["dataset_dir"]
    (problem,) = mm.check(config, rows=rows).problems  # nowhere named: the working directory
    assert f"'{tmp_path}'" in str(problem)
    monkeypatch.chdir(folder)
    assert mm.check(config, rows=rows).problems == []


def test_what_cannot_be_checked_is_refused_without_its_values(config: dict[str, Any]) -> None:
    long = {"training": ROWS * 100}
    for arguments, key in (({"rows": Counting()}, "rows"), ({"model": Successor()}, "model"), (long, "training")):
        with pytest.raises(mm.MMError) as refused:
            mm.check(config, **arguments)
        assert refused.value.problems[0].key == key and len(str(refused.value)) < 400


def test_missing_rows_are_told_by_the_argument_or_key_that_names_them(config: dict[str, Any]) -> None:
    def key_of(**arguments: Any) -> list[str]:
        with pytest.raises(mm.MMError) as refused:
            mm.train(config, **arguments)
        checked = [problem.key for problem in mm.check(config, **arguments).problems]
        assert checked == [problem.key for problem in refused.value.problems]
        return checked

    assert key_of(rows="nope.jsonl") == ["rows"]
    assert key_of(val_rows="nope.jsonl", training={"val_interval": 1}) == ["val_rows"]
    basic = "data.dataset_param.basic_parameters"
    own = [f"{basic}.dataset=nope.jsonl"]
    assert key_of(overrides=own) == [f"{basic}.dataset"]
    validation = [f"{basic}.val_dataset=nope.jsonl"]
    assert key_of(overrides=validation, training={"val_interval": 1}) == [f"{basic}.val_dataset"]


def test_what_is_no_folder_is_refused_kindly(config: dict[str, Any]) -> None:
    for function in (mm.load_run, mm.check):
        with pytest.raises(mm.MMError, match="int is not a path"):
            function(3)
    run = mm.train(config)
    for function in (mm.load_run, mm.infer):
        with pytest.raises(mm.MMError, match=r"training\.save"):
            function(run)
    with pytest.raises(mm.MMError, match=r"run\.model"):
        mm.infer(run, "a question")


def test_the_type_of_an_evaluation_is_told() -> None:
    import typing

    from mindspeed_mm import api

    told = {
        inspect.get_annotations(each)["loss"]: inspect.get_annotations(each)["return"]
        for each in typing.get_overloads(api.evaluate)
    }
    assert told == {"Literal[False]": "Evaluation", "Literal[True]": "LossEvaluation"}


@pytest.mark.parametrize("lr", [0, 1e-3])
def test_a_rate_of_0_is_told(config: dict[str, Any], capsys: pytest.CaptureFixture[str], lr: float) -> None:
    mm.train(config, training={"lr": lr, "train_iters": 1})
    assert ("lr     0: nothing will be learned" in capsys.readouterr().out) == (lr == 0)
