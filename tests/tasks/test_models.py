"""`mm models` and `mm route`: what a card says is so, and a wish leads to commands that exist."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import MMError, UsageError
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.params.cards import ModelCard, families
from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.tasks.models import catalogue, routes, topics
from tests.checkpoint.megatron.test_family_round_trips import NAMES as CONVERTED
from tests.families.test_released_packed import PACKED
from tests.fsdp.train import (
    test_plan_matrix_generators,
    test_plan_matrix_omni,
    test_plan_matrix_text,
    test_plan_matrix_vlm,
)
from tests.helpers.released_rows import ANSWERING
from tests.helpers.released_rows import ROWS as RELEASED
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_families import FAMILIES as GENERATORS
from tests.test_readme import parse

ROOT = Path(__file__).parents[2]
MATRICES = (test_plan_matrix_generators, test_plan_matrix_omni, test_plan_matrix_text, test_plan_matrix_vlm)
TESTED = {
    "train": set(RELEASED),
    "lora": set(RELEASED),
    "data": set(ANSWERING),
    "packed": set(PACKED),
    "plans": {family for matrix in MATRICES for family in matrix.FAMILIES},
    "infer": set(ANSWERING),
    "evaluate": set(ANSWERING),
    "convert": set(CONVERTED),
    "generate": set(GENERATORS),
}
"""Proof → the cases that its test has."""
BY_NAME = {card.name: card for card in families()}
BY_CLASS = {card.model_class: card for card in families()}


def test_what_a_card_says_is_proven_has_its_test() -> None:
    assert TESTED.keys() == catalogue.PROOFS.keys()
    for card in families():
        for proof, case in card.proven.items():
            file, _, function = case.partition(" [")[0].partition("::")
            if function:
                is_there = f"def {function}(" in (ROOT / file).read_text()
            else:
                is_there = {*case.split(", ")} <= TESTED[proof]
            assert is_there, (card.name, proof)
    for proof in catalogue.PROOFS.values():
        name, _, function = proof.test.partition("::")
        stem, _, choices = name.partition("{")
        endings = choices.partition("}")[0].split(",") if choices else [""]
        for file in (f"{stem}{ending}{choices.partition('}')[2]}" for ending in endings):
            assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.edge("BH1")
def test_what_trains_in_a_test_has_its_tick() -> None:
    """Of a generator whose own test trains it and its adapters: what a card says of tests that exist is true, and
    nothing that they prove is left unsaid."""
    text = (ROOT / "tests/families/test_generators.py").read_text(encoding="utf-8")
    body = text[text.index("def test_a_family_equals_its_pipeline") :].partition("\n\n\n")[0]
    assert "check_losses(" in body and "check_adapters(" in body  # that is what the ticks rest on
    for card in families():
        if card.generates:
            assert "train" in card.proven, card.name
            assert ("lora" in card.proven) == (card.name != "wan_vace"), card.name
    table = catalogue.as_markdown(families())
    head = [cell.strip() for cell in table.splitlines()[0].split("|")]
    for line in table.splitlines()[2:]:
        cells = dict(zip(head, (cell.strip() for cell in line.split("|")), strict=True))
        assert cells["train"] == "✓", line


def test_every_task_of_a_generator_has_its_test() -> None:
    """All that `model.task` may be, and no more, stands in the card; and what it names is there."""
    pipelines: dict[str, set[str]] = {}
    for adapter in _adapters(DiffusionAdapter):
        pipelines.setdefault(adapter.transformer_class, set()).update(adapter.pipelines)
    for card in families():
        names = (card.model_class.partition(".")[2], *card.further_classes)
        assert set(card.tasks) == {task for name in names for task in pipelines.get(name, set())}, card.name
        for task, case in card.tasks.items():
            test, _, named = case.partition(" [")
            file, _, function = test.partition("::")
            if not function:
                assert {*case.split(", ")} <= TESTED["generate"], (card.name, task)
                continue
            text = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {function}(" in text and f'"{named.rstrip("]")}"' in (text if named else '""'), (
                card.name,
                task,
            )
            assert function in catalogue.as_proof(card)


def _adapters(base: type[DiffusionAdapter]) -> Iterator[type[DiffusionAdapter]]:
    for card in families():
        for model_id in card.ids if card.generates else ():
            model_register.get(model_id)
    for each in base.__subclasses__():
        if each.__module__.startswith("mindspeed_mm."):
            yield each
        yield from _adapters(each)


def test_what_is_proven_of_a_released_folder_stands_in_its_card() -> None:
    for name in RELEASED:
        proofs = ["train", "lora"] + (["data", "infer", "evaluate"] if name in ANSWERING else [])
        proofs += ["packed"] if name in PACKED else []
        assert all(BY_NAME[name].proven[proof] == name for proof in proofs), name


def test_classes_are_there_and_are_built_by_their_ids() -> None:
    import diffusers
    import transformers

    libraries = {"transformers": transformers, "diffusers": diffusers}
    for card in families():
        library, _, name = card.model_class.partition(".")
        if library == "mindspeed_mm":
            with contextlib.suppress(ImportError):  # an older library lacks what it is built on
                made = [model_register.get(model_id) for model_id in card.ids]
                classes = [each if isinstance(each, type) else each() for each in made]
                names = [each.transformer_class if card.generates else each.__name__ for each in classes]
                assert names == [name]
            continue
        if not hasattr(libraries[library], name):
            continue  # an older library; the tested set has all of them
        for model_id in card.ids:
            entry = model_register.get(model_id)
            if library == "transformers":
                assert entry() is getattr(transformers, name)
            else:
                assert entry.transformer_class == name


def test_every_card_has_a_task_and_no_class_has_two() -> None:
    assert {card.task for card in families()} <= topics.TASKS.keys()
    assert len(BY_CLASS) == len(BY_NAME) == len(families())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3vl", "qwen3vl"),
        ("qwen3_vl", "qwen3vl"),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3vl"),
        ("qwen3-vl-30b-a3b-instruct", "qwen3_vl_moe"),
        ("WhisperForConditionalGeneration", "whisper"),
        ("transformers.Gemma3ForConditionalGeneration", "gemma3"),
        ("openai/whisper-tiny", "whisper"),
    ],
)
def test_a_family_is_found_by_any_of_its_names(name: str, found: str) -> None:
    assert catalogue.find(name) == [BY_NAME[found]]


def test_the_beginning_of_a_name_finds_all_that_begin_so() -> None:
    assert [card.name for card in catalogue.find("Gemma")] == ["gemma3", "gemma4"]
    with pytest.raises(UsageError, match="no family is called 'ge'"):
        catalogue.find("ge")
    with pytest.raises(UsageError, match="trains by its class alone"):
        catalogue.find("microsoft/phi-4-multimodal")


IN_FOLDERS = {
    "glm4.1v": "glm4v", "hunyuanvideo_1.5": "hunyuan_video_1_5", "internvl3": "internvl", "kimik2_5": "kimik2_5",
    "lumina": "lumina_mgpt", "magistral-2509": "mistral3", "moss_tts": "moss_tts_delay",
    "opensoraplan1.3": "opensoraplan", "opensoraplan1.5": "opensoraplan", "qwen3_6": "qwen3_5", "step3_vl": "step3_vl",
    "vace": "wan_vace", "wan2.2": "wan", "qwen3_asr": "qwen3_asr",
}  # fmt: skip
"""Name of a folder of MindSpeed-MM's examples that reads otherwise → card."""


