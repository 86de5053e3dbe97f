"""What a frozen reference is built of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mindspeed_mm.core.errors import Problem, told_as
from mindspeed_mm.fsdp.params.argument import Arguments, PosttrainArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.plan.outline import Outline, build_outline

FOLDER_KEY = "posttrain.reference.model_name_or_path"
_FOLDER_OF_POLICY = "model.model_name_or_path"


def reference_start(arguments: Arguments) -> Arguments:
    """The configuration of the policy, as that of its reference."""
    folder = arguments.posttrain.reference.model_name_or_path
    given = {"model_name_or_path": folder} if folder else {}
    lora = arguments.training.lora
    if folder or not (lora.pretrained_lora_path or lora.frozen_adapters or lora.quantize):
        lora = LoraArguments()  # what it starts with adds nothing to the model
    return arguments.model_copy(
        update={
            "model": arguments.model.model_copy(update=given),
            "training": arguments.training.model_copy(update={"lora": lora}),
        }
    )


def reference_outline(arguments: Arguments) -> Outline:
    """The reference on meta.

    Raises:
        MMError: It cannot be built.
    """
    with told_of_reference(arguments.posttrain):
        return build_outline(reference_start(arguments))


@contextmanager
def told_of_reference(posttrain: PosttrainArguments) -> Iterator[None]:
    """What is wrong with a folder of its own is told under the key that names it."""
    has_own = posttrain.reference.model_name_or_path is not None

    def with_key(problem: Problem) -> Problem:
        if has_own and problem.key in ("", _FOLDER_OF_POLICY):
            return replace(problem, key=FOLDER_KEY)
        return problem

    with told_as(with_key):
        yield
