"""The ways to data of one's own, taken from outside the package: a template, a media plugin and a collator (B); a data
set (C). The plugins are those of `examples/data`, copied into another folder. YAML alone (A) is all the other tests."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.data_collator import DATA_COLLATOR
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin
from mindspeed_mm.fsdp.data.data_utils.template import TEMPLATES
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import Measurer, read_sample
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.register import data_register
from mindspeed_mm.tasks.check.batch import warnings_of_samples
from mindspeed_mm.tasks.data import check, preview, stats
from mindspeed_mm.tasks.data.opening import open_data
from mindspeed_mm.tasks.export.export import notes_on_media
from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest, DataStatsRequest
from tests.helpers.tiny_processors import build_processor
from tests.helpers.tiny_run import make_tiny_run

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
BASIC = "data.dataset_param.basic_parameters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a package with the plugins."""
    folder = tmp_path_factory.mktemp("outside")
    make_tiny_run(folder)
    shutil.copytree(EXAMPLES, folder / "my_plugins", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """What a plugin registers stays registered for the life of a process: here, for the life of a test."""
    data_register.get("huggingface")  # built in: its module registers it once, when it is first asked for
    registries = (MM_PLUGINS, TEMPLATES, DATA_COLLATOR, data_register)
    for registry in registries:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_config_keys", dict(registry._config_keys))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_plugins"]:
        del sys.modules[name]


def preview_of(*words: str, rows: tuple[int, ...] = (0, 1), validation: bool = False) -> dict[str, Any]:
    return preview.run(
        DataPreviewRequest(Path("run.yaml"), words, rows=",".join(map(str, rows)), validation=validation)
    ).to_dict()


def mm(folder: Path, *words: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "mindspeed_mm", *words], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0, finished.stderr + finished.stdout
    return finished.stdout


def trained(row: dict[str, Any]) -> list[str]:
    return [part["text"] for part in row["answers"][0]["stretches"] if part["weight"]]


def told(row: dict[str, Any]) -> str:
    return "".join(part["text"] for part in row["answers"][0]["stretches"])


def test_b_template_plugin_and_collator(folder: Path) -> None:
    words = [
        "training.plugin=[my_plugins/square_pictures.py]",
        f"{BASIC}.template=question_answer",
        "data.dataloader_param.collate_param.model_name=counted",
    ]
    line = json.loads((folder / "rows.jsonl").read_text().splitlines()[0])
    wide = folder / "images" / "0_0.png"
    Image.open(wide).resize((64, 32)).save(wide)
    plain, own = preview_of(), preview_of(*words)
    answer = line["messages"][1]["content"]
    assert told(own["shown"][0]).startswith("Question: <|vision_start|>")
    assert told(own["shown"][0]).endswith(f"Answer:\n{answer}<|im_end|>\n")
    assert trained(own["shown"][0]) == [f"{answer}<|im_end|>"]
    # A picture of 64 × 32 pixels is a square of 64 × 64 now: twice the tokens.
    assert [row["media"][0]["tokens"] for row in (plain["shown"][0], own["shown"][0])] == [8, 16]
    assert own["micro_batch"]["shapes"]["images_per_row"] == [2]
    assert own["micro_batch"]["dtypes"]["images_per_row"] == "int64"
    assert "images_per_row" not in plain["micro_batch"]["shapes"]


