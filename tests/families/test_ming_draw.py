"""What draws in Ming-Lite-Omni against its formulas in fp64, on weights under the released names: conditions,
transformer, losses, samples; released folders both ways, adapters, plans, and MindSpeed-MM's launch."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from mindspeed_mm.core.errors import CheckpointError, MachineError, ModelFolderError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths
from mindspeed_mm.tasks.ming_t2i import run as launch
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import ming_draw_by_hand as by_hand
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import differing, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import generator_config
from tests.helpers.tiny_ming_draw import (
    SHIFT,
    SIDES,
    VAE,
    make_tiny_ming_draw,
)

LAYERS = 24
RELEASED = Path(__file__).parents[1] / "released/ming_draw/t2i.json"
FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")
SEED, SIDE = 7, 16
TASKS = ("t2i", "edit")
CAPTION = "a red box"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that trains; the release beside it is `model.release`."""
    folder = tmp_path_factory.mktemp("ming_draw") / "model"
    make_tiny_ming_draw(folder)
    return folder


def release_of(folder: Path) -> Path:
    return folder.with_name("model.release")


@cache
def exact_parts(folder: str) -> Any:
    """The folder's pipeline without its transformer, in fp64."""
    from mindspeed_mm.fsdp.models.diffusion.components import load_encoders

    return load_encoders(find_adapter(folder), torch.device("cpu"), torch.float64)


def picture(seed: int = 2) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


# --- what is told -----------------------------------------------------------------------------------------------------


def told_by_hand(folder: Path, source: Image.Image | None, *faults: str) -> torch.Tensor:
    """The condition of `CAPTION`: the tokens are those of the published template."""
    tokenizer = exact_parts(str(folder)).tokenizer
    patch = tokenizer.tokenizer.convert_tokens_to_ids("<imagePatch>")
    shown, given = "", None
    if source is not None:
        seen = tokenizer.image_processor(images=[source], return_tensors="pt")
        grid = tuple(seen["image_grid_thw"][0].tolist())
        shown = f"<image>{'<imagePatch>' * (grid[1] * grid[2] // 4)}</image>\n"
        given = seen["pixel_values"].double(), grid
    text = f"<role>HUMAN</role>{shown}{CAPTION}<role>ASSISTANT</role>"
    ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return by_hand.condition(release_of(folder), ids, patch, given, frozenset(faults))


@pytest.mark.parametrize("source", [None, picture()], ids=TASKS)
def test_a_condition_is_that_of_the_formula(source: Image.Image | None, made: Path) -> None:
    """Queries behind the caption, routed and placed as a picture of one row; a connector whose rows all see one
    another; rows of length 1. Each of these done otherwise is seen; so is the next smaller square."""
    (said,) = exact_parts(str(made)).encode_prompt([CAPTION], source)
    torch.testing.assert_close(said[0], told_by_hand(made, source), rtol=1e-6, atol=1e-6)
    for fault in ("causal", "long", "text", "square"):
        assert (said[0] - told_by_hand(made, source, fault)).abs().max() > 1e-3, fault
    assert told_by_hand(made, source, "near").shape[0] != len(said[0]) == SIDES[-1] ** 2


def test_the_condition_of_no_caption_is_zero(made: Path) -> None:
    (said,) = exact_parts(str(made)).encode_prompt(["", CAPTION])
    assert not said[0].any() and said[1].norm(dim=1).allclose(torch.ones(len(said[1])).double())


def test_long_captions_are_cut(made: Path) -> None:
    pipeline = exact_parts(str(made))
    words = pipeline.tokenizer.tokenizer
    ids = words(CAPTION, add_special_tokens=False)["input_ids"]
    (cut,) = pipeline.encode_prompt([CAPTION], max_sequence_length=len(ids) - 1)
    (short,) = pipeline.encode_prompt([words.decode(ids[:-1])])
    (whole,) = pipeline.encode_prompt([CAPTION], max_sequence_length=len(ids))
    assert torch.equal(cut, short) and not torch.equal(cut, whole)


