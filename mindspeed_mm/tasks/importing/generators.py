"""Conversions of setups for generators: optimizers, noise levels, run folders and samples while training."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.other_tools import PeerRow, words_of
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import (
    DATASET,
    DIFFUSION,
    MEDIA,
    Outcome,
    PeerSetup,
    Told,
    conversion,
    default_of,
    idle,
    is_on,
    no,
)
from mindspeed_mm.tasks.importing.generator_adapters import VIDEO_FAMILIES, component, family_of, script_of
from mindspeed_mm.tasks.importing.generator_media import process_of
from mindspeed_mm.tasks.importing.given import read_file
from mindspeed_mm.tasks.importing.run_values import optimizer, steps_of_epoch

_WEIGHTINGS: dict[str, dict[str, str]] = {
    "none": {"timestep_density": "uniform"},
    "uniform": {"timestep_density": "uniform"},
    "sigma_sqrt": {"timestep_density": "uniform", "loss_weighting": "sigma_sqrt"},
    "cosmap": {"timestep_density": "uniform", "loss_weighting": "cosmap"},
    "logit_normal": {"timestep_density": "logit_normal"},
    "mode": {"timestep_density": "mode"},
}
"""`weighting_scheme` of the SD3 scripts (Esser et al. 2024) → keys of `training.diffusion`."""


# --- models and optimizers --------------------------------------------------------------------------------------------


@conversion(":model_of_paths")
def model_of_paths(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The model behind a list of its files, such as `Wan-AI/Wan2.1-T2V-1.3B:diffusion_pytorch_model*.safetensors,…`."""
    name = str(value).partition(":")[0].strip('["')
    draft.note("model.model_name_or_path", "the folder of this model in diffusers' layout")
    return {"model.model_name_or_path": f"models/{name.rpartition('/')[2]}"}


