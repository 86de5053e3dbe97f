"""`mm init`: the first YAML for a model and rows that somebody has, and a script that starts it.

What fits into memory is not guessed: ways to train are tried from the best one on, each as `mm check` checks it, and
the first one whose forecast leaves room is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import ConfigError, MMError, ModelFolderError, UsageError, count_problems
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, read_json_object
from mindspeed_mm.core.model_kinds import GENERATOR, UNIFIED, ModelKind
from mindspeed_mm.core.terminal import quoted, visible
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.tasks.init.given_keys import given_keys
from mindspeed_mm.tasks.init.row_settings import BASIC, RowSetting, row_settings
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.models.first_yaml import (
    RATES,
    RATES_OF_PAIRS,
    ROOM,
    adapters,
    flow,
    merged,
    scalar,
    sections_for,
)
from mindspeed_mm.tasks.requests.init import InitRequest, Method
from mindspeed_mm.tasks.schema import editor_line
from mindspeed_mm.tasks.ui.form import compose

_GIB = 2**30
_ROWS_A_STEP = 16
_ROWS = (8, 2, 1)
"""Rows of a device at a time that are tried: each forecast takes some seconds."""
_ROWS_LOOKED_AT = 100
"""First rows of the data, whose kind decides how they are trained on."""
_LEAST_ROWS_TO_HOLD_OUT, _HELD_OUT = 200, 0.02
_PIXELS = 1024 * 1024
"""Of pictures for a generator whose release names no size: those that are larger are scaled down."""
_CHECKS_A_RUN = 10
"""Validations and checkpoints of a run."""


@dataclass(frozen=True)
class Way:
    """One way to train the model on these devices."""

    method: Method
    recompute: bool
    rows: int
    """Rows of a device at a time."""

    def __str__(self) -> str:
        told = {"full": "all weights", "lora": "LoRA", "qlora": "LoRA over a base in four bits"}[self.method]
        if self.recompute:
            told += ", blocks computed again"
        plural = "s" if self.rows > 1 else ""
        return f"{told}, {self.rows} row{plural} a device"


@dataclass(frozen=True)
class Made:
    """What was written, and what it is expected to take."""

    config: Path
    script: Path
    way: Way
    devices: int
    rows: int
    peak_bytes: int
    """Forecast of a rank."""
    device_bytes: int
    notes: tuple[str, ...] = ()
    """What is set because of the rows or the folder, and why."""


def run(request: InitRequest, tell: Callable[[str], None] = lambda _: None) -> Made:
    """Choose a way to train, check it as `mm check` does, and write the YAML and a script.

    Args:
        request: The model, the rows and the devices.
        tell: Is given a line for each way that is tried.

    Raises:
        UsageError: The files are there already, or a key is given that is chosen here.
        ConfigError: The configuration has problems that are not about memory, or nothing fits; all are told.
        MMError: The model folder or the rows cannot be read.
    """
    from mindspeed_mm.fsdp.tools.memory_model.report import in_units  # torch: the help does without

    given_keys(request.overrides)  # refused before anything is looked at
    script = request.out.with_suffix(".sh")
    for path in (request.out, script):
        if path.exists() and not request.overwrite:
            way_out = "Name another one, or add --overwrite."
            raise UsageError("is there already", where=str(path), key="--out", way_out=way_out)
    setup = _Setup.of(request)
    rows = setup.count_rows()
    if rows is not None:
        setup = replace(setup, rows=rows)
    peaks: dict[Way, int] = {}

    def fits(way: Way) -> bool:
        if way not in peaks:
            peaks[way] = _peak(setup.sections(way), setup.devices, request.overrides)
            tell(f"{way}: {in_units(peaks[way])} of {in_units(setup.memory)} a device")
        return peaks[way] <= ROOM * setup.memory

    for method in setup.methods():
        # the way that needs least: one forecast rules the whole method out
        if not fits(Way(method, recompute=True, rows=1)):
            continue
        way = next(way for way in setup.ways(method) if fits(way))
        atomic_write_text(request.out, setup.text(way))
        atomic_write_text(script, setup.script())
        script.chmod(0o755)
        notes = tuple(f"{name}: {setting.value} ({setting.comment})" for name, setting in setup.settings.items())
        return Made(request.out, script, way, setup.devices, setup.rows, peaks[way], setup.memory, notes)
    raise ConfigError(
        f"{' and '.join(setup.methods())} need more than {in_units(setup.memory)} a device",
        where=str(request.model),
        key="--gpu",
        way_out="Name more devices, --devices N, or choose a smaller model.",
    )


@dataclass(frozen=True)
class _Setup:
    """A request, with the kind of its model and the devices."""

    request: InitRequest
    kind: ModelKind
    devices: int
    memory: int
    """Bytes of a device."""
    is_accelerator: bool
    sizes: Mapping[str, int]
    """Of a generator, the size of samples that the release was made for."""
    settings: Mapping[str, RowSetting] = field(default_factory=dict)
    """Of `basic_parameters`: what the rows need beyond their path."""
    rows: int = _ROWS_A_STEP
    """How many rows are trained on."""
    family: str = ""
    """Of a model that answers and draws: its `model_id`, which is also its `dataset_type`."""

    @classmethod
    def of(cls, request: InitRequest) -> _Setup:
        """Look at the model's folder and at this machine."""
        kind = kind_of_path(request.model)
        if kind is GENERATOR:
            return cls(request, kind, *_devices(request), _sizes(request.model))
        if kind is UNIFIED:
            return cls(request, kind, *_devices(request), {}, family=_family_of(request.model))
        settings = row_settings(request.model, _first_rows(request.data))
        given = {key.removeprefix(f"{BASIC}.") for key in given_keys(request.overrides)}
        if "chat_template" in given:
            given.add("template")
        settings = {name: setting for name, setting in settings.items() if name not in given}
        return cls(request, kind, *_devices(request), {}, settings)

    @property
    def holds_pairs(self) -> bool:
        """Whether the rows have a better and a worse answer, to be trained on by DPO."""
        return "stage" in self.settings and self.settings["stage"].value == "rm"

    @property
    def holds_out(self) -> bool:
        """Whether there are rows enough to leave some out of the training."""
        return self.kind is not GENERATOR and self.rows >= _LEAST_ROWS_TO_HOLD_OUT

    @property
    def rates(self) -> Mapping[Method, float]:
        """Learning rate of each method."""
        if self.holds_pairs:
            return RATES_OF_PAIRS
        return RATES

    def methods(self) -> tuple[Method, ...]:
        """Methods to try, the best one first; generators are adapted, as their users do."""
        if self.request.method != "auto":
            return (self.request.method,)
        methods: tuple[Method, ...] = ("lora",)
        if self.kind is not GENERATOR:
            methods = ("full", "lora")
        if self.is_accelerator:
            return (*methods, "qlora")
        return methods

    def ways(self, method: Method) -> Iterator[Way]:
        """Ways of a method from the fastest one on; the last one needs least memory."""
        few = [rows for rows in _ROWS if rows * self.devices <= self.rows and self.kind is not GENERATOR]
        for rows in few or [1]:
            for recompute in (False, True):
                yield Way(method, recompute, rows)

    def sections(self, way: Way) -> dict[str, JsonObject]:
        """The configuration as a mapping."""
        data = self.request.data
        training: JsonObject = {
            "lr": self.rates[way.method],
            "micro_batch_size": way.rows,
            "gradient_accumulation_steps": self.accumulation(way),
        }
        own: dict[str, Any] = {"training": training}
        if self.kind is GENERATOR:
            own["data"] = {"dataset_param": {"dataset_type": "generation", "preprocess_parameters": self.sizes}}
        if self.family:
            own |= {"model": {"model_id": self.family}, "data": {"dataset_param": {"dataset_type": self.family}}}
        if self.settings:
            basic = {name: setting.value for name, setting in self.settings.items()}
            own["data"] = {"dataset_param": {"basic_parameters": basic}}
        if self.holds_pairs:
            own["posttrain"] = {"method": "dpo"}
        if way.recompute:
            own["features"] = {"recompute": True}
        dtype = "bf16" if self.is_accelerator else None
        sections = sections_for(
            self.request.model, data, _folder_of(data), method=way.method, save=self.save, dtype=dtype
        )
        return merged(sections, own)

    @property
    def save(self) -> str:
        """The run folder, named after the YAML."""
        return str(Path("runs") / self.request.out.stem)

    def accumulation(self, way: Way) -> int:
        """Return the number of micro-batches of a step, for about 16 rows on all devices together."""
        if self.kind is GENERATOR:
            return 1
        return max(1, min(_ROWS_A_STEP, self.rows) // (way.rows * self.devices))

    def count_rows(self) -> int | None:
        """How many rows are trained on; None where they cannot be opened: the check says why, beside all else."""
        from mindspeed_mm.fsdp.data import build_mm_dataset
        from mindspeed_mm.fsdp.params.loader import load_config

        try:
            sections = self.sections(Way("full", recompute=False, rows=1))
            arguments = load_config(sections, self.request.overrides).arguments
            train, _ = build_mm_dataset(arguments.data.dataset_param, seed=arguments.training.seed, encode_ahead=False)
        except MMError:
            return None
        return len(train)

    def text(self, way: Way) -> str:
        """The YAML, with a comment where a value may well be another one."""
        basic = self.sections(way)["data"]["dataset_param"]["basic_parameters"]
        out = quoted(self.request.out)
        start = f"mm train {out} --nproc {self.devices}"
        each = way.rows * self.devices * self.accumulation(way)
        given = given_keys(self.request.overrides)
        steps = given.get("training.train_iters") or max(1, self.rows // each)
        interval = max(1, steps // _CHECKS_A_RUN)
        plural = "s" if self.devices > 1 else ""
        on = f"on {self.devices} device{plural}"
        lines = [
            editor_line(),
            _comment(f"{self.request.model.name}: {way}, {on}."),
            _comment(f"Check: mm check {out} --nproc {self.devices}      Train: {start}"),
            "model:",
            f"  model_name_or_path: {scalar(self.request.model)}",
        ]
        if self.family:
            lines.append(f"  model_id: {self.family}")
        lines += self._data_lines(basic)
        if self.is_accelerator:
            lines += ["parallel:", "  fsdp_plan: {param_dtype: bf16}"]
        if way.recompute:
            lines += ["features:", "  recompute: true   # less memory, more time: blocks are computed again"]
        lines += [
            "training:",
            f"  lr: {scalar(self.rates[way.method])}   # {self.usual_rates(way)} are usual",
            f"  micro_batch_size: {way.rows}   # rows of a device at a time",
            f"  gradient_accumulation_steps: {self.accumulation(way)}   # {each} rows a step",
        ]
        if not given.get("training.train_iters"):
            lines.append("  train_epochs: 1")
        lines += [
            f"  save: {scalar(self.save)}",
            f"  save_interval: {interval}   # of about {steps:,} steps",
        ]
        if self.holds_out:
            lines.append(f"  val_interval: {interval}")
        if way.method != "full":
            lines.append(f"  lora: {flow(adapters(way.method))}")
        if self.holds_pairs:
            lines += ["posttrain:", "  method: dpo   # posttrain.dpo has its losses and beta"]
        text = "\n".join(lines) + "\n"
        if not given:
            return text
        return compose(text, {key: flow(value) for key, value in given.items()})

    def _data_lines(self, basic: JsonMapping) -> list[str]:
        """The lines of the section `data`, with what the rows need."""
        lines = ["data:", "  dataset_param:"]
        if self.family:
            lines.append(f"    dataset_type: {self.family}")
        if self.kind is GENERATOR:
            sizes = ", ".join(f"{name}: {size}" for name, size in self.sizes.items())
            told = "as the release has it"
            if "max_pixels" in self.sizes:
                told = "larger pictures are scaled down"
            lines += [
                "    dataset_type: generation",
                f"    preprocess_parameters: {{{sizes}}}   # {told}",
            ]
        lines += [
            "    basic_parameters:",
            f"      dataset: {scalar(basic['dataset'])}   # {self.rows:,} rows",
            f"      dataset_dir: {scalar(basic['dataset_dir'])}   # where relative paths of media start",
        ]
        for name, setting in self.settings.items():
            lines.append(f"      {name}: {scalar(setting.value)}   # {setting.comment}")
        if self.holds_out:
            lines.append(f"      val_rate: {_HELD_OUT}   # share that is not trained on, for val_loss")
        return lines

    def usual_rates(self, way: Way) -> str:
        """Learning rates that others train with."""
        of_all_weights, of_adapters = "1e-6 to 2e-5", "5e-5 to 3e-4"
        if self.holds_pairs:
            of_all_weights, of_adapters = "5e-7 to 5e-6", "5e-6 to 5e-5"
        if way.method == "full":
            return of_all_weights
        return of_adapters

    def script(self) -> str:
        """The commands that check and train."""
        out = quoted(self.request.out)
        return (
            "#!/usr/bin/env bash\n# Run it where mm init was run: relative paths start there.\nset -euo pipefail\n"
            f'mm check {out} --nproc {self.devices}\nmm train {out} --nproc {self.devices} "$@"\n'
        )


def _devices(request: InitRequest) -> tuple[int, int, bool]:
    """How many devices there are, the memory of each in bytes, and whether they are accelerators."""
    import torch  # seconds: the help does without

    from mindspeed_mm.fsdp.utils.device import get_device_type, memory_total_bytes

    is_here = get_device_type() != "cpu"
    if request.gpu is not None:  # of another machine
        return request.devices or 1, int(request.gpu * _GIB), True
    memory = memory_total_bytes()
    if is_here:
        return request.devices or torch.accelerator.device_count(), memory, True
    devices = request.devices or 1
    return devices, memory // devices, False  # processes share the memory of the host


def _folder_of(data: Path) -> Path:
    """Where relative paths of media start: the folder of rows, or the one that their file is in."""
    if data.is_dir():
        return data
    return data.parent


def _first_rows(data: Path) -> list[JsonObject]:
    """Some of the first rows; none where rows cannot be opened, which is the check's to say."""
    from mindspeed_mm.fsdp.data.data_utils.rows.row_table import open_rows
    from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetAttr

    basic = BasicParameters.model_construct(dataset=str(data), dataset_dir=str(_folder_of(data)))  # may be called true
    try:
        table = open_rows(basic, DatasetAttr())
        return [dict(table.row(number)) for number in range(min(len(table), _ROWS_LOOKED_AT))]
    except MMError:
        return []


def _family_of(model: Path) -> str:
    """What the config.json of a model that answers and draws calls its family, as its card and its rows do."""
    model_type = read_json_object(model / "config.json", ModelFolderError).get("model_type")
    card = next(card for card in families() if model_type in card.ids)
    return str(card.smallest["data"]["dataset_param"]["dataset_type"])


def _sizes(model: Path) -> dict[str, int]:
    """The size of samples that the release was made for; a bound of pixels where it names none."""
    from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
    from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
    from mindspeed_mm.fsdp.sampling.defaults import filled

    adapter = find_adapter(model)
    sampling = filled(adapter, SamplingArguments(), "--size")
    sizes = {"height": sampling.height, "width": sampling.width, "num_frames": sampling.num_frames}
    given = {name: size for name, size in sizes.items() if size is not None and (name != "num_frames" or size > 1)}
    return given or {"max_pixels": _PIXELS}


def _peak(sections: Mapping[str, object], devices: int, overrides: Sequence[str] = ()) -> int:
    """Forecast of the first batch's peak on a rank, in bytes.

    Args:
        sections: The configuration.
        devices: Number of ranks.
        overrides: What is given beside it.

    Raises:
        ConfigError: The check found problems.
    """
    from mindspeed_mm.tasks.check import check

    result = check.run(dict(sections), [*overrides, "training.save=null"], nproc=devices)
    if result.problems:
        # A problem of a key that an option has set is a problem of the option.
        problems = [replace(problem, key=_OPTIONS.get(problem.key, problem.key)) for problem in result.problems]
        told = [count_problems("the model and its rows", problems), *result.headlines]
        raise ConfigError("; ".join(told), problems=problems)
    peak = result.predicted_memory.get("peak_bytes")
    if not isinstance(peak, int):
        what = "; ".join(result.warnings) or "the memory of a step cannot be predicted"
        raise ConfigError(what, way_out="Write the YAML by hand: docs/fine-tune.md has three.")
    return peak


_OPTIONS = {
    "model.model_name_or_path": "--model",
    f"{BASIC}.dataset": "--data",
    f"{BASIC}.dataset_dir": "--data",
}
"""Key that an option sets → the option."""


def _comment(text: str) -> str:
    """A line of comment, whatever is in a path."""
    return f"# {visible(text)}".replace("\n", " ")
