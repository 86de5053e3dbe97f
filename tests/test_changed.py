"""`python -m tests.changed` finds the tests that prove a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import changed


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("mindspeed_mm/fsdp/loss/sliced_head.py", "tests/fsdp/loss/test_chunk_loss.py"),
        ("mindspeed_mm/core/suggest.py", "tests/core/test_suggest.py"),
        ("mindspeed_mm/fsdp/models/flux2/modeling_flux2.py", "tests/families/test_generator_plans.py"),
        (
            "mindspeed_mm/fsdp/models/hunyuan_video_1_5/__init__.py",
            "tests/families/test_generators.py",
        ),
        ("mindspeed_mm/finetune_ocr.py", "tests/test_entries.py"),
        ("tests/helpers/hostile.py", "tests/core/test_outbound.py"),
        ("docs/data.md", "tests/test_readme.py"),
        ("tests/test_words.py", "tests/test_words.py"),
        ("pyproject.toml", "tests/tasks/test_infer.py"),
    ],
)
def test_a_change_leads_to_its_tests(path: str, test: str) -> None:
    assert (changed.ROOT / path).is_file() and test in changed.tests_of_file(path)


def test_every_module_has_tests_and_few_have_all() -> None:
    found = {path: changed.tests_of_module(path) for path in changed.modules()}
    assert all(found.values()), [path for path, tests in found.items() if not tests]
    sizes = sorted(map(len, found.values()))
    assert sizes[len(sizes) // 2] < len(changed.test_files()) / 20  # half of the modules need less than a twentieth


def test_what_git_says_is_new_or_changed_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"diff": "mindspeed_mm/core/suggest.py\n", "ls-files": "tests/new.py\n"}

    class Ran:
        def __init__(self, words: tuple[str, ...], **_: object) -> None:
            self.stdout = said[words[1]]

    monkeypatch.setattr(changed.subprocess, "run", Ran)
    assert changed.changed_files("HEAD") == ["mindspeed_mm/core/suggest.py", "tests/new.py"]
