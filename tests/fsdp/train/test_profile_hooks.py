"""Profiles of a real run: what is recorded, that nothing else changes, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.tools_args import MemoryProfile, Profile, StaticProfile
from mindspeed_mm.fsdp.tools import memory_profiler, recorder
from mindspeed_mm.fsdp.tools.memory_profiler import MemoryProfiler
from mindspeed_mm.fsdp.tools.recorder import Recorder, Window
from mindspeed_mm.fsdp.tools.trace_analysis import analyse
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.profiles import (
    DynamicProfileHook,
    build_memory_profile_hook,
    build_time_profile_hook,
)
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecorder
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

TIME = "tools.profile.static_param"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("profiled"), training={"train_iters": 5, "save_interval": 0})


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text through one layer: with stacks, each call of a function is recorded."""
    folder = tmp_path_factory.mktemp("short")
    make_tiny_qwen3(folder / "model", num_hidden_layers=1)
    make_rows(folder, images=(0,))
    return make_tiny_run(folder, training={"train_iters": 4, "save_interval": 0, "micro_batch_size": 1})


def train(yaml: Path, *overrides: str, hooks: Any = (), **options: Any) -> Trainer:
    trainer = Trainer(load_with_plugins(yaml, list(overrides)), TrainOptions(**options), hooks=hooks)
    trainer.train()
    return trainer


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_profile_of_a_run_holds_its_parts_and_modules(short: Path, tmp_path: Path) -> None:
    on = ["tools.profile.enable=true", f"{TIME}.level=2", f"{TIME}.start_step=3", f"{TIME}.end_step=5"]
    plain, profiled = StepRecorder(), StepRecorder()
    train(short, hooks=[plain])
    train(short, f"training.save={tmp_path}/run", *on, hooks=[profiled])
    assert [step["loss"] for step in plain.steps] == [step["loss"] for step in profiled.steps]
    folder = tmp_path / "run" / "profiling"
    assert [path.name for path in sorted(folder.iterdir())] == [
        "rank0_step3-4.summary.txt",
        "rank0_step3-4.trace.json.gz",
    ]
    (times,) = analyse(folder).ranks.values()
    assert times.steps == 2
    assert {"data wait", "prepare", "forward", "backward", "clip", "read numbers", "optimizer"} <= times.phases.keys()
    assert sum(times.shares.values()) == pytest.approx(times.window)
    assert sum(part["host"] for part in times.phases.values()) <= times.window
    assert any(name.endswith("layers.0.mlp.down_proj") for name in times.modules)
    log = (tmp_path / "run" / "log" / "train.log").read_text()
    assert "bottleneck: " in log and str(folder / "rank0_step3-4.trace.json.gz") in log
    shapes = [e for e in events(folder) if e["name"] == "aten::mm" and "Input Dims" in e["args"]]
    assert shapes


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_level_0_records_times_alone_and_single_keys_add_to_it(yaml: Path, tmp_path: Path) -> None:
    on = ["tools.profile.enable=true", f"{TIME}.start_step=1", f"{TIME}.end_step=2", "training.train_iters=2"]
    train(yaml, *on, f"{TIME}.save_path={tmp_path}/a", f"{TIME}.analyse_flag=false")
    train(yaml, *on, f"{TIME}.save_path={tmp_path}/b", f"{TIME}.record_shapes=true", f"{TIME}.with_memory=true")
    light, heavier = events(tmp_path / "a"), events(tmp_path / "b")
    assert not any("Input Dims" in e.get("args", {}) or e["name"] == "[memory]" for e in light)
    assert any("Input Dims" in e.get("args", {}) for e in heavier)
    assert any(e["name"] == "[memory]" for e in heavier)
    assert not any(e["name"].startswith("mm.module") for e in heavier)
    assert not list((tmp_path / "a").glob("*.txt")) and list((tmp_path / "b").glob("*.txt"))