@pytest.mark.parametrize("source", [None, picture()], ids=TASKS)
def test_special_tokens_in_captions_are_text(source: Image.Image | None, made: Path) -> None:
    """No further picture is looked for, and no token of the caption is a mark. Captions are measured all the same."""
    from mindspeed_mm.fsdp.models.ming_draw.pipeline_ming_draw import as_read

    pipeline, adapter = exact_parts(str(made)), find_adapter(made)
    processor, tokenizer = pipeline.tokenizer, pipeline.tokenizer.tokenizer
    without = as_read(processor, "a b", source, 64)
    for mark in ("<image>", "<imagePatch>", "</audio>", "<role>", tokenizer.eos_token):
        read, known = as_read(processor, f"a {mark} b", source, 64), tokenizer.convert_tokens_to_ids(mark)
        ids, kinds = read["input_ids"], read["mm_token_type_ids"]
        assert (ids == known).sum() == (without["input_ids"] == known).sum(), mark
        assert tokenizer.decode(ids[0]).endswith(f"a {mark} b<role>ASSISTANT</role>")
        assert kinds.shape == ids.shape and kinds.sum() == without["mm_token_type_ids"].sum()
    (said,) = pipeline.encode_prompt(["a <image> b"], source)
    assert said.isfinite().all()
    plain, marked = CaptionLengths(adapter, pipeline.components)(["a fox", "a fox <image>"])
    assert marked.tokens == plain.tokens + len(tokenizer(" <image>").input_ids)


# --- training ---------------------------------------------------------------------------------------------------------


def make_run(folder: Path, task: str = "t2i", made: Path | None = None) -> Path:
    """The YAML, and four pictures with captions, of which two are of other sizes; edit: with sources."""
    if made is None:
        make_tiny_ming_draw(folder / "model")
    rows = []
    for number in range(4):
        row = {"path": f"{number}.png", "cap": f"{CAPTION} {number}"}
        picture(number).save(folder / row["path"])
        if task == "edit":
            row["source"] = f"source{number}.png"
            picture(10 + number).save(folder / row["source"])
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"train_iters": 2, "seed": SEED, "diffusion": {}}
    model = {"task": task, "model_name_or_path": str(made or folder / "model")}
    config = generator_config(folder, {"height": SIDE, "width": SIDE}, training=training, model=model)
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(config, file)
    return folder / "run.yaml"


FEATURES = "data.dataset_param.basic_parameters.features_dir="


@pytest.mark.parametrize("task", ["t2i", pytest.param("edit", marks=pytest.mark.slow)])
def test_a_loss_is_that_of_the_formula(task: str, tmp_path: Path, made: Path) -> None:
    """Raw pictures and features, in fp64: a step is the mean over samples of |v − (ε − x)|², σ logit-normal and shifted
    by the scheduler's 3. What is not trained stays, and the export goes back to the released names."""
    yaml = make_run(tmp_path, task, made)
    said = mm("extract", yaml, "--out", tmp_path / "features")
    assert said.code == 0, said.err
    seen: list[dict[str, Any]] = []
    with keeping_double(), watched_steps(lambda _, batches: seen.extend(batches)):
        train(yaml, tmp_path / "run", FEATURES + str(tmp_path / "features"), *FP64)
        train(yaml, tmp_path / "raw", *FP64, "training.train_iters=1")
    w, batch = by_hand.transformer_weights(release_of(made)), seen[0]
    expected = losses_by_hand(w, batch, made)
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-5)
    assert losses(tmp_path / "raw")[1] == pytest.approx(expected, rel=2e-5)
    assert losses(tmp_path / "run")[2] != losses(tmp_path / "run")[1]
    for fault in ("shift", "sign", *(["source"] if task == "edit" else [])):
        assert losses_by_hand(w, batch, made, fault) != pytest.approx(expected, rel=1e-3), fault
    check_export(tmp_path, made, task)


def losses_by_hand(w: by_hand.Weights, batch: dict[str, Any], folder: Path, fault: str = "") -> float:
    found = []
    for row, sample in enumerate(batch["sample_ids"]):
        chance = np.random.Generator(np.random.Philox(key=derive_seed(SEED, batch["epochs"][row], sample)))
        chance.random()  # whether the caption is dropped
        level = 1 / (1 + np.exp(-chance.normal(0.0, 1.0)))
        sigma = level if fault == "shift" else SHIFT * level / (1 + (SHIFT - 1) * level)
        x = batch["latents"][row].double()
        noise = noise_of(derive_seed(SEED, batch["epochs"][row], sample), tuple(x.shape)).double()
        source = None
        if "source_latents" in batch and fault != "source":
            source = batch["source_latents"][row].double()
        told = batch["prompt_embeds"][row].double()
        made = by_hand.predicted(w, (1 - sigma) * x + sigma * noise, 1000 * sigma, told, source)
        found.append(float((made - (x - noise if fault == "sign" else noise - x)).square().mean()))
    return float(np.mean(found))


