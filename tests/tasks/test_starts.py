"""What `mm models NAME` and `mm route WISH` print to begin with: the YAML passes the check, the names are those of the
model, the devices are those of the forecast, and the files exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.all_linear import all_linear
from mindspeed_mm.fsdp.params.cards import ModelCard, families
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.utils.model_parts import module_names
from mindspeed_mm.tasks.models import catalogue, routes
from mindspeed_mm.tasks.models.first_yaml import RATES, ROOM, as_yaml, scalar, smallest
from mindspeed_mm.tasks.models.start import DEVICES_GIB, ROOT, FamilyStart, start_of
from mindspeed_mm.tasks.models.topics import ANY_MODEL, TASKS, YamlRecipe
from tests.helpers.needed_memory import METHODS, needs_gib, with_record
from tests.helpers.released_examples import names_of_parts
from tests.helpers.released_rows import ROWS, rows_of
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_families import FAMILIES, TinyFamily
from tests.helpers.tiny_generator_run import make_clips, make_pictures

CARDS = {card.name: card for card in families()}
PLAIN = YamlRecipe()


# --- the YAML ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", families(), ids=lambda card: card.name)
def test_the_smallest_yaml_is_a_configuration(card: ModelCard, tmp_path: Path) -> None:
    """Without a folder: keys, values and what excludes what; each way to train; and no key that is its default."""
    for method in METHODS:
        sections = smallest(card, method)
        path = tmp_path / f"{method}.yaml"
        path.write_text(as_yaml(sections))
        config = load_config(path)
        assert config.warnings == () and config.arguments.training.lr == RATES[method]
        assert config.arguments.training.lora.enable == (method != "full")
        assert (config.arguments.training.lora.quantize == "nf4") == (method == "qlora")
        assert yaml.safe_load(path.read_text()) == sections  # readers of YAML 1.1 read the same
    assert start_of(card, PLAIN).yaml == as_yaml(smallest(card))


def test_values_are_written_as_yaml_reads_them() -> None:
    values = [1e-4, 2.5e-5, 0.5, 12, True, None, "on", "1e5", "2024", "a b", "models/Qwen3-0.6B", "", "it's", "a: b"]
    assert [yaml.safe_load(scalar(value)) for value in values] == values
    assert scalar(1e-4) == "1.0e-4" and scalar("models/Qwen3-0.6B") == "models/Qwen3-0.6B"
    nested = {"a": {"b": list(range(40)), "c": {"d": "x" * 80, "e": [{"f": 1}]}}}
    assert yaml.safe_load(as_yaml(nested)) == nested


def tiny(card: ModelCard, folder: Path) -> list[str]:
    """Write a small folder of the family and rows for it; the words that put them into its smallest YAML."""
    basic = "data.dataset_param.basic_parameters"
    model = folder / "model"
    if card.generates:
        family = _tiny_generator(card, model)
        data = folder / "rows"
        rows = make_clips(data, 4, family.frames, family.side) if family.frames > 1 else _pictures(data, family.side)
        if card.name == "wan_vace":
            _add_controls(rows)
        size = {"height": family.side, "width": family.side, "max_pixels": "null"}
        size |= {"num_frames": family.frames, "frame_interval": 1} if family.frames > 1 else {}
        words = [f"data.dataset_param.preprocess_parameters.{name}={value}" for name, value in size.items()]
        words += ["model.task=t2v"] if card.name == "ltx2" else []  # its clips have no sound
    elif card.name == "qwen3omni_talker":
        from tests.helpers.tiny_omni_talker import write_omni, write_spoken_rows

        write_omni(model)
        rows, words = write_spoken_rows(folder / "rows"), []
    elif card.name == "lumina_mgpt":
        from tests.fsdp.models.test_lumina_mgpt import run_of

        words = []
        found = yaml.safe_load(run_of(folder).read_text())["data"]["dataset_param"]["basic_parameters"]
        rows = Path(found["dataset"])
    elif card.name == "bagel":
        from tests.helpers.tiny_bagel import make_tiny_bagel
        from tests.helpers.tiny_bagel import write_rows as write_rows_of_parts

        model.mkdir(parents=True)
        make_tiny_bagel(model)
        rows, words = write_rows_of_parts(folder / "rows"), []
    elif card.name == "internvlu":
        from tests.helpers.tiny_internvlu import run_of as run_of_internvlu

        words, rows = [], run_of_internvlu(folder).parent / "rows" / "rows.jsonl"
    elif card.name == "videoalign":
        from tests.helpers.tiny_videoalign import MARKS, write_reward_run

        # Of a folder of Qwen2-VL; the released one has its head and its tokens.
        words = [f"model.add_special_tokens={json.dumps(MARKS)}", "training.allow_missing=['rm_head.weight']"]
        found = yaml.safe_load(write_reward_run(folder / "rewards").read_text())
        (folder / "rewards" / "model").rename(model)
        rows = Path(found["data"]["dataset_param"]["basic_parameters"]["dataset"])
    elif card.name == "janus_pro":
        from tests.helpers.tiny_janus import make_tiny_janus, write_drawn_rows

        make_tiny_janus(model)
        rows, words = write_drawn_rows(folder / "rows"), []
    else:
        ROWS[card.name].write(model)
        rows, words = rows_of(ROWS[card.name], folder / "rows"), []
    words += [f"model.model_name_or_path={model}", f"{basic}.dataset={rows}", f"{basic}.dataset_dir={rows.parent}"]
    return [*words, "training.save=null", "data.dataloader_param.num_workers=0"]


def _add_controls(rows: Path) -> None:
    """Let each clip follow itself."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps({**line, "control": line["path"]}) + "\n" for line in lines))


