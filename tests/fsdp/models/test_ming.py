"""Ming-Lite-Omni, version 1.5 and preview, against the formulas in fp64 on weights under the released names; then as
any model: plans, what is exported, and answers."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import ming_by_hand as by_hand
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.runs import differing, mm, tensors, train
from tests.helpers.tiny_ming import HIDDEN, LAYERS, PLACES, make_tiny_ming
from tests.helpers.tiny_run import make_tiny_run
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "FunAsrNanoConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)
KINDS = ("1.5", "preview")
SIZES = [(32, 24), (16, 40)]
"""Of the pictures: the windows of the tower do not divide them."""
TEXT = "<role>HUMAN</role><image>Which of <audio>both?<image><role>ASSISTANT</role>The <audio>second."


@cache
def released(root: str, kind: str) -> tuple[Path, by_hand.Weights]:
    folder = Path(root) / kind
    return folder, make_tiny_ming(folder, preview=kind == "preview")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("ming"))


def sounds() -> list[np.ndarray]:
    """Two of different lengths, so that one is filled up."""
    draw = np.random.default_rng(0)
    return [draw.standard_normal(length).astype(np.float32) * 0.1 for length in (4000, 2650)]


def batch_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    processor: Any = load_processor(folder)
    made = dict(processor(images=random_pictures(SIZES), audio=sounds(), text=[TEXT], return_tensors="pt"))
    return processor, {name: each.double() if each.is_floating_point() else each for name, each in made.items()}


def expected_of(w: by_hand.Weights, batch: dict[str, Any], kind: str) -> torch.Tensor:
    is_preview = kind == "preview"
    grids = [tuple(grid) for grid in batch["image_grid_thw"].tolist()]
    patches = batch["pixel_values"].split([math.prod(grid) for grid in grids])
    media = {
        by_hand.IMAGE: torch.cat([by_hand.seen(w, own, grid) for own, grid in zip(patches, grids, strict=True)]),
        by_hand.AUDIO: torch.cat(
            [
                by_hand.heard(w, frames[mask.bool()], preview=is_preview)
                for frames, mask in zip(batch["input_features"], batch["input_features_mask"], strict=True)
            ]
        ),
    }
    embeddings = w["model.model.word_embeddings.weight"][batch["input_ids"][0]]
    kinds = batch["mm_token_type_ids"][0].tolist()
    for number, features in media.items():
        embeddings[torch.tensor(kinds) == number] = features
    places = by_hand.positions(kinds, {by_hand.IMAGE: grids})
    if is_preview:
        places = [(at, at, at) for at in range(len(kinds))]
    return by_hand.logits(w, LAYERS, embeddings, kinds, places, preview=is_preview)


def exchange(first: nn.Parameter, second: nn.Parameter) -> None:
    first.data, second.data = second.data.clone(), first.data.clone()


def forget_shared(model: Any) -> None:
    model.language_model.layers[0].mlp.shared_experts = None


def plain_head(model: Any) -> None:
    head = nn.Linear(HIDDEN, len(model.lm_head.weight), bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


FAULTS = {
    "routers of pictures and words exchanged": lambda model: exchange(
        model.language_model.layers[0].mlp.gate.weight, model.language_model.layers[0].mlp.gate.image_weight
    ),
    "routers of pictures and sounds exchanged": lambda model: exchange(
        model.language_model.layers[1].mlp.gate.audio_weight, model.language_model.layers[1].mlp.gate.image_weight
    ),
    "shared experts left out": forget_shared,
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formulas(kind: str, root: str) -> None:
    folder, stored = released(root, kind)
    model, (_, batch) = loaded(folder), batch_of(folder)
    w = {name: tensor.double() for name, tensor in stored.items()}
    with torch.no_grad(), keeping_double():
        expected = expected_of(w, batch, kind)
        assert (model(**batch).logits[0] - expected).abs().max() < 1e-9
        assert expected.std() > 0.1
        faults = FAULTS | ({"head not normed": plain_head} if kind == "preview" else {})
        for name, plant in faults.items():
            model = loaded(folder)
            plant(model)
            assert (model(**batch).logits[0] - expected).abs().max() > 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind: str, root: str) -> None:
    """The published head's lengths are constants for the gradient, its weight is not."""
    folder, stored = released(root, kind)
    model, (_, batch) = loaded(folder), batch_of(folder)
    w = {name: tensor.double().requires_grad_() for name, tensor in stored.items()}
    with keeping_double():
        loss = nn.functional.cross_entropy(expected_of(w, batch, kind)[:-1], batch["input_ids"][0, 1:])
        loss.backward()
        own = model(**batch, labels=batch["input_ids"]).loss
        own.backward()
    assert abs(float(own - loss)) < 1e-9
    named = dict(model.named_parameters())
    pairs = {
        "lm_head.weight": "model.lm_head.weight",
        "language_model.embed_tokens.weight": "model.model.word_embeddings.weight",
        "language_model.layers.0.mlp.gate.image_weight": "model.model.layers.0.mlp.image_gate.weight",
        "language_model.layers.1.mlp.gate.audio_weight": "model.model.layers.1.mlp.audio_gate.weight",
        "language_model.layers.0.attention.o_proj.weight": "model.model.layers.0.attention.dense.weight",
        "linear_proj.0.weight": "linear_proj.0.weight",
        "linear_proj_audio.0.weight": "linear_proj_audio.0.weight",
        "vision.blocks.0.attn.qkv.weight": "vision.blocks.0.attn.qkv.weight",
    }
    for name, of_release in pairs.items():
        gradient = w[of_release].grad
        assert gradient is not None and gradient.abs().max() > 1e-9, name
        assert (named[name].grad - gradient).abs().max() < 1e-8, name


