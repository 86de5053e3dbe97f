"""`mm data check`: every row read once, what is wrong with each, and what to change."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm.core.artifacts import atomic_write_jsonl, make_writable_folder
from mindspeed_mm.core.errors import ConfigError, DataError, ExitCode, MMError
from mindspeed_mm.core.file_writing import check_output_file, first_line_has
from mindspeed_mm.fsdp.data.data_utils.rows.sources import rows_folder
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate, own_template
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataEntry
from mindspeed_mm.fsdp.params.sizes.parallel import least_ranks
from mindspeed_mm.fsdp.utils.processor import beginning_of, tokenizer_of
from mindspeed_mm.tasks.data.denoised import denoised_findings, is_denoised, lengths_of
from mindspeed_mm.tasks.data.facts import DenoisedLook, RowLook
from mindspeed_mm.tasks.data.findings import BASIC, DataFinding, Fix, Terms, find_all, to_dict
from mindspeed_mm.tasks.data.histogram import Bin, as_dicts, histogram
from mindspeed_mm.tasks.data.opening import OpenedData, open_data
from mindspeed_mm.tasks.data.scan import scan
from mindspeed_mm.tasks.data.tally import BadRow, RowStatistics, SourceShare, shares
from mindspeed_mm.tasks.data.tokens import special_texts
from mindspeed_mm.tasks.requests.data import DataCheckRequest

_COMPARED_ROWS = 16
MediaRead = Literal["headers", "measured", "decoded", "samples", "features", "none"]
"""How media were looked at: by their headers; decoded, because headers do not tell their size; decoded, as asked for;
in samples that the data set makes itself; not at all, because features are stored of them, or there are none."""


@dataclass
class DataCheck:
    """Holds what `mm data check` found: counts of rows, findings, histograms and the bad rows."""

    path: Path
    rows: int = 0
    """Number of rows in the data set."""
    read: int = 0
    usable: int = 0
    shrunk: int = 0
    samples: int = 0
    """Samples that usable rows give: more than rows where documents are cut into pieces."""
    cut: int = 0
    """Number of such documents."""
    seconds: float = 0.0
    media_read: MediaRead = "headers"
    """How media were looked at."""
    findings: list[DataFinding] = field(default_factory=list)
    tokens: list[Bin] = field(default_factory=list)
    patches: list[Bin] = field(default_factory=list)
    shares: list[SourceShare] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Number of findings that are errors."""
        return sum(finding.is_error for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """4 when a finding is an error."""
        if self.errors:
            return int(ExitCode.DATA)
        return int(ExitCode.OK)

    def _are_media_decoded(self) -> bool | None:
        """None where the data set makes its samples itself, and nobody knows."""
        if self.media_read == "samples":
            return None
        return self.media_read in ("decoded", "measured")

    def to_dict(self) -> dict[str, object]:
        """For machines; bad rows are in `--bad-rows`."""
        return {
            "path": str(self.path),
            "rows": self.rows,
            "read": self.read,
            "usable": self.usable,
            "bad": len(self.bad),
            "shrunk": self.shrunk,
            "cut": self.cut,
            "samples": self.samples,
            "seconds": round(self.seconds, 2),
            "decoded": self._are_media_decoded(),
            "media_read": self.media_read,
            "exit_code": self.exit_code,
            "findings": [to_dict(finding) for finding in self.findings],
            "tokens": as_dicts(self.tokens),
            "patches": as_dicts(self.patches),
            "shares": [each.to_dict() for each in self.shares],
        }


def run(request: DataCheckRequest) -> DataCheck:
    """Read the rows once and judge them.

    Raises:
        ConfigError: The configuration is off.
    """
    result = DataCheck(request.config)
    try:
        data = open_data(request.config, request.overrides, validation=request.validation, patient=True)
    except DataError as error:
        what = str(error)
        if error.headline:
            problem = error.problems[0]
            where = " ".join(part for part in (problem.where, problem.key) if part)
            what = f"{where}  {problem}"
        result.findings = [DataFinding("error", "the data set does not open", what, 0)]
        return result
    began = time.monotonic()
    tally = look_through(data, decode=request.decode, limit=request.limit, workers=request.workers)
    result.seconds = time.monotonic() - began
    result.media_read = _media_read(data.dataset, tally, decode=request.decode)
    ranks = _ranks(request.nproc, data)
    _judge(result, data, tally, ranks)
    # a batch of rows that have faults fails for the same reasons
    if not result.errors:
        result.findings = [*_of_first_batch(data, ranks), *result.findings]
    return result


def look_through(data: OpenedData, *, decode: bool, limit: int | None, workers: int | None) -> RowStatistics:
    """One pass over the rows, or over so many of them, evenly spread."""
    rows, seed = chosen_rows(data.first_samples, limit), data.arguments.training.seed
    if is_denoised(data.dataset):
        denoised = DenoisedLook(data.dataset, decode=decode, lengths=lengths_of(data.dataset), seed=seed)
        tally = RowStatistics.of(scan(rows, denoised, workers=workers))
        tally.leave_out(data.dataset.left_out)
        return tally
    specials = special_texts(data.processor())
    look = RowLook(
        data.dataset,
        decode=decode,
        specials=specials,
        check_sample=data.sample_check(),
        collate=data.own_collator(),
        seed=seed,
    )
    return RowStatistics.of(scan(rows, look, workers=workers))


def chosen_rows(rows: Sequence[int], limit: int | None) -> Sequence[int]:
    """All rows, or so many of them evenly over all, the first among them."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[number * len(rows) // limit] for number in range(limit)]


def write_bad_rows(path: Path, bad: Sequence[BadRow]) -> None:
    """One JSON object a line: index, file, row, kind, what is wrong, and the way out."""
    is_ours = first_line_has("index", "file", "row", "kind", "what", "key", "way_out")
    target = check_output_file(path, is_ours, "--bad-rows")
    make_writable_folder(target.parent)
    atomic_write_jsonl(target, [row.to_dict() for row in bad])


def _media_read(dataset: MMDataset, tally: RowStatistics, *, decode: bool) -> MediaRead:
    """What was done to media in this pass."""
    if is_denoised(dataset):
        if not dataset.is_raw:
            return "features"
        return "decoded" if decode else "headers"
    if not dataset.has_rows:
        return "samples"
    if not tally.with_media:
        return "none"
    if decode:
        return "decoded"
    if tally.decoding:
        return "measured"
    return "headers"


def _judge(result: DataCheck, data: OpenedData, tally: RowStatistics, ranks: int) -> None:
    """Fill in what the pass says."""
    dataset, basic = data.dataset, data.param.basic_parameters
    terms = Terms(
        basic,
        data.param.preprocess_parameters,
        data.arguments.data.dataloader_param,
        global_batch=0 if data.is_validation else data.global_batch(ranks),
        rows=data.rows,
        repeated=len(dataset) - data.distinct,
    )
    result.rows, result.read, result.usable = data.rows, tally.rows, tally.usable
    result.shrunk, result.bad = tally.shrunk, tally.bad
    result.samples, result.cut = len(tally.sample_lengths(basic)), tally.longer_documents(basic)
    elsewhere = None
    if not is_denoised(dataset):
        elsewhere = partial(_search_media, dataset, basic)
    findings = find_all(tally, terms, lambda row: str(dataset.place(row)), elsewhere)
    findings += _of_template(data, tally)
    if is_denoised(dataset):
        findings += denoised_findings(dataset, tally)
        findings.sort(key=lambda finding: not finding.is_error)
    result.findings = findings
    lengths = tally.full_lengths()
    if lengths.any():  # samples of generators have other sizes
        result.tokens = histogram(lengths)
    result.patches = histogram(tally.patches_of_media)
    result.shares = shares(dataset, basic, tally)


def _of_first_batch(data: OpenedData, ranks: int) -> list[DataFinding]:
    """What is wrong with how rows are joined: seen where the first micro-batch is made."""
    if data.is_validation:  # which takes every row once, however few there are
        ranks = least_ranks(data.arguments.parallel)
    try:
        loader = data.loader(ranks)
        next(iter(loader))
    except MMError as error:
        return [DataFinding("error", "first micro-batch", f"it cannot be made: {error}", 0)]
    # Where the first step leaves a part of the epoch, nothing comes twice in it, and a large data set is not measured.
    if data.is_validation or not loader.position.epoch or not loader.repeat_note:
        return []
    fix = Fix(f"lower {loader.size_keys}, or give more data", data.rows)
    return [DataFinding("warning", "repeated rows", loader.repeat_note, data.rows, fixes=(fix,))]


def _ranks(nproc: int | None, data: OpenedData) -> int:
    """Ranks of the run: as asked, as launched, or one; the fewest that can train its plan where so many cannot."""
    world = os.environ.get("WORLD_SIZE", "")
    ranks = nproc or 1
    if not nproc and world.isdigit():
        ranks = int(world)
    try:
        data.global_batch(ranks)
    except ConfigError:
        return least_ranks(data.arguments.parallel)
    return ranks


def _of_template(data: OpenedData, tally: RowStatistics) -> list[DataFinding]:
    """What is off about the chat template, if the rows are conversations."""
    template = data.dataset.template
    if template is None:
        return []
    samples: list[Sample] = []
    for row in tally.index[:_COMPARED_ROWS]:
        with contextlib.suppress(MMError):  # a finding of its own
            samples.append(data.dataset.sample(row))
    return list(_template_findings(template, data.processor(), samples))


# --- media ------------------------------------------------------------------------------------------------------------
# Where missing media may lie: the folders beside the rows, tried for some of the rows that miss one.

_MOST_TRIED = 200
_SUBFOLDERS = ("images", "image", "media", "videos", "audios", "data")


def _search_media(dataset: MMDataset, basic: BasicParameters, rows: Sequence[BadRow]) -> list[Fix]:
    """Settings of `dataset_dir` under which the media of rows would be found: the best; none when nothing helps."""
    tried = rows[:_MOST_TRIED]
    if not dataset.has_rows:
        return []
    folders = []
    if basic.dataset_dir is None:
        folders = [file.parent for file in _named_files(basic)]
    paths_of_rows = []
    for row in tried:
        if paths := _paths(dataset.sample(row.index)):
            paths_of_rows.append([_as_written(path, folders) for path in paths])
    found = []
    for folder in _candidates(basic):
        saved = 0
        for paths in paths_of_rows:
            saved += all((folder / path).is_file() for path in paths)
        if saved:
            # so many of the rows that were tried, scaled to all that miss media
            found.append(Fix(f"{BASIC}.dataset_dir={folder}", round(saved * len(rows) / len(tried))))
    return sorted(found, key=lambda fix: -fix.saves_rows)[:1]


def _as_written(path: str, folders: Sequence[Path]) -> str:
    """A path as its row has it: without the folder of the rows, where it was looked up."""
    for folder in folders:
        if path.startswith(f"{folder.absolute()}/"):
            return path.removeprefix(f"{folder.absolute()}/")
    return path


def _paths(sample: Sample) -> list[str]:
    found = []
    for item in sample.media:
        source = item.source
        if isinstance(source, dict):
            source = source.get("path")
        if not isinstance(source, list):  # a list: the frames of a clip
            source = [source]
        found += [name for name in source if isinstance(name, str)]
    return found


def _candidates(basic: BasicParameters) -> list[Path]:
    """The folders of the files of rows, those around them, and their usual sub-folders."""
    files = _named_files(basic)
    bases = [file.parent for file in files]
    bases += [beside.parent for beside in bases]
    bases = list(dict.fromkeys(bases))
    bases.append(rows_folder(basic.dataset_dir))
    tried = list(bases)
    for base in bases:
        tried += [base / name for name in _SUBFOLDERS]
    here = None
    if basic.dataset_dir is not None:
        here = Path(basic.dataset_dir).resolve()
    found = []
    for folder in dict.fromkeys(tried):
        if folder.is_dir() and folder.resolve() != here:
            found.append(folder)
    return found


def _named_files(basic: BasicParameters) -> list[Path]:
    """The files of rows that are there; a folder of them counts as a file in it."""
    entries: Sequence[str | DataEntry] = basic.dataset or ()
    if isinstance(entries, str):
        entries = entries.split(",")
    found = []
    for entry in entries:
        if isinstance(entry, DataEntry):
            entry = entry.path
        name = str(entry).strip()
        for path in (Path(name), rows_folder(basic.dataset_dir) / name):
            if path.exists():
                found.append(path if path.is_file() else path / "rows")
                break
    return found


# --- the chat template ------------------------------------------------------------------------------------------------
# Whether the chat template in use fits the model: the marks it writes are tokens, and it is the model's own.

_MARKS = re.compile(r"<\|[^|<>]{1,40}\|>|<(?:start|end)_of_[a-z]+>|\[/?INST\]|</?think>")
"""What templates write around turns."""
_PROBE = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
)


def _template_findings(template: ChatTemplate, processor: object, samples: list[Sample]) -> Iterator[DataFinding]:
    """Warnings about a template.

    Args:
        template: The one in use.
        processor: Of the model's folder.
        samples: A few rows to compare with.
    """
    tokenizer = tokenizer_of(processor)
    beginning = tokenizer.decode(beginning_of(processor))
    source = own_template(processor)
    own = ChatTemplate(processor, source) if source and source != template.source else None
    split = sorted(mark for mark in _marks_written(template) if not _is_one_token(mark, tokenizer))
    if split:
        yield DataFinding(
            "warning",
            "template mismatch",
            f"the chat template writes marks that are not tokens of this model: {', '.join(split)}",
            len(samples),
            fixes=(Fix(_instead(processor, beginning, own), 0),),
        )
    differing: list[Sample] = []
    if own is not None:
        differing = [sample for sample in samples if _differs(template, own, beginning, sample)]
    if differing:
        yield DataFinding(
            "warning",
            "template mismatch",
            f"{len(differing)} of the first {len(samples)} rows render differently than with the model's own template",
            len(differing),
            tuple(str(sample.place) for sample in differing[:3]),
            (Fix(f"{_instead(processor, beginning, own)}, unless the model is to learn another format", 0),),
        )


def _instead(processor: object, beginning: str, own: ChatTemplate | None) -> str:
    """What to set in the place of a template that does not fit. A beginning that the processor alone writes has to be
    written by a template: `mm check` asks for it where rows lack it."""
    if own is None:
        return f"name a format of this model's tokens in {BASIC}.template or chat_template"
    if not beginning or _begins(own, beginning):
        return f"leave {BASIC}.template and chat_template out: the model's folder has its own"
    return (
        f"set {BASIC}.chat_template to a file with {beginning!r}, which {type(processor).__name__} begins every text "
        "with, and the model's own template behind it"
    )


def _begins(template: ChatTemplate, beginning: str) -> bool:
    try:
        return template.render(_PROBE).startswith(beginning)
    except DataError:
        return False  # it wants another conversation


def _marks_written(template: ChatTemplate) -> set[str]:
    try:
        return set(_MARKS.findall(template.render(_PROBE, add_generation_prompt=True)))
    except DataError:
        return set()  # it wants another conversation


def _is_one_token(mark: str, tokenizer: Any) -> bool:
    return len(tokenizer(mark, add_special_tokens=False)["input_ids"]) == 1


def _differs(used: ChatTemplate, own: ChatTemplate, beginning: str, sample: Sample) -> bool:
    """Whether a row is written otherwise than by the model's own template, with or without what its processor begins
    every text with."""
    try:
        written = own.render(sample.messages)
        return used.render(sample.messages) not in (written, beginning + written)
    except DataError:
        return True