@pytest.mark.parametrize(("name", "card"), IN_FOLDERS.items())
def test_a_family_is_found_by_its_name_in_mindspeed_mm(name: str, card: str) -> None:
    assert card in [each.name for each in catalogue.find(name)]


@pytest.mark.parametrize(
    "name",
    [
        "opensora2.0", "vae", "deepseekv3-vl", "qihoo_t2x",
    ],
)  # fmt: skip
def test_a_planned_family_is_said_to_be_planned(name: str) -> None:
    with pytest.raises(UsageError, match=r"planned, and not built yet"):
        catalogue.find(name)
    assert "Planned, not built yet" in mm("models").out


def test_a_family_is_found_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Glm4vForConditionalGeneration"]}))
    assert catalogue.find(str(tmp_path)) == [BY_NAME["glm4v"]]
    (tmp_path / "wan/transformer").mkdir(parents=True)
    (tmp_path / "wan/transformer/config.json").write_text(json.dumps({"_class_name": "WanTransformer3DModel"}))
    assert catalogue.find(str(tmp_path / "wan")) == [BY_NAME["wan"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds neither"),
        ("{", "does not say which class"),
        ("[]", "does not say which class"),
        ('{"architectures": null}', "does not say which class"),
        ('{"architectures": ["MyModel"]}', "MyModel is of no family"),
    ],
)
def test_a_folder_of_nothing_known_is_refused_in_one_message(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(MMError, match=words) as caught:
        catalogue.find(str(tmp_path))
    assert caught.value.problems[0].way_out


def test_a_folder_that_is_not_there_is_told_from_a_family(tmp_path: Path) -> None:
    with pytest.raises(MMError, match="no folder and no family is called"):
        catalogue.find(str(tmp_path / "gone"))
    with pytest.raises(MMError, match="no family is called 'Nobody/qqq'"):
        catalogue.find("Nobody/qqq")


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(MMError, match=r"no family is called 'qwen3vll'.*[Dd]id you mean.*qwen3vl"):
        catalogue.find("qwen3vll")


@pytest.mark.parametrize(
    ("wish", "title", "family"),
    [
        ("fine-tune a speech recogniser", topics.TASKS["hear"].title, "qwen3_asr"),
        ("teach Qwen3-VL to read receipts", topics.TASKS["see"].title, "qwen3vl"),
        ("train an OCR model", topics.TASKS["see"].title, "deepseek_ocr2"),
        ("t2v with Wan", topics.TASKS["film"].title, "wan"),
        ("make videos of my cat", topics.TASKS["film"].title, "wan"),
        ("draw pictures in my style", topics.TASKS["draw"].title, "flux"),
        ("an omni assistant", topics.TASKS["omni"].title, "qwen3omni"),
        ("SFT of an LLM", topics.TASKS["text"].title, "qwen3"),
        ("text to video LoRA", topics.TASKS["film"].title, "wan"),
        ("speech-to-text with whisper", topics.TASKS["hear"].title, "whisper"),
        ("fine-tune text to speech", topics.TASKS["speak"].title, "cosyvoice3"),
        ("quantise my model", "Train or run with weights in 4 or 8 bits", None),
        ("evaluate word error rate", "Score a model", None),
        ("resume training on another number of gpus", "Go on with a run", None),
        ("count tokens", "Look at rows before training", None),
        ("convert Qwen2.5-VL to Megatron", "Convert a checkpoint to another layout", "qwen2_5vl"),
        ("LoRA of Gemma 3", "Train small matrices beside frozen weights", None),
        ("my training is too slow", "Find out where the time goes", None),
        ("handwriting recognition", topics.TASKS["see"].title, "deepseek_ocr"),
        ("read tables out of PDFs", topics.TASKS["see"].title, "deepseek_ocr2"),
        ("a video model that answers questions", topics.TASKS["see"].title, "qwen3vl"),
        ("video captions", topics.TASKS["see"].title, "qwen2_5vl"),
        ("animate a photo", topics.TASKS["film"].title, "wan"),
        ("edit an image", topics.TASKS["draw"].title, "qwen_image"),
        ("inpaint a hole", topics.TASKS["draw"].title, "flux"),
        ("audio question answering", topics.TASKS["omni"].title, "qwen2_5omni"),
        ("emotion recognition from voice", topics.TASKS["omni"].title, "qwen3omni"),
        ("a speech to speech assistant", topics.TASKS["omni"].title, "qwen2_5omni"),
        ("talking assistant that sees and hears", topics.TASKS["omni"].title, "qwen2_5omni"),
        ("clone a voice", topics.TASKS["speak"].title, "qwen3tts"),
        ("serve with vllm", "Serve a model over HTTP", None),
        ("fine-tune with one 24 GB card", "Fit into memory", None),
        ("MMMU", "Score a model on a published set", None),
        ("evaluate on DocVQA", "Score a model on a published set", None),
        ("pretrain a tiny model", "Train a model from nothing", None),
        ("train with DPO on preferences", "Train a model on preferences or rewards", None),
        ("my loss is nan", "Find out why a loss is wrong", None),
        ("GRPO FLUX", "Train a model on preferences or rewards", "flux"),
        ("convert InternVL3 to Megatron", "Convert a checkpoint to another layout", "internvl"),
        ("resume from a checkpoint", "Go on with a run", None),
        ("test a model on held-out rows", "Score a model", None),
        ("LoRA with a YAML", "Train small matrices beside frozen weights", None),
    ],
)
def test_a_wish_leads_to_its_task(wish: str, title: str, family: str | None) -> None:
    route = routes.find(wish)
    assert route.title == title
    assert family is None or BY_NAME[family] in route.families


FSDP2, MEGATRON, TESTING = "docs/architecture.md", "docs/provider.md", "CONTRIBUTING.md"
TREE = {
    FSDP2: ("FSDP2", "YAML config", "plugin", "ModelHub", "trainer.py", "FSDP2 YAML config plugin"),
    MEGATRON: ("Megatron", "pretrain_", "provider", "training.py", "provider training.py Megatron pretrain_"),
    "docs/conversion.md": ("checkpoint", "convert", "hf2mg", "mg2hf", "DCP", "checkpoint convert hf2mg mg2hf DCP"),
    "docs/profiling.md": ("profile", "FLOPs", "MFU", "profile FLOPs MFU memory"),
    "docs/memory.md": ("memory",),
    TESTING: ("test", "CI", "unit test", "CI unit test"),
}
"""Page → what a request mentions, in the decision tree of document 000: each alone, and all together."""
REQUESTS = {
    "Add model X to FSDP2": FSDP2, "Add dataset Y": FSDP2, "Fix training OOM": "docs/memory.md",
    "Convert checkpoint A→B": "docs/conversion.md", "Profile training": "docs/profiling.md",
    "Add parallel strategy": "docs/parallelism.md", "Fix forward/loss": "docs/verify.md",
    "Fix data loading": "docs/data.md", "Add unit test": TESTING, "Update docs": TESTING,
}  # fmt: skip
"""Request in the table of document 000, section 7 → page."""
CRITERIA = {
    ("see",): (
        "VLM", "vision-language", "image-text understanding", "OCR", "Qwen2VL", "InternVL", "GLM4V",
        "Train understanding model / VLM",
    ),
    ("draw", "film"): (
        "Video generation", "image generation", "t2v", "t2i", "i2v", "Wan", "CogVideoX", "FLUX",
        "Train generative model / video / image",
    ),
    ("omni",): ("Omni", "speech + vision + text", "Train omni model"),
    ("hear", "speak"): ("Speech recognition", "TTS", "ASR", "Whisper", "CosyVoice", "Train speech / TTS model"),
}  # fmt: skip
"""Tasks → keywords and intents of the routing criteria of document 001."""
POSTTRAINING = ("DPO", "GRPO", "preference alignment", "reinforcement learning", "GRPO FLUX image generation")


@pytest.mark.parametrize(
    ("wish", "page"),
    [*((wish, page) for page, wishes in TREE.items() for wish in wishes), *REQUESTS.items()],
)
def test_the_tree_of_document_000_leads_where_it_says(wish: str, page: str) -> None:
    assert routes.find(wish).page == page


@pytest.mark.parametrize(("tasks", "wish"), [(tasks, wish) for tasks, wishes in CRITERIA.items() for wish in wishes])
def test_the_criteria_of_document_001_lead_to_their_kind(tasks: tuple[str, ...], wish: str) -> None:
    assert routes.find(wish).title in [topics.TASKS[task].title for task in tasks]


@pytest.mark.parametrize("wish", POSTTRAINING)
def test_posttraining_is_meant_whatever_the_model_is(wish: str) -> None:
    assert routes.find(wish).page == "docs/posttrain.md"


def test_only_families_that_do_it_are_told_where_others_cannot() -> None:
    videos = routes.find("describe clips")
    assert videos.families and all("video" in card.modalities for card in videos.families)
    assert videos.stages["ask it"].startswith("mm infer runs/mine --video")
    assert [card.name for card in routes.find("edit photos").families] == ["flux", "ming_draw", "qwen_image"]
    assert "--image" in routes.find("animate a photo").stages["make samples"]
    scans = [card.name for card in routes.find("OCR of scans").families]
    assert scans[:2] == ["deepseek_ocr", "deepseek_ocr2"] and "qwen3vl" in scans
    assert re.search(r"and \d+ more", routes.as_text(routes.find("OCR of scans")))
    clones = routes.as_text(routes.find("clone a voice"))
    assert "--speak gap.wav" in clones and "codec of the release" in clones


def test_what_a_card_does_is_known() -> None:
    for card in families():
        assert all(topics.ASPECTS[each].task == card.task for each in card.does), card.name
    for name in topics.ASPECTS.keys() - {"video"}:
        assert any(name in card.does for card in families()), name


def test_what_else_a_wish_is_about_is_named() -> None:
    assert routes.find("text to video LoRA").also == ["Train small matrices beside frozen weights: docs/adapters.md"]


@pytest.mark.parametrize(
    "wish",
    [
        "segment images",
        "embed documents",
        "music generation",
        "upscale an image",
        "image classification",
        "anonymise faces in my pictures",
    ],
)
def test_what_nothing_here_does_is_said(wish: str) -> None:
    with pytest.raises(UsageError, match="here"):
        routes.find(wish)


NEWCOMERS = {
    "see two of my trainings side by side": "Compare runs", "try five learning rates": "Compare runs",
    "compare two runs": "Compare runs", "which of my runs is better, A versus B": "Compare runs",
    "hyperparameter sweep": "Compare runs", "sweep learning rates": "Compare runs",
    "slurm": "Run on Slurm or Kubernetes", "train on a slurm cluster": "Run on Slurm or Kubernetes",
    "sbatch script": "Run on Slurm or Kubernetes", "run on kubernetes": "Run on Slurm or Kubernetes",
    "train without GPU": "Train without a GPU", "can I train without a GPU?": "Train without a GPU",
    "train without a graphics card": "Train without a GPU",
    "fine-tune on CPU": "Train without a GPU", "train on my cpu": "Train without a GPU",
    **dict.fromkeys(
        ("web ui", "dashboard", "a gradio page for training", "fine-tune in a web ui"),
        "Train and compare runs in the browser",
    ),
    **dict.fromkeys(
        (
            "plugin import errors", "write a plugin for a model", "migrate a new vision-language model",
            "bring my own model", "bring a new data set", "write my own chat template", "a custom collator",
        ),
        "Train by a YAML, with models and data sets of your own",
    ),
    "fine-tune a vision-language model on my own data set": "Answer questions about pictures and videos",
    "chat with my model in a web UI": "Serve a model over HTTP",
    "my laptop only has a gguf file, can I use it": "Convert a checkpoint to another layout",
    "load a gguf model and convert it": "Convert a checkpoint to another layout",
    "use a reward model for GRPO": "Train a model on preferences or rewards",
    **dict.fromkeys(("prepare weights", "weight-prep"), "Convert a checkpoint to another layout"),
    "convert a checkpoint for CPU-only use": "Train without a GPU",
    **dict.fromkeys(
        (
            "write a converter", "my weights have other names", "rename the tensors of a checkpoint",
            "my checkpoint has a layout that the suite does not know", "weights in my own format",
            "an unknown checkpoint", "my own checkpoint layout", "a state dict with different keys",
        ),
        "Write a converter for a layout of your own",
    ),
    **dict.fromkeys(
        ("convert my checkpoint", "convert my own checkpoint", "a checkpoint in a different layout"),
        "Convert a checkpoint to another layout",
    ),
    "resume from my own checkpoint": "Go on with a run",
    **dict.fromkeys(
        (
            "FID of my samples", "evaluate generated pictures", "measure drawn clips", "vbench",
            "CLIP score of generated videos", "how is the quality of synthetic images scored",
        ),
        "Measure drawn pictures and clips",
    ),
}  # fmt: skip
"""What newcomers ask → title of the answer."""
INSTEAD = {
    "export to gguf": "mm export", "save my model as GGUF": "llama.cpp", "convert to gguf": "convert_hf_to_gguf.py",
    "deepspeed": "FSDP2", "deepspeed zero3": "FSDP2", "train with DeepSpeed ZeRO-3": "docs/parallelism.md",
    "reward model": "mm posttrain dpo", "train a reward model": "posttrain.rewards",
    "reward modelling": "mm posttrain",
}  # fmt: skip
"""What newcomers ask that is not here → a word of what to do instead."""


@pytest.mark.parametrize("wish", ["open-sora 2.0", "qihoo t2x"])
def test_a_wish_for_a_planned_family_is_told_so(wish: str) -> None:
    with pytest.raises(UsageError, match="is planned, and not built yet"):
        routes.find(wish)


@pytest.mark.parametrize(("wish", "title"), NEWCOMERS.items())
def test_a_newcomer_is_answered(wish: str, title: str) -> None:
    assert routes.find(wish).title == title


@pytest.mark.parametrize(
    ("wish", "guide"),
    [("add a vision-language model", "SKILL.md"), ("convert my checkpoint", "references/converter.md")],
)
def test_a_wish_for_something_of_ones_own_names_its_guide(wish: str, guide: str) -> None:
    """The page of the answer is about everything; the guide has the steps."""
    guides = re.findall(r"[\w./-]+\.md", routes.find(wish).note)
    assert f"skills/mindspeed-mm-fsdp2-model-only-vlm-migration/{guide}" in guides
    for guide in guides:
        assert (ROOT / guide).is_file(), guide


def test_a_release_in_few_bits_is_sent_to_its_export() -> None:
    """`mm convert` refuses the release itself."""
    assert "`mm convert` takes what `mm export` writes" in routes.find("convert DeepSeek-V3 fp8 weights").note


@pytest.mark.parametrize(("wish", "instead"), INSTEAD.items())
def test_what_is_done_in_another_way_is_said(wish: str, instead: str) -> None:
    said = mm("route", wish, "--json")
    (problem,) = json.loads(said.out)["error"]["problems"]
    assert said.code == 2 and instead in problem["what"] + problem["way_out"]
    for command in re.findall(r"`(mm [^`]*)`", problem["way_out"]):
        parse(command)
    for page in re.findall(r"docs/[\w-]+\.md", problem["way_out"]):
        assert (ROOT / page).is_file()


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "qwen2_5_vl", "qwen2.5-vl-7b-instruct"])
def test_a_family_is_found_by_its_title_however_it_is_written(name: str) -> None:
    assert "qwen2_5vl" in [card.name for card in catalogue.find(name)]


