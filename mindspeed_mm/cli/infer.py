"""The command `mm infer`: generates answers or samples with a model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mindspeed_mm.cli.sharing import Options, check_inputs, chosen, given_of, is_given, of_checkpoint, share
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.garbage import collecting_later
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.core.whole_text import check_whole_characters

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem

EXAMPLES = """
\b
Examples:
  mm infer runs/digits/hf --image three.png --prompt "Which digit is this?"
  mm infer runs/digits/run --data questions.jsonl --out answers.jsonl
  mm infer models/Qwen3-VL-2B-Instruct --lora exported/lora --image three.png --prompt "Which digit is this?"
  mm infer runs/omni --video walk.mp4 --audio steps.wav --prompt "What is heard, and what is seen?"
  mm infer runs/asr --audio hello.wav
  mm infer models/Qwen3-Omni-30B-A3B-Instruct --audio question.wav --speak answer.wav --speaker Chelsie
  mm infer runs/digits_flux/run --prompt "a seven" --num-samples 4 --out sevens
  mm infer models/wan --lora exported/lora --prompts prompts.txt --size 480x832 --frames 81 --out clips --nproc 8
  mm infer exported/ours --plugin our_family --prompt "a seven" --out sevens
"""

LANGUAGE_ONLY = (
    "data",
    "max_new_tokens",
    "audios",
    "temperature",
    "top_p",
    "top_k",
    "beams",
    "hide_thoughts",
    "adapters",
    "speak",
    "speaker",
)
GENERATOR_ONLY = (
    "prompts_file", "num_inference_steps", "guidance_scale", "negative_prompt", "size", "num_frames", "fps",
    "num_samples", "last_image", "mask", "control", "references", "task", "strength", "vae_tiling", "vae_slicing",
)  # fmt: skip
SETTINGS = (
    "num_inference_steps", "guidance_scale", "negative_prompt", "num_frames", "fps", "seed", "num_samples",
    "batch_size", "strength",
)  # fmt: skip
"""Options that are fields of a `sampling` section."""
QUESTIONS_AT_A_TIME = 32

Medium = Literal["image", "video", "audio"]
POSITIVE = click.IntRange(min=1)
PATH = click.Path(path_type=Path)


def finite(_context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse nan and inf, which are floats to click."""
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{value} is not a number", key=parameter.opts[0], way_out="Give a finite number.")
    return value


