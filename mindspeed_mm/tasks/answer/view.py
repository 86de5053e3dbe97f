"""How a model's run looked at its rows."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.fsdp.data.data_utils.training_view import check_trained_with, view_of_adapters, with_view
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.model_source import ModelSource, run_arguments


def rows_view(source: ModelSource, config: Path | None = None) -> RowsView:
    """How the run of a model looked at its rows; of a model folder, as the folder says.

    Args:
        source: The model.
        config: A configuration whose `data.dataset_param` is taken instead of the run's.

    Raises:
        ConfigError: The configuration is wrong, or a media plugin that the model was trained with is not registered.
    """
    if config is not None:
        param = load_with_plugins(config).arguments.data.dataset_param
    else:
        arguments = run_arguments(source.run)
        param = arguments.data.dataset_param if arguments is not None else DatasetParam()
        # The exported folder has the template that the run used, also where its file is gone.
        basic = param.basic_parameters.model_copy(update={"template": None, "chat_template": None})
        param = param.model_copy(update={"basic_parameters": basic})
    for folder in (source.folder, source.lora):
        if folder is not None:
            check_trained_with(folder, reads_rows_itself=config is None and source.run is None)
    return RowsView(_with_adapters(param, source.lora) if source.lora is not None else param)


def _with_adapters(param: DatasetParam, lora: Path) -> DatasetParam:
    basic = param.basic_parameters
    if basic.template is None and basic.chat_template is None:
        template = view_of_adapters(lora).basic_parameters.chat_template
        basic = basic.model_copy(update={"chat_template": template})
    return with_view(param.model_copy(update={"basic_parameters": basic}), lora)
