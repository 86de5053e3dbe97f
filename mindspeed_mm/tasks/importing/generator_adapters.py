"""Which layers of a generator get adapters, by the rules of a setup's tool, and which family the generator is of."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.tasks.importing.common_values import with_lora
from mindspeed_mm.tasks.importing.draft import (
    LORA,
    MODEL,
    Outcome,
    PeerSetup,
    conversion,
    default_of,
    idle,
    is_on,
    no,
    texts,
)

_FAMILIES = (
    (r"flux[-_.]?2", "flux2"),
    (r"flux|flex|chroma|fpack_flux", "flux"),
    (r"sd_?3|stable-diffusion-3", "sd3"),
    (r"qwen-?_?image", "qwen"),
    (r"wan", "wan"),
    (r"hunyuan-?_?video-?_?1[._]?5|hv_1_5", "hunyuan1.5"),
    (r"hunyuan-?_?video|hv_|fpack|framepack", "hunyuan"),
    (r"lumina-?_?2|lumina_|lumina-image", "lumina2"),
    (r"z-?_?image", "zimage"),
    (r"cogvideo", "cogvideo"),
    (r"sana", "sana"),
)
"""Part of a script's, model's or class's name → a family of generators; the first that is found."""
VIDEO_FAMILIES = ("wan", "hunyuan", "hunyuan1.5", "cogvideo")
_BLOCKS = {
    "flux": ("transformer_blocks.*", "single_transformer_blocks.*"),
    "flux2": ("transformer_blocks.*", "single_transformer_blocks.*"),
    "sd3": ("transformer_blocks.*",),
    "qwen": ("transformer_blocks.*",),
    "wan": ("blocks.*",),
    "hunyuan": ("transformer_blocks.*", "single_transformer_blocks.*"),
    "hunyuan1.5": ("transformer_blocks.*",),
    "lumina2": ("layers.*", "noise_refiner.*", "context_refiner.*"),
    "zimage": ("layers.*",),
}
"""Family → every linear layer of its blocks, which kohya's scripts (`networks/lora_flux.py` and its kin) and ai-toolkit
(`LoRASpecialNetwork`, `transformer_only`) adapt."""
_BOTH_STREAMS = (
    "transformer_blocks.{*}.attn.*",
    "transformer_blocks.{*}.ff.*",
    "transformer_blocks.{*}.ff_context.*",
    "single_transformer_blocks.{*}.attn.*",
)
_WITHOUT_MODULATION = {
    "flux": (*_BOTH_STREAMS, "single_transformer_blocks.{*}.proj_*"),
    "flux2": _BOTH_STREAMS,
    "qwen": tuple(f"transformer_blocks.{{*}}.{name}.*" for name in ("attn", "img_mlp", "txt_mlp")),
    "wan": ("blocks.*",),
    "hunyuan": (*_BOTH_STREAMS, "single_transformer_blocks.{*}.proj_*"),
    "hunyuan1.5": ("transformer_blocks.*",),  # lora_hv_1_5.py adapts the modulation, too
    "zimage": ("layers.{*}.attention.*", "layers.{*}.feed_forward.*"),
}
"""Family → the same without the layers that modulate norms, which musubi-tuner leaves out (`exclude_patterns`)."""
_TARGETS = f"{LORA}.target_modules"


def script_of(draft: PeerSetup) -> str:
    """The name of the script that a command starts; empty for a file."""
    if draft.given.program:
        return Path(draft.given.program[0]).name
    return ""