@click.command(epilog=EXAMPLES)
@click.argument("model", type=PATH)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Question to ask, or prompt to generate from; may be repeated for a generator.",
)
@click.option(
    "--image",
    "images",
    type=PATH,
    multiple=True,
    help="Image file; may be repeated for language models and for editing models that take several.",
)
@click.option(
    "--video",
    "videos",
    type=PATH,
    multiple=True,
    help="Video file; may be repeated for a language model. Generators: the input video of v2v.",
)
@click.option("--audio", "audios", type=PATH, multiple=True, help="Language models: sound file; may be repeated.")
@click.option(
    "--out", type=PATH, help="File that the answers to --data are written to, as JSON lines; or a folder for samples."
)
@click.option("--media-dir", type=PATH, help="Folder that media paths in --data or --prompts are relative to.")
@click.option(
    "--batch-size", type=POSITIVE, help="Number of questions or samples at a time; default: 32 questions, 1 sample."
)
@click.option("--overwrite", is_flag=True, help="Discard what --out already holds.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer, or a summary, as JSON.")
@click.option("--data", type=PATH, help="Language models: rows to answer (conversations, or prompt and image).")
@click.option(
    "--config",
    type=PATH,
    help="YAML to use instead of the run's. For a language model its data section describes the rows; for a generator "
    "its plugins, model and sampling sections apply.",
)
@click.option(
    "--max-new-tokens",
    type=POSITIVE,
    default=512,
    show_default=True,
    help="Language models: maximum length of an answer in tokens.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    callback=finite,
    help="Language models: sampling temperature; 0 is greedy. Default: that of the model's generation_config.json.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    callback=finite,
    help="Language models: sample from the most likely tokens whose probabilities add up to this; default: "
    "generation_config.json.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    help="Language models: sample from the k most likely tokens, 0: all; default: generation_config.json.",
)
@click.option(
    "--beams", type=POSITIVE, help="Language models: number of beams of a beam search; default: generation_config.json."
)
@click.option("--hide-thoughts", is_flag=True, help="Language models: remove thoughts from the answers.")
@click.option("--speak", type=PATH, help="Qwen3-Omni: also speak the answer to --prompt, into this WAV file.")
@click.option("--speaker", help="Qwen3-Omni: whose voice --speak uses; default: Ethan's.")
@click.option("--prompts", "prompts_file", type=PATH, help="Generators: file with one prompt per line, or JSON lines.")
@click.option(
    "--steps",
    "num_inference_steps",
    type=POSITIVE,
    help="Generators: number of denoising steps. Default: the run's; otherwise what the model was released with "
    "(FLUX.1 schnell: 4); otherwise the default of its diffusers pipeline.",
)
@click.option(
    "--guidance-scale",
    type=click.FloatRange(min=0),
    callback=finite,
    help="Generators: guidance scale; 1 switches classifier-free guidance off (Z-Image: 0). Default: as of --steps.",
)
@click.option("--negative-prompt", help="Generators: prompt that guidance steers away from.")
@click.option("--size", help="Generators: height and width in pixels, such as 480x832. Default: as of --steps.")
@click.option(
    "--frames", "num_frames", type=POSITIVE, help="Generators: number of frames of a video. Default: as of --steps."
)
@click.option(
    "--fps",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="Generators: frames per second of video files. Default: the run's; otherwise the rate of the clips that the "
    "model makes (CogVideoX: 8).",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed, from which each row, prompt and sample derives its own. Default: 0; generators: the run's.",
)
@click.option("--last-image", type=PATH, help="Generators: last frame of a video.")
@click.option(
    "--mask", type=PATH, help="Generators: mask, a picture or video that is white where content is generated."
)
@click.option("--control", type=PATH, help="Generators: control video (pose, depth, edges) that samples follow.")
@click.option(
    "--reference",
    "references",
    type=PATH,
    multiple=True,
    help="Generators: picture of a subject that a video should show; may be repeated.",
)
@click.option("--task", help="Generators: task, if the folder allows more than one, such as i2v or flf2v.")
@click.option(
    "--strength",
    type=click.FloatRange(min=0, max=1, min_open=True),
    callback=finite,
    help="Generators: denoising strength for --video; 1 ignores the video.",
)
@click.option("--vae-tiling", is_flag=True, help="Generators: decode large samples tile by tile, in less memory.")
@click.option("--vae-slicing", is_flag=True, help="Generators: decode one sample of a batch at a time, in less memory.")
@click.option("--num-samples", type=POSITIVE, help="Generators: number of samples per prompt.")
@click.option(
    "--lora",
    type=PATH,
    help="Folder or safetensors file of adapters to apply to the weights; of generators ComfyUI's and kohya's, too.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Language models: adapters that rows of --data choose by their field 'adapter'; may be repeated.",
)
@click.option("--plugin", "plugins", multiple=True, help="Package to import first that registers the model's family.")
@click.option(
    "--plan",
    type=PATH,
    help="YAML whose 'parallel' section spreads a model that is too large for one device over the processes, "
    "which then answer each row, or make each sample, together.",
)
@click.option("--nproc", type=POSITIVE, default=1, help="Number of processes on this host; they share rows or prompts.")
@of_checkpoint
@click.pass_context
def command(context: click.Context, /, model: Path, **options: Any) -> int:
    """Let MODEL answer a prompt about pictures, videos or sounds, or every row of a file; or, if it is a generator,
    make pictures or clips from prompts.

    MODEL is a model folder or a run. An existing file of answers or folder of samples is continued: what is there is
    not made again. Generators take what is not given here from the run's configuration. Each line of --prompts is a
    prompt, even an empty one.
    """
    from mindspeed_mm.tasks.model_kind import kind_of_path  # with the verb, not with the help

    if options["plugins"]:
        from mindspeed_mm.fsdp.utils.register import import_plugin

        import_plugin(options["plugins"], key="--plugin")
    for name in ("prompts", "negative_prompt"):
        check_whole_characters(options[name], f"--{name.rstrip('s').replace('_', '-')}")
    answer_or_generate, not_for_it, why = COMMANDS[kind_of_path(model)]
    refuse(context, not_for_it, why)
    return answer_or_generate(context, model, options)


