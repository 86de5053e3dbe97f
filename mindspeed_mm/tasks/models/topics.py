"""The tables of `mm models` and `mm route`: what families of models are for, what is done to any model, and the words
that people use for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.tasks.models.first_yaml import RATES_OF_PAIRS
from mindspeed_mm.tasks.requests.init import Method


class YamlRecipe(NamedTuple):
    """What the smallest YAML of a family becomes for a wish."""

    method: Method | None = None
    """What is trained; None: as the family's users do."""
    adds: JsonMapping = {}
    """Sections that are set in it, level by level; None takes a key out."""
    of_generators: JsonMapping | None = None
    """The same where the family is a generator; None: `adds`."""
    stems: tuple[str, ...] = ()
    """How words begin that ask for this recipe of several; none: it is meant where no other one is."""


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
    recipes: tuple[YamlRecipe, ...] = ()
    """Of the YAML that it takes; none: it takes one that is there, or none at all."""


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
_MEASURE = "mm evaluate samples --generated --clip models/clip-vit-large-patch14"
_GENERATOR = {
    "look at every row": "mm data check run.yaml",
    "encode media and captions once": "mm extract run.yaml",
    **_TRAIN,
    "make samples": 'mm infer runs/mine --prompt "a red fox in the snow" --out samples',
    "measure them": _MEASURE,
    "write a folder that diffusers loads": "mm export runs/mine exported",
}

_OWN_CONVERTER = "skills/mindspeed-mm-fsdp2-model-only-vlm-migration/references/converter.md"
_BY_CLASS = "another model of transformers trains by its class alone: `mm check` tells of its folder"

