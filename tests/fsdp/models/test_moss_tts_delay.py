"""MOSS-TTS with a delay pattern against its published fine-tuning: sequences, losses and gradients by hand in fp64, on
transformers' blocks alone; a denominator for each loss, however a step is split; rows and plans that do not fit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.core.batch import ENGINE_KEYS
from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.code_heads import WithCodeHeads
from mindspeed_mm.fsdp.loss.objectives import ModelLoss, build_objective
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.moss_tts_delay.modeling_moss_tts_delay import MossTTSDelayModel
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
from tests.helpers.runs import mm, train
from tests.helpers.tiny_speech import MOSS_CODEBOOKS, MOSS_CODES, MOSS_MARKS

import transformers  # isort: skip  (after the guard of the lines above)

ROW = ROWS["moss_tts_delay"]
BOOKS = [f"codebook_{number}" for number in range(1, MOSS_CODEBOOKS + 1)]


@cache
def run_of(root: Path) -> Path:
    return write_run(ROW, root)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("moss"))


def built_rows(run: Path, rows: Path | None = None, **basic: Any) -> Any:
    param = dataset_of(ROW, rows or run.parent / "rows" / "rows.jsonl", run.parent / "model")
    param["basic_parameters"] |= basic
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def row_of(run: Path, number: int) -> dict[str, Any]:
    return json.loads((run.parent / "rows" / "rows.jsonl").read_text().splitlines()[number])  # type: ignore[no-any-return]


def batch_of(run: Path, *numbers: int, **basic: Any) -> dict[str, Any]:
    dataset = built_rows(run, **basic)
    return dataset.build_collator(CollateParam())([dataset[number] for number in numbers])


def loaded(run: Path) -> Any:
    arguments = ModelArguments(model_name_or_path=str(run.parent / "model"))
    with InDouble():  # tables of angles, too
        model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    return model.train()


# --- sequences --------------------------------------------------------------------------------------------------------

TOLD = """\
<|im_start|>user
<user_inst>
- Reference(s):
{voices}
- Instruction:
None
- Tokens:
None
- Quality:
None
- Sound Event:
None
- Ambient Sound:
None
- Language:
English
- Text:
{text}
</user_inst><|im_end|>
<|im_start|>assistant
"""


def marked(codes: list[list[int]], slot: str, delay: str) -> tuple[str, list[list[int]]]:
    """A sound as text, and what stands beside its tokens, a column for each codebook."""
    places = len(codes) + MOSS_CODEBOOKS - 1
    beside = [[-1] * MOSS_CODEBOOKS for _ in range(places + 2)]
    for number, frame in enumerate(codes):
        for book, code in enumerate(frame):
            beside[1 + number + book][book] = code
    told = [MOSS_MARKS[f"audio_{slot}_token_id"]] * len(codes)
    told += [MOSS_MARKS[f"audio_{delay}_token_id"]] * (MOSS_CODEBOOKS - 1)
    return "".join(["<|audio_start|>", *told, "<|audio_end|>"]), beside


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_sequence_is_that_of_the_published_fine_tuning(run: Path, number: int) -> None:
    """Without a voice, with one, and with two of three speakers."""
    row, dataset = row_of(run, number), built_rows(run)
    given = {0: None, 1: [row.get("ref_audio_codes")], 2: row.get("reference_audio_codes")}[number]
    sounds = [marked(codes, "user_slot", "user_slot") for codes in given or () if codes]
    named = [f"[S{n}]:\nSOUND" for n, codes in enumerate(given or (), 1) if codes]
    asked = TOLD.format(voices="\n".join(named) if given else "None", text=row["text"])
    answer, beside = marked(row["audio_codes"], "assistant_gen_slot", "assistant_delay_slot")

    def ids(text: str) -> list[int]:
        return dataset.processor(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    silent = [-1] * MOSS_CODEBOOKS
    pieces = asked.split("SOUND")
    texts, codes = ids(pieces[0]), [silent] * len(ids(pieces[0]))
    for (text, places), piece in zip(sounds, pieces[1:], strict=True):
        texts, codes = [*texts, *ids(text), *ids(piece)], [*codes, *places, *[silent] * len(ids(piece))]
    begin = len(texts)
    end = ids("<|im_end|>\n")
    texts, codes = [*texts, *ids(answer), *end], [*codes, *beside, *[silent] * len(end)]
    sample = dataset[number]
    assert sample["input_ids"].tolist() == texts
    assert sample["codec_ids"].tolist() == codes
    assert sample["labels"].tolist() == [-100] * begin + texts[begin:]
    assert dataset.measure(number).tokens == len(texts)


def test_places_that_predict_stand_before_their_codes_padded_and_packed(run: Path) -> None:
    """Codes of given voices are read, and not trained."""
    for packing in (False, True):
        batch = batch_of(run, 1, 2, packing=packing)
        codes, labels = batch["codec_ids"].flatten(0, 1), batch["labels"].flatten()
        found = {(int(p) + 1, g, int(t)) for p, each in zip(batch["code_places"], batch["code_targets"], strict=True)
                 for g, t in enumerate(each) if t != -100}  # fmt: skip
        expected = {(place, book, int(codes[place, book])) for place in range(len(codes))
                    for book in range(MOSS_CODEBOOKS) if codes[place, book] >= 0 and labels[place] != -100}  # fmt: skip
        assert found == expected
        assert len(found) == MOSS_CODEBOOKS * sum(len(row_of(run, n)["audio_codes"]) for n in (1, 2))
        assert (codes >= 0).sum() > len(found)


# --- losses and gradients ---------------------------------------------------------------------------------------------


def by_hand(model: Any, run: Path, numbers: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The published loss of rows, place by place; parameters by the names they have here."""
    w = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    settings = transformers.Qwen3Config(**model.config.language_config.to_dict() | {"vocab_size": 8})
    blocks = transformers.Qwen3Model._from_config(settings, dtype=torch.float64, attn_implementation="eager").train()
    prefix = "language_model."
    own = {name.removeprefix(prefix): t for name, t in model.state_dict().items() if name.startswith(prefix)}
    own.pop("embed_tokens.weight")
    assert not blocks.load_state_dict(own, strict=False).unexpected_keys
    losses: list[list[torch.Tensor]] = [[] for _ in range(MOSS_CODEBOOKS + 1)]
    dataset = built_rows(run)
    for number in numbers:
        sample, places = dataset[number], []
        for word, codes in zip(sample["input_ids"], sample["codec_ids"].tolist(), strict=True):
            here = w[f"{prefix}embed_tokens.weight"][int(word)]
            for book, code in enumerate(codes):
                here = here + w[f"emb_ext.{book}.weight"][code if code >= 0 else MOSS_CODES]
            places.append(here)
        hidden = blocks(inputs_embeds=torch.stack(places)[None], use_cache=False).last_hidden_state[0]
        for place in range(1, len(places)):
            if sample["labels"][place] == -100:
                continue
            logits = w["lm_heads.0.weight"] @ hidden[place - 1]
            losses[0].append(-logits.log_softmax(0)[int(sample["labels"][place])])
            for book, code in enumerate(sample["codec_ids"][place].tolist()):
                if code >= 0:
                    logits = w[f"lm_heads.{book + 1}.weight"][:MOSS_CODES] @ hidden[place - 1]
                    losses[book + 1].append(-logits.log_softmax(0)[code])
    loss = torch.stack([torch.stack(each).mean() for each in losses]).mean()
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in w.items() if tensor.grad is not None}
    gradients |= {f"{prefix}{name}": q.grad for name, q in blocks.named_parameters() if q.grad is not None}
    return loss.detach(), gradients


