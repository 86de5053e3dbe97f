"""What training shows a model of a row is what inference, evaluation and plain transformers' processor of the exported
folder show it: tokens and tensors, with nothing configured and with keys that are given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.data_utils.training_view import view_of_adapters, view_writer, with_view
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.questions import question_of
from mindspeed_mm.fsdp.utils.processor import load_processor
from tests.fsdp.data.conftest import picture, write_jsonl
from tests.helpers.tiny_models import build_tokenizer
from tests.helpers.tiny_more_processors import MORE
from tests.helpers.tiny_processors import FAMILIES
from tests.helpers.tiny_sounds import sound_bytes, tone, write_container

pytestmark = pytest.mark.edge("N1")

WITH_MEDIA = {name: family for name, family in (FAMILIES | MORE).items() if family.kinds and name != "whisper"}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni", "qwen3_omni")
FRAMES, FPS = 20, 8
FILES = {"image": "wide.png", "video": "clip.mp4", "audio": "tone.wav"}


def given_keys(name: str) -> dict[str, Any]:
    """Keys that change what each family sees."""
    keys: dict[str, Any] = {"internvl": {"crop_to_patches": False}, "gemma3": {"image_do_pan_and_scan": True}}
    found = keys.get(name, {"image_max_pixels": 1500})
    return found | ({"video_fps": 1.0, "video_maxlen": 5} if "video" in WITH_MEDIA[name].kinds else {})


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    picture(640, 260, seed=3).save(folder / "wide.png")
    write_container(folder / "clip.mp4", tone(2.5, 16000), 16000, frames=FRAMES, fps=FPS)
    (folder / "tone.wav").write_bytes(sound_bytes(tone(0.6, 16000), 16000))
    return folder


class Case:
    """A row of one medium, trained on with these keys, and the folder that was exported."""

    def __init__(self, name: str, kind: str, media: Path, folder: Path, keys: dict[str, Any]) -> None:
        self.name, self.kind, self.media, self.keys = name, kind, media, keys
        base, self.exported = folder / "base", folder / "exported"
        WITH_MEDIA[name].build().save_pretrained(base)
        self.row = {
            "messages": [
                {"role": "user", "content": f"<{kind}>What is shown?"},
                {"role": "assistant", "content": "seven"},
            ],
            f"{kind}s": [FILES[kind]],
        }
        thinks = {"enable_thinking": False} if keys and WITH_MEDIA[name].thinks else {}
        rows = write_jsonl(folder / "rows.jsonl", [self.row])
        self.param = DatasetParam.model_validate(
            {
                "basic_parameters": {
                    "dataset": str(rows),
                    "dataset_dir": str(media),
                    "cutoff_len": 8192,
                    **thinks,
                },
                "preprocess_parameters": {"model_name_or_path": str(base), **keys},
            }
        )
        shutil.copytree(base, self.exported)
        view_writer(self.param, base)(self.exported)

    def trained(self, param: DatasetParam | None = None) -> dict[str, Any]:
        """Tokens up to the answer, and the tensors of the media, as the training data set gives them."""
        dataset = build_mm_dataset(param or self.param)[0]
        sample = dataset[0]
        first = int(np.flatnonzero(sample["labels"] != -100)[0])
        prompt = sample["input_ids"][:first].tolist()
        if prompt[-2:] == [self.line_break(dataset)] * 2:
            # This tokenizer parts line breaks in front of a word, and joins them at the end of a text.
            prompt[-2:] = dataset.processor.tokenizer("\n\n", add_special_tokens=False)["input_ids"]
        return {"input_ids": torch.tensor(prompt)[None], **dataset.plugin.collate(sample["media"])}

    @staticmethod
    def line_break(dataset: Any) -> int:
        return dataset.processor.tokenizer("\n", add_special_tokens=False)["input_ids"][0]

    def asked(self) -> dict[str, Any]:
        """The same from the exported folder, as `mm infer` and `mm evaluate` ask."""
        encoder = QuestionEncoder(self.exported)
        question, _ = question_of(self.row, RowFormat(), RowLocation("rows", 1), needs_answer=True)
        return encoder.collate([encoder.encode(question, encoder.media(self.media))])

    def plain(self) -> dict[str, Any]:
        """The same by nothing but transformers' processor of the exported folder."""
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(self.exported)
        messages = [{"role": "user", "content": [{"type": self.kind}, {"type": "text", "text": "What is shown?"}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given: dict[str, Any] = getattr(self, f"_plain_{self.kind}")(processor)
        bos = processor.tokenizer.bos_token
        options = {"add_special_tokens": not (bos and text.startswith(bos))}
        return dict(processor(text=[text], return_tensors="pt", text_kwargs=options, **given))

    def _plain_image(self, processor: Any) -> dict[str, Any]:
        image = Image.open(self.media / "wide.png").convert("RGB")
        most = self.keys.get("image_max_pixels")
        if most and self.name not in QWEN:  # what the model card says to do where a processor has no such limit
            factor = (most / (image.width * image.height)) ** 0.5
            size = int(image.width * factor), int(image.height * factor)
            image = image.resize(size, Image.Resampling.BICUBIC)
        given: dict[str, Any] = {"images": [image]}
        if self.keys.get("image_do_pan_and_scan"):
            given["images_kwargs"] = {"do_pan_and_scan": True}
        return given

    def _plain_audio(self, processor: Any) -> dict[str, Any]:
        import soundfile

        samples, rate = soundfile.read(self.media / "tone.wav", dtype="float32")
        return {"audio": [samples], "sampling_rate": rate}

    def _plain_video(self, processor: Any) -> dict[str, Any]:
        with av.open(str(self.media / "clip.mp4")) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        from transformers.video_utils import VideoMetadata

        height, width = frames.shape[1:3]
        if processor.video_processor.do_sample_frames and not self.keys:  # the processor picks by itself
            metadata = VideoMetadata(FRAMES, FPS, width, height, FRAMES / FPS)
            options: dict[str, Any] = {"video_metadata": [metadata]}
        else:  # what the model card says to do: frames spread evenly
            fps, most = self.keys.get("video_fps", 2.0), self.keys.get("video_maxlen", 128)
            indices = np.linspace(0, FRAMES - 1, min(int(FRAMES / FPS * fps), most)).astype(int).tolist()
            frames = frames[indices]
            metadata = VideoMetadata(FRAMES, FPS, width, height, FRAMES / FPS, None, indices)
            options = {"do_sample_frames": False, "video_metadata": [metadata], "fps": metadata.sampled_fps}
        return {"videos": [frames], "videos_kwargs": options | {"input_data_format": "channels_last"}}


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys whose tensors are not the same; marks and masks of tokens and what only processors count aside."""
    passed_over = {
        "attention_mask",
        "mm_token_type_ids",
        "token_type_ids",
        "num_patches",
        "num_crops",
        "video_metadata",
    }
    passed_over |= {"num_chunks_per_video", "num_audio_tokens"}
    names = (one.keys() | other.keys()) - passed_over
    return sorted(name for name in names if not same(one.get(name), other.get(name)))


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.shape == other.shape and torch.equal(one.double(), other.double())


CASES = [(name, kind) for name, family in WITH_MEDIA.items() for kind in family.kinds]


@pytest.mark.parametrize("is_given", [False, True], ids=["nothing given", "keys given"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_training_inference_and_plain_transformers_see_the_same(
    name: str, kind: str, is_given: bool, media: Path, tmp_path: Path
) -> None:
    case = Case(name, kind, media, tmp_path, given_keys(name) if is_given else {})
    trained = case.trained()
    assert difference(trained, case.asked()) == []
    assert difference(trained, case.plain()) == []
    if is_given:  # the planted fault: a key on one side only is seen
        knows_nothing = case.param.model_copy(
            update={
                "preprocess_parameters": DatasetParam().preprocess_parameters.model_copy(
                    update={"model_name_or_path": case.param.preprocess_parameters.model_name_or_path}
                )
            }
        )
        changes = kind == "image" or kind == "video"
        assert bool(difference(case.trained(knows_nothing), case.asked())) == changes


def test_fewer_tiles_are_seen_by_all(media: Path, tmp_path: Path) -> None:
    case = Case("internvl", "image", media, tmp_path, {"image_max_tiles": 2})
    trained = case.trained()
    assert len(trained["pixel_values"]) == 3  # 640 × 260 in two tiles, and the whole
    assert difference(trained, case.asked()) == difference(trained, case.plain()) == []


def trained_from(base: Path, target: Path, only_template: bool = False, **keys: Any) -> Path:
    """The folder of a model, or of adapters, that was trained from `base` with these keys."""
    if only_template:
        target.mkdir()
    else:
        shutil.copytree(base, target)
    param = DatasetParam.model_validate({"preprocess_parameters": {"model_name_or_path": str(base), **keys}})
    view_writer(param, base, only_template=only_template)(target)
    return target


def seen_by(folder: Path) -> tuple[bool, bool, bool]:
    told = with_view(DatasetParam(), folder).preprocess_parameters
    return told.split_special_tokens, told.use_audio_in_video, told.use_fast_tokenizer


def test_a_folder_says_what_its_own_run_trained_with_and_not_what_the_one_before_did(tmp_path: Path) -> None:
    FAMILIES["qwen3_vl"].build().save_pretrained(tmp_path / "base")
    defaults = {"split_special_tokens": True, "use_audio_in_video": False, "use_fast_tokenizer": True}
    others = {name: not value for name, value in defaults.items()}
    first = trained_from(tmp_path / "base", tmp_path / "first", **others)
    assert seen_by(first) == (False, True, False)
    assert seen_by(trained_from(first, tmp_path / "kept")) == (False, True, False)
    assert seen_by(trained_from(first, tmp_path / "second", **defaults)) == (True, False, True)
    adapters = trained_from(first, tmp_path / "adapters", only_template=True, **defaults)
    view_writer(view_of_adapters(adapters), first)(merged := shutil.copytree(first, tmp_path / "merged"))
    assert seen_by(merged) == (True, False, True)
    plain = trained_from(tmp_path / "base", tmp_path / "plain", **defaults)
    assert not (plain / "training_view.json").exists()


def old_mistral_folder(folder: Path) -> Path:
    """A folder of Mistral's as it was before version 5 of transformers, with a vocabulary large enough to be taken for
    one whose rule for splitting text is wrong."""
    build_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    taken = len(vocabulary) + len(content["added_tokens"])
    vocabulary |= {"oW": taken} | {f"unused{number}": number for number in range(taken + 1, 100_100)}
    content["model"]["merges"].append(["o", "W"])  # a word is split between them by the corrected rule alone
    file.write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "transformers_version": "4.52.0"}))
    return folder


def test_a_corrected_rule_for_splitting_text_holds_wherever_the_model_is_used(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "HelloWorld"
    base = old_mistral_folder(tmp_path / "base")
    corrected = AutoTokenizer.from_pretrained(base, fix_mistral_regex=True)(text).input_ids
    assert AutoTokenizer.from_pretrained(base)(text).input_ids != corrected

    exported = trained_from(base, tmp_path / "exported", fix_mistral_regex=True)
    (exported / "config.json").write_text(json.dumps({"model_type": "mistral", "transformers_version": "5.23.0"}))
    assert AutoTokenizer.from_pretrained(exported)(text).input_ids == corrected
    assert QuestionEncoder(exported).tokenizer(text).input_ids == corrected
    uncorrected = RowsView(DatasetParam())
    assert QuestionEncoder(base, uncorrected).tokenizer(text).input_ids != corrected
    param = DatasetParam.model_validate({"preprocess_parameters": {"fix_mistral_regex": True}})
    assert QuestionEncoder(base, RowsView(param)).tokenizer(text).input_ids == corrected
    assert trained_from(exported, tmp_path / "again").joinpath("training_view.json").is_file()
    assert load_processor(tmp_path / "again")(text).input_ids == corrected


def test_that_a_run_trusted_a_folders_code_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    asked: list[Any] = []

    def reading(folder: Path, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        return load_processor(folder, **options)

    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.training_view.load_processor", reading)
    param = DatasetParam.model_validate({"preprocess_parameters": {"trust_remote_code": True}})
    QuestionEncoder(tmp_path, RowsView(param))
    assert asked == [False]


def test_a_trained_folder_has_the_processor_that_made_its_rows(tmp_path: Path) -> None:
    for name in ("base", "other"):
        FAMILIES["qwen3_vl"].build().save_pretrained(tmp_path / name)
    (tmp_path / "base/chat_template.jinja").write_text("of the base")
    other = tmp_path / "other"
    (other / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((other / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages }}"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "config.json").unlink(missing_ok=True)
    trained = shutil.copytree(tmp_path / "base", tmp_path / "trained")
    (trained / "config.json").write_text("{}")
    (trained / "training_view.json").write_text("of the base")
    (tmp_path / "adapters").mkdir()
    param = DatasetParam.model_validate({"preprocess_parameters": {"model_name_or_path": str(other)}})
    view_writer(param, tmp_path / "base")(trained)
    assert AutoTokenizer.from_pretrained(trained).chat_template == "{{ messages }}"
    assert (trained / "config.json").read_text() == "{}"
    assert not (trained / "chat_template.jinja").exists() and not (trained / "training_view.json").exists()
    view_writer(param, tmp_path / "base", only_template=True)(adapters := tmp_path / "adapters")
    assert view_of_adapters(adapters).basic_parameters.chat_template == str(adapters / "chat_template.jinja")
    same = DatasetParam.model_validate({"preprocess_parameters": {"model_name_or_path": f"{tmp_path}/base/."}})
    view_writer(same, tmp_path / "base")(kept := shutil.copytree(tmp_path / "base", tmp_path / "kept"))
    assert (kept / "chat_template.jinja").read_text() == "of the base"
