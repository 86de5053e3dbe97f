"""A folder of samples with its manifest: what is there is proved and kept, what another model made is refused.

Rank 0 appends to `manifest.jsonl` as samples come, other ranks to files of their own, which end up in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindspeed_mm.core.artifacts import (
    DRAWN_MANIFEST,
    append_jsonl,
    atomic_write_text,
    make_writable_folder,
    read_jsonl,
    sha256_file,
)
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.file_writing import check_output_place
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.sampler import MadeSample, SampleOrder
from mindspeed_mm.fsdp.utils.media_files import write_media

_DIGITS = 5
_KEYS = {"number", "sample", "file", "sha256", "settings", "model"}
"""What every line of a manifest has."""
_SETTINGS = (
    "num_inference_steps", "guidance_scale", "negative_prompt", "height", "width", "num_frames", "fps", "seed",
)  # fmt: skip
"""What decides a sample beside its prompt and the model."""

Key = tuple[int, int]
"""Numbers of prompt and sample."""


class SampleFolder:
    """Samples of one model under one set of settings.

    Args:
        path: The folder; made when it is not there.
        model: Fingerprint of the model.
        sampling: As asked for, with what was left out filled in.
    """

    def __init__(self, path: Path, model: str, sampling: SamplingArguments) -> None:
        self.path = path
        self._model, self._sampling = model, sampling
        self._settings = {name: getattr(sampling, name) for name in _SETTINGS}

    def begin(self, orders: Sequence[SampleOrder], *, overwrite: bool) -> set[Key]:
        """Make the folder, and look at what it holds.

        Args:
            orders: What is asked for.
            overwrite: Remove the samples that its manifest lists, and the manifest.

        Returns:
            The orders that are there, unharmed.

        Raises:
            MachineError: It is a file, or cannot be written.
            DataError: It holds what another model, other settings or other prompts have made.
        """
        check_output_place(resolve_output(self.path), "--out")
        self._refuse_foreign(orders)
        make_writable_folder(self.path)
        if overwrite:
            self._clear()
        wanted = {(order.prompt.number, order.number): order for order in orders}
        found = {}
        for entry in self._entries():
            self._check(entry, wanted)
            if self._is_whole(entry):
                found[entry["number"], entry["sample"]] = entry
        self._rewrite(found)  # a line of a damaged file would stand beside the one of the file that is made anew
        return set(found)

    def write(self, order: SampleOrder, sample: MadeSample, rank: int) -> None:
        """Write a sample, then its line in the manifest.

        Args:
            order: What it is.
            sample: Written with its sound, if it has one.
            rank: Of this process.
        """
        fps = self._sampling.fps or 0.0  # which pictures do not have
        path = write_media(self.path / order.file_stem(_DIGITS), sample.frames, fps, sample.sound)
        size = dict(zip(("frames", "height", "width"), sample.frames.shape, strict=False))
        entry = {**order.describe(self._sampling), "file": path.name, "sha256": sha256_file(path), **size}
        if sample.sound is not None:
            entry["sound"] = path.with_suffix(".wav").name
        entry |= {"settings": self._settings, "model": self._model}
        manifest = DRAWN_MANIFEST if rank == 0 else f"manifest.rank{rank}.jsonl"
        append_jsonl(self.path / manifest, entry)

    def finish(self) -> None:
        """Put all lines into the manifest, in order."""
        self._rewrite({(entry["number"], entry["sample"]): entry for entry in self._entries()})

    def _refuse_foreign(self, orders: Sequence[SampleOrder]) -> None:
        """The manifest is written before the first sample: files under a sample's name without one are not ours, nor is
        a manifest of other lines."""
        for entry in self._entries():
            if not entry.keys() >= _KEYS:
                raise self._foreign(f"its {DRAWN_MANIFEST} was not written by mm infer")
        if self._manifests() or not self.path.is_dir():
            return
        standing = {path.stem: path.name for path in self.path.iterdir()}
        for order in orders:
            found = standing.get(order.file_stem(_DIGITS))
            if found is not None:
                raise self._foreign(f"it has no {DRAWN_MANIFEST}, and a sample would be written over '{found}'")

    def _rewrite(self, entries: Mapping[Key, Mapping[str, object]]) -> None:
        lines = [json.dumps(entries[key], ensure_ascii=False) + "\n" for key in sorted(entries)]
        atomic_write_text(self.path / DRAWN_MANIFEST, "".join(lines))
        for file in self._manifests():
            if file.name != DRAWN_MANIFEST:
                file.unlink()

    def _clear(self) -> None:
        for entry in self._entries():
            for name in (entry.get("file"), entry.get("sound")):
                if isinstance(name, str):
                    (self.path / Path(name).name).unlink(missing_ok=True)
        for file in self._manifests():
            file.unlink()

    def _manifests(self) -> list[Path]:
        return sorted(self.path.glob("manifest.rank*.jsonl")) + sorted(self.path.glob(DRAWN_MANIFEST))

    def _entries(self) -> Iterator[JsonObject]:
        for file in self._manifests():
            yield from read_jsonl(file)

    def _is_whole(self, entry: Mapping[str, object]) -> bool:
        name = str(entry["file"])
        path = self.path / name
        is_there = name == path.name and path.is_file() and sha256_file(path) == entry["sha256"]
        return is_there and ("sound" not in entry or path.with_suffix(".wav").is_file())

    def _check(self, entry: JsonMapping, wanted: Mapping[Key, SampleOrder]) -> None:
        if entry["model"] != self._model:
            raise self._foreign("it holds samples of another model")
        for name, value in self._settings.items():
            if entry["settings"].get(name) != value:
                raise self._foreign(f"it holds samples made with {name} {entry['settings'].get(name)}, not {value}")
        order = wanted.get((entry["number"], entry["sample"]))
        if order is None or not self._is_of(entry, order):
            raise self._foreign(f"'{entry['file']}' shows '{entry.get('prompt')}', which was not requested for it")

    def _is_of(self, entry: Mapping[str, object], order: SampleOrder) -> bool:
        """Whether a sample is the one asked for, wherever its prompt stood."""
        for name, value in order.describe(self._sampling).items():
            if name != "place" and entry.get(name) != value:
                return False
        return True

    def _foreign(self, why: str) -> DataError:
        return DataError(
            f"cannot be continued: {why}",
            where=str(self.path),
            key="--out",
            way_out="Choose another folder, or add --overwrite to start again.",
        )
