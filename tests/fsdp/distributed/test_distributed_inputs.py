"""Ranks of tensor parallelism divide the inputs of recomputed blocks: losses and gradients are the same to the bit, and
each keeps its part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state
from mindspeed_mm.fsdp.features.feature_plan import FeaturePlan
from mindspeed_mm.fsdp.features.memory import recompute
from mindspeed_mm.fsdp.features.memory.recompute import DistributedInputs
from mindspeed_mm.fsdp.ops.collectives import AxisRanks
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.fsdp.distributed.tensor_parallel_step import (
    GENERATORS,
    Built,
    Case,
    build,
    label_loss,
    parallel_steps,
    samples_of,
)
from tests.fsdp.tools.test_repeated_blocks import QWEN3, TOKENS, arguments_of, both, rows, written
from tests.helpers.distributed import run_ranks
from tests.helpers.measured_memory import make_long_rows, measured
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, make_tiny_run

KEY = "features.recompute_plan.distribute_saved_activations"
TP, RECOMPUTE = "parallel.tensor_parallel_size=2", "features.recompute=true"
HOWEVER_SMALL = mock.patch.object(recompute, "SMALLEST_BYTES", 0)


# --- the parts --------------------------------------------------------------------------------------------------------


class RanksHere:
    """Ranks in one process, which bring their parts one after the other."""

    def __init__(self, rank: int, parts: list[torch.Tensor]) -> None:
        self.size, self.rank, self._parts = 3, rank, parts

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        assert own is self._parts[self.rank]
        return torch.cat(self._parts)


def hidden(*shape: int) -> torch.Tensor:
    """Computed from a parameter."""
    return nn.Parameter(torch.randn(shape, dtype=torch.float64)) * 2


@pytest.mark.parametrize(
    "whole",
    [hidden(2, 3, 4), hidden(2, 7), hidden(1), hidden(2, 7, 1).transpose(0, 1), hidden(6, 5)[2:4]],
    ids=["even", "uneven", "one", "transposed", "some rows"],
)
def test_parts_make_up_the_whole(whole: torch.Tensor) -> None:
    parts = list[torch.Tensor]()
    with HOWEVER_SMALL:
        calls = []
        for rank in range(3):
            run, kept = DistributedInputs(RanksHere(rank, parts)).divided(lambda *given: given, [whole, 5])
            calls.append((run, kept))
            assert isinstance(kept[0], torch.Tensor)
            parts.append(kept[0])
    for run, kept in calls:
        first, second, third = run(*kept), run(*kept), run(*kept)
        assert first[0] is whole and first[1] == 5
        for again in (second, third):
            assert torch.equal(again[0], whole) and again[0].requires_grad and again[1] == 5
            assert again[0].stride() == whole.stride()
    size = -(-whole.numel() // 3)
    assert [part.untyped_storage().nbytes() for part in parts] == [size * 8] * 3


def test_what_several_modules_are_given_is_divided_once() -> None:
    """Parts of it would be kept beside it. Another part of the same storage, such as other rows, is another input."""
    inputs, text = DistributedInputs(RanksHere(0, [])), hidden(4, 3)
    with HOWEVER_SMALL:
        for number, expected in enumerate((True, False, False)):
            states = hidden(2, 3)
            _, kept = inputs.divided(lambda *_: None, [states, text.view(4, 3)])
            assert (kept[0] is not states, kept[1].numel() == 4) == (True, expected), number  # type: ignore[attr-defined]
        rows = hidden(4, 3)
        for row in rows.split(2):
            assert inputs.divided(lambda *_: None, [row])[1][0] is not row
        copied = deepcopy(inputs)  # of a copied model, which is given nothing of these
        assert copied.divided(lambda *_: None, [text])[1][0] is not text


class Wrapped(torch.Tensor):
    """A tensor around others, as sharded ones are: its own storage holds nothing."""

    __tensor_flatten__ = __tensor_unflatten__ = None


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(8),
        nn.Parameter(torch.ones(8)),
        torch.ones(8, requires_grad=True),
        hidden(4, 4)[:, :2],
        torch.complex(hidden(8), hidden(8)),
        hidden(4, 4).to_sparse(),
        hidden(8).as_subclass(Wrapped),
        "text",
    ],
    ids=["needs no gradient", "parameter", "received", "part of rows", "complex", "sparse", "wrapper", "no tensor"],
)
def test_what_stays_whole(given: object) -> None:
    with HOWEVER_SMALL:
        _, kept = DistributedInputs(RanksHere(1, [])).divided(lambda *_: None, [given])
    assert kept[0] is given


def test_small_inputs_stay_whole() -> None:
    length = recompute.SMALLEST_BYTES // 8
    inputs = DistributedInputs(RanksHere(1, []))
    for given, is_divided in ((hidden(length - 1), False), (hidden(length), True)):
        assert (inputs.divided(lambda *_: None, [given])[1][0] is not given) == is_divided


# --- on ranks ---------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Path], object]] = {
    "text": make_tiny_qwen3,
    "wan": make_tiny_wan,
    "flux": make_tiny_flux,
    "vlm": make_tiny_qwen3_vl,
}


def in_another_order(self: AxisRanks, own: torch.Tensor) -> torch.Tensor:
    """The last rank's part first: a planted fault."""
    parts = [torch.empty_like(own) for _ in range(self.size)]
    dist.all_gather(parts, own, group=self.group)
    return torch.cat(parts[::-1])


