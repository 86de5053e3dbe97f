"""Qwen3-Omni's talker against transformers: what it reads and tells is what `generate` gives it and hears of it; loss
and gradients by hand in fp64 on transformers' whole model; steps, adapters and exports from a released folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.core.batch import ENGINE_KEYS, IGNORED_LABEL
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.datasets.qwen3omni_talker.qwen3omni_talker_dataset import spoken_answer
from mindspeed_mm.fsdp.loss.router_aux import find_routers
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.data.facts import RowLook
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.packed_families import InDouble
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.released_layouts import release
from tests.helpers.runs import mm, train
from tests.helpers.tiny_omni_talker import CODEBOOKS, CODES, VOICES, pattern_of, write_omni_run, write_spoken_rows

import transformers  # isort: skip  (after the guard of the lines above)

FACTOR, LR = 0.3, 1e-3
FP64 = "parallel.fsdp_plan.param_dtype=fp64"


@cache
def run_of(root: Path) -> Path:
    return write_omni_run(
        root, training={"lr": LR, "lr_decay_style": "constant", "clip_grad": 0.5, "adam_fused": False}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("omni"))


def built_rows(run: Path, rows: Path | None = None) -> Any:
    rows = rows or run.parent / "rows" / "rows.jsonl"
    param = {
        "dataset_type": "qwen3_omni_talker",
        "basic_parameters": {"dataset": str(rows), "dataset_dir": str(rows.parent), "cutoff_len": 4096},
        "preprocess_parameters": {"model_name_or_path": str(run.parent / "model")},
    }
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def batch_of(dataset: Any, *numbers: int) -> dict[str, Any]:
    batch: dict[str, Any] = dataset.build_collator(CollateParam())([dataset[number] for number in numbers])
    return {key: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for key, v in batch.items()}


def loaded(run: Path) -> Any:
    arguments = ModelArguments(model_id="qwen3_omni_talker", model_name_or_path=str(run.parent / "model"))
    with InDouble():  # tables of angles, too
        model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    return model.train()


def reference(run: Path) -> Any:
    """transformers' whole model. Its talker counts positions of sounds beside pictures by a section that it lacks."""
    kind = transformers.Qwen3OmniMoeForConditionalGeneration
    with InDouble():
        model = kind.from_pretrained(run.parent / "model", dtype=torch.float64)
    model.set_experts_implementation("eager")  # grouped products have no fp64
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model.eval()


def of_thinker(batch: dict[str, Any]) -> dict[str, Any]:
    names = ("input_features", "feature_attention_mask", "pixel_values", "image_grid_thw")
    return {name: batch[name] for name in names if name in batch}


# --- what it reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_a_sequence_is_what_generating_reads(run: Path, tmp_path: Path, number: int) -> None:
    """The thinker is made to say the row's answer, and the talker speaks it; a row with what it spoke has the same
    logits at every code."""
    whole, dataset = reference(run), built_rows(run)
    batch = batch_of(dataset, number)
    row = json.loads((run.parent / "rows" / "rows.jsonl").read_text().splitlines()[number])
    tokenizer, config = dataset.processor.tokenizer, whole.config
    opening = torch.tensor([[config.im_start_token_id, config.assistant_token_id, tokenizer("\n")["input_ids"][0]]])
    prompt = torch.cat([batch["thinker_input_ids"], opening], dim=1)
    answer = [*tokenizer(row["messages"][-1]["content"])["input_ids"], config.im_end_token_id]
    first, others, spoken = [], [], []
    talker, predictor = whole.talker, whole.talker.code_predictor
    hooks = [
        talker.register_forward_hook(lambda _m, _i, output: first.append(output.logits[0, -1])),
        predictor.register_forward_hook(lambda _m, _i, output: others.append(output.logits[0, -1])),
    ]
    with (
        torch.no_grad(),
        keeping_double(),
        InDouble(),
        mock.patch.object(
            whole.code2wav, "chunked_decode", lambda codes, **_: spoken.append(codes) or torch.zeros(1, 1, 4)
        ),
    ):
        whole.generate(
            prompt, speaker=row["speaker"], attention_mask=torch.ones_like(prompt), **of_thinker(batch),
            thinker_eos_token_id=config.im_end_token_id, talker_do_sample=False, talker_max_new_tokens=7,
            talker_repetition_penalty=1.0, talker_top_k=None, talker_temperature=None, thinker_do_sample=False,
            thinker_prefix_allowed_tokens_fn=lambda _, ids: [answer[len(ids) - prompt.shape[1]]],
        )  # fmt: skip
    for hook in hooks:
        hook.remove()
    frames = spoken[0][0].T.tolist()
    assert len(frames) >= 3 and len({tuple(frame) for frame in frames}) > 1

    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"audio_codes": frames}) + "\n")
    for file in (run.parent / "rows").iterdir():
        if file.suffix != ".jsonl":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    again = batch_of(built_rows(run, tmp_path / "rows.jsonl"), 0)
    model = loaded(run).eval()
    with torch.no_grad(), keeping_double(), InDouble():
        output = model(**{key: value for key, value in again.items() if key not in ENGINE_KEYS})
    told = output.logits[0, again["frame_places"][0] - 1 :][: len(first)]
    torch.testing.assert_close(told[: len(frames)], torch.stack(first)[: len(frames)], rtol=1e-9, atol=1e-9)
    held = output.code_logits.flatten(0, 1)
    torch.testing.assert_close(held[: len(others)], torch.stack(others)[: len(held)], rtol=1e-9, atol=1e-9)
    assert len(others) >= (len(frames) - 1) * (CODEBOOKS - 1)