def check_export(folder: Path, made: Path, task: str) -> None:
    """The export holds what was trained; under the released names it is the release with other transformer and MLP."""
    said = mm("export", folder / "run", folder / "exported")
    assert said.code == 0, said.err
    words = [f"--cfg.source_path={folder / 'exported'}", f"--cfg.target_path={folder / 'release'}"]
    convert("hf_to_source", *words)
    before, after, trained = release_of(made), folder / "release", tensors(folder / "run")
    changed = set()
    for file in ("transformer/diffusion_pytorch_model.safetensors", "mlp/model.safetensors", "model.safetensors",
                 "connector/model.safetensors", "vae/diffusion_pytorch_model.safetensors"):  # fmt: skip
        old, new = load_file(before / file), load_file(after / file)
        assert old.keys() == new.keys(), file
        changed |= {f"{file.partition('/')[0]}: {name}" for name in old if not torch.equal(old[name], new[name])}
        for name in old if file.startswith("transformer") else ():
            if not name.endswith("pos_embed.pos_embed"):
                assert torch.equal(new[name], trained[f"model.{name}"].to(new[name].dtype)), name
    assert not [name for name in changed if not name.startswith(("transformer: ", "mlp: mlp."))]
    assert {"mlp: mlp.fc1.weight", "transformer: noise_refiner.0.attn.to_q.weight"} < changed
    of_editing = [name for name in changed if "ref_" in name]
    assert bool(of_editing) == (task == "edit")
    files, found = files_of(before), files_of(after)
    assert files < found and {path.name for path in found - files} == {
        ".mindspeed-mm-folder",
        "conversion_manifest.json",
    }


