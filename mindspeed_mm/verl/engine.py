"""The engine that verl trains language models with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from verl.utils import tensordict_utils
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from mindspeed_mm.fsdp.checkpoint.adapters import merged_tensors
from mindspeed_mm.fsdp.checkpoint.hf import hub_tensors, live_tensors
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.models.lora.switch import adapters_off
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.optimizer.clip_grad import clip_grads_, grad_norm
from mindspeed_mm.fsdp.optimizer.groups import set_lr
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.assemble import assemble
from mindspeed_mm.fsdp.train.build_engine import build_lr_schedule
from mindspeed_mm.fsdp.train.reference_start import reference_start
from mindspeed_mm.fsdp.train.run.job import joined
from mindspeed_mm.verl.batches import as_jagged, model_inputs, next_tokens
from mindspeed_mm.verl.settings import arguments_of

Metrics = dict[str, Any]


@EngineRegistry.register(model_type="language_model", backend=["mindspeed_mm"], device=["cpu", "cuda", "npu"])
class LanguageModelEngine(BaseEngine):  # type: ignore[misc]
    """A language or vision-language model, sharded by this package.

    verl's losses are means that it multiplies by the number of data ranks, because its own engines average gradients
    over them. Gradients are summed here, so it is told that there is one.

    Args:
        model_config: verl's `HFModelConfig`.
        engine_config: `MindSpeedMMEngineConfig`.
        optimizer_config: verl's `FSDPOptimizerConfig`.
        checkpoint_config: verl's `CheckpointConfig`; checkpoints have this package's layout.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **_: Any
    ) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self._trains = not engine_config.forward_only
        self._arguments = arguments_of(model_config, engine_config, optimizer_config if self._trains else None)
        self._held = ExitStack()
        self._steps = 0

    def initialize(self) -> None:
        """Build and load the model, shard it, and make its optimizer."""
        self._job = self._held.enter_context(joined(self._arguments))
        self._assembled = assemble(self._arguments, self._job.device, trains=self._trains)
        self.module: nn.Module = self._assembled.model
        head = self._assembled.applied.head
        assert head is not None
        self._head: HeadLoss = head
        self._optimizer = None
        if self._trains:
            training = self._arguments.training
            self._optimizer = build_optimizer(
                self.module, training, self._arguments.features, self._assembled.plan.groups, note=self._note
            )
            self._schedule = build_lr_schedule(training, training.train_iters or 1)
            set_lr(self._optimizer, self._schedule.at(0))
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled, grad=False)

    # --- modes --------------------------------------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters wait on the host."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the optimizer's state waits on the host."""
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **options: object) -> AbstractContextManager[Any]:
        """Inside, batches are trained on."""
        return _Mode(self, "train", **options)

    def eval_mode(self, **options: object) -> AbstractContextManager[Any]:
        """Inside, log-probabilities are asked for. Nothing in the model is random in either mode."""
        return _Mode(self, "eval", **options)

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Inside, the model is the one under its adapters."""
        return adapters_off(self.module)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move shards, and the optimizer's state, to the host or back."""
        there = torch.device("cpu") if device == "cpu" else self._job.device
        if model:
            self.module.to(there)
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.to(there) if isinstance(value, torch.Tensor) and value.dim() else value

    # --- steps --------------------------------------------------------------------------------------------------------

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> object:
        """Run a batch, micro-batch by micro-batch.

        Args:
            data: verl's batch: jagged `input_ids`, `position_ids` and `loss_mask`, `multi_modal_inputs`.
            loss_function: Of the model's output and a micro-batch; gives a loss and metrics. None: probabilities alone.
            forward_only: Whether gradients are left out.

        Returns:
            As verl's `postprocess_batch_func` joins it: `model_output` with the jagged `log_probs` and, where
            `calculate_entropy` asks for it, `entropy`; `loss`; `metrics`.
        """
        tokens = data["loss_mask"].sum().to(self._job.device)
        if self._job.data_group is not None:
            dist.all_reduce(tokens, group=self._job.data_group)
        tensordict_utils.assign_non_tensor(data, batch_num_tokens=int(tokens), dp_size=1, sp_size=1)
        micro_batches, indices = prepare_micro_batches(
            data=data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True
        )
        outputs = []
        for each in micro_batches:
            with torch.set_grad_enabled(not forward_only):
                loss, output = self._forward(each.to(self._job.device), loss_function)
            if not forward_only:
                loss.backward()
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _forward(self, batch: Any, loss_function: Callable[..., Any] | None) -> tuple[torch.Tensor, Metrics]:
        told = tensordict_utils.get_non_tensor_data
        with_entropy = bool(told(data=batch, key="calculate_entropy", default=False))
        rows, targets, places = next_tokens(batch["input_ids"])
        found = self._head.log_probs(
            self.module,
            model_inputs(batch),
            rows,
            targets,
            temperature=_temperature(batch),
            with_entropy=with_entropy,
        )
        log_probs = found[:, 0] if with_entropy else found
        output = {"log_probs": as_jagged(batch["input_ids"], places, log_probs)}
        if with_entropy:
            output["entropy"] = as_jagged(batch["input_ids"], places, found[:, 1])
        loss, metrics = torch.ones((), device=log_probs.device), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=output, data=batch, dp_group=self.get_data_parallel_group())
        shown = {name: value.detach() for name, value in output.items()}
        return loss, {"model_output": shown, "loss": loss.detach().item(), "metrics": metrics}

    def optimizer_zero_grad(self) -> None:
        """Reset the gradients of the trained parameters; does nothing where there is no optimizer."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip, and step unless a gradient is not finite; gives the norm before it was clipped."""
        assert self._optimizer is not None
        norm = grad_norm(self.module.parameters())
        value, most = float(norm), self._arguments.training.clip_grad
        if not math.isfinite(value):
            self._optimizer.zero_grad()
            return value
        if most:
            clip_grads_(self.module.parameters(), norm, most)
        self._optimizer.step()
        return value

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step."""
        assert self._optimizer is not None
        used = self._schedule.at(self._steps)
        self._steps += 1
        set_lr(self._optimizer, self._schedule.at(self._steps))
        return used

    # --- weights ------------------------------------------------------------------------------------------------------

    def get_per_tensor_param(self, **_: object) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Whole tensors by the names of Hugging Face's folders, adapters added; each is gathered when it is asked for,
        by all ranks in the same order."""
        return self._whole_tensors(), None

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with ExitStack() as held:
            if self._arguments.training.lora.enable:
                folder = Path(self._arguments.model.model_name_or_path or "")
                outline = build_outline(reference_start(self._arguments)).model
                tensors = held.enter_context(merged_tensors(self.module, outline, folder))
            else:
                tensors = hub_tensors(self.module, live_tensors(self.module))
            for name, tensor in tensors.items():
                yield name, tensor.read().to(self._job.device)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: object,
    ) -> None:
        """Weights and optimizer as one of this package's checkpoints, which any number of ranks reads."""
        assert self._optimizer is not None
        self._manager(local_path).save(global_step, self.module, self._optimizer, {"iteration": self._steps})

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: object
    ) -> None:
        """Go on from the newest checkpoint of a folder; None: there is none."""
        if local_path is None:
            return
        manager = self._manager(local_path)
        found = manager.find_latest()
        assert found is not None
        self._steps = int(manager.load(found, self.module, self._optimizer)["iteration"])
        if self._optimizer is not None:
            set_lr(self._optimizer, self._schedule.at(self._steps))

    def _manager(self, folder: str) -> CheckpointManager:
        context = {"world_size": self._job.world_size}
        return CheckpointManager(Path(folder), self._arguments.training, context=context, note=self._note)

    def _note(self, text: str) -> None:
        """For people; one rank speaks for all."""
        if self._job.rank == 0:
            print(text, flush=True)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def get_data_parallel_size(self) -> int:
        """Ranks that read different rows."""
        return int(self._job.state.data_size)

    def get_data_parallel_rank(self) -> int:
        """Which of them this one is."""
        return int(self._job.state.data_rank)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of these ranks."""
        return self._job.data_group or dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank speaks for those that work on the same rows."""
        return bool(self._job.state.is_first_of_its_samples)


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    """verl's context of a mode, which moves what waits on the host."""

    def __init__(self, engine: LanguageModelEngine, mode: str, **options: Any) -> None:
        super().__init__(engine=engine, mode=mode, **options)

    def __exit__(self, *error: object) -> None:
        if self.mode == "train":
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


def _temperature(batch: Any) -> float:
    """What logits are divided by: one number for all rows."""
    value = batch.get("temperature", 1.0)
    value = getattr(value, "data", value)
    if isinstance(value, torch.Tensor):
        return float(value.reshape(-1)[0])
    return float(value)