def _pictures(folder: Path, side: int) -> Path:
    return make_pictures(folder, 4, ((side, side),))


def _tiny_generator(card: ModelCard, model: Path) -> TinyFamily:
    name = {"zimage": "z_image"}.get(card.name, card.name)
    if name in FAMILIES:
        FAMILIES[name].make(model)
        return FAMILIES[name]
    if name == "ltx2":
        from tests.helpers.tiny_video_families import make_tiny_ltx2

        make_tiny_ltx2(model)
        return TinyFamily(lambda folder: None, side=64, frames=9)
    if name == "ming_draw":
        from tests.helpers.tiny_ming_draw import make_tiny_ming_draw

        make_tiny_ming_draw(model)
        return TinyFamily(lambda folder: None, side=16)
    if name == "stepvideo":
        from tests.helpers.tiny_stepvideo import make_tiny_stepvideo

        make_tiny_stepvideo(model)
        return TinyFamily(lambda folder: None, side=32, frames=17)
    from tests.helpers.tiny_conditioned import make_tiny_conditioned

    make_tiny_conditioned(model, "vace")
    return TinyFamily(lambda folder: None, side=16, frames=5)


QUICK = {"qwen3vl", "flux"}
"""Families that the default run checks; the others take about a second each."""
EACH = [pytest.param(card, id=card.name, marks=() if card.name in QUICK else pytest.mark.slow) for card in families()]


@pytest.mark.parametrize("card", EACH)
def test_the_smallest_yaml_passes_the_check_and_its_names_are_the_models(card: ModelCard, tmp_path: Path) -> None:
    """On a small folder of the family. The parts for `model.freeze` are the whole model, each parameter in one."""
    path = tmp_path / "run.yaml"
    path.write_text(start_of(card, PLAIN).yaml)
    words = tiny(card, tmp_path)
    said = mm("check", path, *words)
    assert said.code == 0, said.out + said.err
    assert "could not be predicted" not in said.out

    model = build_outline(load_config(path, [*words, "training.lora.enable=false"]).arguments).model
    if card.generates:
        adapter = facts_of(model).adapter
        assert adapter is not None and set(card.lora_targets) == set(adapter.lora_targets)
    else:
        ends = {name.rpartition(".")[2] for name in all_linear(model)}
        assert set(card.lora_targets) == {end for end in ends if not end.isdigit()}
    parts = {}
    for part, patterns in card.freeze.items():
        parts[part] = resolve_patterns(patterns, module_names(model), key="model.freeze")
    named = [module for modules in parts.values() for module in modules]
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner and not any(is_inside(module, (owner,)) and module != owner for module in named):
            assert sum(is_inside(name, modules) for modules in parts.values()) == 1, name


def test_every_card_names_its_parts_and_what_adapters_wrap() -> None:
    """That they are the model's own is seen on small folders above, most of them in the slow run."""
    assert [card.name for card in families() if not card.freeze or not card.lora_targets] == []


def test_the_page_of_recipes_names_the_parts_of_the_cards() -> None:
    for folder, parts in names_of_parts().items():
        of_folder = [
            card
            for card in families()
            if "tower" in card.freeze and any(path.split("/")[1] == folder for path in start_of(card, PLAIN).examples)
        ]
        assert of_folder, folder
        for card in of_folder:
            assert tuple(parts) == tuple(", ".join(card.freeze[part]) for part in ("tower", "projector", "language"))


# --- devices ----------------------------------------------------------------------------------------------------------