def test_other_voices_and_turns_are_heard(run: Path) -> None:
    dataset = built_rows(run)
    for number, voice in ((0, "ethan"), (1, "chelsie")):
        assert VOICES[voice] in dataset[number]["codec_ids"][:, 0]
    text = dataset.processor.tokenizer.decode(dataset[1]["input_ids"])
    assert text.count("user\n") == 2 and "system" not in text and "nine" not in text  # an earlier answer is not read


def test_what_is_told_of_a_row_is_of_the_talker(run: Path) -> None:
    """What `mm data check` counts without decoding is of the sequence that is trained, not of the thinker's."""
    dataset = built_rows(run)
    look = RowLook(dataset, decode=False, seed=0)
    for number in range(len(dataset)):
        sample, outline, facts = dataset[number], dataset.outline(number), look(number)
        assert dataset.measure(number) == outline.size
        assert outline.input_ids.tolist() == sample["input_ids"].tolist()
        assert outline.labels.tolist() == sample["labels"].tolist()
        places = [place for first, last in outline.media_spans for place in range(first, last)]
        assert places == sample["media_places"].tolist()
        trained = int((sample["labels"] != IGNORED_LABEL).sum())
        assert (facts.tokens, facts.trained, facts.shrunk) == (len(sample["input_ids"]), trained, False)


# --- loss and gradients -----------------------------------------------------------------------------------------------


def read_by_thinker(whole: Any, dataset: Any, numbers: list[int]) -> Iterator[tuple[int, Any, Any, Any]]:
    """Of each row its tokens up to the last word of the answer (1, K), their embeddings, and the states of the layer
    that the talker reads (1, K, D). The rows are one batch: the tower of sounds fills them up to the longest."""
    batch, config = batch_of(dataset, *numbers), whole.config
    ids = []
    for number in numbers:
        words = dataset.processor.tokenizer(dataset.row(number)["messages"][-1]["content"])["input_ids"]
        own = dataset[number]
        opening = own["input_ids"][np.flatnonzero(own["input_ids"] == config.im_start_token_id)[-1] :][:3]
        ids.append(torch.tensor([*own["thinker_input_ids"], *opening, *words]))
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    with torch.no_grad():
        told = whole.thinker(input_ids=rows, attention_mask=mask, output_hidden_states=True, **of_thinker(batch))
    kept = told.hidden_states[config.talker_config.accept_hidden_layer]
    for n, number in enumerate(numbers):
        own = slice(len(ids[n]))
        yield number, ids[n][None], told.hidden_states[0][n : n + 1, own], kept[n : n + 1, own]