def test_positions_of_pictures_videos_and_words(root: str) -> None:
    """A video's time goes on by one for two frames; what follows stands behind the furthest token, also of time."""
    folder, _ = released(root, "1.5")
    model = loaded(folder)
    kinds = [0, 0, 2, 2, 2, 2, 2, 2, 0, 3, 3, 0, 1, 1, 1, 1, 0]
    grids = {by_hand.VIDEO: [(3, 2, 4)], by_hand.IMAGE: [(1, 4, 4)]}
    ids = torch.zeros(2, 20, dtype=torch.long)
    padded = torch.tensor([[*kinds, 0, 0, 0], [0] * 20])
    mask = torch.tensor([[1] * 17 + [0] * 3, [1] * 20])
    image, video = (torch.tensor(grids[each]) for each in (by_hand.IMAGE, by_hand.VIDEO))
    found, further = model.get_rope_index(ids, padded, image, video, mask)
    expected = by_hand.positions(kinds, grids)
    assert found[:, 0, :17].T.tolist() == [list(place) for place in expected]
    assert found[:, 1].T.tolist() == [[at] * 3 for at in range(20)]
    assert further.tolist() == [[expected[-1][0] + 1 - 17], [0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_is_heard_as_if_alone(kind: str, root: str) -> None:
    folder, _ = released(root, kind)
    model, (_, batch) = loaded(folder), batch_of(folder)
    features, mask = batch["input_features"], batch["input_features_mask"]
    with torch.no_grad(), keeping_double():
        together = model.get_audio_features(features, mask)
        alone = []
        for own, is_there in zip(features, mask.bool(), strict=True):
            alone.append(model.get_audio_features(own[is_there][None], mask.new_ones(1, int(is_there.sum()))))
        assert (together - torch.cat(alone)).abs().max() < 1e-12
        # Planted: a sound that is one frame too long, which is the zeros that fill it up.
        longer = mask[1:].clone()
        longer[0, int(mask[1].sum())] = 1
        assert (model.get_audio_features(features[1:], longer)[: len(alone[1])] - alone[1]).abs().max() > 1e-6
        with pytest.raises(DataError, match="frames of a sound have"):
            model.get_audio_features(features[..., :-1], mask)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_equal_a_loop_without_a_cache(kind: str, root: str) -> None:
    """Behind two pictures and two sounds, whose positions are not those of tokens; what is written is text."""
    folder, stored = released(root, kind)
    model, (_, batch) = loaded(folder), batch_of(folder)
    w = {name: tensor.double() for name, tensor in stored.items()}
    with torch.no_grad(), keeping_double():
        made = model.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None)
        seen = dict(batch)
        for _ in range(4):
            word = expected_of(w, seen, kind)[-1].argmax().view(1, 1)
            seen["input_ids"] = torch.cat([seen["input_ids"], word], dim=1)
            seen["mm_token_type_ids"] = torch.cat([seen["mm_token_type_ids"], torch.zeros_like(word)], dim=1)
    assert made.tolist() == seen["input_ids"].tolist()


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_is_exported_as_released(tmp_path: Path) -> None:
    """The towers are frozen; what speaks lies in the exported folder as it was released."""
    stored = make_tiny_ming(tmp_path / "model")
    (tmp_path / "model" / "talker").mkdir()
    (tmp_path / "model" / "talker" / "model.safetensors").write_bytes(b"as it was")
    run = make_tiny_run(tmp_path, training={"train_iters": 2, "save_interval": 1})
    words = ["model.freeze=[vision, audio, linear_proj, linear_proj_audio]"]
    train(run, tmp_path / "whole", *words)
    train(run, tmp_path / "broken", *words, "training.train_iters=1")
    train(run, tmp_path / "broken", *words)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "broken")) == []
    said = mm("export", tmp_path / "broken", tmp_path / "hf")
    assert said.code == 0, said.err
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: each.shape for name, each in written.items()} == {name: each.shape for name, each in stored.items()}
    changed = {name for name in stored if not torch.equal(stored[name], written[name])}
    assert changed and all(name.startswith("model.") for name in changed)
    layer = "model.model.layers.0.mlp"
    assert {f"{layer}.image_gate.weight", f"{layer}.experts.3.up_proj.weight"} <= changed
    assert f"{layer}.audio_gate.weight" not in changed  # no row has a sound
    assert (tmp_path / "hf" / "talker" / "model.safetensors").read_bytes() == b"as it was"
    assert (tmp_path / "hf" / "am.mvn").is_file() and (tmp_path / "hf" / "preprocessor_config.json").is_file()
    with torch.no_grad():
        assert loaded(tmp_path / "hf")(torch.tensor([[5, 6]])).logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_sound(kind: str, root: str) -> None:
    """The processor writes as many as the model makes, whatever the length; one less, and training is refused."""
    folder, _ = released(root, kind)
    processor: Any = load_processor(folder)
    model = loaded(folder)
    for length in (800, 1600, 2000, 2650, 3210):
        sound = np.linspace(-1, 1, length, dtype=np.float32)
        batch = dict(processor(audio=[sound], text=["a<audio>b"], return_tensors="pt"))
        with torch.no_grad():
            model(**batch)
            kinds = batch["mm_token_type_ids"]
            last = int((kinds[0] == by_hand.AUDIO).nonzero()[-1])
            batch["mm_token_type_ids"] = kinds.clone()
            batch["mm_token_type_ids"][0, last] = 0
            with pytest.raises(DataError, match="tokens for the media"):
                model(**batch)