def step_of(case: Case, built: Built) -> Callable[[nn.Module], torch.Tensor]:
    """The loss of all samples."""
    samples, batched = samples_of(case.kind, built.model, case.images)
    loss = GENERATORS[case.kind].loss if case.kind in GENERATORS else label_loss(built)
    return lambda model: loss(model, batched(samples))


def kept_bytes(model: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> int:
    """Of all that autograd holds of a pass, weights too."""
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model)
    return sum(storage.nbytes() for storage in held.values())


def inputs_of(built: Built) -> tuple[list[StorageWeakRef], list[int]]:
    """Storages of the hidden states that blocks are called with, and their bytes; filled by the next pass."""
    found, sizes = list[StorageWeakRef](), list[int]()

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        found.append(StorageWeakRef(states.untyped_storage()))
        sizes.append(states.nbytes)

    for name in built.spec.blocks:
        built.model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    return found, sizes


def steps_of(case: Case, folder: str) -> dict[str, list[StepRecord]]:
    """Without, with, and with a fault."""
    divided = replace(case, recompute=True, distributed=True)
    steps = {"whole": parallel_steps(replace(case, recompute=True), folder, 2)}
    with HOWEVER_SMALL:
        steps["divided"] = parallel_steps(divided, folder, 2)
        fault = mock.patch.object(AxisRanks, "gather", in_another_order)
        steps["fault"] = parallel_steps(divided, folder, 2, fault=fault)
    return steps


def kept_of(kind: str, folder: str) -> dict[str, Any]:
    """Bytes that autograd holds of a pass, and how many of the blocks' inputs are still there behind it."""
    found: dict[str, Any] = {}
    for name, distributed in {"whole": False, "divided": True}.items():
        case = Case(kind, recompute=True, distributed=distributed)
        built = build(case, folder)
        step = step_of(case, built)
        with HOWEVER_SMALL:
            kept = kept_bytes(built.model, step)
            storages, sizes = inputs_of(built)
            loss = step(built.model)
            alive = sum(not storage.expired() for storage in storages)
            loss.backward()
        found[name] = {"kept": kept, "alive": alive, "sizes": sizes}
        destroy_parallel_state()
    return found