RELEASES = [(card, hub) for card in families() for hub in with_record(card) if hub in card.needs_gib]
SMALL = {"HuggingFaceTB/SmolVLM2-256M-Video-Instruct"}


def test_every_recorded_size_has_its_need() -> None:
    assert len(RELEASES) >= 80
    for card in families():
        assert card.needs_gib.keys() <= card.released.keys(), card.name
        for needs in card.needs_gib.values():
            assert tuple(needs) == METHODS[: len(needs)]
            assert len(needs) == 3 or (list(needs.values())[-1] or 1e9) <= ROOM * DEVICES_GIB[0]  # the rest takes less
            known = [need for need in needs.values() if need is not None]
            assert known == sorted(known, reverse=True), card.name  # adapters take less, and in four bits less still
            assert all(0 < need <= DEVICES_GIB[-1] for need in known)


@pytest.mark.parametrize(
    ("card", "hub"),
    [pytest.param(*each, id=each[1], marks=() if each[1] in SMALL else pytest.mark.slow) for each in RELEASES],
)
def test_what_a_size_needs_is_the_forecast(card: ModelCard, hub: str, tmp_path: Path) -> None:
    found, expected = needs_gib(card, hub, tmp_path), card.needs_gib[hub]
    assert {method: need is None for method, need in found.items()} == {m: need is None for m, need in expected.items()}
    for method, need in found.items():
        assert need is None or need == pytest.approx(expected[method], rel=0.02, abs=0.11), method


def test_a_device_trains_what_leaves_room_on_it() -> None:
    for card in families():
        for hub, by_device in start_of(card, PLAIN).fits.items():
            for device, best in by_device.items():
                fitting = [m for m, need in card.needs_gib[hub].items() if (need or 1e9) <= ROOM * int(device)]
                assert best == (fitting[0] if fitting else None)
    twelve = start_of(CARDS["gemma3"], PLAIN).fits["google/gemma-3-12b-it"]
    assert twelve == {"24": "qlora", "48": "lora", "80": "lora"}


# --- examples, and what is printed ------------------------------------------------------------------------------------