@pytest.fixture(scope="module")
def expected(run: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with InDouble():
        return by_hand(loaded(run), run, (0, 1, 2))


def compare(found: torch.Tensor, model: Any, expected: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    loss, gradients = expected
    torch.testing.assert_close(found.detach(), loss, rtol=1e-10, atol=0)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-7, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def objective_of(model: Any, loss_type: str | None = None) -> WithCodeHeads:
    head = build_head_loss(model, "lm_heads.0", FeatureArguments())
    return WithCodeHeads(build_objective(loss_type, model, head), MOSS_CODEBOOKS)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", [False, True])
def test_loss_and_gradients_are_those_by_hand(run: Path, expected: Any, packing: bool) -> None:
    model = loaded(run)
    objective = objective_of(model, "dict")
    batch = objective.prepare(batch_of(run, 0, 1, 2, packing=packing))
    counts = objective.count([batch])
    with InDouble():
        terms = objective.terms(model, batch)
        loss = sum((terms[name] / counts[name] for name in terms), torch.zeros(()))
        loss.backward()
    frames = 4 + 5 + 6
    # Beside frames: the marks around a sound, those of delay, the end of the turn and its line.
    assert counts == {"loss": frames + 3 * (2 + MOSS_CODEBOOKS - 1 + 2), **dict.fromkeys(BOOKS, frames)}
    compare(loss, model, expected)


def test_the_models_own_loss_is_the_same(run: Path, expected: Any) -> None:
    model = loaded(run)
    objective = ModelLoss(model)
    batch = objective.prepare(batch_of(run, 0, 1, 2))
    with InDouble():
        loss = objective.terms(model, batch)["loss"] / objective.count([batch])["loss"]
        loss.backward()
    compare(loss, model, expected)


def steps_of(yaml: str, words: list[str]) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, ["parallel.fsdp_plan.param_dtype=fp64", "training.train_iters=1", *words])


def test_every_loss_has_a_denominator_of_its_own(run: Path) -> None:
    """One micro-batch of two rows, two of one row, and one packed row: the same step."""
    basic, one = "data.dataset_param.basic_parameters", "training.micro_batch_size=1"
    two = f"{basic}.max_samples=2"
    whole = steps_of(str(run), [two])
    for words in (
        [two, one, "training.gradient_accumulation_steps=2"],
        [two, one, f"{basic}.packing=true", f"{basic}.cutoff_len=324", "data.dataloader_param.drop_last=false"],
    ):
        compare_steps(whole, steps_of(str(run), words), 1e-9)


def test_the_log_has_every_loss_by_name(run: Path, tmp_path: Path) -> None:
    train(run, tmp_path / "run", "features.loss_cfg.loss_type=dict", "training.train_iters=1")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [each for each in lines if "loss" in each]
    named = {name: value for name, value in line.items() if name.startswith("loss/")}
    assert sorted(named) == sorted(["loss/loss", *(f"loss/{name}" for name in BOOKS)])
    assert sum(named.values()) == pytest.approx(line["loss"], rel=1e-6)


@pytest.mark.slow
def test_two_tensor_ranks_equal_one_process(run: Path) -> None:
    expected = steps_of(str(run), [])
    for measured in run_ranks(2, steps_of, str(run), ["parallel.tensor_parallel_size=2"]):
        compare_steps(expected, measured, 1e-8)


def test_flops_are_those_that_torch_counts(run: Path) -> None:
    batch = batch_of(run, 1)
    config = transformers.AutoConfig.from_pretrained(run.parent / "model")
    model = MossTTSDelayModel._from_config(config, attn_implementation="eager").train()
    count = count_flops(model, head_on_labels=False)
    assert count is not None and not count.uncounted
    inputs = {key: value for key, value in batch.items() if key not in ENGINE_KEYS}
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.bmm: batched_product}) as counter:
        model(**inputs, labels=batch["labels"]).loss.backward()
    assert count.of(count.lengths(batch)).full.model == counter.get_total_flops()


