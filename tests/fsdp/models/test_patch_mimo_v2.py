"""A worked pattern of a family's tests, on MiMo-V2-Flash: the model alone, its data, two steps of a run.

transformers has the whole model. The suite changes how it computes: attention of packed rows with sinks and windows by
a kernel of its own, experts in grouped products. The reference is transformers' own model in fp64, eager, called row
by row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.packed_families import WINDOW
from tests.helpers.packed_more_families import MORE
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_processors import build_processor
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-12
FP64 = "parallel.fsdp_plan={param_dtype: fp64, reduce_dtype: fp64}"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo")
    tokenizer = build_processor("qwen3")
    config = MORE["mimo_v2_flash"].config()
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    torch.manual_seed(0)
    model = transformers.MiMoV2FlashForCausalLM._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    make_rows(folder, count=8, images=(0,))
    return make_tiny_run(folder)


def reference(yaml: Path) -> Any:
    return transformers.MiMoV2FlashForCausalLM.from_pretrained(
        yaml.parent / "model", dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def samples(yaml: Path) -> list[dict[str, Any]]:
    return list(build_mm_dataset(load_config(yaml).arguments.data.dataset_param)[0])


def loss_of(model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Σ −log p(label) / number of labels, over all rows: the one denominator of a step."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        ids, labels = torch.as_tensor(row["input_ids"])[None], torch.as_tensor(row["labels"])
        logits = model(input_ids=ids).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total / count


def test_the_model_computes_what_transformers_does(yaml: Path) -> None:
    arguments = ModelArguments(model_name_or_path=str(yaml.parent / "model"))
    model = ModelHub.build(arguments, param_dtype=torch.float64)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    ids = torch.randint(20, 200, (1, 3 * WINDOW), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(
            model(input_ids=ids).logits, reference(yaml)(input_ids=ids).logits, rtol=0, atol=TOLERANCE
        )


def test_a_batch_has_what_its_rows_say(yaml: Path) -> None:
    arguments = load_config(yaml).arguments
    dataset = build_mm_dataset(arguments.data.dataset_param)[0]
    loader = build_mm_dataloader(
        dataset,
        arguments.data.dataloader_param,
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=0,
    )
    (batch,) = next(iter(loader))
    assert set(batch["sample_ids"]) <= {sample["sample_id"] for sample in dataset}
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"] != -100).any(dim=1).all()


@pytest.mark.parametrize("packs", [False, True])
def test_two_steps_begin_as_transformers_does(yaml: Path, packs: bool) -> None:
    words = [*overrides(1, 1, FP64), "training.train_iters=2"]
    with keeping_double():  # transformers computes norms, routers and softmax in fp32 otherwise
        model = reference(yaml)
        loss = loss_of(model, samples(yaml))
        loss.backward()  # type: ignore[no-untyped-call]
        first, second = train_steps(str(yaml), words, packs=packs)
    assert abs(float(first["loss"]) - float(loss)) < TOLERANCE
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(first["gradients"][name], parameter.grad, rtol=0, atol=TOLERANCE), name
    assert float(second["loss"]) != float(first["loss"])


def test_windows_and_sinks_are_there_to_be_seen(yaml: Path) -> None:
    """What the comparisons above could not see if it did nothing."""
    model, rows = reference(yaml), samples(yaml)
    with torch.no_grad():
        plain = loss_of(model, rows)
        model.model.layers[0].self_attn.sliding_window = None
        sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
        for sink in sinks:
            sink.add_(1)
        assert sinks
        assert abs(loss_of(model, rows) - plain) > 1e-6