def test_examples_exist_and_each_is_of_one_family() -> None:
    shown = [path for card in families() for path in start_of(card, PLAIN).examples]
    assert len(shown) == len(set(shown)) and all((ROOT / path).is_file() for path in shown)
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*/*_config*.yaml")}
    released = {path for path in there if "model_name_or_path: models/" in (ROOT / path).read_text()}
    assert released <= set(shown), released - set(shown)
    assert start_of(CARDS["qwen3_vl_moe"], PLAIN).examples[0] == "examples/qwen3vl/qwen3vl_30B_config_v1.yaml"
    assert "examples/internvl3/internvl3_8B_config.yaml" in start_of(CARDS["internvl"], PLAIN).examples


@pytest.mark.parametrize("card", families(), ids=lambda card: card.name)
def test_a_family_fits_on_a_screen(card: ModelCard) -> None:
    lines = catalogue.as_card(card).split("\n")
    assert len(lines) <= 48 and max(map(len, lines)) <= 120
    assert all(line.isascii() or "–" in line for line in lines) and not any(line != line.rstrip() for line in lines)
    if card.freeze:
        assert "modules for model.freeze" in "\n".join(lines)


def test_a_card_says_what_is_not_trained() -> None:
    left = {card.name: card.not_trained for card in families() if card.not_trained}
    assert left.keys() == {"ming", "qwen2_5omni", "qwen3omni"}
    lines = catalogue.as_card(CARDS["ming"]).split("\n")
    said = "speech (talker), drawing (ming_draw trains it): not trained, and handed on unchanged by mm export"
    assert f"  left out  {said}" in lines
    assert "left out" not in catalogue.as_card(CARDS["qwen3vl"])


def test_json_has_the_same_as_fields() -> None:
    (found,) = json.loads(mm("models", "qwen3vl", "--json").out)
    start = start_of(CARDS["qwen3vl"], PLAIN)
    assert (found["yaml"], found["fits"], tuple(found["examples"])) == (start.yaml, start.fits, start.examples)
    assert found["freeze"]["language"] == list(CARDS["qwen3vl"].freeze["language"])
    assert "q_proj" in found["lora_targets"] and found["needs_gib"].keys() == found["released"].keys()
    route = json.loads(mm("route", "LoRA of qwen3vl", "--json").out)
    assert route["start"]["family"] == "qwen3vl" and "rank: 16" in route["start"]["yaml"]
    assert json.loads(mm("route", "score a model", "--json").out)["start"] is None


def started(wish: str) -> FamilyStart:
    start = routes.find(wish).start
    assert start is not None
    return start


@pytest.mark.parametrize(
    ("wish", "family", "has"),
    [
        ("teach Qwen3-VL to read receipts", "qwen3vl", {"training.lr": 1e-5}),
        ("fine-tune a speech recogniser", None, {"training.lr": 1e-5}),
        ("text to video LoRA", "wan", {"training.lora.rank": 16}),
        ("sft an llm with QLoRA", "qwen3", {"training.lora.quantize": "nf4"}),
        ("LoRA of qwen3vl", "qwen3vl", {"training.lora.enable": True, "training.lora.quantize": None}),
        ("QLoRA of qwen3vl", "qwen3vl", {"training.lora.quantize": "nf4"}),
        ("qwen3vl on one 24 GB card", "qwen3vl", {"training.lora.quantize": "nf4", "features.recompute": True}),
        ("pretrain a tiny model", "", {"model.train_from_scratch": True}),
        ("train with DPO on preferences", "", {"posttrain.method": "dpo"}),
        ("GRPO for my VLM", "", {"posttrain.method": "grpo", "posttrain.rewards.0.name": "exact_match"}),
        ("GRPO FLUX", "flux", {"posttrain.method": "grpo", "data.dataset_param.dataset_type": "generation_prompts"}),
        ("dpo of flux", "flux", {"posttrain.method": "dpo", "data.dataset_param.dataset_type": "generation"}),
        ("train without GPU", "", {"training.lr": 1e-5}),
    ],
)  # fmt: skip
def test_a_wish_has_its_yaml(wish: str, family: str | None, has: dict[str, Any], tmp_path: Path) -> None:
    start = started(wish)
    assert family is None or start.family == family
    found = yaml.safe_load(start.yaml)
    (tmp_path / "run.yaml").write_text(start.yaml)
    assert load_config(tmp_path / "run.yaml").warnings == ()
    for key, value in has.items():
        inner: Any = found
        for name in key.split("."):
            inner = inner[int(name)] if name.isdigit() else inner.get(name)
        assert inner == value, key
    assert ("parallel" in found) == (wish != "train without GPU")


def test_wishes_for_what_is_there_have_no_yaml() -> None:
    assert all(task.recipes for task in TASKS.values())
    for topic in ANY_MODEL:
        if topic.recipes:
            assert any("run.yaml" in command for command in topic.stages.values()), topic.title
    for wish in ("serve with vllm", "convert a checkpoint", "compare my scores", "my loss is nan", "count tokens"):
        assert routes.find(wish).start is None or wish == "compare my scores"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "kind"),
    [
        ("dpo of qwen3vl", "pairs"), ("grpo of qwen3vl", "rows"), ("LoRA of qwen3vl", "rows"),
        ("QLoRA of qwen3vl", "rows"), ("qwen3vl on one 24 GB card", "rows"), ("pretrain qwen3vl from scratch", "rows"),
        ("GRPO FLUX", "prompts"), ("dpo of flux", "media pairs"),
    ],
)  # fmt: skip
def test_the_yaml_of_a_wish_passes_the_check(wish: str, kind: str, tmp_path: Path) -> None:
    from tests.helpers.tiny_media_pairs import make_tiny_media_pairs
    from tests.helpers.tiny_pairs import make_pairs
    from tests.helpers.tiny_rollout_run import make_tiny_rollout_run

    start = started(wish)
    path = tmp_path / "wish.yaml"
    path.write_text(start.yaml)
    basic = "data.dataset_param.basic_parameters"
    size = "data.dataset_param.preprocess_parameters"
    if kind == "prompts":
        make_tiny_rollout_run(tmp_path)
        words = [f"model.model_name_or_path={tmp_path / 'model'}", f"{basic}.dataset={tmp_path / 'prompts.txt'}"]
        words += [f"{size}.height=16", f"{size}.width=16"]
    elif kind == "media pairs":
        make_tiny_media_pairs(tmp_path)
        words = [f"model.model_name_or_path={tmp_path / 'model'}", f"{basic}.dataset={tmp_path / 'rows.jsonl'}"]
        words += [f"{basic}.dataset_dir={tmp_path}", f"{size}.max_pixels=null", f"{size}.height=16", f"{size}.width=16"]
    else:
        words = tiny(CARDS["qwen3vl"], tmp_path)
        if kind == "pairs":
            rows = make_pairs(tmp_path / "pairs")
            words += [f"{basic}.dataset={rows}", f"{basic}.dataset_dir={rows.parent}"]
    said = mm("check", path, *words)
    assert said.code == 0, said.out + said.err