def refuse(context: click.Context, names: tuple[str, ...], why: str) -> None:
    """Raise `UsageError` for the first of these options that was given."""
    for parameter in context.command.params:
        if parameter.name in names and is_given(context, parameter):
            raise UsageError(why, where=str(context.params["model"]), key=parameter.opts[0], way_out="Leave it out.")


# --- generators ------------------------------------------------------------------------------------------------------


def generate(context: click.Context, model: Path, options: Options) -> int:
    """Make samples, in this process or in many."""
    out = options["out"]
    if out is None:
        raise UsageError("samples need an output folder", key="--out", way_out="Name one: --out DIR.")
    media = media_of(options)
    settings = given_of(options, *SETTINGS) | read_size(options["size"])

    def draw() -> None:
        from mindspeed_mm.tasks.draw import generate  # torch: the help does without

        asked = chosen(options, "prompts", "prompts_file", "task", "media_dir", "lora", "config", "plan")
        request = generate.GenerateRequest(media=media, settings=settings, vae_options=vae_options, **asked)
        outcome = generate.run(model, out, request, overwrite=options["overwrite"])
        if outcome is None:
            return
        if options["as_json"]:
            say_json(asdict(outcome))
        else:
            say(outcome.sentence())

    vae_options = tuple(name for name in ("tiling", "slicing") if options[f"vae_{name}"])
    return share(context, "infer", draw)


def media_of(options: Options) -> dict[str, Path]:
    """Field of a prompt → the file that an option names.

    Raises:
        UsageError: A file is named twice, or without a prompt that it could go with.
    """
    from mindspeed_mm.fsdp.sampling.prompts import SEVERAL  # torch: the help does without

    given: dict[str, tuple[Path, ...]]
    given = {"image": options["images"], "video": options["videos"], "reference": options["references"]}
    for name in ("last_image", "mask", "control"):
        if options[name]:
            given[name] = (options[name],)
    files: dict[str, Path] = {}
    for name, paths in given.items():
        if not paths:
            continue
        option = f"--{name.replace('_', '-')}"
        if not options["prompts"]:
            raise UsageError(
                f"{option} can only be used with --prompt",
                key=option,
                way_out=f"Name '{name}' in the rows of --prompts.",
            )
        names = SEVERAL.get(name, (name,))
        if len(paths) > len(names):
            most = "one" if len(names) == 1 else len(names)
            raise UsageError(f"a generator takes {most} {name.replace('_', ' ')}", key=option, way_out="Give fewer.")
        files |= dict(zip(names, paths, strict=False))
    return files


def read_size(text: str | None) -> dict[str, int]:
    """`480x832` → height and width.

    Raises:
        UsageError: It is something else.
    """
    if text is None:
        return {}
    found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not a size", key="--size", way_out="Give height and width: --size 480x832.")
    return {"height": int(found[1]), "width": int(found[2])}


# --- language --------------------------------------------------------------------------------------------------------


