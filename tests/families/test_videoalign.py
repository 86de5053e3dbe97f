"""VideoAlign's reward model against its paper and its published code (arXiv:2501.13918, KwaiVGI/VideoAlign): what it is
asked, where it is read, the loss of pairs with ties, scores as a reward, and its released files.

Most tests ask a shorter question than the published one, whose text has a test of its own."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import av
import pytest
import torch
from PIL import Image

from mindspeed_mm import inference_videoalign, pretrain_videoalign
from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.rewardvideo import video_questions
from mindspeed_mm.fsdp.data.datasets.rewardvideo.rewardvideo_dataset import RewardVideoDataset
from mindspeed_mm.fsdp.data.datasets.rewardvideo.video_questions import DIMENSIONS, frame_numbers, question
from mindspeed_mm.fsdp.loss.reward_pairs import RewardPairObjective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.posttrain_rewards.pictures import ClipFrames
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, build_reward
from mindspeed_mm.fsdp.posttrain_rewards.videoalign import VideoScorer
from mindspeed_mm.provider.translate import from_flags
from mindspeed_mm.tasks.evaluate.videos import agreement
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.runs import mm, tensors, train
from tests.helpers.tiny_rollout_run import make_tiny_rollout_run
from tests.helpers.tiny_videoalign import CHOICES, MARKS, launch_files, write_released, write_reward_run

import transformers  # isort: skip  (after the guard of the lines above)

SHORT = "\nRate: <|VQ_reward|>\nEND\n\n<|MQ_reward|> of {text_prompt} <|TA_reward|>\nEND\n"
PIXELS = {"video_max_pixels": 1024, "video_min_pixels": 256}
SMALL: dict[str, Any] = {"data": {"dataset_param": {"preprocess_parameters": PIXELS}}}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_questions, "question", lambda: SHORT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return write_reward_run(tmp_path_factory.mktemp("videoalign"), **SMALL)


def built_rows(run: Path, rows: Path | None = None, **preprocess: Any) -> Any:
    param: dict[str, Any] = {
        "dataset_type": "rewardvideo",
        "basic_parameters": {"dataset": str(rows or run.parent / "rows" / "pairs.csv"), "cutoff_len": 4096},
        "preprocess_parameters": {
            "model_name_or_path": str(run.parent / "model"), "add_special_tokens": MARKS, **PIXELS, **preprocess,
        },
    }  # fmt: skip
    if rows is not None:
        param["basic_parameters"]["dataset_dir"] = str(run.parent / "rows")
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def batch_of(run: Path, *numbers: int) -> Any:
    dataset = built_rows(run)
    return dataset.build_collator(CollateParam())([dataset[number] for number in numbers])


def loaded(run: Path, output_dim: int = 1, **more: Any) -> Any:
    section = {"output_dim": output_dim, "add_special_tokens": MARKS, **more}
    arguments = ModelArguments.model_validate(
        {"model_id": "videoalign", "model_name_or_path": str(run.parent / "model"), **section}
    )
    with InDouble():  # tables of angles, too
        model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=3, device=torch.device("cpu"), allow_missing=["rm_head.weight"])
    return model.train()


# --- what it is asked -------------------------------------------------------------------------------------------------


def test_the_question_is_the_published_one() -> None:
    assert hashlib.sha256(question().encode()).hexdigest() == (
        "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"
    )
    assert [question().count(mark) for mark in MARKS] == [1, 1, 1]


@pytest.mark.parametrize(
    ("frames", "fps", "wanted", "seen"),
    [
        (126, 24.0, 2.0, [0, 14, 28, 42, 56, 69, 83, 97, 111, 125]),  # 10.5 frames at 2 a second
        (9, 4.0, 2.0, [0, 3, 5, 8]),  # 4.5 frames, an even number
        (9, 8.0, 2.0, [0, 3, 5, 8]),  # at least 4
        (3, 4.0, 2.0, [0, 2]),  # of 3 an even number
        (5, 1.0, 2.0, [0, 1, 3, 4]),
        (152, 30.0, 1.0, [0, 30, 60, 91, 121, 151]),  # 5.07 is 6: half of it, rounded, twice
    ],
)
def test_frames_are_those_of_the_published_code(frames: int, fps: float, wanted: float, seen: list[int]) -> None:
    assert list(frame_numbers(frames, fps, wanted)) == seen


def decoded(path: Path) -> list[Image.Image]:
    with av.open(str(path)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


def asked_by_hand(run: Path, name: str, caption: str) -> dict[str, torch.Tensor]:
    """The inputs of transformers' own processor, of a text that is written out here."""
    processor = transformers.AutoProcessor.from_pretrained(run.parent / "model")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    pictures = decoded(run.parent / "rows" / name)
    frames = [pictures[number] for number in frame_numbers(len(pictures), 4.0, 2.0)]
    video = torch.stack([torch.tensor(list(p.tobytes()), dtype=torch.uint8).view(32, 32, 3) for p in frames])
    seen = processor.video_processor(
        videos=[video.permute(0, 3, 1, 2)],
        size={"shortest_edge": PIXELS["video_min_pixels"], "longest_edge": PIXELS["video_max_pixels"]},
        do_sample_frames=False,
        return_tensors="pt",
    )
    pads = int(seen["video_grid_thw"].prod()) // processor.video_processor.merge_size**2
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        f"{'<|video_pad|>' * pads}<|vision_end|>{SHORT.replace('{text_prompt}', caption)}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {**seen, "input_ids": ids}


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run.parent / "rows" / "pairs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_batch_holds_both_questions_of_each_pair(run: Path) -> None:
    batch, rows = batch_of(run, 0, 2), rows_of(run)
    for place, (number, side) in enumerate([(0, "A"), (2, "A"), (0, "B"), (2, "B")]):
        expected = asked_by_hand(run, rows[number][f"path_{side}"], rows[number]["prompt"])
        length = int(batch["attention_mask"][place].sum())
        assert batch["input_ids"][place, :length].tolist() == expected["input_ids"][0].tolist()
        found = batch["input_ids"][place][batch["reward_places"][place]]
        assert found.tolist() == ids_of_marks(run)
    assert batch["preferences"].tolist() == [[1, -1, 0], [-1, 0, 1]]
    assert batch["pairs"] == 2


