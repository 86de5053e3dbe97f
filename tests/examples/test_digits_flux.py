"""The pictures' example: generator and judges never share a scan, captions are told apart, the same versions write the
same bytes, the judges judge."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.answers.scoring import Score, score

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_flux"
if str(EXAMPLE) not in sys.path:
    sys.path.append(str(EXAMPLE))

import judges as judging  # noqa: E402
import make_digits_flux  # noqa: E402
from scans import NAMES, Scan, generators_scans, load_scans, split_scans  # noqa: E402


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Scan]]:
    return split_scans(load_scans())


@pytest.fixture(scope="module")
def folder(splits: dict[str, list[Scan]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example from 200 scans, twice."""
    patch = pytest.MonkeyPatch()
    patch.setattr(make_digits_flux, "load_scans", lambda: load_scans()[:200])
    folder = tmp_path_factory.mktemp("digits_flux")
    for place in (folder, folder / "again"):
        make_digits_flux.make_data(place / "data")
        make_digits_flux.write_model_folder(place / "model")
    patch.undo()
    return folder


@pytest.fixture(scope="module")
def judges(splits: dict[str, list[Scan]]) -> judging.Judges:
    return judging.train_judges(*judging.stacked(splits["judge"]))


def test_generator_and_judges_share_no_scan(splits: dict[str, list[Scan]]) -> None:
    dealt = {name: {scan.index for scan in group} for name, group in splits.items()}
    assert {name: len(group) for name, group in dealt.items()} == {"train": 1258, "validation": 89, "judge": 450}
    assert len(set().union(*dealt.values())) == 1797  # with the sizes above: none is twice
    assert all({scan.digit for scan in group} == set(range(10)) for group in splits.values())
    assert {scan.index for scan in generators_scans(splits)} == set(range(1797)) - dealt["judge"]


def test_rows_say_what_the_scans_show(folder: Path) -> None:
    scans = load_scans()
    for name in ("train", "validation"):
        for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["cap"] == f"a {NAMES[scans[int(Path(row['path']).stem)].digit]}"
            assert (folder / "data" / row["path"]).is_file()
    assert (folder / "data" / "prompts.txt").read_text().split("\n")[:2] == ["a zero", "a one"]


def test_the_same_versions_write_the_same_bytes(folder: Path) -> None:
    def files(place: Path) -> dict[Path, bytes]:
        return {
            path.relative_to(place): path.read_bytes()
            for part in ("data", "model")
            for path in (place / part).rglob("*.*")
        }

    assert files(folder) == files(folder / "again")
    assert len(files(folder)) > 150


def test_the_model_folder_is_a_pipeline_without_transformer_weights(folder: Path) -> None:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder / "model", transformer=None)
    assert type(pipeline).__name__ == "FluxPipeline"
    assert [path.name for path in (folder / "model" / "transformer").iterdir()] == ["config.json"]
    pixels = torch.rand(2, 3, 8, 8)
    assert torch.allclose(
        pipeline.vae.decode(pipeline.vae.encode(pixels).latent_dist.mode()).sample, pixels.mean(1, True)
    )


def test_captions_are_told_apart(folder: Path) -> None:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder / "model", transformer=None)
    prompts = [make_digits_flux.caption(digit) for digit in range(10)]
    embeds, pooled, _ = pipeline.encode_prompt(prompts, None, max_sequence_length=3)
    assert mean_cosine(pooled) < 0.6
    assert mean_cosine(embeds.flatten(1)) < 0.6
    assert 0.7 < float(pooled.detach().std()) < 1.3
    # What the usual initialisation gives, and why it is not used:
    torch.manual_seed(0)
    usual = type(pipeline.text_encoder)(pipeline.text_encoder.config).eval()
    ids = pipeline.tokenizer(prompts, return_tensors="pt").input_ids
    assert mean_cosine(usual(ids).pooler_output) > 0.85


def mean_cosine(features: torch.Tensor) -> float:
    """Between two different rows."""
    directions = torch.nn.functional.normalize(features.detach(), dim=1)
    different = ~torch.eye(len(features), dtype=torch.bool)
    return float((directions @ directions.T)[different].mean())


def test_judges_recognise_scans_that_they_never_saw(judges: judging.Judges, splits: dict[str, list[Scan]]) -> None:
    pictures, digits = judging.stacked(generators_scans(splits))
    assert all(each.accuracy > 0.94 for each in judges.scores(pictures, digits).values())
    wrong = [(digit + 1) % 10 for digit in digits]
    assert all(each.accuracy < 0.05 for each in judges.scores(pictures, wrong).values())
    noise = np.random.default_rng(0).integers(0, 256, (500, 8, 8), dtype=np.uint8)
    assert all(each.accuracy < 0.3 for each in judges.scores(noise, [i % 10 for i in range(500)]).values())


@pytest.mark.parametrize(
    ("right", "generated", "code"),
    [(100, 1.1, 0), (95, 1.1, 0), (94, 1.1, 1), (100, 0.1, 1), (100, 1.6, 1)],
    ids=["good", "at the goal", "below it", "copies", "unlike scans"],
)
def test_the_verdict(right: int, generated: float, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    scores: dict[str, Score] = {"SVC": score([True] * right + [False] * (100 - right))}
    assert judging.verdict(scores, judging.Distances(generated, 1.07)) == code
    said = capsys.readouterr()
    assert f"{right}.0 % (n=100" in said.out
    assert ("goal missed" in said.err) == bool(code)


def test_distances_see_copies(splits: dict[str, list[Scan]]) -> None:
    training, held_out = (judging.stacked(splits[name])[0] for name in ("train", "judge"))
    distances = judging.Distances.to_nearest(training, training[:50], held_out)
    assert distances.generated == pytest.approx(0, abs=1e-6)
    a, b = held_out[0].astype(float) / 255, training.astype(float) / 255
    by_hand = min(float(np.linalg.norm(a - each)) for each in b)
    assert judging.distances_to_nearest(held_out[:1], training)[0] == pytest.approx(by_hand)
    assert 0.9 < distances.real < 1.2


def test_without_samples_the_judge_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import judge_digits

    def judge(_: Path) -> int:
        return judge_digits.judge(tmp_path)

    assert judging.run_judge(judge, "") == DataError("").exit_code
    assert "mm infer" in capsys.readouterr().err


def test_the_configuration_names_what_is_made(folder: Path) -> None:
    check_configuration(EXAMPLE / "digits_flux_config.yaml", "runs/digits_flux", folder)


def check_configuration(path: Path, root: str, folder: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    config = load_config(path)
    assert (config.warnings, config.unchecked) == ((), ())
    arguments: Any = config.arguments
    basic = arguments.data.dataset_param.basic_parameters
    made = (
        basic.dataset,
        basic.val_dataset,
        arguments.model.model_name_or_path,
        arguments.training.sampling.prompts_file,
    )
    for name in made:
        assert (folder / Path(str(name)).relative_to(root)).exists()
    assert arguments.training.ema.enable
    assert arguments.training.diffusion.caption_dropout == 0.1