def on_ranks(folders: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    with keeping_double():  # in the second pass, too
        found: dict[str, Any] = {name: steps_of(case, folders[case.kind]) for name, case in cases.items()}
        if dist.get_world_size() == 2:
            found["kept"] = {kind: kept_of(kind, folders[kind]) for kind in CASES}
    return found


CASES = {"text": Case("text"), "wan": Case("wan")}
SLOW_CASES: dict[int, dict[str, Case]] = {
    2: {
        "flux": Case("flux"),
        "vlm, accumulation": Case("vlm", accumulation=2),
        "text, adapters": Case("text", lora=True),
    },
    4: {
        "text, fsdp × tp": Case("text"),
        "vlm, fsdp × tp": Case("vlm"),
        "wan, hsdp × tp": Case("wan", {"fully_shard_parallel_size": 1}),
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {kind: str(make(root / kind) or root / kind) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module")
def quick(folders: dict[str, str]) -> list[dict[str, Any]]:
    return run_ranks(2, on_ranks, folders, CASES)


def check_steps(steps: dict[str, list[StepRecord]]) -> None:
    compare_steps(steps["whole"], steps["divided"], 0.0)
    with pytest.raises(ParityError):
        compare_steps(steps["whole"], steps["fault"], 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_to_the_bit(name: str, quick: list[dict[str, Any]]) -> None:
    for on_rank in quick:
        check_steps(on_rank[name])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SLOW_CASES)
def test_more_steps_are_the_same_to_the_bit(ranks: int, folders: dict[str, str]) -> None:
    for on_rank in run_ranks(ranks, on_ranks, folders, SLOW_CASES[ranks]):
        for name in SLOW_CASES[ranks]:
            check_steps(on_rank[name])


@pytest.mark.parametrize("kind", CASES)
def test_inputs_are_freed_but_for_a_part(kind: str, quick: list[dict[str, Any]]) -> None:
    for on_rank in quick:
        whole, divided = on_rank["kept"][kind]["whole"], on_rank["kept"][kind]["divided"]
        assert len(whole["sizes"]) > 1
        assert (whole["alive"], divided["alive"]) == (len(whole["sizes"]), 0)
        # Of what all blocks are given, the first one has a part beside the others' whole.
        saved, shared = sum(whole["sizes"]) // 2, whole["kept"] - divided["kept"]
        assert shared == saved if kind == "text" else 0 < shared < saved


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    make_tiny_qwen3_moe(root / "moe" / "model")
    make_rows(root / "moe", images=(0,))
    return {"vlm": make_tiny_run(root / "vlm"), "moe": make_tiny_run(root / "moe")}


def plan_of(yaml: Path, *words: str) -> ModelPlan:
    arguments = load_config(yaml, [TP, RECOMPUTE, *words]).arguments
    return resolve_plan(build_outline(arguments), arguments, resolve_parallel_sizes(arguments.parallel, 2))


DECODER = ("model.language_model.layers.0", "model.language_model.layers.1")
TOWER = ("model.visual.blocks.0", "model.visual.blocks.1")
SEQUENCE = 'parallel.tp_plan.sequence_parallel=["*.language_model.layers.{*}.*_layernorm"]'


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {*DECODER, *TOWER}),
        ((f"{KEY}=true", "features.enable_activation_offload=true"), {*DECODER, *TOWER}),
        ((SEQUENCE,), set(TOWER)),
        (("parallel.encoder_plan.tensor_parallel_size=1",), set(DECODER)),
        (("features.recompute_plan.apply_modules=['model.language_model.layers.{0}','model.visual']",), {DECODER[0]}),
    ],
    ids=["all", "with offload", "own tokens", "own media", "named"],
)
def test_blocks_that_all_ranks_call_alike(words: tuple[str, ...], expected: set[str], runs: dict[str, Path]) -> None:
    plan = plan_of(runs["vlm"], *words)
    assert set(plan.features.distributed) == expected
    assert plan.describe()["inputs"] == f"of {len(expected)} recomputed blocks divided among 2 tensor ranks"


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("vlm", (f"{KEY}=false",), "is false"),
        ("vlm", ("features.recompute_plan.mode=selective",), "mode is selective"),
        ("vlm", ("features.recompute_plan.use_reentrant=true",), "lets autograd keep"),
        ("vlm", ("features.recompute_plan.apply_modules=['*.layers.{*}.mlp']",), "none is a whole block"),
        ("vlm", ("model.skip_flash_attn_recompute=true", "features.compile=true",
                 "features.compile_plan.backend=eager"), "blocks are compiled"),
        ("moe", (), "none is a whole block without experts"),
    ],
    ids=["not wanted", "selective", "re-entrant", "parts of blocks", "compiled", "experts"],
)  # fmt: skip
def test_why_inputs_stay_whole_is_said(name: str, words: tuple[str, ...], why: str, runs: dict[str, Path]) -> None:
    plan = plan_of(runs[name], *words)
    assert plan.features.distributed == () and why in plan.describe()["inputs"]
    if "false" not in why:
        with pytest.raises(ConfigError) as refused:
            arguments = load_config(runs[name], [TP, RECOMPUTE, *words, f"{KEY}=true"]).arguments
            resolve_plan(build_outline(arguments), arguments)
        assert KEY in str(refused.value)


def test_without_tensor_parallelism_nothing_is_said(runs: dict[str, Path]) -> None:
    plan = plan_of(runs["vlm"], "parallel.tensor_parallel_size=1")
    assert plan.features == FeaturePlan(plan.features.recomputed, compiler=plan.features.compiler,
                                        most_compilations=plan.features.most_compilations)  # fmt: skip
    assert "inputs" not in plan.describe()


# --- through the trainer ----------------------------------------------------------------------------------------------


def trained(yamls: dict[str, str], pairs: dict[str, tuple[str, list[str]]]) -> dict[str, bool]:
    """Whether each run gathered, after it was compared with the same run whose inputs stay whole."""
    gathered = {}
    for name, (family, words) in pairs.items():
        told = overrides(1, 2, TP, RECOMPUTE, *words)
        watched = mock.patch.object(AxisRanks, "gather", autospec=True, side_effect=AxisRanks.gather)
        with keeping_double(), HOWEVER_SMALL, watched as gather:
            whole = train_steps(yamls[family], [*told, f"{KEY}=false"])
            assert not gather.called
            compare_steps(whole, train_steps(yamls[family], told), 0.0)
            gathered[name] = gather.called
    return gathered