# --- names, rows and plans --------------------------------------------------------------------------------------------


def test_names_shapes_and_number_of_parameters_are_the_released_ones() -> None:
    model, differing_entries = model_of_record(MossTTSDelayModel, "moss-tts-8b")
    assert differing_entries == []
    assert billions(model) == pytest.approx(8.46, rel=0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"audio_codes": None}, "prepare_data.py"),
        ({"audio_codes": [[1, 2]]}, "no frames of 3 numbers"),
        ({"audio_codes": [[1, 2, MOSS_CODES]]}, f"from 0 to {MOSS_CODES - 1}"),
        ({"text": None, "language": None}, "nothing to say"),
        ({"text": " ", "language": "English"}, "nothing to say"),
        ({"text": ["seven"]}, "is not text"),
        ({"audio_codes": 7}, "audio_codes are no frames of 3 numbers"),
        ({"ref_audio_codes": 7}, "ref_audio_codes are no frames of 3 numbers"),
        ({"text": "a <|audio|>"}, "stands for a sound"),
        ({"ref_audio": "voice.wav"}, "a sound without codes"),
        ({"ref_audio_codes": [[1, 2]]}, "ref_audio_codes are no frames of 3 numbers"),
    ],
)
def test_bad_rows_are_told(run: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row_of(run, 0) | change) + "\n")
    with pytest.raises(DataError, match=says):
        built_rows(run, tmp_path / "rows.jsonl")[0]