def answer(context: click.Context, model: Path, options: Options) -> int:
    """Answer one prompt, or every row of a file."""
    media = language_media(options)
    check_source(options, media)
    check_choice(options)
    check_media(media)
    adapters = read_adapters(options["adapters"])
    if adapters and options["lora"] is not None:
        way_out = "Name them as well: --adapter NAME=FOLDER."
        raise UsageError("there are adapters for all rows as well", key="--lora", way_out=way_out)
    check_inputs(context)
    from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling

    choice = chosen(options, "temperature", "top_p", "top_k", "seed", "beams")
    settings: Options = {
        "max_new_tokens": options["max_new_tokens"],
        "lora": options["lora"],
        "config": options["config"],
        "sampling": Sampling(options["max_new_tokens"], **choice),
        "hides_thoughts": options["hide_thoughts"],
    }

    def respond() -> None:
        if options["speak"] is not None:
            speak_answer(model, options, media, settings)
        elif options["data"] is None:
            answer_prompt(model, options, media, settings)
        else:
            answer_rows(model, options, settings | {"adapters": adapters})

    return share(context, "infer", respond, shares=options["data"] is not None)


@collecting_later()
def answer_prompt(model: Path, options: Options, media: list[tuple[Medium, Path]], settings: Options) -> None:
    """Answer the one prompt, and print what is said."""
    from mindspeed_mm.tasks.answer import infer

    shown = as_items(media)
    said = infer.answer_prompt(model, next(iter(options["prompts"]), ""), shown, **settings)
    if options["as_json"]:
        say_json(asdict(said))
    else:
        say(said.text)


@collecting_later()
def speak_answer(model: Path, options: Options, media: list[tuple[Medium, Path]], settings: Options) -> None:
    """Answer the one prompt, print what is said, and write it as it is spoken."""
    from mindspeed_mm.tasks.answer import speech

    shown = as_items(media)
    prompt = next(iter(options["prompts"]), "")
    asked = {"sampling": settings["sampling"], "config": settings["config"]}
    voice = options["speaker"] or speech.USUAL_VOICE
    said = speech.run(model, prompt, shown, options["speak"], speaker=voice, **asked)
    if options["as_json"]:
        facts = {"file": said.file, "seconds": said.seconds, "speaker": said.speaker}
        say_json(asdict(said.answer) | facts)
        return
    say(said.answer.text)
    say(f"{said.file}: {said.seconds:.1f} s", err=True)


@collecting_later()
def answer_rows(model: Path, options: Options, settings: Options) -> None:
    """Answer every row of the file, and print how many there were."""
    from mindspeed_mm.tasks.answer import infer

    outcome = infer.run(
        model,
        options["data"],
        options["out"],
        batch_size=options["batch_size"] or QUESTIONS_AT_A_TIME,
        media_dir=options["media_dir"],
        overwrite=options["overwrite"],
        plan=options["plan"],
        **settings,
    )
    if outcome is None:
        return
    if options["as_json"]:
        say_json(asdict(outcome))
        return
    kept = f", {outcome.kept} were already there" if outcome.kept else ""
    say(f"{outcome.out}: {outcome.answered} answered{kept}")
    if outcome.cut_off:
        longest = options["max_new_tokens"]
        say(f"{outcome.cut_off} answers were cut off at {longest} tokens (--max-new-tokens)", err=True)


def language_media(options: Options) -> list[tuple[Medium, Path]]:
    """The files that go with a prompt, by kind."""
    kinds: tuple[Medium, ...] = ("image", "video", "audio")
    media: list[tuple[Medium, Path]] = []
    for kind in kinds:
        media += [(kind, path) for path in options[f"{kind}s"]]
    return media


def check_media(media: list[tuple[Medium, Path]]) -> None:
    """Raise `DataError` for a file that is not there."""
    for kind, path in media:
        if not path.is_file():
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise DataError("there is no such file", where=str(path), key=f"--{kind}", way_out=way_out)


def as_items(media: list[tuple[Medium, Path]]) -> list[MediaItem]:
    """The same, as questions hold them."""
    from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem  # torch: the help does without

    return [MediaItem(kind, str(path.absolute())) for kind, path in media]