def test_long_windows_are_several_files_and_stop_at_the_limit(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "STEPS_A_FILE", 2)
    on = ["tools.profile.enable=true", f"{TIME}.start_step=1", f"{TIME}.end_step=100", f"{TIME}.analyse_flag=false"]
    train(yaml, *on, f"{TIME}.save_path={tmp_path}/a")
    names = [f"rank0_step{steps}.trace.json.gz" for steps in ("1-2", "3-4", "5-5")]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    monkeypatch.setattr(recorder, "LIMIT_BYTES", 10)
    train(yaml, *on, f"{TIME}.save_path={tmp_path}/b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == names[:1]
    assert "stopped after step 2" in capsys.readouterr().out


def test_steps_are_those_of_the_run_also_after_a_resume(
    yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = [f"training.save={tmp_path}/run", "tools.profile.enable=true", f"{TIME}.analyse_flag=false"]
    on += [f"{TIME}.start_step=4", f"{TIME}.end_step=5"]
    train(yaml, *on, steps=2)
    assert "this start ends before step 4" in capsys.readouterr().out
    assert not (tmp_path / "run" / "profiling").exists()
    train(yaml, *on, steps=2)
    assert [path.name for path in (tmp_path / "run" / "profiling").iterdir()] == ["rank0_step4-4.trace.json.gz"]
    train(yaml, *on)
    assert "steps 4 to 4 are over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["tools.profile.enable=true", "tools.profile.ranks=[0,1]"], "tools.profile.ranks"),
        (["tools.profile.enable=true", "tools.profile.ranks=[-2]"], "tools.profile.ranks"),
        (["tools.profile.enable=true"], f"{TIME}.start_step"),
        (["tools.profile.enable=true", f"{TIME}.with_cpu=false"], f"{TIME}.with_cpu"),
        (
            ["tools.profile.enable=true", "tools.profile.profile_type=dynamic"],
            "tools.profile.dynamic_param.config_path",
        ),
        (["MEMORY.enable=true", "MEMORY.dump_ranks=[3]"], "MEMORY.dump_ranks"),
        (["MEMORY.enable=true", "MEMORY.start_step=9", "MEMORY.end_step=10"], "MEMORY.start_step"),
    ],
)
def test_what_cannot_be_recorded_is_one_error_before_training(yaml: Path, overrides: list[str], key: str) -> None:
    steps: list[int] = []

    class Counting(Hook):
        def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
            steps.append(result.step)

    with pytest.raises(ConfigError) as raised:
        train(yaml, *(words.replace("MEMORY", "tools.memory_profile") for words in overrides), hooks=[Counting()])
    assert raised.value.problems[0].key == key.replace("MEMORY", "tools.memory_profile")
    assert raised.value.problems[0].way_out
    assert not steps


def test_keys_that_mean_nothing_on_this_device_are_named_once() -> None:
    notes: list[str] = []
    static = {"data_simplification": True, "aic_metrics_type": "Memory"}
    memory = {"enable": True, "stacks": "python", "max_entries": 5}
    tools = {"profile": {"enable": True, "static_param": static}, "memory_profile": memory}
    run = Arguments.model_validate({"tools": tools})
    build_memory_profile_hook(run.tools.memory_profile, run.features, run.training, 0, 1, notes.append)
    build_time_profile_hook(run.tools.profile, run.training, 0, 1, notes.append)
    for name in ("data_simplification", "aic_metrics_type", "stacks", "max_entries"):
        assert sum(name in note and "has no effect on cpu" in note for note in notes) == 1


def test_that_compiled_blocks_are_left_out_is_said() -> None:
    notes: list[str] = []
    sections = {"tools": {"memory_profile": {"enable": True}}, "features": {"compile": True}}
    run = Arguments.model_validate(sections)
    build_memory_profile_hook(run.tools.memory_profile, run.features, run.training, 0, 1, notes.append)
    assert any("features.compile" in note for note in notes)


