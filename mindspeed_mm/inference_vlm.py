"""Answers the prompts of model.json: `python inference_vlm.py --mm-model model.json --load RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.answer.infer import answer_prompt
from mindspeed_mm.tasks.requests.infer import MAX_NEW_TOKENS, InferRequest


def infer() -> None:
    """Print the answer to each prompt.

    Raises:
        ConfigError: There is no model, or no prompt.
    """
    args = parse_args()
    if args.rank:
        return  # one rank answers
    translated = translate(args, for_training=False)
    section = JsonSection(translated.model_json)
    model = translated.arguments.training.load or translated.arguments.model.model_name_or_path
    if model is None:
        raise ConfigError("no model is named", key="--load", way_out="Give a model folder or a run.")
    prompts = section.get("prompts") or []
    if not prompts:
        raise ConfigError("has no prompts", where=str(args.mm_model), key="prompts", way_out="Add them.")
    media: dict[str, Any] = {
        f"{kind}s": (Path(path),) for kind in ("image", "video", "audio") if (path := section.get(f"{kind}_path"))
    }
    longest = section.get("generation_config", JsonSection()).get("max_new_tokens", MAX_NEW_TOKENS)
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        say(answer_prompt(InferRequest(Path(model), prompts=(prompt,), max_new_tokens=longest, **media)).text)


def main() -> None:
    """Run `infer` as a script: an `MMError` ends the process with its message and exit code."""
    run_entry(infer)


if __name__ == "__main__":
    main()
