"""Makes pictures or clips of the prompt of model.json by Megatron-style flags: `torchrun … inference_sora.py …`."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import GENERATOR_INDEX
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.checkpoint.base_weights import weights_folder_of_load
from mindspeed_mm.fsdp.params.argument import ModelArguments, TrainingArguments
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.draw import generate


def draw() -> None:
    """Make the samples in `save_path`.

    Raises:
        ConfigError: There is no model, or no prompt.
    """
    args = parse_args()
    translated = translate(args, for_training=False)
    section = JsonSection(translated.model_json)
    model, transformer = generator_of(translated.arguments.model, translated.arguments.training)
    given = translated.arguments.inference.sampling.model_dump(exclude_unset=True)
    prompts = section.get("prompt") if isinstance(section.get("prompt"), list) else given.pop("prompts", ())
    file = given.pop("prompts_file", None)
    if not prompts and file is None:
        raise ConfigError("has no prompt", where=str(args.mm_model), key="prompt", way_out="Add one, or a file.")
    request = generate.GenerateRequest(
        prompts=tuple(prompts),
        prompts_file=Path(file) if file is not None else None,
        media={"image": Path(section.image)} if section.get("image") else {},
        settings=given,
        transformer=transformer,
    )
    outcome = generate.run(model, Path(section.get("save_path", "samples")), request)
    if outcome is not None:
        say(outcome.sentence())


def generator_of(model_args: ModelArguments, training: TrainingArguments) -> tuple[Path, Path | None]:
    """Folder of the model, and that of its transformer where `--load` names weights apart from it.

    Raises:
        ConfigError: There is no model.
    """
    load, model = training.load, model_args.model_name_or_path
    transformer = None
    if load is not None and model is not None and not (Path(load) / GENERATOR_INDEX).is_file():
        transformer = weights_folder_of_load(load)
    if transformer is None:
        model = load or model
    if model is None:
        raise ConfigError("no model is named", key="--load", way_out="Give a folder in diffusers' layout, or a run.")
    return Path(model), transformer


def main() -> None:
    """Run `draw` as a script: an `MMError` ends the process with its message and exit code."""
    run_entry(draw)


if __name__ == "__main__":
    main()
