"""`mm report`: every part is on the page, nothing comes from outside it, and what users wrote cannot become markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from mindspeed_mm.cli.report import command
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.sampling.answers.scoring import score
from mindspeed_mm.tasks.report import report
from mindspeed_mm.tasks.report.charts import draw_charts, smoothed, thinned
from mindspeed_mm.tasks.report.data import choose_samples, read_run


def step_record(step: int, **fields: Any) -> dict[str, Any]:
    record = {"step": step, "loss": 2.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 2e4, "step_ms": 250.0}
    return {**record, "data_share": 0.02, "memory_gib": 0.5, "time": 1.7e9 + step, **fields}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def sample(number: int, task: str, correct: bool, **fields: Any) -> dict[str, Any]:
    given = "seven" if correct else f"wrong-{number}"
    question = f"which is it, {number}?"
    base = {"id": f"s{number}", "task": task, "image": "a.png", "question": question, "expected": "seven"}
    return {**base, "given": given, "correct": correct, **fields}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    (folder / "eval").mkdir(parents=True)
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    write_lines(
        folder / "metrics.jsonl",
        [*(step_record(step) for step in range(1, 41)), {"step": 20, "val_loss": 0.25, "time": 1.7e9}],
    )
    write_lines(
        folder / "events.jsonl",
        [
            {"time": 1.7e9, "kind": "resume", "step": 20, "checkpoint": "iter_0000020"},
            {"time": 1.7e9, "kind": "save", "step": 40, "seconds": 0.125},
        ],
    )
    facts = {
        "status": "finished",
        "total_steps": 50,
        "packages": {"torch": "2.13.0"},
        "command": ["mm", "hub.token=s3cret"],
    }
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "resolved.yaml").write_text("training:\n  lr: 0.003  # run.yaml:21:7\n  api_key: s3cret\n")
    scores = {"naming": score([True] * 9 + [False]).to_dict()}
    (folder / "eval" / "results.json").write_text(json.dumps({"tasks": scores, "media_dir": str(tmp_path)}))
    samples = [sample(number, "naming", number % 3 > 0) for number in range(60)]
    write_lines(folder / "eval" / "samples.jsonl", samples)
    return folder


class Page(HTMLParser):
    """Text and references of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def __contains__(self, words: str) -> bool:
        return words in " ".join(" ".join(self.text).split())


def external(page: Page, html: str) -> list[str]:
    """References that leave the page."""
    away = [reference for reference in page.references if not reference.startswith(("data:image/", "#"))]
    return away + re.findall(r"https?:|@import|url\((?!#)", html)


def test_every_part_is_there_and_nothing_comes_from_outside(run: Path) -> None:
    result = CliRunner().invoke(command, [str(run)], catch_exceptions=False)
    out = run / "report.html"
    assert result.output == f"{out}\n"
    html = out.read_text()
    page = Page(html)
    parts = ["Loss", "validation", "Gradient norm", "Learning rate", "Throughput", "Waiting for data", "Peak memory"]
    parts += ["90.0 %", "59.6–98.2 %", "9 of 10", "40 of 50", "0:00:10", "12 of 20 wrong answers, then 12 of 40 right"]
    parts += ["which is it, 3?", "wrong-3", "1 × resume, 1 × save", "iter_0000020", "packages.torch", "2.13.0"]
    parts += ["lr: 0.003 # run.yaml:21:7"]
    assert [part for part in parts if part not in page] == []
    assert page.tags.count("svg") == 6
    assert html.index("wrong-3") < html.index("which is it, 1?")  # wrong ones first
    assert external(page, html) == []
    assert external(Page('<img src="a.png">'), "url(b.woff)") == ["a.png", "url("]  # the check itself sees them
    assert "s3cret" not in html
    assert not re.search(r"#0[12]0[12]0\d", html)  # every stand-in colour was replaced
    assert len(html) < 2_000_000


def test_what_users_wrote_stays_text(run: Path) -> None:
    evil = "<script>alert(1)</script>"
    write_lines(
        run / "eval" / "samples.jsonl", [sample(1, evil, False, given=evil, question=evil, id=evil, image=evil)]
    )
    write_lines(run / "events.jsonl", [{"kind": evil, "step": evil, "message": evil}])
    (run / "resolved.yaml").write_text(evil)
    (run / "run.json").write_text(json.dumps({evil: evil, "model_class": evil}))
    page = Page(report.run([run]).read_text())
    assert "script" not in page.tags
    assert evil in page
    assert "not found" in page  # the picture, said in its place


def test_two_runs_share_the_charts(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_lines(other / "metrics.jsonl", [step_record(1), step_record(2)])
    html = report.run([run, other], tmp_path / "both.html").read_text()
    page = Page(html)
    assert "Held-out samples: digits" in page
    assert page.tags.count("svg") == 6
    assert html.count("var(--series-2)") > 6
    with pytest.raises(UsageError, match="too many"):
        report.run([run] * 7)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running"}')
    assert "running" in Page(report.run([tmp_path]).read_text())


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        report.run([tmp_path])
    assert not list(tmp_path.iterdir())


def test_steps_done_again_after_a_resume_count_once(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 39, "loss"\n')  # cut short by a crash
        file.write(json.dumps(step_record(39, loss=7.0)) + "\n")
    steps = read_run(run).steps
    assert [record["step"] for record in steps] == list(range(1, 41))
    assert steps[38]["loss"] == 7.0


def test_samples_take_turns_by_task() -> None:
    samples = [sample(number, "ab"[number > 3], correct=False) for number in range(6)]
    wrong, right = choose_samples(samples, 3)
    assert [s["id"] for s in wrong] == ["s0", "s4", "s1"]
    assert right == []


def test_no_secret_of_an_unredacted_run_is_on_the_page(run: Path) -> None:
    lines = (
        "  api_key: 'two s3cret words'",
        "  proxy: https://me:s3cret@proxy.example",
        "  notes: hf_s3cret0123456789abcdef",
        "  hub.private_key: s3cret",
    )
    with (run / "resolved.yaml").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    facts = json.loads((run / "run.json").read_text())
    facts["environment"] = {"WANDB_API_KEY": "s3cret", **{f"note{i}": line for i, line in enumerate(lines)}}
    (run / "run.json").write_text(json.dumps(facts))
    html = report.run([run]).read_text()
    assert "s3cret" not in html
    assert html.count("•••") >= len(lines)


def test_curves() -> None:
    assert smoothed([3.0, 3.0, 3.0], weight=0.9) == pytest.approx([3.0] * 3)
    assert smoothed([1.0, 2.0], weight=0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])
    curve = [(step, 0.0) for step in range(1001)]
    thin = thinned(curve)
    assert (thin[0], thin[-1]) == (curve[0], curve[-1])
    assert len(thin) <= 301 < len(curve)


def test_rewards_have_panels(run: Path) -> None:
    """Each by itself, a judge of weight 0 too, and how far samples of a prompt lie apart."""
    with (run / "metrics.jsonl").open("a") as file:
        for step in (41, 42):
            fields = {"reward": 0.5, "reward/hps_v2": 0.3, "reward/judge": 0.7, "diversity": 9.0}
            file.write(json.dumps(step_record(step, **fields)) + "\n")
    titles = [title for title, _ in draw_charts([read_run(run)])]
    assert {"Reward", "Reward hps_v2", "Reward judge", "Diversity of the samples of a prompt"} <= set(titles)