@cache
def ids_of_marks(run: Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.parent / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return list(tokenizer.convert_tokens_to_ids(MARKS))


# --- loss -------------------------------------------------------------------------------------------------------------


def rewards_by_hand(
    model: Any, run: Path, output_dim: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, str]]]:
    """(K,) scores of both sides of each row: transformers' Qwen2-VL, one question at a time, read at each mark."""
    marks = ids_of_marks(run)
    for row in rows_of(run):
        sides = []
        for side in "AB":
            inputs = asked_by_hand(run, row[f"path_{side}"], row["prompt"])
            ids = inputs["input_ids"]
            kinds = (ids == model.config.video_token_id).int() * 2
            pixels = inputs["pixel_values_videos"].double()
            hidden = model.model(
                input_ids=ids, pixel_values_videos=pixels, video_grid_thw=inputs["video_grid_thw"],
                mm_token_type_ids=kinds, use_cache=False,
            ).last_hidden_state[0]  # fmt: skip
            places = [ids[0].tolist().index(mark) for mark in marks]
            rows = [0, 0, 0] if output_dim == 1 else [0, 1, 2]
            weight = model.rm_head.weight
            sides.append(torch.stack([weight[k] @ hidden[place] for k, place in zip(rows, places, strict=True)]))
        yield sides[0], sides[1], row


def loss_by_hand(first: torch.Tensor, second: torch.Tensor, said: str, name: str) -> torch.Tensor:
    """−log of the probability of what was said, by worths e^score: with ties as Rao and Kupper have it, θ = 5."""
    a, b = first.exp(), second.exp()
    if said == "invalid":
        return first * 0
    if name == "btt":
        theta = 5.0
        if said == "same":
            return -torch.log((theta**2 - 1) * a * b / ((a + theta * b) * (b + theta * a)))
        return -torch.log(a / (a + theta * b) if said == "A" else b / (b + theta * a))
    if said == "same":
        return first * 0
    margin = math.exp(0.57) if name == "constant_margin" else 1.0
    return -torch.log(a / (a + margin * b) if said == "A" else b / (b + margin * a))