FOR_ROWS = ("out", "overwrite", "media_dir", "batch_size")
"""Options of a language model that have no effect on one prompt."""


def check_source(options: Options, media: list[tuple[Medium, Path]]) -> None:
    """Raise `UsageError` unless there is one prompt, or a file of rows with a file for the answers."""
    prompts, data = options["prompts"], options["data"]
    if data is not None and media:
        kind, _ = media[0]
        way_out = f"Name each {kind} in the rows of --data."
        raise UsageError(f"--{kind} can only be used with --prompt", key=f"--{kind}", way_out=way_out)
    if bool(prompts or media) == (data is not None):
        raise UsageError("give either --prompt or --data", way_out="See mm infer --help.")
    if len(prompts) > 1:
        raise UsageError("a language model answers one --prompt", key="--prompt", way_out="Put the rows into --data.")
    if data is not None and options["out"] is None:
        raise UsageError("--data needs --out", key="--out", way_out="Name the file for the answers.")
    check_speech(options)
    if data is None and options["adapters"]:
        way_out = "Name the folder of the adapters that answer the prompt: --lora FOLDER."
        raise UsageError("only rows of --data choose among adapters", key="--adapter", way_out=way_out)
    for name in FOR_ROWS if data is None else ():
        if options[name]:
            option = f"--{name.replace('_', '-')}"
            way_out = "Leave it out, or put the question into --data; the answer to --prompt is printed."
            raise UsageError(f"{option} can only be used with --data", key=option, way_out=way_out)
    if data is None and options["plan"] is not None:
        raise UsageError("a model is spread to answer rows", key="--plan", way_out="Put the question into --data.")
    if data is None and options["nproc"] > 1:
        raise UsageError("one question is answered by one process", key="--nproc", way_out="Leave it out.")


def check_speech(options: Options) -> None:
    """Raise `UsageError` where an answer is to be spoken that cannot be."""
    if options["speak"] is None:
        if options["speaker"] is not None:
            raise UsageError("nothing is spoken", key="--speaker", way_out="Name the file for the voice: --speak FILE.")
        return
    if options["data"] is not None:
        raise UsageError("only the answer to --prompt is spoken", key="--speak", way_out="Ask row by row.")
    if options["lora"] is not None:
        way_out = "Merge the adapters first: mm merge."
        raise UsageError("a model cannot speak with adapters that are not merged", key="--lora", way_out=way_out)
    if options["hide_thoughts"]:
        raise UsageError("all of a spoken answer is heard", key="--hide-thoughts", way_out="Leave one of them out.")


def read_adapters(words: Sequence[str]) -> dict[str, Path]:
    """`NAME=FOLDER` → folders by name.

    Raises:
        UsageError: A word is something else, or a name stands twice.
    """
    found: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not re.fullmatch(r"\w[\w-]*", name) or not equals or not folder or name in found:
            way_out = "Give each a different name: --adapter NAME=FOLDER."
            raise UsageError(f"'{word}' does not name adapters", key="--adapter", way_out=way_out)
        found[name] = Path(folder)
    return found


def check_choice(options: Options) -> None:
    """Raise `UsageError` where options of sampling contradict one another."""
    if options["temperature"] == 0:
        because, without_effect = "--temperature 0", ["top_p", "top_k"]
    elif (options["beams"] or 1) > 1:
        because, without_effect = "--beams", ["temperature", "top_p", "top_k"]
    else:
        return
    for name in without_effect:
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"does nothing with {because}", key=option, way_out="Leave one of them out.")


COMMANDS = {
    LANGUAGE: (answer, GENERATOR_ONLY, "is for image and video generators, but this model is not one"),
    GENERATOR: (generate, LANGUAGE_ONLY, "is for language models, but this model is an image or video generator"),
}
"""Kind of model → what is done, and the options that are not for it, with the reason."""