def by_hand(whole: Any, dataset: Any, numbers: list[int]) -> torch.Tensor:
    """The loss of some rows, frame by frame, by transformers' modules and its own parts of a conversation."""
    talker, config = whole.talker, whole.config
    marks = config.talker_config
    first_losses, other_losses = [], []
    for number, ids, embeds, hidden in read_by_thinker(whole, dataset, numbers):
        row, batch = dataset.row(number), batch_of(dataset, number)
        thinker = config.thinker_config
        media = torch.isin(ids, torch.tensor([thinker.image_token_id, thinker.audio_token_id]))
        starts = (ids[0] == config.im_start_token_id).nonzero().flatten().tolist()
        parts, read = [], []
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            if ids[0, start + 1] == config.user_token_id:
                end = end or ids.shape[1]
                projected = torch.where(
                    media[0, start:end, None],
                    talker.hidden_projection(hidden[0, start:end]),
                    talker.text_projection(embeds[0, start:end]),
                )
                parts.append(projected)
                read.append(ids[0, start:end])
        special = torch.tensor([[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]])
        bos, eos, pad = talker.text_projection(whole.thinker.get_input_embeddings()(special)).chunk(3, dim=1)
        speaker = marks.speaker_id[row["speaker"].lower()]
        answer, answer_ids, trailing = whole._get_talker_assistant_parts(
            starts[-1], ids.shape[1], speaker, embeds, pad, bos, eos
        )
        codes = torch.tensor(row["audio_codes"])
        places, tables = [torch.cat([*parts, answer[0]])], talker.code_predictor.get_input_embeddings()
        for frame, code in enumerate(codes):
            sound = talker.get_input_embeddings()(code[0]) + sum(tables[n](code[n + 1]) for n in range(len(tables)))
            places.append((sound + (trailing[0, frame] if frame < trailing.shape[1] else pad[0, 0]))[None])
        talker_ids = torch.cat([*read, answer_ids[0], torch.full((len(codes),), config.tts_pad_token_id)])[None]
        inputs = torch.cat(places)[None]
        sounds = batch["feature_attention_mask"].sum(1) if "feature_attention_mask" in batch else None
        grids, everywhere = batch.get("image_grid_thw"), torch.ones_like(talker_ids)
        positions, _ = talker.get_rope_index(talker_ids, grids, None, everywhere, False, sounds, None)
        made = talker.model(inputs_embeds=inputs, position_ids=positions, use_cache=False).last_hidden_state[0]
        before = len(inputs[0]) - len(codes) - 1
        for frame, wanted in enumerate([*codes[:, 0].tolist(), marks.codec_eos_token_id]):
            logits = talker.codec_head(made[before + frame])
            first_losses.append(-logits.log_softmax(0)[wanted])
        for frame, code in enumerate(codes):
            told = [made[before + frame], talker.get_input_embeddings()(code[0])]
            for group in range(CODEBOOKS - 1):
                logits = talker.code_predictor(inputs_embeds=torch.stack(told)[None]).logits[0, -1]
                other_losses.append(-logits.log_softmax(0)[code[group + 1]])
                told.append(tables[group](code[group + 1]))
    return torch.stack(first_losses).mean() + FACTOR * torch.stack(other_losses).mean()