@pytest.mark.parametrize(
    ("name", "output_dim"),
    [("btt", 1), ("btt", 3), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("bt", "constant_margin"))],
)
def test_a_step_is_that_of_the_published_loss(run: Path, name: str, output_dim: int) -> None:
    """Loss and all gradients, of four pairs in one micro-batch and in two."""
    with InDouble():
        model = loaded(run, output_dim, reward_loss=name)
        total = torch.zeros(())
        right = chosen = 0
        for first, second, row in rewards_by_hand(model, run, output_dim):
            for k, key in enumerate(("VQ", "MQ", "TA")):
                total = total + loss_by_hand(first[k], second[k], row[key], name) / 12
                if row[key] in "AB":
                    chosen += 1
                    right += bool((first[k] > second[k]) == (row[key] == "A"))
        total.backward()
        expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        for split in ([(0, 1, 2, 3)], [(0,), (1, 2, 3)]):
            model.zero_grad()
            objective = RewardPairObjective(model)
            batches = [objective.prepare(batch_of(run, *numbers)) for numbers in split]
            counts = objective.count(batches)
            assert counts == {"loss": 12, "rewards/margins": chosen, "rewards/accuracies": chosen}
            loss, found = torch.zeros(()), 0.0
            for batch in batches:
                batch["pixel_values_videos"] = batch["pixel_values_videos"].double()
                terms = objective.terms(model, batch)
                loss = loss + terms["loss"] / counts["loss"]
                found += float(terms["rewards/accuracies"])
            loss.backward()
            torch.testing.assert_close(loss.detach(), total.detach(), rtol=1e-9, atol=0)
            assert found == right
            for key, parameter in model.named_parameters():
                if key in expected:
                    torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-6, atol=1e-9)
                else:
                    assert parameter.grad is None


def test_rows_that_fill_up_count_for_nothing(run: Path) -> None:
    """As the loader fills up the last micro-batch of a validation: the labels of both their sides are taken out."""
    batch = batch_of(run, 0, 3)
    batch["labels"][[1, 3]] = -100
    objective = RewardPairObjective(loaded(run))
    assert objective.count([objective.prepare(batch)])["loss"] == 3


def steps_of(yaml: str, words: list[str]) -> Any:
    with keeping_double(), InDouble(), mock.patch.object(video_questions, "question", lambda: SHORT):
        return train_steps(yaml, ["parallel.fsdp_plan.param_dtype=fp64", "training.train_iters=1", *words])


ALL = ["training.micro_batch_size=4"]


@pytest.mark.slow
def test_two_sharded_ranks_equal_one_process(run: Path) -> None:
    expected = steps_of(str(run), ALL)
    for measured in run_ranks(2, steps_of, str(run), ["training.micro_batch_size=2"]):
        compare_steps(expected, measured, 1e-8)


@pytest.mark.slow
def test_two_tensor_ranks_equal_one_process(run: Path) -> None:
    expected = steps_of(str(run), ALL)
    words = [*ALL, "parallel.tensor_parallel_size=2"]
    for measured in run_ranks(2, steps_of, str(run), words):
        compare_steps(expected, measured, 1e-8)