def two_ranks(yaml: str, folder: str) -> list[str]:
    notes: list[str] = []

    class Ask(Hook):
        """Rank 0 asks after step 1, as a person would."""

        def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
            if result.step == 1 and engine.rank == 0:
                (Path(folder) / "watched" / "profile.json").write_text('{"steps": 2}')

    dynamic = ["tools.profile.profile_type=dynamic", f"tools.profile.dynamic_param.config_path={folder}/watched"]
    on = ["tools.profile.enable=true", "tools.profile.ranks=[-1]", f"{TIME}.save_path={folder}/traces", *dynamic]
    train(Path(yaml), *on, "training.micro_batch_size=1", "training.train_iters=6", hooks=[Ask()])
    return notes


@pytest.mark.slow
def test_two_ranks_record_the_same_steps_when_asked(yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    run_ranks(2, two_ranks, str(yaml), str(tmp_path))
    traces = sorted(path.name for path in (tmp_path / "traces").glob("*.gz"))
    assert traces == [f"rank{rank}_step5-6.trace.json.gz" for rank in (0, 1)]
    found = analyse(tmp_path / "traces")
    assert sorted(found.ranks) == [0, 1]
    assert all(times.communication > 0 for times in found.ranks.values())


# --- asked for from outside ------------------------------------------------------------------------------------------


def test_bad_requests_are_one_warning_each_and_a_touch_is_a_request(
    yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = tmp_path / "run" / "watched"

    class Person(Hook):
        def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
            texts = {1: "{", 3: '{"levle": 2}', 5: '{"start": false}', 7: '{"steps": 0}', 9: '{"level": 7}', 11: ""}
            if result.step in texts:
                path = watched / "profile.json"
                path.write_text(texts[result.step])
                os.utime(path, ns=(result.step, result.step))

    watched.mkdir(parents=True)
    (watched / "profile.json").write_text('{"steps": 1}')  # of an earlier run
    on = [f"training.save={tmp_path}/run", "tools.profile.enable=true", "tools.profile.profile_type=dynamic"]
    on += ["tools.profile.dynamic_param.config_path=watched", "training.train_iters=16", f"{TIME}.analyse_flag=false"]
    train(yaml, *on, hooks=[Person()])
    said = capsys.readouterr().out
    for words in ("is not JSON", "Did you mean 'level'?", "steps is 0", "not one of 0, 1, 2"):
        assert said.count(words) == 1, words
    assert said.count("will be recorded") == 1
    (trace,) = (tmp_path / "run" / "profiling").iterdir()
    assert trace.name == "rank0_step12-12.trace.json.gz"


def test_ranks_that_see_a_request_at_different_steps_begin_at_the_same(tmp_path: Path) -> None:
    firsts = set()
    for done in (6, 7, 8):
        hook = DynamicProfileHook(tmp_path / "profile.json", Profile(), tmp_path, 0, 5, lambda _: None)
        hook._seen = None
        (tmp_path / "profile.json").write_text('{"steps": 2, "level": 1}')
        hook._take(SimpleNamespace(iteration=done))  # type: ignore[arg-type]
        assert hook._window is not None and hook._window.settings.level == 1
        firsts.add(hook._window.first)
    assert firsts == {10}


# --- an NPU ----------------------------------------------------------------------------------------------------------


class FakeProfile:
    """Records what it is told."""

    made: list[FakeProfile] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.calls = options, []
        FakeProfile.made.append(self)

    def start(self) -> None:
        self.calls.append("start")

    def step(self) -> None:
        self.calls.append("step")

    def stop(self) -> None:
        self.calls.append("stop")


def fake_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch_npu.profiler")
    module.profile = FakeProfile
    module.ProfilerActivity = SimpleNamespace(CPU="cpu", NPU="npu")
    module.ProfilerLevel = SimpleNamespace(Level0="L0", Level1="L1", Level2="L2")
    module.AiCMetrics = type("AiCMetrics", (), {"PipeUtilization": "pipes", "Memory": "memory", "AiCoreNone": "none"})
    module.ExportType = SimpleNamespace(Text="text")
    module._ExperimentalConfig = lambda **options: options
    module.schedule = lambda **options: options
    module.tensorboard_trace_handler = lambda folder, worker_name, analyse_flag: (folder, worker_name, analyse_flag)
    monkeypatch.setitem(__import__("sys").modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setitem(__import__("sys").modules, "torch_npu.profiler", module)
    monkeypatch.setattr(recorder, "get_device_type", lambda: "npu")
    FakeProfile.made.clear()


def test_an_npus_own_profiler_is_told_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npu(monkeypatch)
    counters = {"aic_metrics_type": "Memory", "data_simplification": True}
    settings = StaticProfile(level=1, with_stack=True, analyse_flag=False, with_cpu=False, **counters)
    assert recorder.check_settings(settings, "k") == []
    notes: list[str] = []
    recording = Recorder(Window(3, 5, settings), tmp_path, 2, torch.nn.Linear(2, 2), notes.append)
    recording.start(2)
    assert [recording.step() for _ in range(3)] == [True, True, False]
    recording.stop()
    (profile,) = FakeProfile.made
    assert profile.calls == ["start", "step", "step", "step", "stop"]
    assert profile.options == {
        "activities": ["npu"],
        "record_shapes": True,
        "profile_memory": False,
        "with_stack": True,
        "schedule": {"wait": 0, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 0},
        "on_trace_ready": (str(tmp_path), "rank2", False),
        "experimental_config": {
            "export_type": "text", "profiler_level": "L1", "aic_metrics": "memory", "data_simplification": True,
        },
    }  # fmt: skip


def test_unknown_metrics_of_an_npu_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npu(monkeypatch)
    with pytest.raises(ConfigError, match=r"It knows AiCoreNone, Memory, PipeUtilization"):
        recorder.check_settings(StaticProfile(aic_metrics_type="Pipes"), "k")
    recorder.check_settings(StaticProfile(aic_metrics_type=None), "k")


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_of_a_run_is_told_by_category_and_module(yaml: Path, tmp_path: Path) -> None:
    on = [f"training.save={tmp_path}/run", "tools.memory_profile.enable=true", "tools.memory_profile.start_step=2"]
    on += ["tools.memory_profile.end_step=4", "tools.memory_profile.record_peak_memory=true"]
    plain, profiled = StepRecorder(), StepRecorder()
    train(yaml, hooks=[plain])
    trainer = train(yaml, *on, hooks=[profiled])
    assert [step["loss"] for step in plain.steps] == [step["loss"] for step in profiled.steps]
    folder = tmp_path / "run" / "memory_snapshot"
    report = json.loads((folder / "memory_rank0_step2-3.json").read_text())
    peak = report["peak"]
    weights = sum(p.numel() * 4 for p in trainer_parameters(tmp_path / "run"))
    assert peak["by_category"]["parameters"] == weights
    assert weights * 2 <= peak["by_category"]["optimizer"] < weights * 2.01
    assert sum(peak["by_category"].values()) == peak["total_bytes"]
    assert sum(sum(kinds.values()) for kinds in peak["by_module"].values()) == peak["total_bytes"]
    assert max(max(m.values()) for m in report["module_peaks"].values()) == peak["total_bytes"]
    assert (folder / "memory_rank0_step2-3.png").stat().st_size > 5000
    log = (tmp_path / "run" / "log" / "train.log").read_text()
    assert "memory of steps 2 to 3 on rank 0: peak" in log
    assert "most held in all while a module was at work" in log
    assert trainer.iteration == 5


def trainer_parameters(run: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    folder = run.parent.parent
    config = json.loads((run / "run.json").read_text())["model_name_or_path"]
    assert folder.is_dir()
    return list(AutoModelForImageTextToText.from_pretrained(config).parameters())


def test_an_accelerators_history_is_written_and_its_allocator_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(("history", options)),
        _dump_snapshot=lambda path: calls.append(("dump", Path(path).name)),
    )
    monkeypatch.setattr(memory_profiler, "get_torch_device", lambda: SimpleNamespace(memory=memory))
    readings = iter(range(100, 10_000, 100))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: next(readings))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: calls.append(("reset", None)))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    settings = MemoryProfile(enable=True, stacks="python", max_entries=7, mem_info=True)
    optimizer = torch.optim.SGD(model.parameters())
    profiler = MemoryProfiler(settings, tmp_path, 1, model, optimizer, torch.device("cuda"))
    profiler.start(3)
    model(torch.ones(1, 2)).sum().backward()
    report = profiler.stop(3)
    told = [call for call in calls if call[0] != "reset"]
    assert told == [
        ("history", {"max_entries": 7, "stacks": "python"}),
        ("dump", "memory_rank1_step3-3.pickle"),
        ("history", {"enabled": None}),
    ]
    assert calls.count(("reset", None)) >= 5
    # Entered: (outside) 100, the model 200, its first layer 300, the model 400, its second 500 …
    assert report.allocated_peaks["0"]["forward"] == 300
    assert report.allocated_peaks["1"]["forward"] == 500
    assert report.allocated_peaks["1"]["backward"] > 500


@pytest.mark.edge("R17")
def test_a_backend_without_a_history_is_profiled_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profiler, "get_torch_device", lambda: SimpleNamespace())
    monkeypatch.setattr(memory_profiler, "get_device_type", lambda: "outside")
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    settings = MemoryProfile(enable=True, max_entries=7)
    assert "has no effect on outside" in memory_profiler.idle_settings(settings)[0]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    profiler = MemoryProfiler(settings, tmp_path, 0, model, optimizer, torch.device("cuda"))
    profiler.start(1)
    model(torch.ones(1, 2))
    profiler.stop(1)
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".png"]