def test_commands_and_pages_of_routes_exist() -> None:
    for aspect in topics.ASPECTS.values():
        assert not aspect.stage or aspect.stage in topics.TASKS[aspect.task].stages
        parse(aspect.command or "mm models")
    for each in (*topics.TASKS.values(), *topics.ANY_MODEL):
        assert (ROOT / each.page).is_file()
        for command in each.stages.values():
            if shlex.split(command)[0] == "mm":
                parse(command)


def test_a_wish_without_a_known_word_lists_what_there_is() -> None:
    with pytest.raises(MMError, match=r"no word of 'xyzzy' is known.*turn speech into text"):
        routes.find("xyzzy")


def test_the_commands_print() -> None:
    assert "Qwen3-VL, dense" in mm("models").out
    assert "test_released_packed.py" in mm("models", "qwen3vl", "--proof").out
    assert [each["name"] for each in json.loads(mm("models", "qwen3vl", "--json").out)] == ["qwen3vl"]
    assert "mm extract run.yaml" in mm("route", "make", "videos").out


def test_the_page_of_models_has_the_table() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert catalogue.as_markdown(families()) in page, "write it anew: mm models --markdown"


@pytest.mark.parametrize("card", families(), ids=lambda card: card.name)
def test_a_card_prints(card: ModelCard) -> None:
    text = catalogue.as_card(card)
    assert card.model_class in text
    assert not re.search(r"None|\{\}", text)