def test_a_folder_without_its_processor_is_told_so(tmp_path: Path) -> None:
    """The class of the processor has the chat template: that none is found is not what is wrong."""
    from mindspeed_mm.fsdp.data.data_utils.template import build_template
    from mindspeed_mm.fsdp.params.data_args import BasicParameters

    folder = tmp_path / "model"
    make_tiny_ming(folder)
    basic = BasicParameters.model_validate({"dataset": "rows.jsonl", "cutoff_len": 64})
    assert build_template(load_processor(folder), basic) is not None
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelFolderError, match="the processor of this 'bailingmm' model is missing"):
        build_template(load_processor(folder), basic)


def test_sounds_that_the_encoder_does_not_take_are_refused_with_their_row(root: str) -> None:
    """By the processor, so that rows are told or left out before a step meets them."""
    processor: Any = load_processor(released(root, "1.5")[0])
    hears = processor.feature_extractor
    longest = 2 * PLACES * 160
    assert hears([np.zeros(longest, dtype=np.float32)])["input_features_mask"].shape == (1, 2 * PLACES)
    with pytest.raises(ValueError, match=f"{2 * PLACES + 1} frames are more than the encoder's {2 * PLACES}"):
        hears([np.zeros(800, dtype=np.float32), np.zeros(longest + 160, dtype=np.float32)])
    assert hears([np.zeros(201, dtype=np.float32)])["input_features_mask"].tolist() == [[1]]
    with pytest.raises(ValueError, match="200 samples are fewer than the 201 that a frame needs"):
        hears([np.zeros(200, dtype=np.float32)])


