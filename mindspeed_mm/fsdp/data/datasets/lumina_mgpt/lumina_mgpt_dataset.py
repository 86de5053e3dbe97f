"""Conversations whose answers may be pictures: `dataset_type: lumina_mgpt`."""

from __future__ import annotations

from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("lumina_mgpt")
class LuminaMGPTDataset(Qwen2VLDataset):
    """Rows as of `huggingface`; a picture in a turn of the model, with the tokens around it, is trained as words are.
    The labels are placeholders until the model has said which tokens the picture is (`loss/language_objective.py`).

    Arguments and errors as of `Qwen2VLDataset`.
    """

    train_media = True
