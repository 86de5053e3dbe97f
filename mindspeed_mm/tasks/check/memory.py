"""The memory stage of `mm check`: what a rank would hold, and whether the device has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.utils.plugins import place_in_plugin

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
    from mindspeed_mm.fsdp.plan.outline import Outline


def predict(
    outline: Outline, plan: ModelPlan, arguments: Arguments, batch: Batch
) -> tuple[list[str], dict[str, object], list[str]]:
    """Lines for people, a record for machines, and warnings.

    Args:
        outline: The model, which is of no use afterwards.
        plan: Resolved for it.
        arguments: The configuration.
        batch: Its first micro-batch, as collated.

    Raises:
        ConfigError: The model cannot be put together as the configuration says, or makes more or fewer features of the
            batch's media than its processor writes tokens for them.
    """
    from mindspeed_mm.fsdp.tools.memory_model.report import as_record, in_units, table
    from mindspeed_mm.fsdp.train.memory.forecast import forecast_plan
    from mindspeed_mm.fsdp.utils.device import get_device_type, memory_total_bytes

    try:
        prediction = forecast_plan(outline, plan, arguments, batch)
    except MMError:
        raise
    except Exception as error:  # noqa: BLE001 (a plugin's model is foreign code, and nothing here keeps it from training)
        return [], {}, [_unpredicted(error)]
    if prediction.media_misfit:
        raise ConfigError(
            "the processor writes other numbers of tokens for the first batch's media than the model makes features of "
            f"them: {prediction.media_misfit}",
            key="model.model_name_or_path",
            way_out="Its settings and those of the model disagree on sizes of pictures, patches or queries: compare "
            "processor_config.json and preprocessor_config.json with config.json, or take both from one release.",
        )
    nproc = plan.parallel.sizes.world
    device, total = get_device_type(), memory_total_bytes()
    ranks = nproc if device == "cpu" else 1  # ranks on a CPU share its memory
    warnings = []
    if prediction.misfit:
        warnings.append(
            f"the model's code fails on the first batch, as training may: {prediction.misfit}. Compare the shapes "
            "of `mm data preview` with those that the model's own processor makes"
        )
    if prediction.peak * ranks > total:
        needed = f"{in_units(prediction.peak)} a rank" + (f" × {ranks} ranks" if ranks > 1 else "")
        has = "this host" if device == "cpu" else f"the device ({device})"
        warnings.append(f"the first batch needs {needed}, but {has} has {in_units(total)}")
    return table(prediction), as_record(prediction) | {"ranks": nproc, "device_bytes": total}, warnings


def _unpredicted(error: Exception) -> str:
    """Why there is no forecast. What Python itself refuses in a plugin, training will refuse, too; anything else may be
    an operator that needs data, of which the forecast has none."""
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    place = place_in_plugin(error)
    if not place or not isinstance(error, (AttributeError, LookupError, NameError, TypeError)):
        return f"memory could not be predicted: {told}"
    return (
        f"the plugin's code fails on the first batch, as training may: {told} ({place}). Compare the arguments of its "
        "forward with the keys of the batch (mm data preview): what forward does not name goes into **kwargs"
    )
