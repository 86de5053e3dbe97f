"""`ConfigManager`, with which scripts of MindSpeed-MM's FSDP2 backend read their YAML and command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import Override
from mindspeed_mm.fsdp.train.configuration import load_with_plugins


class ConfigManager:
    """Reads a configuration as `mm train` does: `script.py run.yaml section.key=value …`.

    Args:
        config_class: `Arguments`; keys of your own are declared where a model or a data set is registered.
        config_file_path: The YAML; None: the first word of the command line.
        additional_args: Sections that win over the YAML and the command line.
        allow_cli_override: Whether words `section.key=value` of the command line are read.
        _options: Switches that loosen MindSpeed-MM's checks of keys; an unknown key is always an error here.

    Raises:
        ConfigError: Another class is given.
    """

    def __init__(
        self,
        config_class: type = Arguments,
        config_file_path: str | Path | None = None,
        additional_args: Mapping[str, object] | None = None,
        allow_cli_override: bool = True,
        **_options: bool,
    ) -> None:
        if config_class is not Arguments:
            raise ConfigError(
                f"{config_class.__name__} is not the class of this suite's configuration",
                key="config_class",
                way_out="Declare keys of your own: @model_register.register('my_model', keys={'my_key': 1}).",
            )
        words = sys.argv[1:]
        if words and words[0].endswith((".yaml", ".yml")):
            config_file_path = config_file_path or words[0]
            words = words[1:]
        self._path = config_file_path
        self._overrides: list[Override] = [*words] if allow_cli_override else []
        if additional_args:
            self._overrides.append(additional_args)
        self._config: Arguments | None = None

    def load_and_parse(self) -> Arguments:
        """Read and check the configuration; `Trainer(config)` takes it.

        Raises:
            UsageError: No YAML is named.
            ConfigError: Every problem of the configuration.
        """
        if self._path is None:
            raise UsageError("names no YAML file", where=sys.argv[0], way_out="Give it as the first word.")
        self._config = load_with_plugins(Path(self._path), self._overrides).arguments
        return self._config

    def get_config(self) -> Arguments | None:
        """Return what `load_and_parse` has read, or None before it was called."""
        return self._config