def test_b_an_opening_that_the_tokenizer_joins_to_the_answer_is_told(folder: Path) -> None:
    """Trained on ` one` as a single token, the model would be asked with a blank in front, which it never saw."""
    turns = "{% for m in messages %}{{ m.role }}:@{{ m.content[0].text }}<|im_end|>\n{% endfor %}"
    source = turns + "{% if add_generation_prompt %}assistant:@{% endif %}"
    row = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "one"}]}
    (folder / "words.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    for blank in (" ", "\n"):
        (folder / "t.jinja").write_text(source.replace("@", blank))
        words = [f"{BASIC}.dataset=words.jsonl", f"{BASIC}.chat_template=t.jinja"]
        assert ("end with ' ', which the tokenizer joins" in mm(folder, "check", "run.yaml", *words)) is (blank == " ")
        held_out = [*words, f"{BASIC}.val_rate=0.5", "training.micro_batch_size=1"]
        told = list(warnings_of_samples(open_data(Path("run.yaml"), held_out).loader()))
        assert any("which the tokenizer joins" in each for each in told) is (blank == " ")


def test_b_lengths_are_known_from_headers() -> None:
    """`mm data stats` decodes nothing, so what it says comes from the plugin's `measure`."""
    words = ["training.plugin=[my_plugins/square_pictures.py]", f"{BASIC}.template=question_answer"]
    shown = preview_of(*words, rows=tuple(range(24)))["shown"]
    assert stats.run(DataStatsRequest(Path("run.yaml"), words)).tokens["total"] == sum(
        row["answers"][0]["tokens"] for row in shown
    )


def test_b_an_export_names_the_plugin_that_its_folder_lacks() -> None:
    """Without it, `mm infer` would show the exported model pictures that no one padded."""
    words = ["training.plugin=[my_plugins/square_pictures.py]", f"{BASIC}.template=question_answer"]
    (note,) = notes_on_media(load_with_plugins(Path("run.yaml"), words).arguments.training.plugin)
    assert note.startswith("its media are prepared by SquarePictures of the plugin my_plugins/square_pictures.py")
    plugins = load_with_plugins(Path("run.yaml"), C_WORDS).arguments.training.plugin
    assert notes_on_media(plugins) == () == notes_on_media(())


@pytest.mark.slow
def test_b_trains(folder: Path) -> None:
    words = ["training.plugin=[my_plugins/square_pictures.py]", f"{BASIC}.template=question_answer"]
    assert "loss" in mm(folder, "train", "run.yaml", "--steps", "2", *words)


C_WORDS = ["training.plugin=[my_plugins/sums.py]", "data.dataset_param.dataset_type=sums"]


def test_c_a_data_set_with_collate_fn_and_validation() -> None:
    found = preview_of(*C_WORDS, "data.dataset_param.numbers=7", f"{BASIC}.max_samples=50")
    assert found["rows"] == 50
    for row in found["shown"]:
        left, right = told(row).removesuffix("<|im_end|>").split(" = ")
        a, b = map(int, left.split(" + "))
        assert (int(right), max(a, b) < 7) == (a + b, True)
        assert trained(row) == [f"{a + b}<|im_end|>"]
    assert set(found["micro_batch"]["shapes"]) == {
        "input_ids",
        "attention_mask",
        "labels",
        "shift_labels",
        "sample_ids",
    }
    assert found["micro_batch"]["documents"][0]["sample_id"].startswith("sums-0:")
    validation = preview_of(*C_WORDS, rows=(0,), validation=True)
    assert validation["rows"] == 100
    assert told(validation["shown"][0]) != told(found["shown"][0])


@pytest.mark.slow
def test_c_trains_and_validates(folder: Path) -> None:
    out = mm(folder, "train", "run.yaml", "--steps", "2", *C_WORDS, "training.val_interval=2", "training.save=out")
    metrics = (folder / "out" / "metrics.jsonl").read_text()
    assert '"val_loss"' in metrics, out


def test_a_wrong_key_of_a_plugin_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'numbers'"):
        preview_of(*C_WORDS, "data.dataset_param.number=7")


DICE = """
import random

from mindspeed_mm.fsdp.data import MMDataset
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("dice")
class Dice(MMDataset):
    def __init__(self, basic_param, preprocess_param, dataset_param):
        pass

    def __len__(self):
        return 8

    def place(self, index):
        return f"dice:{index}"

    def __getitem__(self, index):
        ids = [70] * random.randint(2, 60)
        return {"input_ids": ids, "labels": ids}
"""


def test_c_a_sample_that_is_drawn_is_shown_as_it_is_trained(folder: Path) -> None:
    (folder / "my_plugins" / "dice_dataset.py").write_text(DICE)
    words = ["training.plugin=[my_plugins/dice_dataset.py]", "data.dataset_param.dataset_type=dice"]
    found = preview_of(*words, rows=tuple(range(8)))
    shown = {row["place"]: row["answers"][0]["tokens"] for row in found["shown"]}
    assert stats.run(DataStatsRequest(Path("run.yaml"), tuple(words))).tokens["total"] == sum(shown.values())
    documents = [each for each in found["micro_batch"]["documents"] if each["sample_id"]]
    assert len(documents) > 1
    for document in documents:
        assert document["end"] - document["first"] == shown[document["sample_id"]]


MARKS = """
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("marks")
class Marks(Qwen2VLDataset):
    def conversation(self, index):
        row = super().conversation(index)
        question = "<image>" * len(row["shots"]) + "How many marks?"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": str(len(row["marks"]))}]  # line 11
        return {"conversations": turns, "images": row["shots"]}
"""


def test_c_rows_of_another_layout(folder: Path) -> None:
    """A row that the subclass cannot turn into a conversation is a bad row: named, with the line of the plugin."""
    (folder / "my_plugins" / "marks_dataset.py").write_text(MARKS)
    shots = ["images/0_0.png", "images/2_0.png"]
    rows = [{"shots": shots, "marks": [1, 2, 3]}, {"shots": shots[:1], "marks": []}]
    (folder / "marks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "training.plugin=[my_plugins/marks_dataset.py]",
        "data.dataset_param.dataset_type=marks",
        f"{BASIC}.dataset=marks.jsonl",
    ]
    first, second = preview_of(*words)["shown"]
    assert (trained(first), trained(second)) == (["3<|im_end|>"], ["0<|im_end|>"])
    assert [len(row["media"]) for row in (first, second)] == [2, 1]
    rows[1].pop("marks")
    (folder / "marks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = r"marks\.jsonl:2 .*Marks\.conversation fails: KeyError: 'marks'.*marks_dataset\.py:11"
    dataset = open_data(Path("run.yaml"), words).dataset
    with pytest.raises(DataError, match=told):
        dataset[1]
    assert dataset.row_notes() == []  # the log of a start, which looks at the first rows


DRAWN = """
import random

from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("drawn")
class Drawn(Qwen2VLDataset):
    def conversation(self, index):
        asked = "w" * random.randint(1, 1000)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "x"}]}
"""


def test_c_what_a_conversation_draws_is_of_row_and_epoch(folder: Path) -> None:
    """The built-in class draws nothing, and a class derived from it may: else a resume trains on other samples."""
    (folder / "my_plugins" / "drawn_dataset.py").write_text(DRAWN)
    words = ("training.plugin=[my_plugins/drawn_dataset.py]", "data.dataset_param.dataset_type=drawn")
    data = open_data(Path("run.yaml"), words)
    dataset, seed = data.dataset, data.arguments.training.seed
    picks = [Pick(epoch, row) for epoch in (0, 1) for row in range(4)]
    first, again = ([len(read_sample(dataset, pick, seed)["input_ids"]) for pick in picks] for _ in range(2))
    assert first == again
    assert first[:4] != first[4:]
    # Who measures, checks or shows a row is told of the first epoch, and leaves the process's own numbers alone.
    before = random.getstate()
    assert [Measurer(dataset, seed).size(row).tokens for row in range(4)] == first[:4]
    assert random.getstate() == before
    assert [row["answers"][0]["tokens"] for row in preview_of(*words, rows=(0, 1, 2, 3))["shown"]] == first[:4]
    other = Measurer(open_data(Path("run.yaml"), (*words, f"training.seed={seed + 1}")).dataset, seed)
    assert [other.size(row).tokens for row in range(4)] != first[:4]


NOISY = """
import random

from PIL import Image

from mindspeed_mm.fsdp.data.data_utils.mm_plugin import register_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin


@register_mm_plugin("Qwen3VLProcessor")
class Turned(QwenVLPlugin):
    def __init__(self, processor, preprocess):
        super().__init__(processor, preprocess)

    def encode_image(self, image):
        return super().encode_image(Image.new("RGB", image.size, (random.randint(0, 255), 0, 0)))
"""


def test_b_what_a_media_plugin_draws_is_of_row_and_epoch(folder: Path) -> None:
    (folder / "my_plugins" / "noisy_media.py").write_text(NOISY)
    data = open_data(Path("run.yaml"), ["training.plugin=[my_plugins/noisy_media.py]"])

    def red(epoch: int) -> int:
        sample = read_sample(data.dataset, Pick(epoch, 0), data.arguments.training.seed)
        return int(sample["media"][0].tensors["patches"].max())

    assert red(0) == red(0)
    assert len({red(epoch) for epoch in range(4)}) > 1


PLAIN = """
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import register_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin


class Plain(QwenVLPlugin):
    is_deterministic = True


@register_mm_plugin("Qwen3VLProcessor")
class Derived(Plain):
    SAYS
"""
BORROWED = """
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import register_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin

register_mm_plugin("Qwen3VLProcessor")(QwenVLPlugin)
"""


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        (NOISY, "Turned"),
        (PLAIN.replace("SAYS", "pass"), "Derived"),
        (PLAIN.replace("SAYS", "is_deterministic = True"), ""),
        (BORROWED, ""),
    ],
)
def test_b_what_a_media_plugin_may_draw_is_not_kept_for_all_epochs(folder: Path, source: str, refused: str) -> None:
    """Whatever opens the data refuses it, not training alone; the plugin is named, and not the class of the rows."""
    (folder / "my_plugins" / "noisy_media.py").write_text(source)
    words = ["training.plugin=[my_plugins/noisy_media.py]", f"{BASIC}.preprocess_on_fly=false"]
    if not refused:
        assert open_data(Path("run.yaml"), words).dataset.is_deterministic
        return
    with pytest.raises(ConfigError, match=f"{refused} may draw random numbers") as caught:
        open_data(Path("run.yaml"), words)
    assert caught.value.problems[0].way_out.endswith(
        f"if {refused} draws none, write is_deterministic = True in the class."
    )