_AS_USUAL = (YamlRecipe(),)
_PAIRS: JsonObject = {"data": {"dataset_param": {"basic_parameters": {"stage": "rm"}}}}
_REWARDED: dict[str, JsonObject] = {
    "training": {"gradient_accumulation_steps": 8},
    "posttrain": {"method": "grpo", "grpo": {"num_generations": 8}},
}
_PROMPTS: JsonObject = {
    "dataset_type": "generation_prompts",
    "basic_parameters": {"dataset": "prompts.txt", "dataset_dir": None},
    "preprocess_parameters": {"max_pixels": None, "height": 512, "width": 512},
}
_BY_PREFERENCE = (
    YamlRecipe(
        "lora",
        {**_REWARDED, "posttrain": {**_REWARDED["posttrain"], "rewards": [{"name": "exact_match"}]}},
        {
            **_REWARDED,
            "data": {"dataset_param": _PROMPTS},
            "posttrain": {**_REWARDED["posttrain"], "rewards": [{"name": "jpeg_size"}]},
        },
        ("grpo", "nft", "ppo", "rlhf", "reward", "reinforce"),
    ),
    YamlRecipe(
        "lora",
        {
            **_PAIRS,
            "training": {"lr": RATES_OF_PAIRS["lora"]},
            "posttrain": {"method": "dpo", "dpo": {"beta": 0.1, "pref_ftx": 1}},
        },
        {**_PAIRS, "posttrain": {"method": "dpo", "dpo": {"beta": 2000, "pref_ftx": 0}}},
    ),
)
"""Rewards where a word speaks of them, else pairs."""

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
        recipes=_AS_USUAL,
    ),
    "omni": Topic(
        "Answer questions about pictures, videos and sound together",
        ("omni", "multimodal", "everything", "sound"),
        {**_ROWS, "ask it": 'mm infer runs/mine --audio a.wav --prompt "What is heard?"', **_SCORED},
        "docs/data.md",
        recipes=_AS_USUAL,
    ),
    "hear": Topic(
        "Turn speech into text",
        ("asr", "speech", "recogni", "transcri", "dictat", "listen", "hear", "subtitle", "audio", "whisper"),
        {**_ROWS, **_TRANSCRIBED},
        "docs/data.md",
        recipes=_AS_USUAL,
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
        recipes=_AS_USUAL,
    ),
    "text": Topic(
        "Write and reason in text",
        ("llm", "text", "language", "chat", "reason", "code", "instruct", "write"),
        {**_ROWS, "ask it": 'mm infer runs/mine --prompt "Why is the sky blue?"', **_SCORED},
        "docs/data.md",
        _BY_CLASS,
        recipes=_AS_USUAL,
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
        recipes=_AS_USUAL,
    ),
    "film": Topic(
        "Make videos from words or from a picture",
        ("t2v", "i2v", "film", "video", "clip", "movie", "animat", "genera", "diffusion", "vace"),
        _GENERATOR,
        "docs/generation.md",
        recipes=_AS_USUAL,
    ),
    "reward": Topic(
        "Score videos, and learn to from pairs of them",
        ("videoreward", "scoring", "rewards-of-videos"),
        {
            **_TRAIN,
            "write a folder that posttrain.rewards takes": "mm export runs/mine exported",
            "score videos": "mm posttrain score run.yaml videos.jsonl --out scores.jsonl",
        },
        "docs/posttrain.md",
        "it judges clips of generators as the reward videoalign of `mm posttrain grpo`",
        recipes=_AS_USUAL,
    ),
    "unify": Topic(
        "Answer questions about pictures, draw and edit them by one model",
        ("unif", "interleav", "t2i", "draw", "paint", "image", "picture", "photo", "genera", "edit", "retouch"),
        {
            **_ROWS,
            "draw": 'mm infer runs/mine --prompt "a red dog in the snow" --draw dog.png',
            "edit": 'mm infer runs/mine --image dog.png --prompt "make it blue" --draw blue.png',
            "ask it": 'mm infer runs/mine --image a.png --prompt "What is it?"',
            "write a folder as released": "mm export runs/mine exported",
        },
        "docs/data.md",
        recipes=_AS_USUAL,
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
        recipes=_AS_USUAL,
    ),
    Topic(
        "Train and compare runs in the browser",
        ("webboard",),
        {
            "open the board": "mm ui runs",
            "write the curves of some runs into one page": "mm report runs/mine",
            "talk to a trained model": "mm serve runs/mine",
        },
        "docs/board.md",
        "a form of the board makes a YAML, checks it and starts the run",
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
        recipes=_AS_USUAL,
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
        recipes=(YamlRecipe("full", {"parallel": None}),),
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
        "a release in few bits (fp8, mxfp4, int4) is trained as it is: `mm convert` takes what `mm export` writes; "
        f"weights under names that nothing here knows take a converter of your own: {_OWN_CONVERTER}",
    ),
    Topic(
        "Write a converter for a layout of your own",
        ("own-converter",),
        {
            "see which layouts are known": "mm-convert --help",
            "convert by yours": "mm-convert --plugin my_converter.py MyConverter source_to_hf "
            "--source_dir authors --save_dir models/mine",
            "see whether it trains": "mm models models/mine",
        },
        _OWN_CONVERTER,
        "a converter is a key map of a few lines; the page has a whole one, with its test",
        weight=3,
    ),
    Topic(
        "Train small matrices beside frozen weights",
        ("lora", "qlora", "dora", "adapter", "peft"),
        {**_TRAIN, "merge them into the weights": "mm merge runs/mine --out merged"},
        "docs/adapters.md",
        recipes=(YamlRecipe("qlora", stems=("qlora",)), YamlRecipe("lora")),
    ),
    Topic(
        "Train or run with weights in 4 or 8 bits",
        ("quanti", "nf4", "int8", "fp8", "mxfp8", "4-bit", "8-bit", "qlora"),
        {"set training.lora.quantize: nf4, or training.quantization_plan": "mm check run.yaml", **_TRAIN},
        "docs/adapters.md",
        recipes=(YamlRecipe("qlora"),),
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
        "Measure drawn pictures and clips",
        ("drawn-score", "lpips", "psnr", "ssim", "vbench", "flicker"),
        {
            "draw samples": "mm infer runs/mine --prompts prompts.txt --out samples",
            "measure them by a CLIP model": _MEASURE,
            "compare them with real ones": "mm evaluate samples --generated --reference real",
        },
        "docs/evaluation.md",
        weight=3,
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
        recipes=(YamlRecipe("full", {"model": {"train_from_scratch": True}}),),
    ),
    Topic(
        "Distil a generator into few steps",
        ("distil", "dmd", "few-step", "self-forcing", "self_forcing", "selfforcing", "student"),
        {
            "see what is wrong before it starts": "mm check run.yaml",
            "store how the teacher draws, for a student of blocks": (
                "mm posttrain reference run.yaml posttrain.dmd.objective=ode_regression"
            ),
            "train the student": "mm posttrain dmd run.yaml",
            "draw with it": 'mm infer runs/mine --prompt "a red fox in the snow" --out samples',
        },
        "docs/generation.md",
        weight=3,
        recipes=(YamlRecipe("full", {"data": {"dataset_param": _PROMPTS}, "posttrain": {"method": "dmd"}}),),
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
        recipes=_BY_PREFERENCE,
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
        recipes=(YamlRecipe("qlora", {"features": {"recompute": True}}),),
    ),
    Topic(
        "Spread a run over devices and hosts",
        ("parallel", "multi", "node", "host", "cluster", "slurm", "shard", "scale", "distribut"),
        {"verify the plan on a CPU": "mm verify run.yaml", "start it": "mm train run.yaml --nproc 8"},
        "docs/parallelism.md",
        recipes=_AS_USUAL,
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
        "a package that training.plugin names registers data sets, templates, collators and models: docs/plugins.md; a "
        "model that no library has: skills/mindspeed-mm-fsdp2-model-only-vlm-migration/SKILL.md",
        recipes=_AS_USUAL,
    ),
)

PLANNED = {
    "deepseekv3-vl": "DeepSeek-V3 with a vision tower",
    "longcat_next": "LongCat-Next, pictures, sound and text",
    "opensora2.0": "Open-Sora 2.0, text and image to video",
    "qihoo_t2x": "Qihoo-T2X, text to image and video",
    "vae": "VAE, training of the autoencoders of videos",
}
"""Name → title of families that no library has in a form that trains, and that are not built here yet."""