@pytest.mark.slow
def test_adapters_resume_to_the_bit_and_merge_to_a_folder_that_scores(run: Path, tmp_path: Path) -> None:
    """From a folder of Qwen2-VL with a new head and rows for the marks."""
    start = tmp_path / "start"
    convert("released_to_hf", "--cfg.hf_config.hf_dir", run.parent / "model", "--cfg.save_hf_dir", start,
            "--cfg.common_model_config.resize_vocab_size", 420)  # fmt: skip
    words = [f"model.model_name_or_path={start}", "model.add_special_tokens=[]", "training.allow_missing=[]",
             f"data.dataset_param.preprocess_parameters.model_name_or_path={start}",
             "training.lora.enable=true", "training.lora.rank=2", "training.lora.modules_to_save=[rm_head]",
             "training.save_interval=1", "training.train_iters=2"]  # fmt: skip
    log = train(run, tmp_path / "whole", *words)
    assert "mm infer" not in log  # it answers nothing
    train(run, tmp_path / "cut", *words[:-1], "training.train_iters=1")
    train(run, tmp_path / "cut", *words)
    expected, found = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    said = mm("export", tmp_path / "whole", tmp_path / "merged", "--merge")
    assert said.code == 0, said.err
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2VLRewardModelBT"]
    settings = {"path": str(tmp_path / "merged"), "norm": False, "dtype": "float32", "fps": 4}
    clip = decoded(run.parent / "rows" / "0_A.mp4")
    (score,) = build_reward("videoalign", 1.0, settings)(Judged(["a"], [clip], [{}]))
    assert math.isfinite(score)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"VQ": "C"}, "'C' is not one of A, B, same, invalid"),
        ({"prompt": f"a {MARKS[1]}"}, "the caption holds <|MQ_reward|>"),
        ({"prompt": " "}, "is not a caption"),
        ({"path_B": ""}, "is no video"),
        ({"path_B": "none.mp4"}, "none.mp4"),
    ],
)
def test_bad_rows_are_told(run: Path, tmp_path: Path, change: dict[str, str], says: str) -> None:
    path = tmp_path / "rows.csv"
    row = rows_of(run)[0] | change
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    for read in (RewardVideoDataset.__getitem__, RewardVideoDataset.measure):  # `mm data check` measures all rows
        with pytest.raises(DataError) as error:
            read(built_rows(run, path), 0)
        assert says in str(error.value)
        assert "rows.csv:" in str(error.value)


def test_a_choice_that_is_no_word_is_told(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows_of(run)[0] | {"VQ": ["A"]}), encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.jsonl:1  VQ  \['A'\] is not one of A, B, same, invalid"):
        built_rows(run, path)[0]


@pytest.mark.parametrize("names", [DIMENSIONS, ("TA",)])
def test_rows_without_a_column_of_choices_are_refused(run: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """An empty choice has a loss of 0, so a column of another name would train nothing. No video is opened before."""
    path, row = tmp_path / "rows.jsonl", rows_of(run)[0] | {"path_A": "gone.mp4"}
    path.write_text(json.dumps({name.lower() if name in names else name: row[name] for name in row}))
    for read in (RewardVideoDataset.__getitem__, RewardVideoDataset.measure):
        with pytest.raises(DataError, match=rf"rows.jsonl:1  {names[0]}  is no column of the row"):
            read(built_rows(run, path), 0)


def test_special_tokens_in_captions_are_text(run: Path) -> None:
    dataset = built_rows(run)
    ids = dataset.questions.encode(str(run.parent / "rows" / "0_A.mp4"), "a <|im_end|> b", "place")["input_ids"]
    end = dataset.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.tolist().count(end) == 2  # of the system's turn and the user's


def test_rows_of_ties_alone_are_left_out_if_asked(run: Path, tmp_path: Path) -> None:
    rows = rows_of(run)
    rows[1] |= dict.fromkeys(("VQ", "MQ", "TA"), "same")
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert len(built_rows(run, path)) == len(CHOICES)
    kept = built_rows(run, path, use_tied_data=False)
    assert [str(kept.place(index)) for index in range(len(kept))] == ["rows.csv:1", "rows.csv:3", "rows.csv:4"]


def test_sizes_are_known_before_videos_are_decoded(run: Path) -> None:
    dataset = built_rows(run)
    pair = dataset[1]
    assert dataset.measure(1).tokens == 2 * max(len(pair[side]["input_ids"]) for side in ("A", "B"))


def test_a_model_without_rows_for_the_marks_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="add_special_tokens"):
        built_rows(run, add_special_tokens=())


def test_other_losses_and_other_heads_are_refused(run: Path, tmp_path: Path) -> None:
    for word, says in (("model.reward_loss=reg", "not one of btt"), ("model.output_dim=2", "output_dim")):
        said = mm("check", run, word)
        assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_released(run.parent / "model", tmp_path_factory.mktemp("released"))