def test_frames_of_the_preview_are_joined(root: str) -> None:
    """Three of Kaldi's frames become one, two apart, the first and last repeated; then means and scales of am.mvn."""
    from mindspeed_mm.fsdp.utils.fun_asr_features import log_mel

    folder = Path(root) / "joined"
    make_tiny_ming(folder, preview=True)
    processor: Any = load_processor(folder)
    samples = sounds()[1]
    bands = log_mel(samples * 32768.0, rate=16000, bands=8, frame_ms=25, shift_ms=10)
    found = processor.feature_extractor(samples)["input_features"][0].numpy()
    last = len(bands) - 1
    for number in range(math.ceil(len(bands) / 2)):
        own = [bands[min(max(2 * number + by, 0), last)] for by in (-1, 0, 1)]
        shift = np.array([float(f"{-(at + 1) / 24:.3f}") for at in range(24)])
        expected = (np.concatenate(own) + shift) * -shift
        np.testing.assert_allclose(found[number], expected, rtol=1e-5)
    assert len(found) == math.ceil(len(bands) / 2)


def test_released_size() -> None:
    from mindspeed_mm.fsdp.models.ming.modeling_ming import BailingMMNativeForConditionalGeneration, tell_transformers

    tell_transformers()
    model, differing_entries = model_of_record(BailingMMNativeForConditionalGeneration, "ming-lite-omni-1.5")
    assert billions(model) == pytest.approx(18.2, rel=0.001)
    assert differing_entries == []


def test_a_pipeline_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="cannot be cut into stages"):
        loaded(released(root, "1.5")[0]).get_cut_points()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("use_bias", True, "llm_config.use_bias is True; known is False"),
        ("first_k_dense_replace", 1, "first_k_dense_replace is 1; known is 0"),
        ("rope_scaling", {"type": "video_rope"}, "type is 'video_rope'; known is '3D'"),
        ("head_dim", 64, "head_dim is 64; a rope_scaling of 3D needs 128"),
    ],
)
def test_what_no_release_has_is_refused(key: str, value: object, says: str) -> None:
    from mindspeed_mm.fsdp.models.ming.configuration_ming import BailingMoeConfig

    with pytest.raises(ValueError, match=says):
        BailingMoeConfig(**{"rope_scaling": {"type": "3D"}, key: value})


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {"ming fsdp2": Case("ming", 2, 2, 2)},
    slow={
        "ming ep2, recompute": Case("ming", 2, 2, 2, (EP, "features.recompute=true")),
        "ming tp2": Case("ming", 2, 1, 2, ("parallel.tensor_parallel_size=2",)),
        "ming ulysses2": Case("ming", 2, 1, 2, ("parallel.ulysses_parallel_size=2",)),
        "preview fsdp2": Case("preview", 2, 2, 2),
    },
    slow_faults={"own denominator": Fault("ming ep2, recompute", "rank's own denominator")},
)


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, made = tmp_path_factory.mktemp("plans"), {}
    for name in ("ming", "preview"):
        make_tiny_ming(folder / name / "model", preview=name == "preview")
        made[name] = str(make_tiny_run(folder / name, **FP64))
    return made


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
