"""Qwen3-TTS against its published fine-tuning: sequences, spectra, loss and gradients by hand in fp64, on transformers'
blocks alone; rows that do not fit and plans that it cannot have are told."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.core.batch import ENGINE_KEYS
from mindspeed_mm.core.errors import DataError, MMError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.qwen3tts.qwen3tts_dataset import speaker_mel
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.language_objective import WithCodePredictor
from mindspeed_mm.fsdp.loss.objectives import ModelLoss, build_objective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.qwen3tts.modeling_qwen3tts import Qwen3TTSForConditionalGeneration
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.tools.flops_tool.reading import count_flops
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.counted_flops import batched_product
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.released_rows import ROWS, dataset_of, write_run
from tests.helpers.runs import mm
from tests.helpers.tiny_speech import CODEBOOKS, CODES, MARKS

import transformers  # isort: skip  (after the guard of the lines above)

FACTOR = 0.3


@cache
def run_of(root: Path) -> Path:
    return write_run(ROWS["qwen3tts"], root)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("qwen3tts"))


def built_rows(run: Path, rows: Path | None = None, **basic: Any) -> Any:
    param = dataset_of(ROWS["qwen3tts"], rows or run.parent / "rows" / "rows.jsonl", run.parent / "model")
    param["basic_parameters"] |= basic
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def batch_of(run: Path, *numbers: int) -> dict[str, Any]:
    dataset = built_rows(run)
    return dataset.build_collator(CollateParam())([dataset[number] for number in numbers])


def loaded(run: Path) -> Any:
    arguments = ModelArguments(model_name_or_path=str(run.parent / "model"))
    with InDouble():  # tables of angles, too
        model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    return model.train()


# --- sequences and spectra --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("voice", ["sound", "named", "none"])
def test_a_sequence_is_that_of_the_published_fine_tuning(run: Path, tmp_path: Path, voice: str) -> None:
    row = json.loads((run.parent / "rows" / "rows.jsonl").read_text().splitlines()[2])
    if voice != "sound":
        row.pop("ref_audio")
    if voice == "named":
        row["speaker"] = "Vera"
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    dataset = built_rows(run, tmp_path / "rows.jsonl", dataset_dir=str(run.parent / "rows"))
    sample, tokenizer = dataset[0], dataset.processor
    pad, bos, eos = (tokenizer.convert_tokens_to_ids(f"<|{each}|>") for each in ("endoftext", "im_start", "im_end"))
    role, text = tokenizer("<|im_start|>assistant\n")["input_ids"], tokenizer(row["text"])["input_ids"]
    frames = row["audio_codes"]
    mark = {name.removeprefix("codec_").removesuffix("_id"): number for name, number in MARKS.items()}
    of_voice = {"sound": [-2], "named": [70], "none": []}[voice]
    places = [(word, -1) for word in role]
    head = [MARKS["codec_nothink_id"], mark["think_bos"], mark["think_eos"], *of_voice]
    places += [(pad, each) for each in head] + [(bos, mark["pad"])]
    places += [(word, mark["pad"]) for word in text] + [(eos, mark["pad"]), (pad, mark["bos"])]
    begins = len(places)
    places += [(pad, frame[0]) for frame in frames] + [(pad, mark["eos_token"])]
    assert sample["input_ids"].tolist() == [word for word, _ in places]
    assert sample["codec_ids"][:, 0].tolist() == [code for _, code in places]
    others = np.full((len(places), CODEBOOKS - 1), -1)
    others[begins : begins + len(frames)] = np.array(frames)[:, 1:]
    assert sample["codec_ids"][:, 1:].tolist() == others.tolist()
    assert sample["labels"].tolist() == [-100] * begins + [frame[0] for frame in frames] + [mark["eos_token"]]
    assert dataset.measure(0).tokens == len(places)
    assert ("speaker_features" in sample) == (voice == "sound")


def test_the_spectrum_of_a_voice_is_the_published_one() -> None:
    """By torch's Fourier transform and Slaney's mel scale: linear up to 1 kHz, 27 steps an octave-like 6.4 above."""
    draw = np.random.default_rng(0)
    sound = (0.3 * draw.standard_normal(5000)).astype(np.float32)
    padded = F.pad(torch.from_numpy(sound).double()[None, None], (384, 384), mode="reflect")[0]
    window = torch.hann_window(1024, dtype=torch.float64)
    spectrum = torch.stft(padded, 1024, 256, 1024, window, center=False, return_complex=True)
    magnitude = (spectrum.real**2 + spectrum.imag**2 + 1e-9).sqrt()[0]

    def hertz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)

    highest = 15 + math.log(12.0) / (math.log(6.4) / 27)
    borders = [hertz(highest * number / 17) for number in range(18)]
    bands = torch.zeros(16, 513, dtype=torch.float64)
    for band in range(16):
        low, peak, high = borders[band : band + 3]
        for number in range(513):
            at = number * 24000 / 1024
            bands[band, number] = max(0.0, min((at - low) / (peak - low), (high - at) / (high - peak)))
        bands[band] *= 2 / (high - low)
    expected = (bands @ magnitude).clamp(min=1e-5).log().T
    torch.testing.assert_close(torch.from_numpy(speaker_mel(sound, 16)).double(), expected, rtol=1e-5, atol=1e-5)


# --- loss and gradients -----------------------------------------------------------------------------------------------


def blocks_of(model: Any, config: Any, *, in_three: bool) -> Any:
    """transformers' blocks with these weights: Qwen3-VL's, whose rotary embedding is in three parts, or Qwen3's."""
    sizes = {key: getattr(config, key) for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps",
    )}  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}  # as published, where config.json has none
    if in_three:
        rope |= {"rope_theta": 1000000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        kind, config_kind = transformers.Qwen3VLTextModel, transformers.Qwen3VLTextConfig
    else:
        kind, config_kind = transformers.Qwen3Model, transformers.Qwen3Config
    settings = config_kind(**sizes, vocab_size=8, rope_parameters=rope, attn_implementation="eager")
    made = kind._from_config(settings, dtype=torch.float64).train()
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("layers.", "norm."))}
    assert not made.load_state_dict(own, strict=False).unexpected_keys
    return made