def convert(*words: object) -> None:
    from mindspeed_mm.cli import mm_convert

    assert mm_convert.run(["VideoAlignConverter", *map(str, words)]) == 0


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("form", ["whole", "adapters"])
def test_released_files_become_a_folder(run: Path, released: Any, tmp_path: Path, form: str) -> None:
    """Adapters are added by alpha / rank, the head is kept, the copy of the embedding is left out."""
    convert("released_to_hf", "--cfg.hf_config.hf_dir", run.parent / "model", "--cfg.pt_path", released.path(form),
            "--cfg.save_hf_dir", tmp_path / "hf")  # fmt: skip
    found = weights_of(tmp_path / "hf")
    assert found.keys() == released.expected.keys()
    for name, tensor in released.expected.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=1e-6, atol=1e-6)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["output_dim"] == 1 and config["reward_norm"]["TA_std"] == 4.0
    assert config["vocab_size"] == len(released.expected["model.embed_tokens.weight"])


def test_the_documented_lines_go_to_megatrons_layout_and_back(run: Path, released: Any, tmp_path: Path) -> None:
    canonical = ["--cfg.common_model_config.enable_canonical_hf_struct", "true"]
    common = ["--cfg.parallel_config.llm_pp_layers", "[[2]]", "--cfg.parallel_config.vit_pp_layers", "[[2]]",
              "--cfg.parallel_config.tp_size", 1, *canonical]  # fmt: skip
    base = run.parent / "model"
    convert("hf_to_mm", "--cfg.mm_dir", tmp_path / "mm", "--cfg.hf_config.hf_dir", base, "--cfg.pt_path",
            released.path("whole"), "--cfg.common_model_config.model_prefix", "base_model.model.", *common)  # fmt: skip
    convert("mm_to_hf", "--cfg.mm_dir", tmp_path / "mm", "--cfg.hf_config.hf_dir", tmp_path / "mm",
            "--cfg.save_hf_dir", tmp_path / "back", *canonical)  # fmt: skip
    for name, tensor in weights_of(tmp_path / "back").items():
        torch.testing.assert_close(tensor.double(), released.expected[name].double(), rtol=1e-6, atol=1e-6)
    convert("hf_to_mm", "--cfg.mm_dir", tmp_path / "start", "--cfg.hf_config.hf_dir", base,
            "--cfg.common_model_config.resize_vocab_size", 420, *common)  # fmt: skip
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    assert config["vocab_size"] == 420 and config["output_dim"] == 1


def test_other_ways_to_see_videos_are_refused(run: Path, released: Any, tmp_path: Path) -> None:
    path = released.copy(tmp_path)
    settings = json.loads((path.parent / "model_config.json").read_text())
    for section, name, value in (("data_config", "fps", 8.0), ("model_config", "reward_token", "last")):
        changed = settings | {section: settings[section] | {name: value}}
        (path.parent / "model_config.json").write_text(json.dumps(changed))
        with pytest.raises(MMError, match=f"{section}.{name}"):
            convert("released_to_hf", "--cfg.hf_config.hf_dir", run.parent / "model", "--cfg.pt_path", path,
                    "--cfg.save_hf_dir", tmp_path / "hf")  # fmt: skip
    (path.parent / "model_config.json").unlink()
    with pytest.raises(MMError, match="says their scale"):
        convert("released_to_hf", "--cfg.hf_config.hf_dir", run.parent / "model", "--cfg.pt_path", path,
                "--cfg.save_hf_dir", tmp_path / "hf")  # fmt: skip


