"""Files and launches of a checkout of MindSpeed-MM at the sizes that they are written for: by the memory forecast, a
step fits the devices that their scripts name.

`MINDSPEED_MM_CHECKOUT=/path/to/MindSpeed-MM pytest -m slow tests/upstream/test_forecasts.py -s`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from tests.helpers.needed_memory import asked_of
from tests.helpers.released_examples import full_batch
from tests.upstream.checkout import OF_CHECKOUT, checkout
from tests.upstream.launches import launches, make_root, through_the_door
from tests.upstream.shell import Started

pytestmark = OF_CHECKOUT
CHECKOUT = checkout() or Path()
CARDS = {card.name: card for card in families()}
GIB = 64
"""Of a device of Atlas A2 and A3, for which the scripts are written."""


class Release(NamedTuple):
    """Which released size is trained: a card and a name on the hub."""

    card: str
    hub: str


FILES = {
    "qwen3tts/qwen3tts_config": Release("qwen3tts", "Qwen/Qwen3-TTS-12Hz-1.7B-Base"),
    "cosyvoice3/cosyvoice3_config": Release("cosyvoice3", "FunAudioLLM/Fun-CosyVoice3-0.5B-2512"),
    "moss_tts/moss_tts_delay_config": Release("moss_tts_delay", "OpenMOSS-Team/MOSS-TTS"),
    "ltx2/ltx2_config_t2av": Release("ltx2", "Lightricks/LTX-2"),
    "ltx2/ltx2_config_t2v": Release("ltx2", "Lightricks/LTX-2"),
    "funasr/funasr_config": Release("funasr", "FunAudioLLM/Fun-ASR-Nano-2512-hf"),
    "qwen3_asr/qwen3_asr_1.7B_config": Release("qwen3_asr", "Qwen/Qwen3-ASR-1.7B"),
    "qwen3_5/qwen3_5_4B_config": Release("qwen3_5", "Qwen/Qwen3.5-4B"),
    "qwen3_5/qwen3_5_9B_config": Release("qwen3_5", "Qwen/Qwen3.5-9B"),
    "qwen3_5/qwen3_5_122B_config": Release("qwen3_5_moe", "Qwen/Qwen3.5-122B-A10B"),
    "qwen3vl/qwen3vl_30B_config_v1": Release("qwen3_vl_moe", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen3vl/qwen3vl_30B_config_v1_A5": Release("qwen3_vl_moe", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "step3_vl/step3_vl_10b_config": Release("step3_vl_10b", "stepfun-ai/Step3-VL-10B"),
    "mimov2_5/mimov2_5_config": Release("mimov2_5", "XiaomiMiMo/MiMo-V2.5"),
    "kimik2_5/kimik2_5_config": Release("kimik2_5", "moonshotai/Kimi-K2.5"),
}
"""File, without its ending → what it trains. Rows of 16,384 tokens and more, of Qwen3.5 27B and 35B, Qwen3.6 and
Qwen3-Omni, are not here: forecasts of linear attention at such lengths take many minutes."""
SCRIPTS = {
    "bagel/finetune_bagel.sh": Release("bagel", "ByteDance-Seed/BAGEL-7B-MoT"),
    "opensoraplan1.3/i2v/pretrain_i2v.sh": Release("opensoraplan", "LanguageBind/Open-Sora-Plan-v1.3.0"),
    "opensoraplan1.3/t2v/pretrain_t2v.sh": Release("opensoraplan", "LanguageBind/Open-Sora-Plan-v1.3.0"),
    "opensoraplan1.3/t2v_A3/pretrain_t2v_A2.sh": Release("opensoraplan", "LanguageBind/Open-Sora-Plan-v1.3.0"),
    "opensoraplan1.3/t2v_A3/pretrain_t2v_A3.sh": Release("opensoraplan", "LanguageBind/Open-Sora-Plan-v1.3.0"),
    "opensoraplan1.5/pretrain.sh": Release("opensoraplan", "LanguageBind/Open-Sora-Plan-v1.5.0"),
    "stepvideo/t2v/pretrain_t2v.sh": Release("stepvideo", "stepfun-ai/stepvideo-t2v"),
}
"""Script of flags → what it trains. Step-Video is forecast with all 48 layers, of which its model.json has 24."""
TOO_LARGE = {
    "mimov2_5/mimov2_5_config": "its script says that only a model of fewer layers was tried on one host",
}
"""What takes more than a device has, and why."""
WRITTEN = ("bagel", "opensoraplan", "stepvideo", "cosyvoice3", "qwen3tts", "moss_tts_delay", "ltx2")
"""Cards whose rows are no conversations of media: their micro-batch is that of the smallest YAML."""


def has_room(name: str, needed: float) -> None:
    """The step fits, or is one of those that are known not to."""
    print(f"{name}: {needed:.1f} GiB")
    assert (needed > GIB) == (name in TOO_LARGE), f"{name}: {needed:.1f} GiB"


def row_of(release: Release, folder: Path, arguments: Arguments, clip: tuple[int, ...]) -> Batch:
    """A micro-batch: where rows are conversations as long as the file lets it become, of stored clips of this shape."""
    if release.card == "ltx2":
        return _latents_of_ltx2()
    if release.card not in WRITTEN:
        return full_batch(build_outline(arguments).model, arguments)
    _, batch = asked_of(CARDS[release.card], release.hub, "full", folder)
    size = arguments.data.dataset_param.preprocess_parameters
    rows = arguments.training.micro_batch_size
    if "pixels" in batch and size.height and size.width:
        clip = (getattr(size, "num_frames", 0) or 1, size.height, size.width)
    if "pixels" in batch and clip:
        batch["pixels"] = torch.empty((rows, 3, *clip), device="meta")
        batch |= {"sample_ids": ["a"] * rows, "epochs": [0] * rows, "fps": [24.0] * rows, "captions": ["a"] * rows}
    return batch


def _latents_of_ltx2() -> Batch:
    """Stored features of a clip of 121 pictures of 512 × 768 pixels with its sound."""
    text = torch.zeros(1, 1024, 3840)
    return {
        "sample_ids": ["a"], "epochs": [0], "fps": [24.0], "latents": torch.zeros(1, 128, 16, 16, 24),
        "audio_latents": torch.zeros(1, 8, 126, 16), "prompt_embeds": text, "audio_prompt_embeds": text,
        "prompt_mask": torch.ones(1, 1024),
    }  # fmt: skip


def needed_gib(release: Release, source: Any, folder: Path, ranks: int, clip: tuple[int, ...] = ()) -> float:
    """GiB of a step of a file, with the released configuration in place of its folder, on clips of frames, height and
    width."""
    asked_of(CARDS[release.card], release.hub, "full", folder)  # which writes the configuration
    words = [f"model.model_name_or_path={folder}", "training.save=null", "training.load=null"]
    arguments = load_with_plugins(source, words).arguments
    found = forecast(arguments, row_of(release, folder, arguments, clip), world_size=ranks, device_type="npu")
    return found.peak / 2**30


def stored_clip(started: Started) -> tuple[int, ...]:
    """Frames, height and width of the clips whose features a launch reads, by its data.json; () of other launches."""
    file = CHECKOUT / started.own[started.own.index("--mm-data") + 1]
    told = json.loads(file.read_text(encoding="utf-8"))["dataset_param"]
    if told["dataset_type"] != "feature":
        return ()
    sizes = told["preprocess_parameters"]
    return sizes["num_frames"], sizes["max_height"], sizes["max_width"]


def ranks_of(file: Path) -> int:
    """Devices of a host × hosts, by the script that starts a file."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(file.parent.glob("*.sh"))]
    (text,) = [text for text in texts if re.search(rf"{re.escape(file.name)}(?![\w.])", text)]
    sizes = re.findall(r"(?m)^(?:NPUS_PER_NODE|NNODES)=(?:\$\{\w+:-)?(\d+)", text)
    return int(sizes[0]) * int(sizes[1])


