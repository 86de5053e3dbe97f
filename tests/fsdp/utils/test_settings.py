from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from mindspeed_mm.fsdp.utils.model_parts import setting_of


def test_the_first_name_with_a_value_of_the_kind_counts() -> None:
    config = SimpleNamespace(merge_size=None, merge_kernel_size=(2, 2), patch_size=14)
    assert setting_of(config, int, "patch_size") == 14
    assert setting_of(config, int, "merge_size", "merge_kernel_size", "patch_size") == 14
    assert setting_of(config, Sequence, "merge_size", "merge_kernel_size") == (2, 2)


def test_there_is_none_where_a_name_or_its_kind_is_missing() -> None:
    assert setting_of(SimpleNamespace(patch_size="14"), int, "patch_size", "side") is None
    assert setting_of(None, object, "config") is None
