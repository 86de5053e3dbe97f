"""Which files the workers of pytest-xdist begin with.

Files come in the order of their numbers of tests, so that those with few tests are last; where one of these takes long,
one core would finish it while the others have nothing to do.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

LONG = (
    "tests/cli/test_train_launch.py",
    "tests/families/test_generators.py",
    "tests/families/test_generator_plans.py",
    "tests/fsdp/train/test_optimizers.py",
    "tests/fsdp/train/test_two_ranks.py",
    "tests/fsdp/train/test_parity.py",
    "tests/fsdp/train/test_data_orders.py",
    "tests/fsdp/train/test_lora_parity.py",
    "tests/fsdp/train/test_model_parallel_parity.py",
    "tests/fsdp/train/test_pipeline_parity.py",
    "tests/fsdp/train/test_pipeline_checkpoints.py",
    "tests/fsdp/train/test_encoder_layout_parity.py",
    "tests/fsdp/features/test_features_in_training.py",
    "tests/examples/test_released_examples.py",
    "tests/tasks/test_verify.py",
    "tests/cli/test_kills_of_writers.py",
    "tests/test_documented_imports.py",
    "tests/test_documented_steps.py",
    "tests/test_imports.py",
    "tests/test_python_page.py",
)
"""Files of few tests that take ten seconds and more."""


ONE_BY_ONE = ("tests/fsdp/tools/test_repeated_blocks.py",)
"""Files whose tests share nothing and take minutes together: each test is dealt out on its own, and these come last,
which lets all workers end at about the same time."""


class LongFilesFirst(LoadFileScheduling):  # type: ignore[misc]
    """Deals whole files out, those of `LONG` first; tests of `ONE_BY_ONE` in between and at the end."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file in ONE_BY_ONE:
            return nodeid
        return str(file)

    def _assign_work_unit(self, node: Any) -> None:
        for file in LONG:
            if file in self.workqueue:
                self.workqueue.move_to_end(file, last=False)
                break
        super()._assign_work_unit(node)
