"""`mm models`: families, released sizes, and which test proves what of them. Everything is read from their cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.cards import ModelCard, families
from mindspeed_mm.tasks.models.routes import bare, bare_names, cards_of, refuse_planned
from mindspeed_mm.tasks.models.start import as_lines, device_lines, start_of
from mindspeed_mm.tasks.models.topics import PLANNED, TASKS, YamlRecipe


@dataclass(frozen=True)
class Proof:
    """Something that a test shows of a family."""

    what: str
    test: str
    """File and function; the card of a family names the case, or another test, of the family alone."""


PROOFS = {
    "train": Proof(
        "from the released keys two steps, in fp64, equal a bare loop over the plain model; a resume equals an "
        "unbroken run to the bit; exports bear the released keys and shapes. Generators: loss and exported weights "
        "equal those of diffusers' own pipeline",
        "tests/families/test_released_training.py::test_two_steps_equal_a_bare_loop",
    ),
    "lora": Proof(
        "adapters train on the released keys and merge into them; those of generators load into diffusers' pipeline",
        "tests/families/test_released_training.py::test_adapters_merge_into_what_is_released",
    ),
    "data": Proof(
        "tokens and tensors of the rows equal those of the family's own processor, or published preparation",
        "tests/families/test_released_data.py::test_rows_are_what_the_processor_makes_of_them",
    ),
    "packed": Proof(
        "a step on packed rows equals the step on each row alone, in fp64",
        "tests/families/test_released_packed.py::test_packed_rows_are_trained_as_each_by_itself",
    ),
    "plans": Proof(
        "every parallel plan equals one process, in fp64",
        "tests/fsdp/train/test_plan_matrix_{text,vlm,omni,generators}.py::test_plan_equals_one_process",
    ),
    "infer": Proof(
        "`mm infer` answers what `generate` of transformers answers",
        "tests/families/test_released_answers.py::test_answers_are_those_of_transformers",
    ),
    "evaluate": Proof(
        "`mm evaluate` counts the wrong characters of these answers as a hand does",
        "tests/families/test_released_answers.py::test_evaluate_counts_as_a_hand_does",
    ),
    "generate": Proof(
        "features, loss, samples, exports and adapters equal those of diffusers' own pipeline",
        "tests/families/test_generators.py::test_a_family_equals_its_pipeline",
    ),
    "convert": Proof(
        "through Megatron-style layouts and back without loss",
        "tests/checkpoint/megatron/test_family_round_trips.py"
        "::test_a_model_passes_through_every_kind_of_layout_and_loses_nothing",
    ),
}
"""Name of a column → what it says and the test."""


def find(name: str) -> list[ModelCard]:
    """The families that a name stands for: a family's own or its beginning, a `model_id`, a class, a name on the hub,
    also of a size that is not listed, or a folder with a `config.json`.

    Raises:
        UsageError: Nothing bears the name.
        ModelFolderError: The folder holds no configuration, or one of another family.
    """
    if Path(name).is_dir():
        return _in_folder(Path(name))
    wanted = name.lower()
    refuse_planned([wanted.rpartition("/")[2]])
    found = [card for card in families() if bare(wanted) in map(bare, _names(card))] or _akin(wanted)
    if not found:
        known: set[str] = set()
        for card in families():
            known |= {card.name, *card.ids, card.title}
        is_lost_path = Path(name).parent.is_dir() and "/" in name
        raise UsageError(
            f"no folder and no family is called '{name}'" if is_lost_path else f"no family is called '{name}'",
            way_out=f"{did_you_mean(name, sorted(known))}`mm models` lists all. A model of transformers that is not "
            "listed trains by its class alone: try `mm check` with its folder.",
        )
    return found


def _akin(name: str) -> list[ModelCard]:
    """Families whose names begin so, or else, of a name on the hub, that whose name it begins with."""
    wanted, size = bare(name), bare(name.rpartition("/")[2])
    beginning: list[ModelCard] = []
    begun: list[ModelCard] = []
    longest = 1
    for card in families():
        names = bare_names(card)
        if len(wanted) > 2 and any(each.startswith(wanted) for each in names):
            beginning.append(card)
        length = max((len(each) for each in names if size.startswith(each)), default=0)
        if length > longest:
            longest, begun = length, []
        if length == longest:
            begun.append(card)
    if beginning or "/" not in name:
        return beginning
    return begun


def _names(card: ModelCard) -> Iterator[str]:
    yield from (card.name, *card.ids, *card.called, card.title, card.model_class, card.model_class.partition(".")[2])
    for hub in card.released:
        yield from (hub, hub.partition("/")[2])


def _in_folder(folder: Path) -> list[ModelCard]:
    for inside in ("config.json", "transformer/config.json"):
        path = folder / inside
        if not path.is_file():
            continue
        try:
            config = parse_json(path.read_text(encoding="utf-8"))
            if "_class_name" in config:
                classes = [config["_class_name"]]
            else:
                classes = list(config["architectures"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(
                "does not say which class its model is",
                where=str(path),
                way_out="Put back the config.json that the model was released with, which has 'architectures'.",
            ) from error
        found = [card for card in families() if card.model_class.partition(".")[2] in classes]
        if found:
            return found
        raise ModelFolderError(
            f"{', '.join(map(str, classes))} is of no family that is listed",
            where=str(path),
            way_out="A model of transformers trains by its class alone: `mm check` tells whether this one does.",
        )
    raise ModelFolderError(
        "holds neither config.json nor transformer/config.json",
        where=str(folder),
        way_out="Name a folder as it is released, of transformers or of diffusers.",
    )


def as_text(cards: Sequence[ModelCard]) -> str:
    """A table, in groups by task."""
    width = max(len(card.name) for card in cards)
    title = max(len(card.title) for card in cards)
    lines: list[str] = []
    for task, (heading, *_) in TASKS.items():
        group = cards_of(task, cards)
        if group and lines:
            lines.append("")
        if group:
            lines.append(heading)
        for card in group:
            proven = ", ".join(card.proven) or "-"
            lines.append(f"  {card.name:{width}}  {card.title:{title}}  {sizes(card):>11}  {proven}")
    lines += ["", "Planned, not built yet"]
    for name, about in PLANNED.items():
        lines.append(f"  {name:{width}}  {about}")
    lines += ["", "Proven by tests, `mm models NAME` tells which:"]
    for name, proof in PROOFS.items():
        lines.append(f"  {name:8} {proof.what}")
    return "\n".join(lines)


def as_card(card: ModelCard) -> str:
    """What a family is, and how somebody begins with it."""
    heading = TASKS[card.task].title
    names_id = f"model.model_id: {card.ids[0]}, or " if card.ids else ""
    lines = [
        f"{card.title}: {heading[0].lower()}{heading[1:]}",
        f"  class     {card.model_class}",
        f"  takes     {', '.join(card.modalities)}",
        f"  chosen by {names_id}the class that config.json names",
    ]
    if card.tasks:
        lines.append(f"  trains    model.task: {', '.join(card.tasks)}")
    if card.proven:
        lines.append(f"  proven    {', '.join(card.proven)} (by which test: mm models {card.name} --proof)")
    if card.not_trained:
        lines.append(f"  left out  {', '.join(card.not_trained)}: not trained, and handed on unchanged by mm export")
    start = start_of(card, YamlRecipe())
    return "\n".join([*lines, "", *device_lines(start, card), *as_lines(start, card)])


def as_proof(card: ModelCard) -> str:
    """What tests prove of a family, each with the test that proves it."""
    lines = [card.title]
    for name, case in card.proven.items():
        lines += [f"  {name:9} {PROOFS[name].what}", f"            {_test(name, case)}"]
    if card.tasks:
        lines.append("  tasks     values of model.task, and the test of each")
    for task, case in card.tasks.items():
        lines.append(f"            {task:6} {_test('generate', case)}")
    return "\n".join(lines)


def as_record(card: ModelCard) -> JsonObject:
    """The card and the start for machines."""
    start = start_of(card, YamlRecipe())
    return {**asdict(card), "yaml": start.yaml, "fits": start.fits, "examples": start.examples}


def _test(proof: str, case: str) -> str:
    """What a card names: a test of its own, or cases of the proof's."""
    if "::" in case:
        return case
    return f"{PROOFS[proof].test} [{case}]"


def as_markdown(cards: Sequence[ModelCard]) -> str:
    """The table of the README."""
    rows = [f"| family | `mm models` | takes | released | {' | '.join(PROOFS)} |", "|---" * (4 + len(PROOFS)) + "|"]
    for task in TASKS:
        for card in cards:
            if card.task != task:
                continue
            ticks = " | ".join("✓" if name in card.proven else "" for name in PROOFS)
            rows.append(f"| {card.title} | `{card.name}` | {', '.join(card.modalities)} | {sizes(card)} | {ticks} |")
    return "\n".join(rows)


def sizes(card: ModelCard) -> str:
    """The smallest and the largest released size: 2.1–33 B."""
    known = sorted(size for size in card.released.values() if size is not None)
    if not known:
        return ""
    smallest, largest = _short_size(known[0]), _short_size(known[-1])
    if smallest == largest:
        return f"{smallest} B"
    return f"{smallest}–{largest} B"


def _short_size(size: float) -> str:
    if size >= 10:
        return f"{size:.0f}"
    return f"{size:.1f}"