def test_b_a_plugin_keeps_the_pixel_bounds_of_a_single_picture(folder: Path) -> None:
    """The plugin is made anew with them, as it was made: from a processor and its settings."""
    asked = [{"type": "image", "image": "images/0_0.png", "max_pixels": 256}, {"type": "text", "text": "?"}]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "x"}]
    (folder / "bounded.jsonl").write_text(2 * (json.dumps({"messages": turns}) + "\n"))
    (folder / "my_plugins" / "noisy_media.py").write_text(NOISY)
    words = ["training.plugin=[my_plugins/noisy_media.py]", f"{BASIC}.dataset=bounded.jsonl"]
    (row,) = preview_of(*words, rows=(0,))["shown"]
    assert (row["fault"], row["media"][0]["tokens"]) == (None, 1)


@pytest.mark.parametrize("measures", [True, False])
def test_b_a_plugin_whose_measure_is_not_of_its_pictures_is_told(folder: Path, measures: bool) -> None:
    """Packs are planned with what `measure` says, which overriding `encode_image` alone leaves as it was."""
    source = (folder / "my_plugins" / "square_pictures.py").read_text()
    if not measures:
        source = source.replace("def measure(", "def other(")
    (folder / "my_plugins" / "squares.py").write_text(source)
    line = json.loads((folder / "rows.jsonl").read_text().splitlines()[0])
    Image.new("RGB", (64, 32)).save(folder / "images" / "wide.png")
    (folder / "wide.jsonl").write_text(2 * (json.dumps(line | {"images": ["images/wide.png"]}) + "\n"))
    words = ["training.plugin=[my_plugins/squares.py]", f"{BASIC}.dataset=wide.jsonl", f"{BASIC}.packing=true"]
    loader = open_data(Path("run.yaml"), [*words, "data.dataloader_param.drop_last=false"]).loader()
    told = r"sample .*wide\.jsonl:\d has \d+ tokens, and packs and budgets count with \d+: "
    assert bool([each for each in warnings_of_samples(loader) if re.match(told, each)]) is not measures