def by_hand(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The published loss of a batch, place by place and frame by frame; parameters by the names they have here."""
    w = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    t, p = "talker.", "talker.code_predictor."
    talker = blocks_of(model.talker.model, model.config.talker_config, in_three=True)
    predictor = blocks_of(
        model.talker.code_predictor.model, model.config.talker_config.code_predictor_config, in_three=False
    )
    voices = iter(batch["speaker_features"].double().split(batch["speaker_frames"].tolist()))
    first_losses, other_losses = [], []
    for row, mask in enumerate(batch["attention_mask"]):
        length = int(mask.sum())
        places = []
        for place in range(length):
            word = w[f"{t}model.text_embedding.weight"][batch["input_ids"][row, place]]
            inner = F.linear(word, w[f"{t}text_projection.linear_fc1.weight"], w[f"{t}text_projection.linear_fc1.bias"])
            inner = inner * torch.sigmoid(inner)
            here = F.linear(inner, w[f"{t}text_projection.linear_fc2.weight"], w[f"{t}text_projection.linear_fc2.bias"])
            first, *others = batch["codec_ids"][row, place].tolist()
            if first >= 0:
                here = here + w[f"{t}model.codec_embedding.weight"][first]
            if first == -2:
                here = here + model.speaker_encoder(next(voices)[None])[0].detach()
            for number, code in enumerate(others):
                if code >= 0:
                    here = here + w[f"{p}model.codec_embedding.{number}.weight"][code]
            places.append(here)
        hidden = talker(inputs_embeds=torch.stack(places)[None], use_cache=False).last_hidden_state[0]
        for place in range(1, length):
            label = batch["labels"][row, place]
            if label != -100:
                logits = w[f"{t}codec_head.weight"] @ hidden[place - 1]
                first_losses.append(-logits.log_softmax(0)[label])
            first, *others = batch["codec_ids"][row, place].tolist()
            if others[0] < 0:
                continue
            told = [hidden[place - 1], w[f"{t}model.codec_embedding.weight"][first]]
            for number, code in enumerate(others):
                given = F.linear(
                    torch.stack(told), w[f"{p}small_to_mtp_projection.weight"], w[f"{p}small_to_mtp_projection.bias"]
                )
                made = predictor(inputs_embeds=given[None], use_cache=False).last_hidden_state[0, -1]
                logits = w[f"{p}lm_head.{number}.weight"] @ made
                other_losses.append(-logits.log_softmax(0)[code])
                told.append(w[f"{p}model.codec_embedding.{number}.weight"][code])
    loss = torch.stack(first_losses).mean() + FACTOR * torch.stack(other_losses).mean()
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in w.items() if tensor.grad is not None}
    for blocks, prefix in ((talker, f"{t}model."), (predictor, f"{p}model.")):
        gradients |= {f"{prefix}{name}": q.grad for name, q in blocks.named_parameters() if q.grad is not None}
    return loss.detach(), gradients


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def expected(run: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with InDouble():
        return by_hand(loaded(run), batch_of(run, 0, 2))


def compare(found: torch.Tensor, model: Any, expected: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    loss, gradients = expected
    torch.testing.assert_close(found.detach(), loss, rtol=1e-10, atol=0)
    own = gradients_of(model)
    assert own.keys() == gradients.keys()
    assert not any(name.startswith("speaker_encoder") for name in own)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-7, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def test_loss_and_gradients_are_those_by_hand(run: Path, expected: Any) -> None:
    model = loaded(run)
    head = build_head_loss(model, "talker.codec_head", FeatureArguments())
    objective = WithCodePredictor(build_objective(None, model, head), model.code_loss_factor)  # type: ignore[arg-type]
    batch = objective.prepare(batch_of(run, 0, 2))
    counts = objective.count([batch])
    with InDouble():
        terms = objective.terms(model, batch)
        loss = sum((terms[name] / counts[name] for name in terms), torch.zeros(()))
        loss.backward()
    assert counts == {"loss": 5 + 7 + 2, "code_predictor": (5 + 7) * (CODEBOOKS - 1)}
    compare(loss, model, expected)


def test_the_models_own_loss_is_the_same(run: Path, expected: Any) -> None:
    model = loaded(run)
    objective = ModelLoss(model)
    batch = objective.prepare(batch_of(run, 0, 2))
    with InDouble():
        loss = objective.terms(model, batch)["loss"] / objective.count([batch])["loss"]
        loss.backward()
    compare(loss, model, expected)


def test_a_step_has_a_denominator_for_each_term(run: Path) -> None:
    """Two micro-batches of one sample are one of two, whose frames are not as many."""
    words = ["parallel.fsdp_plan.param_dtype=fp64", "training.train_iters=1"]
    parts = ["training.micro_batch_size=1", "training.gradient_accumulation_steps=2"]
    with keeping_double(), InDouble():
        compare_steps(train_steps(str(run), words), train_steps(str(run), [*words, *parts]), 1e-9)


def steps_of(yaml: str, words: list[str]) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, ["parallel.fsdp_plan.param_dtype=fp64", *words])


@pytest.mark.slow
def test_two_tensor_ranks_equal_one_process(run: Path) -> None:
    expected = steps_of(str(run), [])
    for measured in run_ranks(2, steps_of, str(run), ["parallel.tensor_parallel_size=2"]):
        compare_steps(expected, measured, 1e-8)


def test_flops_are_those_that_torch_counts(run: Path, tmp_path: Path) -> None:
    """One row without a voice: forward and backward of every layer, and of the code predictor frame by frame."""
    row = json.loads((run.parent / "rows" / "rows.jsonl").read_text().splitlines()[1])
    (tmp_path / "rows.jsonl").write_text(json.dumps({key: row[key] for key in ("text", "audio_codes")}) + "\n")
    dataset = built_rows(run, tmp_path / "rows.jsonl")
    batch = dataset.build_collator(CollateParam())([dataset[0]])
    config = transformers.AutoConfig.from_pretrained(run.parent / "model")
    model = Qwen3TTSForConditionalGeneration._from_config(config, attn_implementation="eager").train()
    count = count_flops(model, head_on_labels=False)
    assert count is not None and all(name.startswith("speaker_encoder") for name in count.uncounted)
    inputs = {key: value for key, value in batch.items() if key not in ENGINE_KEYS}
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: batched_product}) as counter:
        model(**inputs, labels=batch["labels"]).loss.backward()
    assert count.of(count.lengths(batch)).full.model == counter.get_total_flops()


# --- names and rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "published"), [("qwen3-tts-0.6b", 0.9), ("qwen3-tts-1.7b", 1.9)])
def test_names_shapes_and_number_of_parameters_are_the_released_ones(size: str, published: float) -> None:
    model, differing_entries = model_of_record(Qwen3TTSForConditionalGeneration, size)
    assert differing_entries == []
    assert billions(model) == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"audio_codes": None}, "no codec here makes them"),
        ({"audio_codes": [[1, 2]]}, "no frames of 4 numbers"),
        ({"audio_codes": [[1, 2, 3, 4], [1]]}, "no frames of 4 numbers"),
        ({"audio_codes": [[1, 2, 3, CODES]]}, f"from 0 to {CODES - 1}"),
        ({"text": ""}, "is not text"),
        ({"ref_audio": "", "speaker": "nobody"}, "not a voice of this model"),
        ({"ref_audio": "missing.wav"}, "missing.wav"),
    ],
)
def test_bad_rows_are_told(run: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    row = json.loads((run.parent / "rows" / "rows.jsonl").read_text().splitlines()[0]) | change
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=says):
        built_rows(run, tmp_path / "rows.jsonl", dataset_dir=str(run.parent / "rows"))[0]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("parallel.pipeline_parallel_size=2", "states no cut points"),
        ("parallel.ulysses_parallel_size=2", "no decoder whose attention"),
        ("data.dataset_param.basic_parameters.packing=true", "is not packed"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, word: str, says: str) -> None:
    said = mm("check", run, word, "training.gradient_accumulation_steps=2", "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out


def test_a_voice_model_hears_nobody(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (run.parent / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tts_model_type": "custom_voice"}))
    param = dataset_of(ROWS["qwen3tts"], run.parent / "rows" / "rows.jsonl", folder)
    with pytest.raises(MMError, match="hears no voices"):
        build_mm_dataset(DatasetParam.model_validate(param))[0][0]