@pytest.mark.edge("R17")
@pytest.mark.parametrize("failing", ["history", "tracker"])
def test_a_memory_profile_that_cannot_start_says_why(
    yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    ended: list[Any] = []

    def history(**options: Any) -> None:
        if failing == "history":
            raise RuntimeError("the true cause")
        ended.append(options.get("enabled", "on"))

    def cannot_enter(self: Any) -> None:
        raise RuntimeError("the true cause")

    memory = SimpleNamespace(_record_memory_history=history)
    real = memory_profiler.MemoryProfiler.__init__

    def with_history(self: Any, *args: Any) -> None:
        real(self, *args)
        self._history = memory

    monkeypatch.setattr(memory_profiler.MemoryProfiler, "__init__", with_history)
    if failing == "tracker":
        monkeypatch.setattr(memory_profiler.MemoryTracker, "__enter__", cannot_enter)
    with pytest.raises(RuntimeError, match="the true cause"):
        train(yaml, f"training.save={tmp_path}/run", "tools.memory_profile.enable=true")
    assert ended == ([] if failing == "history" else ["on", None])


@pytest.mark.edge("R17")
@pytest.mark.parametrize(
    ("device", "outside", "expected"),
    [
        ("cuda", "privateuseone", ["CPU", "CUDA"]),
        ("xpu", "privateuseone", ["CPU", "XPU"]),
        ("openreg", "openreg", ["CPU", "PrivateUse1"]),
        ("mps", "privateuseone", ["CPU"]),
        ("cpu", "privateuseone", ["CPU"]),
    ],
)
def test_a_profile_records_what_the_backend_is_called(
    device: str, outside: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "get_device_type", lambda: device)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: outside)
    found = recorder.recorded_activities(torch.profiler, with_cpu=True)
    assert found == [getattr(torch.profiler.ProfilerActivity, name) for name in expected]
