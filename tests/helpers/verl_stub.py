"""Stands for verl where it is not installed: the classes and functions of it that the engine meets, with the behaviour
that verl's documentation and sources state (0.9), written anew and as small as they can be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


class Batch(dict[str, Any]):
    """As much of a TensorDict as is asked of one; `told` are its plain values."""

    def to(self, device: Any) -> Batch:
        return Batch(
            {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in self.items()}
        )


class EngineRegistry:
    engines: dict[tuple[str, str, str], type] = {}

    @classmethod
    def register(cls, model_type: str, backend: list[str], device: list[str]) -> Callable[[type], type]:
        def keep(engine: type) -> type:
            cls.engines.update({(model_type, name, each): engine for name in backend for each in device})
            return engine

        return keep


class BaseEngine:
    def train_batch(self, data: Any, loss_function: Any) -> Any:
        self.optimizer_zero_grad()  # type: ignore[attr-defined]
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)  # type: ignore[attr-defined]
        outputs["metrics"]["grad_norm"] = self.optimizer_step()  # type: ignore[attr-defined]
        return outputs

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)  # type: ignore[attr-defined]


class BaseEngineCtx:
    def __init__(self, engine: Any, mode: str, **options: Any) -> None:
        self.engine, self.mode = engine, mode

    def __enter__(self) -> None:
        self.engine.mode = self.mode

    def __exit__(self, *error: Any) -> None:
        self.engine.mode = None


def prepare_micro_batches(data: Batch, dp_group: Any, same_micro_num_in_dp: bool) -> tuple[list[Batch], None]:
    """Of `micro_batch_size_per_gpu` rows each."""
    rows, size = len(data["input_ids"].offsets()) - 1, data["micro_batch_size_per_gpu"]

    def part(value: Any, first: int) -> Any:
        if isinstance(value, torch.Tensor) and value.is_nested:
            return torch.nested.as_nested_tensor(list(value.unbind())[first : first + size], layout=torch.jagged)
        return value[first : first + size] if isinstance(value, list) else value

    return [Batch({name: part(value, first) for name, value in data.items()}) for first in range(0, rows, size)], None


def postprocess_batch_func(output_lst: list[dict[str, Any]], indices: None, data: Batch) -> dict[str, Any]:
    names = output_lst[0]["model_output"]
    joined = {
        name: torch.nested.as_nested_tensor(
            [row for each in output_lst for row in each["model_output"][name].unbind()], layout=torch.jagged
        )
        for name in names
    }
    return {"model_output": joined, "loss": [each["loss"] for each in output_lst], "metrics": {}}


@dataclass
class EngineConfig:
    strategy: str | None = None
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False


@dataclass
class ActorConfig:
    strategy: str | None = None

    def __post_init__(self) -> None:
        self.engine: Any = None


@contextmanager
def verl_stub() -> Iterator[None]:
    """Inside, `import verl` finds it."""
    base, engine, utils = (ModuleType(f"verl.workers.engine{name}") for name in (".base", "", ".utils"))
    told, config = ModuleType("verl.utils.tensordict_utils"), ModuleType("verl.workers.config")
    base.BaseEngine, base.BaseEngineCtx, base.EngineRegistry = BaseEngine, BaseEngineCtx, EngineRegistry  # type: ignore[attr-defined]
    utils.prepare_micro_batches, utils.postprocess_batch_func = prepare_micro_batches, postprocess_batch_func  # type: ignore[attr-defined]
    told.assign_non_tensor = lambda data, **values: data.update(values)  # type: ignore[attr-defined]
    told.get_non_tensor_data = lambda data, key, default: data.get(key, default)  # type: ignore[attr-defined]
    config.EngineConfig, config.ActorConfig = EngineConfig, ActorConfig  # type: ignore[attr-defined]
    parents = {name: ModuleType(name) for name in ("verl", "verl.utils", "verl.workers")}
    parents["verl.utils"].tensordict_utils = told  # type: ignore[attr-defined]
    modules = {each.__name__: each for each in (base, engine, utils, told, config)} | parents
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [*modules, *(name for name in sys.modules if name.startswith("mindspeed_mm.verl."))]:
            del sys.modules[name]
