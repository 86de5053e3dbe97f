"""What the critic of a distillation is built of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mindspeed_mm.core.errors import Problem, told_as
from mindspeed_mm.fsdp.params.argument import Arguments, PosttrainArguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.train.reference_start import FOLDER_KEY as REFERENCE_KEY

_OWN_KEY = "posttrain.dmd.critic_name_or_path"


def critic_folder(posttrain: PosttrainArguments) -> str | None:
    """The folder that the critic starts from; None: the student's, as its training starts."""
    return posttrain.dmd.critic_name_or_path or posttrain.reference.model_name_or_path


def critic_key(posttrain: PosttrainArguments) -> str:
    """The key that names `critic_folder`."""
    if posttrain.dmd.critic_name_or_path:
        return _OWN_KEY
    return REFERENCE_KEY


def critic_start(arguments: Arguments) -> Arguments:
    """The configuration of the student, as that of its critic."""
    dmd, training, folder = arguments.posttrain.dmd, arguments.training, critic_folder(arguments.posttrain)
    given = {"model_name_or_path": folder} if folder else {}
    adapts = training.lora.enable if dmd.critic_lora is None else dmd.critic_lora
    lora = LoraArguments()
    if adapts:
        own = {"enable": True, "pretrained_lora_path": None, "frozen_adapters": ()}
        lora = training.lora.model_copy(update=own)
    changed = {
        "lora": lora,
        "lr": dmd.lr_critic or training.lr,
        "adam_beta1": training.adam_beta1 if dmd.beta1_critic is None else dmd.beta1_critic,
        "adam_beta2": training.adam_beta2 if dmd.beta2_critic is None else dmd.beta2_critic,
    }
    return arguments.model_copy(
        update={
            "model": arguments.model.model_copy(update=given),
            "training": training.model_copy(update=changed),
        }
    )


@contextmanager
def told_of_critic(posttrain: PosttrainArguments) -> Iterator[None]:
    """What is wrong with a folder that is not the student's is told under the key that names it."""
    key, is_named = critic_key(posttrain), critic_folder(posttrain) is not None

    def with_key(problem: Problem) -> Problem:
        if is_named and problem.key == "model.model_name_or_path":
            return replace(problem, key=key)
        return problem

    with told_as(with_key):
        yield
