"""Follows the numbers of a run beside its own files: TensorBoard, Weights & Biases, SwanLab, MLflow, Trackio.

Each library decides for itself, by its own environment variables (WANDB_MODE, SWANLAB_MODE, MLFLOW_TRACKING_URI,
TRACKIO_DIR …), where its numbers go; offline stays offline. A tracker that fails is named once and left out from then
on: it never ends a run.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image
from typing_extensions import override

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.train.run.event_file import EventFile
from mindspeed_mm.fsdp.utils.media_files import clip_gif
from mindspeed_mm.fsdp.utils.model_parts import setting_of

PROJECT = "mindspeed-mm"
"""Name of the project, or experiment, where a tracker's own variable names no other."""
IDENTITIES = "trackers.json"
"""File in the run folder's `log/`: the id under which each service knows the run, so that a resumed one goes on."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run before its first number."""

    name: str
    settings: Mapping[str, object]
    """Dotted key → value of what was given, without secrets."""
    folder: Path | None
    """Where files may be put; None for a run that keeps none."""
    first_step: int
    """The first step that will be logged; what was logged from there on by a start that was killed is done again."""
    identities: dict[str, str] = field(default_factory=dict)
    """Tracker → id of the run there, from an earlier start; a tracker adds its own."""


class Tracker:
    """One place that follows a run. Whatever it raises is said to people, and the run goes on without it."""

    package: str
    """What must be importable."""

    def begin(self, run: TrackedRun) -> None:
        """The run starts or goes on."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of a step; a step may come several times with different names."""
        raise NotImplementedError

    def show(self, media: Mapping[str, Path], step: int) -> None:
        """Pictures (PNG) and clips (mp4) that were drawn at a step, by name; a tracker may leave them out."""

    def end(self, exit_code: int) -> None:
        """Called when the run has ended, with the exit code of its process; 0 means success."""


class _RunOfService(Protocol):
    """What wandb and trackio give for a run."""

    def log(self, metrics: Mapping[str, object], *, step: int) -> None:
        """Send what a step has."""


def _send(
    run: _RunOfService, kinds: Mapping[str, Callable[[str], object]], media: Mapping[str, Path], step: int
) -> None:
    """Send pictures and clips, each as the kind of object that its service takes for the ending of its name."""
    sent = {}
    for name, path in media.items():
        if path.suffix in kinds:
            sent[name] = kinds[path.suffix](str(path))
    run.log(sent, step=step)


_SHOWN = frozenset({".png", ".mp4"})


def _picture(path: Path) -> tuple[bytes, int, int]:
    """The file, width and height."""
    with Image.open(path) as picture:
        return path.read_bytes(), *picture.size


class TensorBoard(Tracker):
    """Event files in `tb/` of the run folder."""

    package = "tensorboard"

    def begin(self, run: TrackedRun) -> None:
        """Remember the folder and the first step; what comes first opens the event file."""
        self._folder, self._first_step = run.folder, run.first_step
        self._opened: EventFile | None = None

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step, as one event."""
        if self._folder is not None:
            self._file(self._folder).add_numbers(numbers, step)

    def show(self, media: Mapping[str, Path], step: int) -> None:
        """Pictures as they are; clips as animated GIFs among the pictures, since TensorBoard plays no mp4."""
        for name, path in media.items():
            if self._folder is None or path.suffix not in _SHOWN:
                continue
            data, width, height = clip_gif(path) if path.suffix == ".mp4" else _picture(path)
            self._file(self._folder).add_picture(name, data, width, height, step)

    def _file(self, folder: Path) -> EventFile:
        if self._opened is None:
            self._opened = EventFile(folder / "tb", self._first_step)
        return self._opened

    @override
    def end(self, exit_code: int) -> None:
        if self._opened is not None:
            self._opened.close()


class WandB(Tracker):
    """Sends numbers, pictures and clips to Weights & Biases. https://docs.wandb.ai/ref/python/sdk/functions/init"""

    package = "wandb"

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with that of an earlier start."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.identities.get(self.package),
            resume="allow",
            dir=str(run.folder) if run.folder is not None else None,
            config=dict(run.settings),
        )
        run.identities[self.package] = self._run.id

    @override
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    @override
    def show(self, media: Mapping[str, Path], step: int) -> None:
        import wandb

        _send(self._run, {".png": wandb.Image, ".mp4": wandb.Video}, media, step)

    def end(self, exit_code: int) -> None:
        """Mark the run as finished or failed."""
        self._run.finish(exit_code=exit_code)