def test_loss_and_gradients_are_those_by_hand(run: Path) -> None:
    whole, model, dataset = reference(run), loaded(run), built_rows(run)
    with keeping_double(), InDouble():
        expected = by_hand(whole, dataset, [0, 1, 2])
        expected.backward()
        batch = batch_of(dataset, 0, 1, 2)
        found = model(**{k: v for k, v in batch.items() if k not in ENGINE_KEYS}, labels=batch["labels"]).loss
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    wanted = {f"talker.{name}": p.grad for name, p in whole.talker.named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-7, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


def test_two_steps_equal_a_bare_loop(run: Path) -> None:
    """Rows 0 and 1, then 2 and 3; a denominator for each term of a step."""
    with keeping_double(), InDouble():
        measured = train_steps(str(run), [FP64])
        whole, dataset = reference(run), built_rows(run)
        talker = whole.talker
        optimizer = torch.optim.AdamW(talker.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for step, rows in zip(measured, ([0, 1], [2, 3]), strict=True):
            loss = by_hand(whole, dataset, rows)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(talker.parameters(), 0.5)
            torch.testing.assert_close(torch.tensor(step["loss"]), loss.detach(), rtol=1e-9, atol=0, check_dtype=False)
            torch.testing.assert_close(torch.tensor(step["grad_norm"]), norm, rtol=1e-8, atol=0, check_dtype=False)
            optimizer.step()
            optimizer.zero_grad()
        last = measured[-1]["weights"]
        for name, parameter in talker.named_parameters():
            torch.testing.assert_close(last[f"talker.{name}"].double(), parameter.detach(), rtol=1e-8, atol=1e-9)


def steps_of(yaml: str, words: list[str]) -> Any:
    with keeping_double(), InDouble():
        return train_steps(yaml, [FP64, *words])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first row has media, the second has none."""
    made = write_omni_run(tmp_path_factory.mktemp("uneven"), training={"lr": LR, "lr_decay_style": "constant"})
    rows = made.parent / "rows" / "rows.jsonl"
    first, second, *others = [json.loads(line) for line in rows.read_text().splitlines()]
    bare = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two three"}]
    second |= {"messages": bare, "images": [], "audios": []}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (first, second, *others)))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], ["parallel.expert_parallel_size=2"], ["parallel.tensor_parallel_size=2", "training.micro_batch_size=2"]],
)
def test_two_ranks_equal_one_process(uneven: Path, words: list[str]) -> None:
    """A rank without media in a step runs the thinker's towers all the same."""
    expected = steps_of(str(uneven), [])
    for measured in run_ranks(2, steps_of, str(uneven), ["training.micro_batch_size=1", *words]):
        compare_steps(expected, measured, 1e-8)


def test_the_balance_of_experts_is_that_of_the_talker(run: Path) -> None:
    model = loaded(run)
    names = {module: name for name, module in model.named_modules()}
    assert sorted(names[module] for module, _ in find_routers(model)) == [
        f"talker.model.layers.{n}.mlp.gate" for n in (0, 1)
    ]


# --- folders ----------------------------------------------------------------------------------------------------------


def test_the_small_folder_has_the_released_keys(run: Path) -> None:
    stored = load_file(run.parent / "model" / "model.safetensors")
    assert {pattern_of(key) for key in stored} == set(release("qwen3-omni-30b-a3b").shapes())


def exported(run: Path, folder: Path, out: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stored tensors before and after."""
    said = mm("export", folder, out, *words)
    assert said.code == 0, said.err
    before = run.parent / "model"
    assert json.loads((out / "config.json").read_text()) == json.loads((before / "config.json").read_text())
    return load_file(before / "model.safetensors"), load_file(out / "model.safetensors")


def check_only_talker_changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The names of what was trained."""
    assert {k: (v.dtype, v.shape) for k, v in before.items()} == {k: (v.dtype, v.shape) for k, v in after.items()}
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert all(key.startswith("talker.") for key in changed)
    return changed


def test_an_export_has_every_part_and_only_the_talker_changed(run: Path, tmp_path: Path) -> None:
    train(run, tmp_path / "run")
    before, after = exported(run, tmp_path / "run", tmp_path / "exported")
    changed = check_only_talker_changed(before, after)
    assert {"talker.codec_head.weight", "talker.model.layers.0.mlp.experts.0.up_proj.weight"} <= changed
    assert any("code_predictor" in key for key in changed)
    again = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )[1]
    assert not any(again.values()), again


def test_adapters_merge_into_what_is_released(run: Path, tmp_path: Path) -> None:
    targets = "training.lora.target_modules=[q_proj, k_proj, v_proj]"
    lora = ["training.lora.enable=true", "training.lora.rank=2", targets, "training.lr=0.1", "training.train_iters=1"]
    train(run, tmp_path / "run", *lora)
    before, after = exported(run, tmp_path / "run", tmp_path / "merged", "--merge")
    changed = check_only_talker_changed(before, after)
    assert changed and all("_proj" in key for key in changed)


# --- rows that do not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"audio_codes": None}, "no codec here makes them"),
        ({"audio_codes": [[1, 2, 3, CODES]]}, f"from 0 to {CODES - 1}"),
        ({"speaker": "nobody"}, "'nobody' is not a voice"),
        ({"speaker": None}, "names no voice"),
        ({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": " "}], "images": [],
          "audios": []}, "has no words"),
    ],
)  # fmt: skip
def test_bad_rows_are_told(run: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    rows = write_spoken_rows(tmp_path)
    rows.write_text(json.dumps(json.loads(rows.read_text().splitlines()[0]) | change) + "\n")
    with pytest.raises(DataError, match=says):
        built_rows(run, rows)[0]


def test_media_of_other_turns_are_refused(run: Path, tmp_path: Path) -> None:
    rows = write_spoken_rows(tmp_path, ("image",))
    row = json.loads(rows.read_text().splitlines()[0])
    row["messages"] = [{"role": "system", "content": "<image>"}, {"role": "user", "content": "one"}, row["messages"][1]]
    rows.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="not the user's"):
        built_rows(run, rows)[0]


def test_a_conversation_has_a_question_and_ends_with_an_answer(run: Path) -> None:
    config = built_rows(run)._config
    start, user, model, end = config.im_start_token_id, config.user_token_id, config.assistant_token_id, 5
    codes = np.zeros((2, CODEBOOKS), dtype=np.int64)
    with pytest.raises(DataError, match="no turn is the user's"):
        spoken_answer(config, np.array([start, model, end, 9]), [9], codes, 47)
    with pytest.raises(DataError, match="last turn is not the model's"):
        spoken_answer(config, np.array([start, user, end, 9]), [9], codes, 47)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("parallel.pipeline_parallel_size=2", "states no cut points"),
        ("parallel.ulysses_parallel_size=2", "no decoder whose attention"),
        ("data.dataset_param.basic_parameters.packing=true", "is not packed"),
        ("model.model_id=null", "which model.model_id: qwen3_omni_talker alone is trained on"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, word: str, says: str) -> None:
    said = mm("check", run, word, "training.gradient_accumulation_steps=2", "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out + said.err
