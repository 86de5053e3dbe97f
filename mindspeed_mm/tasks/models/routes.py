"""`mm route`: from what somebody wants to do, in their words, to families, commands and the page to read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.params.cards import ModelCard, families
from mindspeed_mm.tasks.models.start import FamilyStart, as_lines, device_lines, start_of, wrapped
from mindspeed_mm.tasks.models.topics import ANY_MODEL, ASPECTS, PLANNED, TASKS, Aspect, Topic, YamlRecipe

_SEEN, _HEARD = r"(image|picture|photo|page|scan)s?", r"(audio|sound|music|voice|speech)s?"
_WEIGHTS, _LAYOUT = r"(weights?|tensors?|checkpoints?|keys?|state.?dicts?)", r"(layouts?|formats?)"
_FOREIGN = r"(unknown|foreign|custom|unlisted|unsupported)"
_ASKED = r"(questions?|answer\w*|ask\w*|caption\w*|descri\w*|understand\w*|emotions?)"
_MEASURED = r"(evaluat\w*|scor\w*|measur\w*|metrics?|quality)"
_DRAWN = r"(generated|drawn|synthetic) (image|picture|photo|video|clip|film|movie|sample)s?"
_PHRASES = {
    r"\b(to|into|as|export\w*|write|save\w*|make)\b.*\bgguf\b": "gguf-export",
    r"\bgguf\b(?!-export)": "convert convert",
    rf"\b{_MEASURED}\b.*\b{_DRAWN}\b|\b{_DRAWN}\b.*\b{_MEASURED}\b|\b(fid|fvd|clip[ -]?scores?)\b": "drawn-score",
    r"\b(runs|trainings|experiments)\b.*\bside[ -]by[ -]side\b": "compare compare",
    r"\bside[ -]by[ -]side\b.*\b(runs|trainings|experiments)\b": "compare compare",
    r"\b(try\w*|several|different|many|two|three|four|five|\d+)\b.*\b(learning rates|batch sizes|settings)\b": "sweep",
    r"\b(train\w*|fit|build)\b.*\breward[ -]models?\b": "rewardmodel",
    r"^\W*(a )?reward[ -]models?\W*$|\breward[ -]model+ing\b": "rewardmodel",
    r"\b(train\w*|fine-?tun\w*|start\w*)\b.*\b(web[ -]?ui|gui|browser|gradio|llamaboard)\b": "webboard",
    r"\b(web[ -]?ui|gui|browser|gradio)\b.*\b(train\w*|fine-?tun\w*)\b": "webboard",
    r"^\W*(an? |the )?(web[ -]?ui|gui|gradio|dashboard|web ?board)\W*$": "webboard",
    r"\b(web[ -]?ui|gui|gradio|chat page)\b": "serve serve",
    r"\bplugin\w*\b.*\berrors?\b": "plugin plugin",
    r"\b(without|no|lacking)\b( an?| any)? (gpus?|npus?|graphics? cards?|accelerators?|cuda)\b": "cpu-only",
    r"\bon( an?| my)? cpus?\b|\bcpu[ -]only\b": "cpu-only",
    r"\bunit[ -]tests?\b|\bci\b": "unittest",
    r"\btest\w*\b.*\b(models?|rows|sets?|data|split|answers)\b": "evaluate",
    r"\b(to|into|from)[ -]megatron\b": "convert",
    r"\b(hugging ?face|hf)\b.*\bmegatron\b|\bmegatron\b.*\b(hugging ?face|hf)\b": "convert",
    r"\b(write|add|make|create|build|implement|own|custom|new)\b.*\bconverters?\b": "own-converter",
    rf"\b(rename|map)\b.*\b{_WEIGHTS}\b": "own-converter",
    rf"\b{_WEIGHTS}\b.*\b({_FOREIGN}|own|other|different)\b.*\b(names?|keys?)\b": "own-converter",
    rf"\b{_WEIGHTS}\b.*\b({_FOREIGN}|own)\b.*\b{_LAYOUT}\b": "own-converter",
    rf"\b({_FOREIGN}|own)\b.*\b{_WEIGHTS} {_LAYOUT}\b|\b{_FOREIGN} {_WEIGHTS}\b": "own-converter",
    rf"\b{_WEIGHTS}\b.*\b(not|\w+n[’']t) (know|known|support|supported|recogni\w+|match\w*)\b": "own-converter",
    r"\bprepar\w*( \w+){0,2} weights?\b|\bweight[ -]prep\w*": "convert",
    r"\bfsdp\b": "shard",
    r"\bpretrain_\w*(\.py)?": "megatron",
    r"\b(add|register)\b.*\b(models?|data ?sets?|templates?|collators?)\b": "plugin plugin",
    r"\bbring\b.*\bdata ?sets?\b": "plugin plugin",
    r"\b(own|custom|new|write)\b.*\b(chat templates?|collators?|mm_plugins?|data ?sets? plugins?)\b": "plugin plugin",
    r"\b(bring|migrat\w*|port)\b.*\b(new|own|unlisted)\b.*\b(models?|architectures?)\b": "plugin plugin",
    r"\b(write|make|create)\b.*\bplugins?\b": "plugin plugin",
    rf"\b{_HEARD}\b.*\bvision\b": "omni omni",
    rf"\bvision\b.*\b{_HEARD}\b": "omni omni",
    rf"\b{_ASKED}\b.*\b{_HEARD}\b": "omni",
    rf"\b{_HEARD}\b.*\b{_ASKED}\b": "omni",
    r"\b(speech|voice|audio)[ -]?(to|2|into)[ -]?(speech|voice|audio)\b": "omni",
    r"\bsee\w*\b.*\b(hear|listen)\w*": "omni",
    r"\b(hear|listen)\w*\b.*\bsee\w*": "omni",
    rf"\b{_ASKED}\b.*\b(video|clip|film|movie)s?\b": "vqa see video",
    rf"\b(video|clip|film|movie)s?\b.*\b{_ASKED}\b": "vqa see video",
    rf"\banimat\w*\b.*\b{_SEEN}\b": "i2v film",
    rf"\b{_SEEN}\b.*\b{_ASKED}\b": "vqa see",
    rf"\b{_ASKED}\b.*\b{_SEEN}\b": "vqa see",
    r"\b(first|last)[ -]frames?\b": "i2v",
    r"\b(text|words?|prompts?)[ -]?(to|2|into)[ -]?(video|clip|film|movie)s?\b": "t2v",
    r"\b(image|picture|photo)s?[ -]?(to|2|into)[ -]?(video|clip|film|movie)s?\b": "i2v",
    r"\b(text|words?|prompts?)[ -]?(to|2|into)[ -]?(image|picture|photo)s?\b": "t2i",
    r"\b(speech|audio|voice|sound)[ -]?(to|2|into)[ -]?(text|words?)\b": "asr",
    r"\b(text|words?)[ -]?(to|2|into)[ -]?(speech|voice|audio)\b": "tts",
    r"\b(image|picture|photo|video)s?[ -]?(to|2|into)[ -]?(text|words?)\b": "vqa",
}
"""From what to what: the words alone would name both ends alike."""
_ABSENT = {
    ("segment", "detect", "depth", "pose"): "no family here segments pictures or finds things in them",
    ("embed", "rerank", "retrieval"): "no family here makes embeddings",
    ("music", "song", "melod"): "no family here makes music",
    ("classif",): "no family here has a head for classes; one that answers questions about pictures can answer "
    "with the class",
    ("anonymi", "de-identif", "deidentif"): "no command here changes pictures of rows; a media plugin can, in "
    "`encode_image`: docs/data.md",
    ("upscal", "super-res", "superres", "denois"): "no family here makes pictures larger or cleaner",
}
"""What people ask for in vain."""


_ELSEWHERE = {
    ("deepspeed", "zero-1", "zero-2", "zero-3", "zero1", "zero2", "zero3"): (
        "DeepSpeed is not used: FSDP2 shards parameters, gradients and optimizer states as its ZeRO stage 3 does",
        "Leave parallel.fully_shard_parallel_size at its default, which shards over all ranks, and see "
        "docs/parallelism.md; features of memory are in docs/memory.md.",
    ),
    ("gguf-export",): (
        "no command writes GGUF; it is only read",
        "Write a Hugging Face folder by `mm export runs/mine exported`, and convert that by convert_hf_to_gguf.py of "
        "llama.cpp.",
    ),
    ("rewardmodel",): (
        "no reward model of answers or pictures is trained here, only one of videos (`mm models videoalign`)",
        "Train on the pairs directly by `mm posttrain dpo run.yaml`, or use a reward function, a judge or a served "
        "reward model in posttrain.rewards of `mm posttrain grpo run.yaml`: docs/posttrain.md.",
    ),
}
"""What is done here in another way, in the words of `_PHRASES` → what is so, and what to do instead."""


_OF_NAMED = 0.9
"""What the name of a family adds to its task: less than a word."""


@dataclass(frozen=True)
class Route:
    """An answer to a wish."""

    title: str
    families: Sequence[ModelCard]
    stages: Mapping[str, str]
    page: str
    note: str = ""
    also: Sequence[str] = ()
    """What else the wish is about, with its page."""
    start: FamilyStart | None = None
    """What its commands begin with, of the first family; None: they take a YAML that is there, or none."""


def find(wish: str) -> Route:
    """The task or topic whose words a wish shares most of; of a tie the earlier one.

    A family that is named decides the task, unless the wish has as many words for something that is done to any model.

    Raises:
        UsageError: No word is known, or the wish names a family that is not built.
    """
    text = wish.lower()
    # in order: a phrase sees what earlier ones have put in
    for phrase, word in _PHRASES.items():
        text = re.sub(phrase, word, text)
    words = re.findall(r"[\w.-]+", text)
    for stems, answer in _ABSENT.items():
        if _shared(stems, words):
            raise UsageError(answer, way_out="`mm models` lists what there is.")
    for stems, (what, way_out) in _ELSEWHERE.items():
        if _shared(stems, words):
            raise UsageError(what, way_out=way_out)
    # refused before anything is scored: its task would lead to other families in silence
    named_words = (*words, *map("".join, pairwise(words)))  # Gemma 3 is one name
    refuse_planned(named_words)
    names = set(map(bare, named_words))
    named = [card for card in families() if not names.isdisjoint(bare_names(card))]
    scored: list[tuple[float, Route, Topic]] = []
    for key, task in TASKS.items():
        score: float = _shared(task.stems, words)
        if cards_of(key, named):
            score += _OF_NAMED
        scored.append((score, _of_task(key, task, named, words), task))
    also: list[Topic] = []
    for topic in ANY_MODEL:
        score = topic.weight * _shared(topic.stems, words)
        scored.append((score, Route(topic.title, named, topic.stages, topic.page, topic.note), topic))
        if score:
            also.append(topic)
    # `max` keeps the first of equals: tasks before topics, each in the order of its table
    best, route, chosen = max(scored, key=lambda each: each[0])
    if not best:
        titles = [each.title.lower() for each in (*TASKS.values(), *ANY_MODEL)]
        raise UsageError(
            f"no word of '{wish}' is known",
            way_out=f"Say in English what the model is to do, or what you want to do with it: {'; '.join(titles)}.",
        )
    others = [other for other in also if other is not chosen]
    recipe = _recipe(chosen, others, words)
    start = None
    if recipe is not None:
        start = start_of(_first(route.families, named), recipe)
    return replace(route, also=[f"{other.title}: {other.page}" for other in others], start=start)


def _first(found: Sequence[ModelCard], named: Sequence[ModelCard]) -> ModelCard | None:
    """The family to begin with: of those that the wish names the one with the smallest release."""
    asked = [card for card in found if card in named]
    if asked:
        return min(asked, key=lambda card: min((size for size in card.released.values() if size), default=math.inf))
    return next(iter(found), None)


def _recipe(chosen: Topic, others: Sequence[Topic], words: Sequence[str]) -> YamlRecipe | None:
    """The recipe of a topic that the words ask for; that adapters are trained may be said by another topic."""
    recipe = _asked_recipe(chosen, words)
    if recipe is None or recipe.method is not None:
        return recipe
    said = [_asked_recipe(other, words) for other in others]
    return recipe._replace(method=next((each.method for each in said if each is not None and not each.adds), None))


def _asked_recipe(topic: Topic, words: Sequence[str]) -> YamlRecipe | None:
    return next((each for each in topic.recipes if not each.stems or _shared(each.stems, words)), None)


def _shared(stems: Sequence[str], words: Sequence[str]) -> int:
    """Words that begin with one of the stems."""
    return sum(word.startswith(tuple(stems)) for word in words)


def bare_names(card: ModelCard) -> list[str]:
    """What a person may call a family: its name, its ids, its further names, and its title up to a comma."""
    return list(map(bare, (card.name, *card.ids, *card.called, card.title.partition(",")[0])))


def refuse_planned(names: Iterable[str]) -> None:
    """Raise `UsageError` for the name of a planned family, with a version or a size behind it perhaps."""
    asked = list(map(bare, names))
    for name, title in PLANNED.items():
        known = "|".join(map(bare, (name, title.partition(",")[0])))
        if any(re.fullmatch(rf"({known})([v_]?\d\w*)?", each) for each in asked):
            what = f"'{name}' ({title}) is planned, and not built yet"
            raise UsageError(what, way_out="`mm models` lists what is built.")


def bare(name: str) -> str:
    """A name without case and punctuation: `Qwen2.5-VL` and `qwen2_5_vl` are one."""
    return re.sub(r"[\W_]", "", name.lower())


def _of_task(key: str, task: Topic, named: Sequence[ModelCard], words: Sequence[str]) -> Route:
    """A task's route: what is named, else those that do all that the wish speaks of, most proven first."""
    aspects: dict[str, Aspect] = {}
    for name, aspect in ASPECTS.items():
        if aspect.task == key and _shared(aspect.stems, words):
            aspects[name] = aspect
    stages = dict(task.stages)
    for aspect in aspects.values():
        if aspect.stage:
            stages[aspect.stage] = aspect.command
    mine = cards_of(key, named)
    if not mine:
        mine = sorted(cards_of(key, families()), key=lambda card: len(card.proven), reverse=True)
        for name, aspect in aspects.items():
            doing: list[ModelCard] = []
            others: list[ModelCard] = []
            for card in mine:
                if name in card.does or aspect.medium in card.modalities:
                    doing.append(card)
                else:
                    others.append(card)
            mine = doing
            # an aspect with a command of its own leaves only those that can do it; any other puts them first
            if not doing or not aspect.stage:
                mine = doing + others
    return Route(task.title, mine, stages, task.page, task.note)