@pytest.mark.parametrize("name", FILES)
def test_a_step_of_a_file_fits_its_devices(name: str, tmp_path: Path) -> None:
    path = CHECKOUT / "examples" / f"{name}.yaml"
    if not path.is_file():
        pytest.skip("this checkout has no such file")
    has_room(name, needed_gib(FILES[name], path, tmp_path / "model", ranks_of(path)))


def test_the_script_of_mimov2_5_says_what_was_tried() -> None:
    """A model of fewer layers, on one host: which is why a step of the released one is in `TOO_LARGE`."""
    script = CHECKOUT / "examples" / "mimov2_5" / "finetune_mimov2_5.sh"
    if not script.is_file():
        pytest.skip("this checkout has no such script")
    assert re.search(r"(?m)^NNODES=1 +# .*只验证了减层单机运行$", script.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Started, dict[str, Any]]]:
    """Script → what it starts and what the door of flags answers."""
    scratch = tmp_path_factory.mktemp("launches")
    make_root(scratch / "root", CHECKOUT)
    found = launches(scratch / "root", scratch)
    found = {name: started for name, started in found.items() if name.removeprefix("examples/") in SCRIPTS}
    answers = through_the_door(found, scratch / "root")
    return {name.removeprefix("examples/"): (found[name], answer) for name, answer in answers.items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_of_a_launch_fits_its_devices(
    name: str, read: dict[str, tuple[Started, dict[str, Any]]], tmp_path: Path
) -> None:
    if not (CHECKOUT / "examples" / name).is_file():
        pytest.skip("this checkout has no such script")
    started, answer = read[name]
    (tmp_path / "run.yaml").write_text(json.dumps(answer["config"]))
    ranks = int(started.variables["WORLD_SIZE"])
    needed = needed_gib(SCRIPTS[name], tmp_path / "run.yaml", tmp_path / "model", ranks, stored_clip(started))
    has_room(name, needed)