@pytest.fixture(scope="module")
def reward_folder(run: Path, released: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "hf"
    convert("released_to_hf", "--cfg.hf_config.hf_dir", run.parent / "model", "--cfg.pt_path", released.path("whole"),
            "--cfg.save_hf_dir", folder)  # fmt: skip
    view = {"preprocess_parameters": PIXELS, "basic_parameters": {}}
    (folder / "training_view.json").write_text(json.dumps(view))
    return folder


def test_a_reward_is_the_weighted_sum_of_normalised_scores(run: Path, reward_folder: Path) -> None:
    """Means and deviations of the release; of clips in memory at their rate, as of the file."""
    options = {"path": str(reward_folder), "dtype": "float64", "fps": 30.0}
    names = ["0_A.mp4", "1_B.mp4"]
    clips = [ClipFrames(decoded(run.parent / "rows" / name), 4.0) for name in names]
    judged = Judged(["one", "two"], clips, [{}, {}])
    found = build_reward("videoalign", 1.0, options)(judged)
    plain = VideoScorer(str(reward_folder), norm=False, dtype="float64", batch_size=2, root=run.parent / "rows")
    raw = plain.scores(names, ["one", "two"])
    norm = {"VQ": (3.0, 2.0), "MQ": (1.0, 0.5), "TA": (2.0, 4.0)}
    for score, row in zip(found, raw, strict=True):
        assert score == pytest.approx(sum((row[k] - mean) / std for k, (mean, std) in norm.items()), rel=1e-6)
    weighed = build_reward("videoalign", 1.0, {**options, "norm": False, "weights": {"MQ": 2.0, "TA": -1.0}})(judged)
    assert weighed == pytest.approx([2 * row["MQ"] - row["TA"] for row in raw], rel=1e-6)
    # at another rate other frames are seen
    assert build_reward("videoalign", 1.0, options)(Judged(["one"], [list(clips[0])], [{}])) != found[:1]


def test_the_verb_scores_clips_of_rows(run: Path, reward_folder: Path, tmp_path: Path) -> None:
    """As they are scored in memory, at the rate of the file; both sides of a pair."""
    rows = tmp_path / "rows.jsonl"
    names = ["0_A.mp4", "1_B.mp4"]
    for name in names:
        (tmp_path / name).write_bytes((run.parent / "rows" / name).read_bytes())
    rows.write_text(json.dumps({"prompt": "one", "file": names[0], "file_rejected": names[1]}) + "\n")
    settings = json.dumps({"path": str(reward_folder), "dtype": "float64"})
    word = f"posttrain.rewards=[{{name: videoalign, settings: {settings}}}]"
    said = mm("posttrain", "score", run, rows, word, "--out", tmp_path / "out.jsonl")
    assert said.code == 0, said.err
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    reward = build_reward("videoalign", 1.0, json.loads(settings))
    clips = [ClipFrames(decoded(run.parent / "rows" / name), 4.0) for name in names]
    expected = reward(Judged(["one", "one"], clips, [{}, {}]))
    assert [row["score"], row["score_rejected"]] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_generator_of_clips_learns_from_it(reward_folder: Path, tmp_path: Path) -> None:
    settings = {"path": str(reward_folder), "dtype": "float32", "fps": 4}
    posttrain = {"rewards": [{"name": "videoalign", "settings": settings}]}
    yaml = make_tiny_rollout_run(tmp_path, "t2v", posttrain=posttrain, training={"train_iters": 1})
    train(yaml, tmp_path / "run")
    (record,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    samples = list(map(json.loads, (tmp_path / "run" / "rollouts" / "rollout_0000000.jsonl").read_text().splitlines()))
    rewards = [sample["reward"] for sample in samples if "reward" in sample]
    assert len(rewards) == 8 and len(set(rewards)) > 1
    assert record["reward"] == pytest.approx(sum(rewards) / 8, rel=1e-5)
    assert record["grad_norm"] > 0


def test_what_is_no_clip_and_what_is_no_model_of_rewards_is_told(run: Path, reward_folder: Path) -> None:
    reward = build_reward("videoalign", 1.0, {"path": str(reward_folder), "dtype": "float32"})
    with pytest.raises(DataError, match="the sample is a picture"):
        reward(Judged(["one"], [Image.new("RGB", (32, 32))], [{}]))
    with pytest.raises(ConfigError, match="how fast they are shown"):
        reward(Judged(["one"], [[Image.new("RGB", (32, 32))] * 4], [{}]))
    with pytest.raises(MMError, match="is not VideoAlign's model"):
        build_reward("videoalign", 1.0, {"path": str(run.parent / "model")})
    norm = dict.fromkeys((f"{name}_{kind}" for name in DIMENSIONS for kind in ("mean", "std")), 1.0)
    for settings, says in (
        ({"weights": {"XQ": 1}}, "'XQ' is not one of"), ({"norm_param": norm | {"MQ_mean": math.nan}}, "MQ: "),
        ({"norm_param": {"VQ_mean": 1}}, "VQ: "), ({"fps": 0}, "0 is no rate"), ({"batch_size": 0}, "0 is below 1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            build_reward("videoalign", 1.0, {"path": str(reward_folder), **settings})


# --- the documents' launch --------------------------------------------------------------------------------------------


def test_the_documents_files_say_what_is_trained(run: Path, reward_folder: Path, tmp_path: Path) -> None:
    words = launch_files(tmp_path, run.parent / "rows", reward_folder, **PIXELS)
    arguments = from_flags([*words, "--save", str(tmp_path / "run")], {}).arguments
    assert (arguments.model.model_id, arguments.model.model_name_or_path) == ("videoalign", str(reward_folder))
    assert arguments.training.load is None
    lora = arguments.training.lora
    assert lora.target_modules == ("o_proj", "q_proj") and lora.modules_to_save == ("rm_head", "model.visual")
    param = arguments.data.dataset_param
    assert (param.dataset_type, param.preprocess_parameters.video_fps) == ("rewardvideo", 2.0)
    assert param.basic_parameters.cutoff_len == 65536  # --seq-length cuts nothing
    assert arguments.model["output_dim"] == 1 and arguments.model["reward_loss"] == "btt"
    for change, says in (({"eval_dim": ["VQ"]}, "eval_dim is"), ({"prompt_template_type": "none"}, "detailed_special")):
        words = launch_files(tmp_path, run.parent / "rows", reward_folder, **PIXELS, **change)
        with pytest.raises(ConfigError, match=says):
            from_flags(words, {})


@pytest.mark.slow
def test_the_documents_entries_train_and_score(
    run: Path, reward_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = launch_files(tmp_path, run.parent / "rows", reward_folder, **PIXELS)
    for entry, more in ((pretrain_videoalign, ["--save", str(tmp_path / "run")]), (inference_videoalign, [])):
        monkeypatch.setattr(sys, "argv", [f"{entry.__name__}.py", *words, *more])
        entry.main()
    assert (tmp_path / "run" / "iter_0000001").is_dir()
    assert "VQ: accuracy with ties" in capsys.readouterr().out
    with (tmp_path / "scores" / "reward_out_single.csv").open(encoding="utf-8", newline="") as file:
        scores = {row["path"]: float(row["reward_VQ"]) for row in csv.DictReader(file)}
    plain = VideoScorer(str(reward_folder), norm=False, dtype="float32", root=run.parent / "rows")
    (expected,) = plain.scores(["0_A.mp4"], [rows_of(run)[0]["prompt"]])
    assert scores["0_A.mp4"] == pytest.approx((expected["VQ"] - 1) / 2, rel=1e-4)
    assert len(scores) == 2 * len(CHOICES)
    told = json.loads((tmp_path / "scores" / "eval_accuracy.json").read_text())
    assert told.keys() == {"VQ Accuracy", "TA Accuracy"}


def test_the_example_holds_on_a_small_folder(run: Path, reward_folder: Path, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "videoalign" / "videoalign_2B_config.yaml"
    basic = "data.dataset_param.basic_parameters"
    said = mm("check", example, f"model.model_name_or_path={reward_folder}",
              f"{basic}.dataset={run.parent / 'rows' / 'pairs.csv'}", f"training.save={tmp_path / 'run'}")  # fmt: skip
    assert said.code == 0, said.out + said.err
    assert "fails" not in said.out and "could not be simulated" not in said.out


def test_names_and_shapes_are_those_of_qwen2_vl_without_its_head_of_words(run: Path) -> None:
    """And `rm_head.weight`, as the published class has it."""
    model, differing_entries = model_of_record(type(loaded(run)), "qwen2-vl-2b")
    assert differing_entries == []
    assert tuple(model.rm_head.weight.shape) == (1, 1536) and not hasattr(model, "lm_head")
    assert billions(model) == pytest.approx(2.209, rel=0.001)


def test_agreement_with_people() -> None:
    """Two of four at the threshold 0.3, where the tie is one; without ties two of three."""
    found = agreement([1, -1, 0, 1], [0.9, -0.5, 0.3, -0.2])
    assert found.with_ties == pytest.approx(3 / 4)
    assert found.without_ties == pytest.approx(2 / 3)
    assert agreement([], []).with_ties is None
    assert agreement([0], [0.9]).with_ties == 1.0  # a difference as large as the threshold is a tie
