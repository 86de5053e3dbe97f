"""What scripts of MindSpeed-MM call where `--hetero-parallel` is given, which is refused before."""

from __future__ import annotations

from typing import NoReturn

from mindspeed_mm.core.errors import ConfigError


def _refuse(*_args: object, **_kwargs: object) -> NoReturn:
    """Raises `ConfigError`: parts of a model cannot have plans of their own."""
    raise ConfigError(
        "is not built: all parts of a model share one parallel plan", key="--hetero-parallel", way_out="Leave it out."
    )


change_parallel_state = _refuse
apply_hetero_parallel_hooks = _refuse
hetero_align_config = _refuse
