"""A configuration with the plugins that it names: they are imported first, for the keys that they declare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.checkpoint.recognise import is_gguf
from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.params.loader import (
    Given,
    Override,
    PluginKeys,
    ResolvedConfig,
    load_config,
    read_plugins,
)

_MODELS = ("model.model_name_or_path", "posttrain.reference.model_name_or_path")
"""Keys that may name a GGUF file."""


def load_with_plugins(given: Given, overrides: Sequence[Override] = (), *, ranks: int | None = None) -> ResolvedConfig:
    """Import the plugins that a configuration names, then validate it with the keys that they declare. A model in GGUF
    becomes the model folder that is made from it.

    Args:
        given: A YAML file, or a mapping of sections.
        overrides: `section.key=value`, or mappings of sections.
        ranks: As of `load_config`.

    Raises:
        ConfigError: Every problem of the configuration, or a plugin that cannot be imported.
        ModelFolderError, MachineError: A GGUF file cannot be read, or its folder cannot be written.
    """
    config = _load_run(given, overrides, ranks)
    folders = []
    for key in _MODELS:
        name = value_at(config.arguments, key)
        if isinstance(name, str) and is_gguf(Path(name)):
            from mindspeed_mm.fsdp.models.loading.gguf import model_folder_of  # torch: only such files need it

            with config.told_as_own():
                folders.append(f"{key}={model_folder_of(Path(name), key)}")
    if folders:
        return _load_run(given, [*overrides, *folders], ranks)
    return config


def _load_run(given: Given, overrides: Sequence[Override], ranks: int | None) -> ResolvedConfig:
    plugins, model_id, dataset_type = read_plugins(given, overrides)
    if not plugins:
        return load_config(given, overrides, ranks=ranks)
    # Imported here: only plugins need the registries.
    from mindspeed_mm.fsdp.utils.register import data_register, import_plugin, model_register

    try:
        import_plugin(plugins)
        for registry, name in ((model_register, model_id), (data_register, dataset_type)):
            if name is not None:
                registry.get(name)  # a mistyped id is the cause of unknown keys, not the other way round
    except MMError:
        with load_config(given, overrides, ranks=ranks).told_as_own():
            raise
    keys = PluginKeys(
        model=model_register.config_keys(model_id) if model_id else {},
        dataset=data_register.config_keys(dataset_type) if dataset_type else {},
    )
    return load_config(given, overrides, plugin_keys=keys, ranks=ranks)
