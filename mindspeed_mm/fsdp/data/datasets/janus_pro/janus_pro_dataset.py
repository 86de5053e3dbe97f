"""Conversations whose answers may be pictures: `dataset_type: janus_pro`."""

from __future__ import annotations

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("janus_pro")
class JanusProDataset(Qwen2VLDataset):
    """Rows as of `huggingface`. A picture in a turn of the model is drawn: it is cut to the square in its middle, its
    codes are learned through the generation head, and the tokens around it as words (`loss/drawn_pictures.py`).

    Arguments and errors as of `Qwen2VLDataset`; `ConfigError` where rows are preference pairs, too.
    """

    train_media = True

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        if basic_param.stage == "rm":
            raise ConfigError(
                "pictures in answers cannot be compared in pairs yet",
                key="data.dataset_param.dataset_type",
                way_out="Take dataset_type: huggingface, and leave model.model_id out, for pairs of answers in words.",
            )
        super().__init__(basic_param, preprocess_param, dataset_param)