def test_b_a_plugin_of_qwens_patches_refuses_another_processor() -> None:
    with pytest.raises(ConfigError, match=r"QwenVLPlugin is for .* LlavaProcessor does not\. .*from ProcessorPlugin"):
        QwenVLPlugin(build_processor("llava"), PreprocessParameters())


def test_c_whatever_a_data_set_raises_is_a_bad_row_that_may_be_skipped(folder: Path) -> None:
    """As `mm data check` says of it: a broken picture that the plugin opens itself is no DataError."""
    failing = DICE.replace(
        "        ids = ", "        if index == 5:\n            raise OSError('cut short')\n        ids = "
    )
    (folder / "my_plugins" / "dice_dataset.py").write_text(failing)
    words = ["training.plugin=[my_plugins/dice_dataset.py]", "data.dataset_param.dataset_type=dice"]
    skips = [f"{BASIC}.on_bad_sample=skip", f"{BASIC}.max_bad_fraction=0.2"]

    def trained_on(*given: str) -> set[str]:
        loader = open_data(Path("run.yaml"), [*words, *given]).loader()
        return {name for step in islice(loader, 4) for batch in step for name in batch["sample_ids"]}

    assert trained_on(*skips) == {f"dice:{index}" for index in range(8)} - {"dice:5"}
    with pytest.raises(DataError, match=r"^dice:5  the data set failed: OSError: cut short\. .*dice_dataset\.py:21"):
        trained_on()
    fault = check.run(DataCheckRequest(Path("run.yaml"), tuple(words))).bad[0].fault
    assert fault is not None and (fault.kind, fault.what) == (
        "the data set failed",
        "the data set failed: OSError: cut short",
    )


def test_c_a_data_set_that_keeps_a_file_open_is_told_before_training(folder: Path) -> None:
    keeping = DICE.replace("        pass\n", "        self.rows = open('rows.jsonl')\n")
    (folder / "my_plugins" / "dice_dataset.py").write_text(keeping)
    words = ["training.plugin=[my_plugins/dice_dataset.py]", "data.dataset_param.dataset_type=dice"]
    open_data(Path("run.yaml"), words)  # no workers
    with pytest.raises(ConfigError, match="Dice keeps a file open in rows"):
        open_data(Path("run.yaml"), [*words, "data.dataloader_param.num_workers=1"])