class SwanLab(Tracker):
    """Sends numbers, pictures and clips to SwanLab. https://docs.swanlab.cn/en/api/py-init.html"""

    package = "swanlab"

    def begin(self, run: TrackedRun) -> None:
        """Start an experiment, or go on with that of an earlier start."""
        import swanlab

        self._module = swanlab
        options = {}
        if run.folder is not None and "SWANLAB_LOG_DIR" not in os.environ:
            options["logdir"] = str(run.folder / "swanlab")
        known = run.identities.get(self.package)
        if known:
            options |= {"id": known, "resume": "allow"}
        started = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            experiment_name=run.name,
            config=dict(run.settings),
            **options,
        )
        identity = setting_of(setting_of(started, object, "public"), object, "run_id")
        if identity:
            run.identities[self.package] = str(identity)

    @override
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._module.log(dict(numbers), step=step)

    def show(self, media: Mapping[str, Path], step: int) -> None:
        """Send pictures, and clips as GIFs: SwanLab takes no mp4."""
        sent: JsonObject = {}
        for name, path in media.items():
            if path.suffix == ".png":
                sent[name] = self._module.Image(str(path))
            elif path.suffix == ".mp4":
                sent[name] = self._module.Video(io.BytesIO(clip_gif(path)[0]))
        self._module.log(sent, step=step)

    def end(self, exit_code: int) -> None:
        """Mark the experiment as finished or failed."""
        if exit_code == 0:
            self._module.finish()
        else:
            self._module.finish(state="crashed", error=f"exit code {exit_code}")


class MLflow(Tracker):
    """MLflow, by its client: whatever else a notebook logs with `mlflow` stays apart.
    https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html"""

    package = "mlflow"
    _most_params = 100
    """Parameters of one request."""

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with that of an earlier start."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        known = run.identities.get(self.package)
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            if experiment is not None:
                number = experiment.experiment_id
            else:
                number = self._client.create_experiment(name)
            known = self._client.create_run(number, run_name=run.name).info.run_id
            # Older servers refuse longer values.
            params = [Param(key, str(value)[:500]) for key, value in run.settings.items()]
            for first in range(0, len(params), self._most_params):
                self._client.log_batch(known, params=params[first : first + self._most_params])
        else:
            self._client.update_run(known, status="RUNNING")
        self._id = run.identities[self.package] = known

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Send the numbers in one request."""
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in numbers.items()])

    def show(self, media: Mapping[str, Path], step: int) -> None:
        """Keep the files as artifacts of the run."""
        for path in media.values():
            self._client.log_artifact(self._id, str(path), f"samples/iter_{step:07}")

    def end(self, exit_code: int) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, status="FINISHED" if exit_code == 0 else "FAILED")


class Trackio(Tracker):
    """Sends numbers, pictures and clips to Trackio. https://huggingface.co/docs/trackio"""

    package = "trackio"

    def begin(self, run: TrackedRun) -> None:
        """Start a run, or go on with that of an earlier start."""
        import trackio

        name = run.identities.setdefault(self.package, run.name)
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(project=project, name=name, config=dict(run.settings), resume="allow", embed=False)

    @override
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    @override
    def show(self, media: Mapping[str, Path], step: int) -> None:
        import trackio

        _send(self._run, {".png": trackio.Image, ".mp4": trackio.Video}, media, step)

    @override
    def end(self, exit_code: int) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "swanlab": SwanLab,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By the names of `training.report_to`."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise `MachineError` for a tracker that is not installed."""
    missing = [TRACKERS[name].package for name in names if importlib.util.find_spec(TRACKERS[name].package) is None]
    if missing:
        raise MachineError(
            f"not installed: {', '.join(missing)}",
            key="training.report_to",
            way_out="Install the extra: pip install 'mindspeed-mm[track]'; or take it out of the list.",
        )


class Trackers:
    """All that follow one run; on ranks other than 0 there are none.

    Args:
        trackers: By name.
        warn: Tells people.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self._have_begun = False

    @classmethod
    def of(cls, names: Sequence[str], further: Sequence[Tracker], warn: Callable[[str], None]) -> Trackers:
        """Those of `training.report_to`, and further ones."""
        trackers: dict[str, Tracker] = {name: TRACKERS[name]() for name in names}
        for tracker in further:
            trackers[type(tracker).__name__] = tracker
        return cls(trackers, warn)

    def begin(self, run: TrackedRun) -> None:
        """Tell all of them that the run starts."""
        file = run.folder / "log" / IDENTITIES if run.folder is not None else None
        if file is not None and file.exists():
            with suppress(OSError, ValueError, TypeError):  # the services then see a new run
                run.identities.update(parse_json(file.read_bytes()))
        self._have_begun, before = True, dict(run.identities)
        self._each(lambda tracker: tracker.begin(run), "does not follow this run")
        if file is not None and run.identities != before:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_text(file, json.dumps(run.identities))

    def log(self, metrics: Mapping[str, float]) -> None:
        """The numbers among a step's metrics."""
        numbers = {}
        for name, value in metrics.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name != "step":
                numbers[name] = float(value)
        self._each(lambda tracker: tracker.log(numbers, int(metrics["step"])), "stops here")

    def show(self, media: Mapping[str, Path], step: int) -> None:
        """Pictures and clips that were drawn at a step."""
        self._each(lambda tracker: tracker.show(media, step), "stops here")

    def end(self, exit_code: int) -> None:
        """Tell all of them how the run ended; nothing where it never began."""
        if not self._have_begun:
            return
        self._each(lambda tracker: tracker.end(exit_code), "could not be closed")
        self._trackers.clear()

    def _each(self, action: Callable[[Tracker], None], failing: str) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # noqa: BLE001  (foreign code: nothing that a tracker does may end a run)
                del self._trackers[name]
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                self._warn(f"warning: {name} {failing} ({reason}); metrics.jsonl goes on")
