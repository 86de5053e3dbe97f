"""The engine under verl's interface, against a stub of its base classes: probabilities, steps and weights are those of
the plain model."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from mindspeed_mm.core.errors import ConfigError
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.verl_stub import Batch, EngineRegistry, verl_stub

ROOT = Path(__file__).parents[2]
LENGTHS = (7, 4, 9, 5)
FP64 = "parallel.fsdp_plan.param_dtype=fp64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("verl") / "model")


def engine_of(folder: Path, *, forward_only: bool = False, lora_rank: int = 0, overrides: Any = ()) -> Any:
    from mindspeed_mm.verl.config_classes import MindSpeedMMActorConfig, MindSpeedMMEngineConfig

    settings = MindSpeedMMEngineConfig(overrides=[FP64, *overrides], forward_only=forward_only)
    actor = MindSpeedMMActorConfig(mindspeed_mm=settings)
    model = SimpleNamespace(local_path=str(folder), lora_rank=lora_rank, lora_alpha=8, target_modules="all-linear")
    optimizer = SimpleNamespace(
        lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=0.5, lr_scheduler_type="constant",
        total_training_steps=4, lr_warmup_steps=-1, lr_warmup_steps_ratio=0.0,
    )  # fmt: skip
    import mindspeed_mm.verl.engine  # noqa: F401 verl imports it by the entry point

    made = EngineRegistry.engines["language_model", "mindspeed_mm", "cpu"](model, actor.engine, optimizer, None)
    made.initialize()
    return made


def batch_of(rows: tuple[int, ...] = (0, 1, 2, 3), **more: Any) -> Batch:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 300, (length,), generator=draw) for length in LENGTHS]
    masks = [(torch.arange(length) >= 2).long() for length in LENGTHS]
    own: dict[str, list[torch.Tensor]] = {
        "input_ids": [ids[row] for row in rows],
        "position_ids": [torch.arange(LENGTHS[row]) for row in rows],
        "loss_mask": [masks[row] for row in rows],
    }
    jagged = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in own.items()}
    return Batch(jagged | {"micro_batch_size_per_gpu": 2, "temperature": 0.7, **more})


def loss_of_verl(model_output: Any, data: Any, dp_group: Any) -> Any:
    """A mean over the batch's tokens, times the data ranks, as verl's losses are."""
    log_probs, mask = model_output["log_probs"].values(), data["loss_mask"].values().roll(-1)
    ends = data["loss_mask"].offsets()[1:] - 1
    mask = mask.index_fill(0, ends, 0)
    return -(log_probs * mask).sum() / data["batch_num_tokens"] * data["dp_size"], {}


def by_hand(folder: Path) -> tuple[torch.nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """The plain model in fp64, log p of each next token by row, and entropies."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    log_probs, entropies = [], []
    for ids in batch_of()["input_ids"].unbind():
        logits = model(input_ids=ids[None]).logits[0] / 0.7
        every = logits.log_softmax(-1)
        log_probs.append(every[:-1].gather(1, ids[1:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1)[:-1])
    return model, log_probs, entropies


def test_verl_finds_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["verl.plugins"] == {"mindspeed_mm": "mindspeed_mm.verl.engine"}
    config = ROOT / "mindspeed_mm" / "verl" / "config"
    with verl_stub():
        import mindspeed_mm.verl.config_classes as classes
        import mindspeed_mm.verl.engine  # noqa: F401

        assert {key[2] for key in EngineRegistry.engines} == {"cpu", "cuda", "npu"}
        read = {path.name: YAML(typ="safe").load(path.read_text()) for path in config.rglob("*.yaml")}
        kinds = {"mindspeed_mm_actor.yaml", "mindspeed_mm_ref.yaml", "mindspeed_mm_critic.yaml", "mindspeed_mm.yaml"}
        assert kinds == set(read)
        for content in read.values():
            if "_target_" in content:
                assert hasattr(classes, content["_target_"].rpartition(".")[2])


def test_only_the_first_rank_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with verl_stub():
        from mindspeed_mm.verl.engine import LanguageModelEngine

        for rank in (1, 0):
            LanguageModelEngine._note(SimpleNamespace(_job=SimpleNamespace(rank=rank)), f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"


def check_probabilities(folder: Path) -> None:
    """log p of each next token, and entropies, are those of the plain model."""
    _, log_probs, entropies = by_hand(folder)
    engine = engine_of(folder, forward_only=True)
    with engine.eval_mode():
        found = engine.infer_batch(batch_of(calculate_entropy=True))["model_output"]
    engine._held.close()
    for name, expected in (("log_probs", log_probs), ("entropy", entropies)):
        for row, own in zip(found[name].unbind(), expected, strict=True):
            torch.testing.assert_close(row[:-1], own.detach(), rtol=1e-10, atol=1e-10)
            assert row[-1] == 0


def test_probabilities_and_entropies_are_the_models(folder: Path) -> None:
    with verl_stub():
        check_probabilities(folder)


def test_a_temperature_that_is_passed_over_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: logits are not divided by what samples were drawn at."""
    with verl_stub():
        import mindspeed_mm.verl.engine as engine

        monkeypatch.setattr(engine, "_temperature", lambda _batch: 1.0)
        with pytest.raises(AssertionError, match="not close"):
            check_probabilities(folder)


def steps(folder: str, save: str, count: int, rows: Any = None, resume: bool = False) -> Any:
    """(norms, weights) of some steps."""
    with verl_stub():
        engine = engine_of(Path(folder))
        if resume:
            engine.load_checkpoint(save)
        norms = []
        for _ in range(count):
            own = (0, 1, 2, 3) if rows is None else rows[torch.distributed.get_rank()]
            with engine.train_mode():
                norms.append(engine.train_batch(batch_of(own), loss_of_verl)["metrics"]["grad_norm"])
            engine.lr_scheduler_step()
        if save and not resume:
            engine.save_checkpoint(save, global_step=count)
        weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        engine._held.close()
    return norms, weights


def test_a_step_is_that_of_the_plain_model(folder: Path) -> None:
    model, log_probs, _ = by_hand(folder)
    masked = torch.cat([each[1:] for each in log_probs])  # the first two tokens of a row are its prompt
    tokens = sum(length - 2 for length in LENGTHS)
    (-masked.sum() / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    norms, weights = steps(str(folder), "", 1)
    assert norms[0] == pytest.approx(float(norm), rel=1e-9)
    named = dict(model.named_parameters())
    for name, tensor in weights.items():
        moved = (named[name].detach() - before[name]).abs().max()
        decayed = 1 if named[name].dim() > 1 else 0  # vectors are not decayed here
        gap = (tensor - named[name].detach()).abs().max()
        assert gap <= (1e-6 if decayed else 1.1e-4) < moved, name


@pytest.mark.slow
def test_ranks_and_resumes_change_nothing(folder: Path, tmp_path: Path) -> None:
    norms, weights = steps(str(folder), str(tmp_path / "one"), 2)
    for own, found in run_ranks(2, steps, str(folder), "", 2, [(0, 3), (2, 1)]):
        assert own == pytest.approx(norms, rel=1e-9)
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
    later, whole = steps(str(folder), "", 3)
    resumed, rest = steps(str(folder), str(tmp_path / "one"), 1, None, True)
    assert resumed[0] == later[2] and all(torch.equal(rest[name], whole[name]) for name in whole)


def test_adapters_are_given_merged(folder: Path) -> None:
    with verl_stub():
        engine = engine_of(folder, lora_rank=4)
        stored = load_file(folder / "model.safetensors")
        start = dict(engine.get_per_tensor_param()[0])
        assert start.keys() == stored.keys()
        with engine.train_mode():
            engine.train_batch(batch_of(), loss_of_verl)
        moved = [name for name, tensor in engine.get_per_tensor_param()[0] if not torch.equal(tensor, start[name])]
        assert moved and all(name.endswith("proj.weight") for name in moved)
        with engine.eval_mode(), engine.disable_adapter():
            base = engine.infer_batch(batch_of())["model_output"]["log_probs"].values()
        engine._held.close()
        frozen = engine_of(folder, forward_only=True)
        own = frozen.infer_batch(batch_of())["model_output"]["log_probs"].values()
        frozen._held.close()
    torch.testing.assert_close(base, own, rtol=1e-10, atol=1e-10)


def test_what_does_not_go_together(folder: Path) -> None:
    with verl_stub(), pytest.raises(ConfigError, match="under verl a model is sharded"):
        engine_of(folder, overrides=["parallel.ulysses_parallel_size=2"])