RUNS: dict[str, tuple[str, list[str]]] = {"vlm": ("vlm", [])}
SLOW_RUNS: dict[int, dict[str, tuple[str, list[str]]]] = {
    2: {
        "vlm, offload": ("vlm", ["features.enable_activation_offload=true"]),
        "vlm, attention kept": ("vlm", ["model.skip_flash_attn_recompute=true"]),
        "vlm, adapters": ("vlm", ["training.lora.enable=true"]),
        "vlm, slices": ("vlm", ["features.enable_chunk_mbs=true",
                                "features.chunkmbs_plan.apply_modules=['model.language_model.layers.{*}']",
                                "features.chunkmbs_plan.chunk_kwarg_names="
                                "['attention_mask','position_ids','position_embeddings']"]),
        "wan": ("wan", []),
        "wan, offload": ("wan", ["features.enable_activation_offload=true"]),
    },
    4: {
        "vlm, two stages": ("vlm", ["parallel.pipeline_parallel_size=2"]),
        "vlm, ulysses": ("vlm", ["parallel.ulysses_parallel_size=2"]),
        "vlm, fsdp": ("vlm", ["training.micro_batch_size=2"]),
        "vlm, idle towers, frozen": ("vlm", ["training.micro_batch_size=1", "model.freeze=['model.language_model']"]),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("trained")
    make_tiny_wan(root / "wan" / "model", task="t2v", num_layers=2)
    return {
        "vlm": str(make_tiny_run(root / "vlm", **FP64)),
        "wan": str(make_tiny_generator_run(root / "wan", "t2v", side=32, **FP64)),
    }


def test_a_run_is_the_same_to_the_bit(yamls: dict[str, str]) -> None:
    assert run_ranks(2, trained, yamls, RUNS) == [dict.fromkeys(RUNS, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SLOW_RUNS)
def test_more_runs_are_the_same_to_the_bit(ranks: int, yamls: dict[str, str]) -> None:
    found = run_ranks(ranks, trained, yamls, SLOW_RUNS[ranks])
    assert found == [dict.fromkeys(SLOW_RUNS[ranks], True)] * ranks


# --- the forecast -----------------------------------------------------------------------------------------------------

LAYERS = 7


def test_the_forecast_knows_the_parts(tmp_path: Path) -> None:
    """Seven inputs of 48 tokens of 32 numbers of four bytes, of which a rank of two keeps half; and the forecast by
    kinds is that of all blocks."""
    words = (TP, RECOMPUTE)
    model = written(tmp_path / "model", QWEN3, LAYERS)
    with HOWEVER_SMALL:
        whole = forecast(arguments_of(model, *words, f"{KEY}=false"), rows(), 2, "cuda")
        divided, of_all = both(arguments_of(model, *words), 2)
    assert divided == of_all
    assert whole.activations - divided.activations == LAYERS * TOKENS * 32 * 4 // 2
    # At the end of the backward pass a block has its part beside what it gathered.
    assert divided.peak <= whole.peak + TOKENS * 32 * 4 // 2


def _peaks(yaml: str) -> dict[str, int]:
    """What a rank of a step of many tokens holds, as predicted and as measured, of inputs kept whole and in parts."""
    found = {}
    for kept, word in {"whole": "false", "parts": "true"}.items():
        words = [TP, RECOMPUTE, f"{KEY}={word}", "training.micro_batch_size=4"]
        with HOWEVER_SMALL:
            real = measured(Path(yaml), words)
            predicted = forecast(load_with_plugins(Path(yaml), words).arguments, real.batches[-1], world_size=2)
        assert real.peak is not None
        found |= {f"{kept}, measured": real.peak.total_bytes, f"{kept}, predicted": predicted.peak}
    return found


@pytest.mark.slow
def test_the_forecast_is_what_ranks_hold(tmp_path: Path) -> None:
    """What parts save is forecast to the byte: the peak is in the last block, which has gathered its own input."""
    make_tiny_qwen3_vl(tmp_path / "model", num_hidden_layers=LAYERS)
    make_long_rows(tmp_path, 200)
    for found in run_ranks(2, _peaks, str(make_tiny_run(tmp_path))):
        assert abs(found["whole, predicted"] / found["whole, measured"] - 1) < 0.05, found
        saved = found["whole, measured"] - found["parts, measured"]
        assert saved == found["whole, predicted"] - found["parts, predicted"] > 0, found