def test_another_number_of_codebooks_is_refused(run: Path) -> None:
    assert len(built_rows(run, n_vq=MOSS_CODEBOOKS)) == 4
    with pytest.raises(ConfigError, match="16, and the model has 3 codebooks"):
        built_rows(run, n_vq=16)


def test_special_tokens_in_rows_are_text_unless_they_are_asked_for(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row_of(run, 0) | {"text": "a <|audio_start|>"}) + "\n")
    dataset = built_rows(run, tmp_path / "rows.jsonl")
    start = dataset.processor.convert_tokens_to_ids("<|audio_start|>")
    assert dataset[0]["input_ids"].tolist().count(start) == 1  # that of the answer
    param = dataset_of(ROW, tmp_path / "rows.jsonl", run.parent / "model")
    param["preprocess_parameters"]["split_special_tokens"] = False
    with pytest.raises(DataError, match="begins a sound"):
        build_mm_dataset(DatasetParam.model_validate(param))[0][0]


def test_rows_may_be_named_by_their_folder_key_alone(run: Path) -> None:
    """As MindSpeed-MM's own file does."""
    rows = run.parent / "rows" / "rows.jsonl"
    assert len(built_rows(run, dataset=None, dataset_dir=str(rows))) == len(rows.read_text().splitlines())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("parallel.pipeline_parallel_size=2", "cannot be cut"),
        ("parallel.ulysses_parallel_size=2", "no decoder whose attention"),
        ("features.loss_cfg.loss_type=per_sample_loss", "mean over its own labels"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, word: str, says: str) -> None:
    said = mm("check", run, word, "training.gradient_accumulation_steps=2", "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out


def test_losses_by_name_are_of_models_that_have_them() -> None:
    config = transformers.Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8, vocab_size=8
    )
    model = transformers.Qwen3ForCausalLM(config)
    with pytest.raises(ConfigError, match="no losses by name"):
        build_objective("dict", model, build_head_loss(model, "lm_head", FeatureArguments()))


def test_a_folder_of_another_model_and_one_without_a_template_are_refused(run: Path, tmp_path: Path) -> None:
    for name, change, says in (
        ("config.json", {"model_type": "qwen3"}, "not one of MOSS-TTS"),
        ("tokenizer_config.json", {"chat_template": None}, "no chat template"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for path in (run.parent / "model").iterdir():
            if path.name != "chat_template.jinja" or name == "config.json":
                (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
        param = dataset_of(ROW, run.parent / "rows" / "rows.jsonl", folder)
        with pytest.raises(MMError, match=says):
            build_mm_dataset(DatasetParam.model_validate(param))
