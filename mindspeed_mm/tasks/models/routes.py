"""`mm route`: from what somebody wants to do, in their words, to families, commands and the page to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.params.cards import ModelCard, families


class Topic(NamedTuple):
    """What families of models are for, or something that is done to any model."""

    title: str
    stems: tuple[str, ...]
    """How words begin that people use for it."""
    stages: Mapping[str, str]
    """What is done, in order → the command."""
    page: str
    note: str = ""
    """What is not to be expected."""
    weight: int = 1
    """Of a word; a method that is meant whatever the model is has more."""


class Aspect(NamedTuple):
    """Something that some families of a task do and others do not."""

    task: str
    stems: tuple[str, ...]
    medium: str = ""
    """What a family has to take; none: its card says that it `does` this."""
    stage: str = ""
    """The stage of the task whose command is another for it; none: the others do it as well, though not best."""
    command: str = ""


_TRAIN = {
    "see what is wrong before it starts": "mm check run.yaml",
    "train": "mm train run.yaml",
}
_ROWS = {
    "look at every row": "mm data check run.yaml",
    **_TRAIN,
}
_TRANSCRIBED = {
    "transcribe rows": "mm infer runs/mine --data data/test.jsonl --out answers.jsonl",
    "count wrong words": "mm evaluate runs/mine --data data/test.jsonl --metric wer",
    "write a folder that transformers loads": "mm export runs/mine exported",
}
_SCORED = {
    "score it on rows that it has not seen": "mm evaluate runs/mine --data data/test.jsonl",
    "write a folder that transformers loads": "mm export runs/mine exported",
}
_GENERATOR = {
    "look at every row": "mm data check run.yaml",
    "encode media and captions once": "mm extract run.yaml",
    **_TRAIN,
    "make samples": 'mm infer runs/mine --prompt "a red fox in the snow" --out samples',
    "write a folder that diffusers loads": "mm export runs/mine exported",
}

_BY_CLASS = "another model of transformers trains by its class alone: `mm check` tells of its folder"

TASKS: dict[str, Topic] = {
    "see": Topic(
        "Answer questions about pictures and videos",
        (
            "vlm",
            "vl",
            "vision",
            "visual",
            "vqa",
            "ocr",
            "caption",
            "descri",
            "understand",
            "chart",
            "document",
            "see",
            "handwrit",
            "receipt",
            "table",
            "pdf",
            "invoice",
            "scan",
            "screenshot",
        ),
        {**_ROWS, "ask it": 'mm infer runs/mine --image a.png --prompt "What is it?"', **_SCORED},
        "docs/data.md",
        _BY_CLASS,
    ),
    "omni": Topic(
        "Answer questions about pictures, videos and sound together",
        ("omni", "multimodal", "everything", "sound"),
        {**_ROWS, "ask it": 'mm infer runs/mine --audio a.wav --prompt "What is heard?"', **_SCORED},
        "docs/data.md",
    ),
    "hear": Topic(
        "Turn speech into text",
        ("asr", "speech", "recogni", "transcri", "dictat", "listen", "hear", "subtitle", "audio", "whisper"),
        {**_ROWS, **_TRANSCRIBED},
        "docs/data.md",
    ),
    "speak": Topic(
        "Turn text into speech",
        ("tts", "speak", "voice", "synthes", "narrat", "cosyvoice", "talker", "clon"),
        {
            **_ROWS,
            "let it speak": 'mm infer runs/mine --prompt "Mind the gap." --speak gap.wav',
            "score it by a recogniser": "mm evaluate runs/mine --data texts.jsonl --recogniser models/whisper-small",
            "write a folder of the trained weights": "mm export runs/mine exported",
        },
        "docs/data.md",
        "sound is made of codes by the codec of the release, which has to be in the model's folder",
    ),
    "text": Topic(
        "Write and reason in text",
        ("llm", "text", "language", "chat", "reason", "code", "instruct", "write"),
        {**_ROWS, "ask it": 'mm infer runs/mine --prompt "Why is the sky blue?"', **_SCORED},
        "docs/data.md",
        _BY_CLASS,
    ),
    "draw": Topic(
        "Make pictures from words",
        (
            "t2i",
            "draw",
            "paint",
            "image",
            "picture",
            "photo",
            "dreambooth",
            "style",
            "genera",
            "diffusion",
            "edit",
            "inpaint",
            "outpaint",
            "retouch",
            "erase",
        ),
        _GENERATOR,
        "docs/generation.md",
    ),
    "film": Topic(
        "Make videos from words or from a picture",
        ("t2v", "i2v", "film", "video", "clip", "movie", "animat", "genera", "diffusion", "vace"),
        _GENERATOR,
        "docs/generation.md",
    ),
}
"""Key of `task` in a card → what it means, in the order that lists have."""

_ASK, _SAMPLE = "ask it", "make samples"
ASPECTS: dict[str, Aspect] = {
    "video": Aspect(
        "see", ("video", "clip", "movie", "film", "footage"), "video", _ASK,
        'mm infer runs/mine --video a.mp4 --prompt "What happens?"',
    ),
    "ocr": Aspect("see", ("ocr", "handwrit", "receipt", "table", "pdf", "invoice", "scan", "document")),
    "edit": Aspect(
        "draw", ("edit", "retouch", "kontext"), "", _SAMPLE,
        'mm infer runs/mine --image a.png --prompt "make it winter" --out samples',
    ),
    "fill": Aspect(
        "draw", ("inpaint", "outpaint", "fill", "erase"), "", _SAMPLE,
        'mm infer runs/mine --image a.png --mask hole.png --prompt "a bench" --out samples',
    ),
    "i2v": Aspect(
        "film", ("i2v", "animat"), "", _SAMPLE,
        'mm infer runs/mine --image a.png --prompt "the fox runs" --out samples',
    ),
    "control": Aspect(
        "film", ("vace", "control"), "", _SAMPLE,
        'mm infer runs/mine --control edges.mp4 --prompt "a red fox" --out samples',
    ),
}  # fmt: skip
"""Key of `does` in a card, or of a medium → what it is called."""


ANY_MODEL: tuple[Topic, ...] = (
    Topic(
        "Compare runs",
        ("compar", "versus", "vs", "sweep", "hyperparamet", "hyper-paramet", "grid", "optuna", "ablation"),
        {
            "train one run for each value": "mm train run.yaml training.lr=1e-5 training.save=runs/lr1e-5",
            "see curves, scores and what differs in the configurations": "mm report runs/lr1e-5 runs/lr3e-5",
            "test the difference of two scores": "mm evaluate runs/lr3e-5 --data data/test.jsonl "
            "--against runs/lr1e-5/eval",
        },
        "docs/evaluation.md",
        "there is no search over hyper-parameters: a shell loop over section.key=value is a sweep, and "
        "`mm train --json` gives each outcome",
        weight=2,
    ),
    Topic(
        "Run on Slurm or Kubernetes",
        ("slurm", "sbatch", "srun", "kubernetes", "k8s", "kubeflow"),
        {
            "verify the plan on a CPU": "mm verify run.yaml",
            "start it on Slurm": "sbatch examples/launch/slurm.sbatch run.yaml",
        },
        "docs/multi-host.md",
        "`mm train` under srun or torchrun is a rank of their job; examples/launch has a file for each way",
        weight=2,
    ),
    Topic(
        "Train without a GPU",
        ("cpu-only", "gpu-less"),
        {
            "see what this machine has": "mm doctor",
            "train and judge a small model in three minutes": "make quickstart",
            "train": "mm train run.yaml",
        },
        "docs/quick-start.md",
        "everything trains on a CPU; `mm check` forecasts the memory, and what is slow there is large models",
        weight=2,
    ),
    Topic(
        "Go on with a run",
        ("resum", "restart", "continue", "crash", "killed", "preempt"),
        {"start it again, on as many devices as there are now": "mm train run.yaml --nproc 4"},
        "README.md",
    ),
    Topic(
        "Convert a checkpoint to another layout",
        ("convert", "checkpoint", "dcp", "hf2mg", "mg2hf", "reshard", "layout"),
        {
            "convert": "mm convert models/Qwen2.5-VL-7B-Instruct qwen-tp2 --to megatron --tp 2",
            "see every flag of a family": "mm-convert --help",
        },
        "docs/conversion.md",
    ),
    Topic(
        "Train small matrices beside frozen weights",
        ("lora", "qlora", "dora", "adapter", "peft"),
        {**_TRAIN, "merge them into the weights": "mm merge runs/mine --out merged"},
        "docs/adapters.md",
    ),
    Topic(
        "Train or run with weights in 4 or 8 bits",
        ("quanti", "nf4", "int8", "fp8", "mxfp8", "4-bit", "8-bit", "qlora"),
        {"set training.lora.quantize: nf4, or training.quantization_plan": "mm check run.yaml", **_TRAIN},
        "docs/adapters.md",
    ),
    Topic(
        "Score a model on a published set",
        (
            "benchmark",
            "leaderboard",
            "mmmu",
            "docvqa",
            "chartqa",
            "textvqa",
            "ai2d",
            "mmbench",
            "mathvista",
            "ocrbench",
            "realworldqa",
            "videomme",
            "video-mme",
        ),
        {
            "score it": "mm evaluate runs/mine --benchmark docvqa_val --data sets/DocVQA",
            "compare results": "mm evaluate runs/mine --benchmark docvqa_val --data sets/DocVQA --against base",
        },
        "docs/evaluation.md",
    ),
    Topic(
        "Score a model",
        ("evaluat", "benchmark", "score", "accuracy", "wer", "cer", "error", "metric"),
        {
            "count right answers": "mm evaluate runs/mine --data data/test.jsonl",
            "count wrong words of transcripts": "mm evaluate runs/mine --data data/test.jsonl --metric wer",
            "measure the loss of held-out rows": "mm evaluate runs/mine --loss",
        },
        "docs/evaluation.md",
    ),
    Topic(
        "Serve a model over HTTP",
        ("serv", "api", "endpoint", "deploy", "openai", "vllm", "http", "production"),
        {"answer as OpenAI's interface does": "mm serve runs/mine", "by vLLM": "mm serve runs/mine --engine vllm"},
        "docs/inference.md",
    ),
    Topic(
        "Talk to a model in the terminal",
        ("talk", "conversation", "terminal", "interactive"),
        {"talk to it": "mm chat runs/mine"},
        "docs/inference.md",
    ),
    Topic(
        "Train a model from nothing",
        ("scratch", "pretrain", "pre-train", "initiali", "random"),
        {"start with random weights": "mm train run.yaml model.train_from_scratch=true"},
        "docs/data.md",
    ),
    Topic(
        "Train a model on preferences or rewards",
        ("dpo", "grpo", "nft", "ppo", "rlhf", "reward", "preference", "alignment", "reinforce", "rejected"),
        {
            "look at every row": "mm data check run.yaml",
            "train on pairs of a better and a worse answer": "mm posttrain dpo run.yaml",
            "train on rewards of the model's own answers": "mm posttrain grpo run.yaml",
            "see what was drawn, with its rewards": "mm posttrain rollouts runs/mine",
        },
        "docs/posttrain.md",
        weight=3,
    ),
    Topic(
        "Find out why a loss is wrong",
        ("nan", "inf", "diverg", "spike", "explod", "wrong", "loss"),
        {
            "look at what is trained": "mm data preview run.yaml",
            "compare the plan with one process": "mm verify run.yaml",
            "leave out steps that are not finite": "mm train run.yaml training.on_nonfinite=skip",
        },
        "docs/verify.md",
    ),
    Topic(
        "Look at rows before training",
        ("row", "token", "dataset", "data", "length", "preview", "stat", "clean"),
        {
            "see what is wrong with them": "mm data check run.yaml",
            "count tokens and media": "mm data stats run.yaml",
            "see some as the model does": "mm data preview run.yaml",
        },
        "docs/data.md",
    ),
    Topic(
        "Find out where the time goes",
        ("profil", "slow", "speed", "faster", "bottleneck", "mfu", "flop", "throughput"),
        {"trace some steps": "mm profile run.yaml", "count FLOPs": "mm flops run.yaml"},
        "docs/profiling.md",
    ),
    Topic(
        "Fit into memory",
        ("memory", "oom", "fit", "offload", "gb", "vram", "gpu", "card", "laptop", "cpu"),
        {
            "see what a rank will hold": "mm check run.yaml",
            "train small matrices beside weights in 4 bits: training.lora.quantize": "mm train run.yaml",
        },
        "docs/memory.md",
    ),
    Topic(
        "Spread a run over devices and hosts",
        ("parallel", "multi", "node", "host", "cluster", "slurm", "shard", "scale", "distribut"),
        {"verify the plan on a CPU": "mm verify run.yaml", "start it": "mm train run.yaml --nproc 8"},
        "docs/parallelism.md",
    ),
    Topic(
        "Change the suite: tests and documents",
        ("test", "pytest", "unittest", "contribut", "docs", "documentation"),
        {
            "run the tests near a change": "make test-changed",
            "run one test": 'python -m pytest tests/fsdp -xvs -k "NAME"',
            "run all of them": "make test",
            "look at style, types and layers": "make check",
        },
        "CONTRIBUTING.md",
    ),
    Topic(
        "Train with the flags and functions of Megatron's entries",
        ("megatron", "provider", "training.py", "launch", "forward_step"),
        {
            "see the YAML that a launch script stands for": "mm config --from-flags finetune.sh",
            "train": "torchrun --nproc_per_node 8 pretrain_vlm.py --mm-model model.json --mm-data data.json",
        },
        "docs/provider.md",
        "functions of your own are called as Megatron-LM calls them: docs/own-functions.md",
    ),
    Topic(
        "Train by a YAML, with models and data sets of your own",
        ("fsdp2", "yaml", "config", "plugin", "modelhub", "trainer.py", "onboard"),
        {
            "see every key": "mm schema",
            "see what is wrong with keys, plugin and patterns": "mm check run.yaml",
            "train": "mm train run.yaml",
        },
        "docs/architecture.md",
        "a package that training.plugin names registers data sets and models: docs/plugins.md",
    ),
)


_SEEN, _HEARD = r"(image|picture|photo|page|scan)s?", r"(audio|sound|music|voice|speech)s?"
_ASKED = r"(questions?|answer\w*|ask\w*|caption\w*|descri\w*|understand\w*|emotions?)"
_PHRASES = {
    r"\b(to|into|as|export\w*|write|save\w*|make)\b.*\bgguf\b": "gguf-export",
    r"\b(train\w*|fit|build)\b.*\breward[ -]models?\b": "rewardmodel",
    r"^\W*(a )?reward[ -]models?\W*$|\breward[ -]model+ing\b": "rewardmodel",
    r"\b(train\w*|fine-?tun\w*|start\w*)\b.*\b(web[ -]?ui|gui|browser|gradio|llamaboard)\b": "webtrain",
    r"\b(web[ -]?ui|gui|browser|gradio)\b.*\b(train\w*|fine-?tun\w*)\b": "webtrain",
    r"\b(web[ -]?ui|gui|gradio|chat page)\b": "serve serve",
    r"\b(without|no|lacking)\b( an?| any)? (gpus?|npus?|accelerators?|cuda)\b": "cpu-only",
    r"\bon( an?| my)? cpus?\b|\bcpu[ -]only\b": "cpu-only",
    r"\bunit[ -]tests?\b|\bci\b": "unittest",
    r"\btest\w*\b.*\b(models?|rows|sets?|data|split|answers)\b": "evaluate",
    r"\b(to|into|from)[ -]megatron\b": "convert",
    r"\b(hugging ?face|hf)\b.*\bmegatron\b|\bmegatron\b.*\b(hugging ?face|hf)\b": "convert",
    r"\bfsdp\b": "shard",
    r"\bpretrain_\w*(\.py)?": "megatron",
    r"\b(add|register)\b.*\b(models?|data ?sets?|templates?|collators?)\b": "plugin plugin",
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
        "no reward model is trained here",
        "Train on the pairs directly by `mm posttrain dpo run.yaml`, or use a reward function, a judge or a served "
        "reward model in posttrain.rewards of `mm posttrain grpo run.yaml`: docs/posttrain.md.",
    ),
    ("webtrain",): (
        "there is no page to start training from",
        "Let `mm init --model FOLDER --data FILE` write the YAML, start it by `mm train run.yaml`, and watch it by "
        "TensorBoard or `mm report runs/mine`; the page of `mm serve runs/mine` is for trying a model.",
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


def find(wish: str) -> Route:
    """The task or topic whose words a wish shares most of; of a tie the earlier one.

    A family that is named decides the task, unless the wish has as many words for something that is done to any model.

    Raises:
        UsageError: No word is known.
    """
    text = wish.lower()
    for phrase, word in _PHRASES.items():
        text = re.sub(phrase, word, text)
    words = re.findall(r"[\w.-]+", text)
    for stems, answer in _ABSENT.items():
        if _shared(stems, words):
            raise UsageError(answer, way_out="`mm models` lists what there is.")
    for stems, (what, way_out) in _ELSEWHERE.items():
        if _shared(stems, words):
            raise UsageError(what, way_out=way_out)
    named = [card for card in families() if _is_named(card, words)]
    scored: list[tuple[float, Route]] = []
    for key, task in TASKS.items():
        score = _shared(task.stems, words) + (_OF_NAMED if cards_of(key, named) else 0)
        scored.append((score, _of_task(key, task, named, words)))
    also: list[str] = []
    for topic in ANY_MODEL:
        score = topic.weight * _shared(topic.stems, words)
        scored.append((score, Route(topic.title, named, topic.stages, topic.page, topic.note)))
        if score:
            also.append(f"{topic.title}: {topic.page}")
    best, route = max(scored, key=lambda each: each[0])
    if not best:
        titles = [each.title.lower() for each in (*TASKS.values(), *ANY_MODEL)]
        raise UsageError(
            f"no word of '{wish}' is known",
            way_out=f"Say in English what the model is to do, or what you want to do with it: {'; '.join(titles)}.",
        )
    return replace(route, also=[other for other in also if other != f"{route.title}: {route.page}"])


def _shared(stems: Sequence[str], words: Sequence[str]) -> int:
    """Words that begin with one of the stems."""
    return sum(word.startswith(tuple(stems)) for word in words)


def _is_named(card: ModelCard, words: Sequence[str]) -> bool:
    return not set(bare_names(card)).isdisjoint(map(bare, words))


def bare_names(card: ModelCard) -> list[str]:
    """What a person may call a family: its name, its ids, its further names, and its title up to a comma."""
    return list(map(bare, (card.name, *card.ids, *card.called, card.title.partition(",")[0])))


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
                does_it = name in card.does or aspect.medium in card.modalities
                (doing if does_it else others).append(card)
            mine = doing
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
        lines.append(f"  with {'; '.join(shown)}")
    for number, (stage, command) in enumerate(route.stages.items(), start=1):
        lines.append(f"  {number}  {stage:{width}}  {command}")
    if route.note:
        lines.append(f"  note: {route.note}")
    for other in route.also:
        lines.append(f"  also: {other}")
    return "\n".join([*lines, f"  read {route.page}; `mm models NAME` tells what is proven of a family"])