def cards_of(task: str, cards: Iterable[ModelCard]) -> list[ModelCard]:
    """Those of one task, in their order."""
    return [card for card in cards if card.task == task]


_MOST_FAMILIES = 8


def as_text(route: Route) -> str:
    """The answer, for a terminal."""
    width = max(len(stage) for stage in route.stages)
    lines = [route.title]
    if route.families:
        shown = [card.title for card in route.families[:_MOST_FAMILIES]]
        more = len(route.families) - len(shown)
        if more:
            shown.append(f"and {more} more: mm models")
        lines += wrapped("  with ", "; ".join(shown))
    for number, (stage, command) in enumerate(route.stages.items(), start=1):
        lines.append(f"  {number}  {stage:{width}}  {command}")
    if route.note:
        lines.append(f"  note: {route.note}")
    for other in route.also:
        lines.append(f"  also: {other}")
    lines.append(f"  read {route.page}; `mm models NAME` shows any other family")
    if route.start is not None:
        lines += _start_lines(route.start)
    return "\n".join(lines)


def _start_lines(start: FamilyStart) -> list[str]:
    """The start of the first family, under its name."""
    card = next((card for card in families() if card.name == start.family), None)
    if card is None:
        return as_lines(start, None)
    return ["", card.title, *device_lines(start, card), *as_lines(start, card)]