def component(draft: PeerSetup, name: str) -> JsonObject:
    """A JSON file of the model's folder, such as `scheduler/scheduler_config.json`; empty where it is not here."""
    for folder in (draft.out.get(MODEL), draft.model_name):
        try:
            found = parse_json((Path(str(folder)) / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
        return {}
    return {}


def family_of(draft: PeerSetup) -> str:
    """The family of generators: by the folder's classes, else by the script's and the model's name; empty where none of
    them says."""
    classes = component(draft, "model_index.json").get("transformer")
    given = [str(draft.get(word, "")) for word in ("model.arch", "dit")]
    if is_on(draft.get("model.is_flux", False)):
        given.append("flux")
    if is_on(draft.get("model.is_v3", False)):
        given.append("sd3")
    names = [str(classes[1])] if isinstance(classes, list) and len(classes) == 2 else []
    for name in (*names, script_of(draft), *given, draft.model_name):
        for pattern, family in _FAMILIES:
            if re.search(pattern, name, re.IGNORECASE):
                return family
    return ""


def _adapted(draft: PeerSetup) -> JsonObject:
    """The layers that the tool adapts unless it is told otherwise."""
    table = _WITHOUT_MODULATION if draft.tool.name == "musubi" else _BLOCKS
    layers = table.get(family_of(draft))
    if layers is None:
        draft.note(f"{LORA}.enable", f"{draft.tool.title} adapts all linear layers of the blocks: see target_modules")
        return {}
    return {_TARGETS: list(layers)}


@conversion(":network_module")
def network_module(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The kinds of adapters of kohya's scripts, of which LoRA is built, and the layers that get them."""
    kind = str(value).rpartition(".")[2]
    if not kind.startswith("lora"):
        way_out = "training.lora trains LoRA and DoRA adapters: network_module networks.lora."
        raise draft.refuse(f"{value} is not built", "network_module", way_out)
    with_lora(draft)
    return {f"{LORA}.enable": True, **({} if _TARGETS in draft.out else _adapted(draft))}


_NUMBERS_OF_BLOCKS = {
    "train_double_block_indices": "transformer_blocks",
    "train_single_block_indices": "single_transformer_blocks",
    "train_block_indices": "transformer_blocks",
}
"""Setting of `networks/lora_flux.py` and `lora_sd3.py` → the blocks that it counts."""


def _numbered_blocks(draft: PeerSetup, given: dict[str, str]) -> list[str]:
    """Patterns of the blocks that get adapters: `all`, `none`, or numbers such as `0,1,8-12`."""
    chosen = {_NUMBERS_OF_BLOCKS[name]: text.replace(" ", "") for name, text in given.items()}
    patterns = []
    for pattern in _BLOCKS.get(family_of(draft), ()):
        stack = pattern.removesuffix(".*")
        numbers = chosen.get(stack, "all")
        if numbers != "none":
            patterns.append(pattern if numbers == "all" else f"{stack}.{{{numbers}}}.*")
    return patterns


@conversion(":network_args")
def network_args(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Further arguments of adapters: the kind and the numbers of blocks, and LoRA+; others, such as convolutions, are
    not built."""
    found: JsonObject = {}
    pairs = [str(each).partition("=") for each in (value if isinstance(value, list) else re.split(r"\s+", str(value)))]
    blocks = {name: text for name, _, text in pairs if name in _NUMBERS_OF_BLOCKS}
    if blocks:
        found[_TARGETS] = _numbered_blocks(draft, blocks)
    for name, _, text in (each for each in pairs if each[0] not in blocks):
        if name == "loraplus_lr_ratio" and re.fullmatch(r"[\d.]+", text):
            found["training.lr_scaling_plan"] = [{"match": "lora_B", "scale": float(text)}]
        elif name == "train_blocks" and text in ("single", "double"):
            found[_TARGETS] = ["single_transformer_blocks.*" if text == "single" else "transformer_blocks.*"]
        elif name != "train_blocks" or text != "all":
            return no(f"{name}: training.lora.target_modules names the layers; other kinds of adapters are not built")
    return found


@conversion(":ai_network")
def ai_network(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """LoRA, and the layers that get it; LoKr and others are named."""
    if str(value).lower() not in ("lora", "lierla"):
        raise draft.refuse(f"{value} is not built", "network.type", "training.lora trains LoRA and DoRA adapters.")
    return {f"{LORA}.enable": True, **({} if _TARGETS in draft.out else _adapted(draft))}


@conversion(":only_if_contains")
def only_if_contains(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Parts of the names of modules that get adapters, as patterns."""
    names = [each.removeprefix("transformer.") for each in texts(value)]
    return {_TARGETS: [f"*{name}*" for name in names]}


@conversion(":lora_base_model")
def lora_base_model(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The part that gets adapters: the transformer alone is supported."""
    if value not in ("dit", "video_dit", "dit2"):
        return no("adapters are on the transformer")
    return {f"{LORA}.enable": True}


@conversion(":unet_only")
def unet_only(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether the transformer alone is adapted; without it, kohya's scripts adapt CLIP's text encoder, too."""
    if is_on(value):
        return idle("adapters are on the transformer alone")
    if not draft.out.get(f"{LORA}.enable") or family_of(draft) not in ("flux", "sd3"):
        return idle("text encoders are not trained")
    return no("adapters of the text encoder, too, unless it is set: here the transformer alone is trained")


# --- what follows from a script of diffusers --------------------------------------------------------------------------


def is_adapter_script(draft: PeerSetup) -> bool:
    """Whether a script of diffusers trains adapters."""
    return any("lora" in word for word in draft.given.program) or draft.has("rank")


@default_of("alpha_of_diffusers")
def alpha_of_diffusers(draft: PeerSetup) -> float | None:
    """4 where a DreamBooth script has `--lora_alpha`, 128 for CogVideoX; scripts without it take the rank."""
    if not is_adapter_script(draft):
        return None
    script = script_of(draft)
    if "cogvideox" in script:
        return 128.0
    has_alpha = re.search(r"dreambooth_lora_(flux|qwen|z_image|sana|krea|ideogram|cosmos)", script)
    if has_alpha:
        return 4.0
    return float(draft.get("rank", 4))


@default_of("rank_of_diffusers")
def rank_of_diffusers(draft: PeerSetup) -> int | None:
    """4, and 128 for CogVideoX."""
    if not is_adapter_script(draft):
        return None
    if "cogvideox" in script_of(draft):
        return 128
    return 4


@default_of("beta2_of_diffusers")
def beta2_of_diffusers(draft: PeerSetup) -> float | None:
    """0.95 in the scripts for CogVideoX; the others have AdamW's 0.999."""
    if "cogvideox" in script_of(draft):
        return 0.95
    return None