@conversion(":blocks_to_swap")
def blocks_to_swap(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Frozen blocks that wait on the host; that needs recomputation."""
    if not value or not int(value):
        return {}
    return {"features.enable_weight_offload": True, "features.recompute": True}


@conversion(":ko_optimizer")
def ko_optimizer(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """AdamW in its kinds, whose weight decay is 0.01 in torch and bitsandbytes unless `optimizer_args` has another."""
    found = optimizer(draft, row, value)
    if isinstance(found, Told) or "weight_decay" in str(draft.get("optimizer_args", "")):
        return found
    return {**found, "training.weight_decay": 0.01}


@conversion(":ko_lr")
def ko_lr(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The rate of the transformer's adapters, which `unet_lr` goes before."""
    rate = draft.get("unet_lr", draft.get("train.unet_lr", value))
    return {key_of(row): float(rate)}


@conversion(":optimizer_args")
def optimizer_args(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """`weight_decay=0.01`, `betas=0.9,0.99`, `eps=1e-8` of AdamW."""
    found: JsonObject = {}
    for pair in value if isinstance(value, list) else re.split(r"\s+", str(value)):
        name, _, text = str(pair).partition("=")
        numbers = [
            float(each) for each in re.findall(r"[-+.\deE]+", text) if re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", each)
        ]
        if name == "weight_decay" and numbers:
            found["training.weight_decay"] = numbers[0]
        elif name == "betas" and len(numbers) == 2:
            found |= {"training.adam_beta1": numbers[0], "training.adam_beta2": numbers[1]}
        elif name == "eps" and numbers:
            found["training.adam_eps"] = numbers[0]
        else:
            return no(f"{name} is not an argument of AdamW here: adam_beta1, adam_beta2, adam_eps and weight_decay are")
    return found


@conversion(":betas")
def betas(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The decay rates of the two moments of AdamW."""
    if not isinstance(value, list) or len(value) != 2:
        return no("write adam_beta1 and adam_beta2 in the section training")
    return {"training.adam_beta1": float(value[0]), "training.adam_beta2": float(value[1])}


@conversion(":must_be_on")
def must_be_on(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A part that is always trained here."""
    if is_on(value):
        return {}
    return no("the transformer alone is trained")


@conversion(":off_or_no")
def off_or_no(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Not built; switched off it changes nothing."""
    is_off = value in (False, None, 0, 0.0, "", ",", ", ") or str(value).lower() in ("false", "0", "0.0")
    if is_off:
        return idle("it is off")
    return no(row.note)


@conversion(":off_or_idle")
def off_or_idle(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """It changes how the tool computes."""
    return idle(row.note)


@conversion(":sd_only")
def sd_only(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A setting of Stable Diffusion 1, 2 and XL, which predict noise: these families are not built."""
    if value in (False, 0, 0.0):
        return idle("it is off")
    return no("it is for Stable Diffusion 1, 2 and XL, which are not built: mm models lists what is")


# --- noise levels and losses ------------------------------------------------------------------------------------------


def _density(draft: PeerSetup, scheme: str, flips: bool = True) -> JsonObject:
    """A `weighting_scheme`; the scripts index times that run down, so less noise where the paper has more."""
    found: JsonObject = {f"{DIFFUSION}.{key}": value for key, value in _WEIGHTINGS[scheme].items()}
    if scheme == "logit_normal":
        mean = float(draft.get("logit_mean", 0.0))
        found[f"{DIFFUSION}.logit_mean"] = -mean if flips and mean else mean
        found[f"{DIFFUSION}.logit_std"] = float(draft.get("logit_std", 1.0))
    if scheme == "mode":
        found[f"{DIFFUSION}.mode_scale"] = float(draft.get("mode_scale", 1.29))
    return found


@default_of("weighting_of_diffusers")
def weighting_of_diffusers(draft: PeerSetup) -> str:
    """`logit_normal` in the scripts for SD3, `none` in the others."""
    if re.search(r"sd3|ideogram", script_of(draft)):
        return "logit_normal"
    return "none"


@conversion(":di_weighting")
def di_weighting(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The density of diffusers' flow-matching scripts; CogVideoX counts steps uniformly."""
    if str(value) not in _WEIGHTINGS:
        return no(f"{value} is not built; training.diffusion.timestep_density has uniform, logit_normal, mode and beta")
    if family_of(draft) == "cogvideo":
        return {}
    return {**_density(draft, str(value)), f"{DIFFUSION}.shift": _shift_of_scheduler(draft)}


def _shift_of_scheduler(draft: PeerSetup) -> float | None:
    """The shift of the scheduler that the scripts of diffusers draw noise levels from: that of the folder, unless it
    shifts by the resolution (FlowMatchEulerDiscreteScheduler). None leaves it to the folder."""
    scheduler = component(draft, "scheduler/scheduler_config.json")
    if scheduler:
        return 1.0 if scheduler.get("use_dynamic_shifting") else float(scheduler.get("shift", 1.0))
    if family_of(draft) in ("sd3", "lumina2", "zimage"):
        return None
    return 1.0


@default_of("init_of_diffusers")
def init_of_diffusers(draft: PeerSetup) -> bool | None:
    """The scripts of DreamBooth draw the first matrix from a normal distribution, those of CogVideoX as PEFT does."""
    if re.search(r"dreambooth_lora", script_of(draft)):
        return True
    return None


@default_of("precondition_of_diffusers")
def precondition_of_diffusers(draft: PeerSetup) -> int | None:
    """On in the scripts of SD3, which alone have it."""
    if "sd3" in script_of(draft):
        return 1
    return None


@conversion(":precondition")
def precondition(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether the clean sample is compared, x = x_σ − σ v, instead of the velocity v: σ² times the same error."""
    if not is_on(value):
        return {}
    weighting = draft.out.get(f"{DIFFUSION}.loss_weighting", "none")
    together = {"none": "sigma_squared", "sigma_sqrt": "none"}.get(str(weighting))
    if together is None:
        return no(f"set --precondition_outputs 0: weighting_scheme {weighting} is not built together with it")
    return {key_of(row): together}


@default_of("ko_timesteps")
def ko_timesteps_default(draft: PeerSetup) -> str | None:
    """By script: sigma for FLUX.1 and SD3, shift for Lumina."""
    if script_of(draft).startswith("lumina"):
        return "shift"
    return "sigma"


def _usual_shift(draft: PeerSetup) -> float:
    """`discrete_flow_shift` unless it is given: 1 in musubi-tuner; 6 for Lumina 2 and 3 for FLUX.1 in kohya's."""
    if draft.tool.name == "musubi":
        return 1.0
    if family_of(draft) == "lumina2":
        return 6.0
    return 3.0


def _shift_of_flux2(draft: PeerSetup) -> float:
    """exp(μ), μ on the line of FLUX.1 through the tokens of a picture, as musubi-tuner has it; `resolution` here is the
    curve that the pipeline of FLUX.2 draws pictures with, which shifts far more."""
    sizes = [each["sizes"] for each in draft.out.get(DATASET) or [] if isinstance(each, dict) and "sizes" in each]
    sides = ("max_pixels", "height", "width")
    sizes.append({name: draft.out[f"{MEDIA}.{name}"] for name in sides if f"{MEDIA}.{name}" in draft.out})
    areas = [each.get("max_pixels", each.get("height", 0) * each.get("width", 0)) for each in sizes]
    area = max(areas, default=0) or 960 * 544
    draft.note(f"{DIFFUSION}.shift", f"of pictures of {area} pixels there, by flux2_shift")
    return round(math.exp(0.5 + (1.15 - 0.5) / (4096 - 256) * (area / 256 - 256)), 4)


@conversion(":ko_timesteps")
def ko_timesteps(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """`timestep_sampling` of kohya's scripts (get_noisy_model_input_and_timesteps)."""
    word = str(value)
    is_sd3 = draft.tool.name == "kohya" and family_of(draft) == "sd3"
    setting, usual = ("training_shift", 1.0) if is_sd3 else ("discrete_flow_shift", _usual_shift(draft))
    shift = float(draft.get(setting, usual))
    if word == "sigma" or is_sd3:  # sd3_train_utils.py has no other way
        scheme = str(draft.get("weighting_scheme", "none"))
        if scheme not in _WEIGHTINGS:
            return no(f"weighting_scheme {scheme} is not built")
        return {**_density(draft, scheme, flips=not is_sd3), f"{DIFFUSION}.shift": shift}
    if word in ("uniform", "nextdit_shift"):
        how_much = 1.0 if word == "uniform" else "resolution"
        return {f"{DIFFUSION}.timestep_density": "uniform", f"{DIFFUSION}.shift": how_much}
    std = float(draft.get("sigmoid_scale", 1.0))
    found: JsonObject = {f"{DIFFUSION}.timestep_density": "logit_normal", f"{DIFFUSION}.logit_std": std}
    if word == "sigmoid":
        return {**found, f"{DIFFUSION}.shift": 1.0}
    if word == "shift":
        return {**found, f"{DIFFUSION}.shift": shift}
    if word == "flux2_shift" and family_of(draft) == "flux2":
        return {**found, f"{DIFFUSION}.shift": _shift_of_flux2(draft)}
    if word in ("flux_shift", "flux2_shift", "qwen_shift"):
        return {**found, f"{DIFFUSION}.shift": "resolution"}
    if word in ("logsnr", "qinglong_flux", "qinglong_qwen"):
        return no(f"{word} is not built; training.diffusion.timestep_density has uniform, logit_normal, mode and beta")
    return no(f"{word} is not known")


@conversion(":ai_timesteps")
def ai_timesteps(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """How noise levels are drawn by `timestep_type` of ai-toolkit (custom_flowmatch_sampler.py)."""
    word = str(value)
    found: dict[str, JsonObject] = {
        "sigmoid": {"timestep_density": "logit_normal", "shift": 1.0},
        "linear": {"timestep_density": "uniform", "shift": 1.0},
        "weighted": {"timestep_density": "uniform", "shift": 1.0, "loss_weighting": "bell"},
        "flux_shift": {"timestep_density": "uniform", "shift": "resolution"},
        "lumina2_shift": {"timestep_density": "uniform", "shift": "resolution"},
        "shift": {"timestep_density": "uniform"},
    }
    if word not in found:
        return no(f"{word} is not built; training.diffusion.timestep_density has uniform, logit_normal, mode and beta")
    return {f"{DIFFUSION}.{key}": each for key, each in found[word].items()}


@default_of("prediction_of_kohya")
def prediction_of_kohya(draft: PeerSetup) -> str | None:
    """`sigma_scaled` in flux_train_utils.py; other scripts compare velocities."""
    if family_of(draft) == "flux":
        return "sigma_scaled"
    return None


@conversion(":prediction_type")
def prediction_type(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """What the loss compares: the velocity as it is (raw), or weighted by σ²."""
    return (
        {} if value == "raw" else no(f"{value}: here the loss compares velocities, as model_prediction_type raw does")
    )


@conversion(":sigma_range")
def sigma_range(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Timesteps of a thousand, as noise levels."""
    low, high = float(draft.get("min_timestep", 0)) / 1000, float(draft.get("max_timestep", 1000)) / 1000
    if (low, high) == (0, 1):
        return {}
    return {key_of(row): [low, high]}


@conversion(":boundaries")
def boundaries(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Shares of the timesteps, which run down in DiffSynth-Studio."""
    low = 1 - float(draft.get("max_timestep_boundary", 1.0))
    high = 1 - float(draft.get("min_timestep_boundary", 0.0))
    draft.note(key_of(row), "shares of the steps there, which the shift moves: see docs/generation.md")
    if (low, high) == (0, 1):
        return {}
    return {key_of(row): [round(low, 4), round(high, 4)]}


@conversion(":guidance")
def guidance(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The guidance that FLUX.1 dev and HunyuanVideo take as an input."""
    return {key_of(row): float(value)}


@default_of("guidance_one")
def guidance_one(draft: PeerSetup) -> float | None:
    """1 for the generators that take guidance as an input, in ai-toolkit and musubi-tuner."""
    if family_of(draft) in ("flux", "flux2", "hunyuan"):
        return 1.0
    return None


@conversion(":bypass_guidance")
def bypass_guidance(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether the input for guidance is left out."""
    return no("training.diffusion.guidance: 1.0 trains FLUX.1 dev at guidance 1") if is_on(value) else idle("it is off")


@conversion(":ai_loss")
def ai_loss(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Losses that are not built; at their default they change nothing."""
    if value in (False, 0, 0.0, 1, 1.0, "", None) or value == "mse":
        return idle("it is off")
    return no("remove it: training.diffusion has the losses that are built")


# --- runs and samples -------------------------------------------------------------------------------------------------


@conversion(":ko_save")
def ko_save(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A folder, with the name of what is trained."""
    folder, name = draft.get("output_dir"), draft.get("output_name")
    return {"training.save": "/".join(str(each).rstrip("/") for each in (folder or "output", name) if each)}


@conversion(":ai_save")
def ai_save(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The run folder of a job: its training folder and its name."""
    name, folder = draft.get("config.name", "job"), draft.get("training_folder", "output")
    return {"training.save": f"{str(folder).rstrip('/')}/{name}"}


@conversion(":prompts")
def prompts(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The prompts that samples are drawn from while training."""
    separator = str(draft.get("validation_prompt_separator", ":::"))
    several = [str(each) for each in (value if isinstance(value, list) else str(value).split(separator))]
    if any(re.search(r"\s--ctrl_img\b", each) for each in several):
        return no("write JSON lines with prompt and image, and name the file in training.sampling.prompts_file")
    if draft.tool.name == "ai-toolkit":
        several = [re.split(r"\s+--(?=[a-z])", each)[0] for each in several]
    return {"training.sampling.prompts": several}


@conversion(":sample_prompts")
def sample_prompts(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The prompts of ai-toolkit's list of samples."""
    samples = (process_of(draft).get("sample") or {}).get("samples") or []
    if any(key.startswith("ctrl_img") for sample in samples for key in sample):
        return no("write JSON lines with prompt and image, and name the file in training.sampling.prompts_file")
    return {"training.sampling.prompts": [str(sample["prompt"]) for sample in samples if "prompt" in sample]}


@conversion(":prompts_file")
def prompts_file(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """One prompt a line; kohya's options behind it are not read."""
    draft.note(key_of(row), "one prompt a line, without --w, --h and other options behind it")
    return {key_of(row): str(value)}


@conversion(":validation_epochs")
def validation_epochs(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Steps between two rounds of samples, from a number of epochs or steps."""
    if draft.has("validation_steps"):
        return {key_of(row): int(draft.get("validation_steps"))}
    steps = steps_of_epoch(draft)
    if steps is None:
        draft.note(key_of(row), f"every {value} epochs there; the number of rows is not known here")
        return {key_of(row): 200}
    return {key_of(row): max(1, round(steps * int(value)))}


@conversion(":several_frames")
def several_frames(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Frames of a sample; a picture has one, which is said to a generator of clips. Wan's are 4k + 1 (WanPipeline)."""
    family = family_of(draft)
    count = int(value)
    if family in ("wan", "hunyuan", "hunyuan1.5") and count % 4 != 1:
        count = count // 4 * 4 + 1
    return {key_of(row): count} if count > 1 or family in VIDEO_FAMILIES else {}


_LEVELS = ("datasets[].subsets[].", "datasets[].", "general.", "")
"""Where kohya's and musubi-tuner's TOML may have a setting of a data set, which goes down to the levels below."""


def plain_key(tool: str, key: str) -> str:
    """A setting of a TOML as the table has it: at the level that it lists, or without its section."""
    known, last = words_of(tool), key.rpartition(".")[2].removeprefix("[].")
    if key in known:
        return key
    levels = _LEVELS if key.startswith(("datasets[].", "general.")) else ("",)
    return next((level + last for level in levels if level + last in known), last)


def with_dataset_file(draft: PeerSetup) -> None:
    """Read the TOML that `dataset_config` names, beside the file or in the working directory."""
    name = draft.get("dataset_config")
    if not isinstance(name, str) or draft.tool.name not in ("kohya", "musubi"):
        return
    path = next((each for each in (Path(name), draft.given.folder / name) if each.is_file()), None)
    if path is None:
        return
    of_data = read_file(path)
    settings = [replace(each, key=plain_key(draft.tool.name, each.key)) for each in of_data.settings]
    draft.given.settings.extend(settings)
    draft.given = type(draft.given)(
        draft.given.source,
        draft.given.settings,
        {**draft.given.tree, **of_data.tree},
        draft.given.program,
        draft.given.environment,
        draft.given.folder,
    )
    for each in settings:
        if each.value is not None:
            draft.settings.setdefault(each.key, each)