def files_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def convert(command: str, *words: str) -> None:
    from mindspeed_mm.cli.mm_convert import run

    assert run(["MingConverter", command, *words]) == 0


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_of_a_loop_by_hand(task: str, made: Path) -> None:
    """Euler steps over the scheduler's levels, guided away from the condition 0; edit: with the source in both."""
    from mindspeed_mm.fsdp.models.diffusion.components import load_pipeline
    from mindspeed_mm.tasks.draw.loading import load_transformer

    adapter, encoders = find_adapter(made, task=task), exact_parts(str(made))
    transformer = load_transformer(adapter, adapter.transformer_folder).double()
    pipeline = load_pipeline(adapter, transformer, encoders)
    start = torch.randn(1, 4, SIDE // 2, SIDE // 2, generator=torch.Generator().manual_seed(1))
    given = {"image": picture()} if task == "edit" else {}
    (drawn,) = pipeline(
        prompt=[CAPTION], height=SIDE, width=SIDE, latents=start, num_inference_steps=4, guidance_scale=3.0,
        output_type="latent", return_dict=False, **given,
    )  # fmt: skip
    w, told = by_hand.transformer_weights(release_of(made)), told_by_hand(made, given.get("image"))
    source = None
    if task == "edit":
        pixels = torch.from_numpy(np.asarray(given["image"]).copy()).permute(2, 0, 1)[None].double() / 127.5 - 1
        source = (encoders.vae.encode(pixels).latent_dist.mode()[0] - VAE["shift_factor"]) * VAE["scaling_factor"]
    x = start[0].double()
    # diffusers' levels: n even parts from the first to the last of 1000 shifted ones, shifted again
    ends = [SHIFT * s / (1 + (SHIFT - 1) * s) for s in (1.0, 0.001)]
    levels = [SHIFT * s / (1 + (SHIFT - 1) * s) for s in np.linspace(*ends, 4)]
    for now, then in itertools.pairwise([*levels, 0.0]):
        wanted = by_hand.predicted(w, x, 1000 * now, told, source)
        away = by_hand.predicted(w, x, 1000 * now, told * 0, source)
        x = x + (then - now) * (away + 3.0 * (wanted - away))
    torch.testing.assert_close(drawn[0].double(), x, rtol=1e-4, atol=1e-4)


def test_negative_prompts_are_refused(made: Path, tmp_path: Path) -> None:
    said = mm("infer", made, "--prompt", CAPTION, "--negative-prompt", "grain", "--out", tmp_path / "drawn")
    assert said.code != 0 and "Ming-Lite-Omni guides away from the condition 0" in said.err


# --- released names ---------------------------------------------------------------------------------------------------


def test_released_names_and_shapes_are_those_of_the_classes() -> None:
    from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class

    diffusers_class("ModelMixin")
    from mindspeed_mm.fsdp.models.ming_draw.pipeline_ming_draw import MingQueries
    from mindspeed_mm.fsdp.models.ming_draw.transformer import MingImageTransformer

    record = json.loads(RELEASED.read_text(encoding="utf-8"))
    expected = {}
    for name, shape in record["transformer"].items():
        for number in range(LAYERS - 1 if "{n}" in name else 1):
            expected[name.replace("{n}", str(number))] = tuple(shape)
    expected |= {name: tuple(shape) for name, shape in record["mlp"].items()}
    with torch.device("meta"):
        model, queries = MingImageTransformer(**record["config"]), MingQueries()
    found = {name: tuple(each.shape) for part in (model, queries) for name, each in part.state_dict().items()}
    assert found == expected
    parameters = sum(each.numel() for each in model.parameters())
    assert parameters == pytest.approx(2.2e9, rel=0.02)  # the card's


def test_a_release_that_lacks_a_part_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(release_of(made), tmp_path / "release")
    shutil.rmtree(tmp_path / "release/connector")
    words = [f"--cfg.source_path={tmp_path / 'release'}", f"--cfg.target_path={tmp_path / 'model'}"]
    with pytest.raises(ModelFolderError, match=r"connector.*is missing, and what draws in Ming-Lite-Omni needs it"):
        convert("source_to_hf", *words)
    file = tmp_path / "release/mlp/model.safetensors"
    shutil.copytree(release_of(made) / "connector", tmp_path / "release/connector")
    save_file({name: each for name, each in load_file(file).items() if name != "mlp.fc1.weight"}, file)
    with pytest.raises(CheckpointError, match=r"has no tensor mlp\.fc1\.weight"):
        convert("source_to_hf", *words)
    assert not (tmp_path / "model").exists()


def test_a_released_folder_says_how_it_becomes_one_that_trains(made: Path, tmp_path: Path) -> None:
    yaml = make_run(tmp_path, "t2i", release_of(made))
    said = mm("check", yaml, "model.model_id=ming_draw")
    assert said.code != 0 and "mm-convert MingConverter source_to_hf" in said.err + said.out


# --- adapters, plans, MindSpeed-MM's launch ---------------------------------------------------------------------------

LORA = ("training.lora.enable=true", "training.lora.rank=4")


def stored(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_adapters_go_on(made: Path, tmp_path: Path) -> None:
    """A LoRA of two steps is that of one step, resumed."""
    yaml = make_run(tmp_path, "t2i", made)
    train(yaml, tmp_path / "whole", *LORA)
    train(yaml, tmp_path / "parts", *LORA, "training.train_iters=1")
    train(yaml, tmp_path / "parts", *LORA)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert differing(tensors(tmp_path / "parts"), tensors(tmp_path / "whole")) == []


def test_adapters_train_and_are_applied(made: Path, tmp_path: Path) -> None:
    """A LoRA changes attentions alone, and draws the same when it is merged."""
    yaml = make_run(tmp_path, "t2i", made)
    train(yaml, tmp_path / "run", *LORA)
    for words in (("export", tmp_path / "run", tmp_path / "lora"),
                  ("merge", made, tmp_path / "lora", "--out", tmp_path / "merged")):  # fmt: skip
        said = mm(*words)
        assert said.code == 0, said.err
    merged, before = stored(tmp_path / "merged"), stored(made)
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert merged.keys() == before.keys()
    assert {name.split(".attn.")[1] for name in changed} == {
        *(f"{layer}.weight" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"{layer}.weight" for layer in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    }
    drawn = []
    size = ("--size", f"{SIDE}x{SIDE}", "--steps", 2, "--prompt", CAPTION)
    for number, words in enumerate(((made, "--lora", tmp_path / "lora"), (tmp_path / "merged",))):
        said = mm("infer", *words, *size, "--out", tmp_path / f"samples{number}")
        assert said.code == 0, said.err
        (file,) = (tmp_path / f"samples{number}").glob("*.png")
        drawn.append(np.asarray(Image.open(file)).astype(float))
    assert drawn[0].shape == (SIDE, SIDE, 3) and np.abs(drawn[0] - drawn[1]).mean() < 1


PLANS = {
    "fsdp": (2, ("training.micro_batch_size=1",)),
    "ulysses": (2, ("parallel.ulysses_parallel_size=2",)),
    "tensor": (2, ("parallel.tensor_parallel_size=2",)),
}


def steps_of(yaml: str, words: tuple[str, ...]) -> Any:
    with keeping_double():
        return train_steps(yaml, [*FP64, *words])


@pytest.mark.parametrize(
    ("plan", "task"),
    [("fsdp", "t2i"), *[pytest.param(plan, task, marks=pytest.mark.slow) for plan in PLANS for task in TASKS]],
)
def test_a_plan_trains_like_one_process(plan: str, task: str, made: Path, tmp_path: Path) -> None:
    yaml, (ranks, words) = str(make_run(tmp_path, task, made)), PLANS[plan]
    expected = steps_of(yaml, ())
    for measured in run_ranks(ranks, steps_of, yaml, words):
        compare_steps(expected, measured, 1e-6)


def launch_words(folder: Path, model: Path) -> list[str]:
    """As examples/ming/finetune_t2i.sh starts it, on smaller pictures."""
    given = {
        "pretrained_model_name_or_path": model, "json_path": folder / "rows.jsonl", "image_folder": folder,
        "processor_path": ".", "micro_batch_size": 1, "dataloader_num_workers": 0, "seed": SEED,
        "checkpointing_steps": 500, "max_train_steps": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
        "lr_warmup_steps": 2, "clip_grad": 0.0, "lr_scheduler": "constant_with_warmup", "weight_decay": 1e-2,
        "weighting_scheme": "logit_normal", "output_dir": folder / "run",
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, "--resolution", "512", "512"]


def test_the_launch_of_mindspeed_mm_trains_a_released_folder(made: Path, tmp_path: Path) -> None:
    """The flags make the YAML that a person would write, and the released folder becomes one that trains."""
    make_run(tmp_path, "t2i", made)
    rows = [{"image_name": f"{number}.png", "text": f"{CAPTION} {number}"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = launch_words(tmp_path, release_of(made))
    flags = launch.read_flags(words)
    assert any("--processor_path has no effect" in note for note in flags.notes)
    config, sizes = launch.configuration(flags.options), "data.dataset_param.preprocess_parameters"
    training = config["training"]
    assert config["model"] == {
        "model_name_or_path": str(tmp_path / "run.model"),
        "model_id": "ming_draw",
        "task": "t2i",
    }
    assert config["data"]["dataset_param"]["preprocess_parameters"] == {
        "height": 512, "width": 512, "flip": False, "crop": "random",
    }  # fmt: skip
    assert (training["lr"], training["lr_warmup_ratio"], training["clip_grad"]) == (1e-4, 0.5, 0.0)
    assert training["diffusion"]["timestep_density"] == "logit_normal" and training["lr_decay_style"] == "constant"
    smaller = [f"{sizes}.height={SIDE}", f"{sizes}.width={SIDE}", "training.train_iters=1"]
    launch.run([*words, *smaller])
    assert list(losses(tmp_path / "run")) == [1]
    before, trained = stored(made), tensors(tmp_path / "run")
    assert (trained["model.mlp.fc1.weight"] != before["mlp.fc1.weight"]).any()
    unused = "ref_pos_embed.proj.weight"  # is kept in what is computed in
    assert torch.equal(trained[f"model.{unused}"], before[unused].bfloat16())


def test_sizes_are_those_of_the_nearest_ratio() -> None:
    cases = {(512, 512): (512, 512), (1024, 512): (704, 352), (720, 1280): (384, 672), (100, 3000): (256, 1024)}
    assert {asked: launch.size_of(*asked) for asked in cases} == cases


def test_other_ranks_wait_for_the_folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = launch.read_flags(launch_words(tmp_path, release_of(made))).options
    folder = launch.model_folder(options)
    monkeypatch.setattr(launch.time, "sleep", lambda _: shutil.copytree(made, folder))
    launch.make_model(options, is_first=False)
    shutil.rmtree(folder)
    monkeypatch.setattr(launch.time, "sleep", lambda _: None)
    with pytest.raises(MachineError, match=r"the first rank writes it, and all ranks read it"):
        launch.make_model(options, is_first=False, now=itertools.count(0, 3600).__next__)
