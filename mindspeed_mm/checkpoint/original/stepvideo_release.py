"""Step-Video's released folder in diffusers' layout. Facts: `api/call_remote_server.py` and `vae/vae.py` of
stepfun-ai/Step-Video-T2V.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from mindspeed_mm.checkpoint.conversion.files import SafetensorsFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, convert
from mindspeed_mm.checkpoint.original.generator import Json
from mindspeed_mm.checkpoint.original.reading import open_file, pt_tensors
from mindspeed_mm.core.errors import ModelFolderError

_VAE_FILE = "vae/vae_v2.safetensors"
_CLIP, _WORDS = "hunyuan_clip/clip_text_encoder", "step1_chat_tokenizer.model"
_HOME = "mindspeed_mm.fsdp.models.stepvideo"
_INDEX: Json = {
    "_class_name": "StepVideoPipeline",
    "transformer": [f"{_HOME}.transformer", "StepVideoModel"],
    "vae": [f"{_HOME}.vae", "StepVideoVAE"],
    "text_encoder": [f"{_HOME}.step_llm", "StepLLMModel"],
    "tokenizer": [f"{_HOME}.step_llm", "StepChatTokenizer"],
    "text_encoder_2": ["transformers", "BertModel"],
    "tokenizer_2": ["transformers", "BertTokenizer"],
    "scheduler": [f"{_HOME}.pipeline_stepvideo", "FlowMatchDiscreteScheduler"],
}


def convert_release(source: Path, target: Path, *, stream: TextIO | None = None) -> Converted:
    """Write a released folder in diffusers' layout: every component under its own name, weights as safetensors.

    Args:
        source: With transformer/, vae/, step_llm/ and hunyuan_clip/.
        target: The folder to write.
        stream: Where progress is shown.

    Raises:
        ModelFolderError: A part is missing.
        CheckpointError: A file is damaged, or what was written does not read back.
        UsageError: The target may not be written.
    """
    clip_files = (f"{_CLIP}/model.safetensors", f"{_CLIP}/pytorch_model.bin")
    clip = next((name for name in clip_files if (source / name).is_file()), clip_files[-1])
    copied = {
        "transformer": "transformer",
        "tokenizer_2": "hunyuan_clip/tokenizer",
        f"tokenizer/{_WORDS}": f"step_llm/{_WORDS}",
        "text_encoder_2/config.json": f"{_CLIP}/config.json",
    }
    for name in ("step_llm/config.json", clip, _VAE_FILE, *copied.values()):
        if not (source / name).exists():
            raise ModelFolderError(
                "is missing, and a released folder of Step-Video has it",
                where=str(source / name),
                way_out="Name the folder that holds transformer/, vae/, step_llm/ and hunyuan_clip/.",
            )
    copies = {name: source / place for name, place in copied.items()}
    for path in sorted((source / "step_llm").iterdir()):
        if path.suffix in (".json", ".safetensors"):
            copies[f"text_encoder/{path.name}"] = path
    with ExitStack() as stack:
        vae, _ = stack.enter_context(open_file(source / _VAE_FILE))
        if clip.endswith(".bin"):
            words = pt_tensors(source / clip)
        else:
            words, _ = stack.enter_context(open_file(source / clip))
        ledgers = [SourceLedger(vae, source / _VAE_FILE), SourceLedger(words, source / clip)]
        of_vae = {_vae_name(name): tensor for name, tensor in ledgers[0].tensors.items()}
        files = {
            "vae/diffusion_pytorch_model.safetensors": SafetensorsFile(of_vae),
            "text_encoder_2/model.safetensors": SafetensorsFile(dict(ledgers[1].tensors)),
        }
        texts = {
            "model_index.json": _json(_INDEX),
            "vae/config.json": _json({"_class_name": "StepVideoVAE"}),
            "scheduler/scheduler_config.json": _json({"_class_name": "FlowMatchDiscreteScheduler", "shift": 13.0}),
        }
        plan = Conversion([source], ledgers, files, {"kind": "diffusers"}, copies=copies, texts=texts)
        return convert(plan, target, stream=stream)


def _vae_name(stored: str) -> str:
    """The released file leaves one module out, as its loader knows."""
    start = "decoder.conv_out."
    if stored.startswith(start):
        return f"{start}conv.{stored.removeprefix(start)}"
    return stored


def _json(value: Json) -> str:
    return json.dumps(value, indent=2) + "\n"
