"""The command `mm infer`: generates answers or samples with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed_mm.cli.requests import given_names, takes
from mindspeed_mm.cli.sharing import check_inputs, import_plugins, share
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.garbage import collecting_later
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind
from mindspeed_mm.core.terminal import say, say_json
from mindspeed_mm.tasks.requests.infer import InferRequest

if TYPE_CHECKING:
    from mindspeed_mm.tasks.answer.infer import InferOutcome

EXAMPLES = """
\b
Examples:
  mm infer runs/digits/hf --image three.png --prompt "Which digit is this?"
  mm infer runs/digits/run --data questions.jsonl --out answers.jsonl
  mm infer models/Qwen3-VL-2B-Instruct --lora exported/lora --image three.png --prompt "Which digit is this?"
  mm infer runs/omni --video walk.mp4 --audio steps.wav --prompt "What is heard, and what is seen?"
  mm infer runs/asr --audio hello.wav
  mm infer models/Qwen3-Omni-30B-A3B-Instruct --audio question.wav --speak answer.wav --speaker Chelsie
  mm infer models/Qwen3-TTS-12Hz-1.7B-Base --prompt "Mind the gap." --audio voice.wav --speak said.wav
  mm infer models/Janus-Pro-1B --prompt "a red dog" --draw dog.png
  mm infer models/BAGEL-7B-MoT --image dog.png --prompt "make it blue" --draw blue.png
  mm infer runs/digits_flux/run --prompt "a seven" --num-samples 4 --out sevens
  mm infer models/wan --lora exported/lora --prompts prompts.txt --size 480x832 --frames 81 --out clips --nproc 8
  mm infer exported/ours --plugin our_family --prompt "a seven" --out sevens
"""


@click.command(epilog=EXAMPLES)
@takes(InferRequest)
def command(request: InferRequest) -> int:
    """Let MODEL answer a prompt about pictures, videos or sounds, or every row of a file; or, if it is a generator,
    make pictures or clips from prompts.

    MODEL is a model folder or a run. An existing file of answers or folder of samples is continued: what is there is
    not made again. Generators take what is not given here from the run's configuration. Each line of --prompts is a
    prompt, even an empty one.
    """
    from mindspeed_mm.tasks.model_kind import kind_of_path  # with the verb, not with the help

    import_plugins(request.plugins)
    kind = kind_of_path(request.model)
    request.check_kind(kind, given_names())
    return COMMANDS[kind](request)


# --- generators ------------------------------------------------------------------------------------------------------


def generate(request: InferRequest) -> int:
    """Make samples, in this process or in many."""
    request.check_samples()
    media, settings = media_of(request), request.sampling_fields

    def draw() -> None:
        from mindspeed_mm.tasks.draw import generate  # torch: the help does without

        asked = generate.GenerateRequest(
            prompts=request.prompts,
            prompts_file=request.prompts_file,
            media=media,
            task=request.task,
            media_dir=request.media_dir,
            settings=settings,
            lora=request.lora,
            vae_options=request.vae_options,
            config=request.config,
            plan=request.plan,
        )
        assert request.out is not None
        outcome = generate.run(request.model, request.out, asked, overwrite=request.overwrite)
        if outcome is None:
            return
        if request.as_json:
            say_json(asdict(outcome))
        else:
            say(outcome.sentence())

    return share("infer", request, draw)


def media_of(request: InferRequest) -> dict[str, Path]:
    """Field of a prompt → the file that an option names.

    Raises:
        UsageError: A file is named twice, or without a prompt that it could go with.
    """
    from mindspeed_mm.fsdp.sampling.prompts import SEVERAL  # torch: the help does without

    given = {"image": request.images, "video": request.videos, "reference": request.references}
    for name, path in (("last_image", request.last_image), ("mask", request.mask), ("control", request.control)):
        given[name] = (path,) if path is not None else ()
    files: dict[str, Path] = {}
    for name, paths in given.items():
        if not paths:
            continue
        option = f"--{name.replace('_', '-')}"
        if not request.prompts:
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


# --- language --------------------------------------------------------------------------------------------------------


def answer(request: InferRequest) -> int:
    """Answer one prompt, or every row of a file."""
    request.check_questions()
    check_inputs(request)
    if request.speak is not None:
        respond = speak_answer
    elif request.draw is not None:
        respond = draw_answer
    elif request.data is None:
        respond = answer_prompt
    else:
        respond = answer_rows
    return share("infer", request, lambda: respond(request), shares=request.data is not None)


@collecting_later()
def answer_prompt(request: InferRequest) -> None:
    """Answer the one prompt, and print what is said."""
    from mindspeed_mm.tasks.answer import infer

    said = infer.answer_prompt(request)
    if request.as_json:
        say_json(asdict(said))
    else:
        say(said.text)


@collecting_later()
def speak_answer(request: InferRequest) -> None:
    """Write the prompt, or the answer to it, as it is spoken; an answer is printed as well."""
    from mindspeed_mm.tasks.answer import speech

    said = speech.run(request)
    seconds, finished = said.utterance.seconds, said.utterance.finished
    if request.as_json:
        answer = asdict(said.answer) if said.answer is not None else {"finished": finished}
        say_json(answer | {"file": said.file, "seconds": seconds, "speaker": said.utterance.name})
        return
    if said.answer is not None:
        say(said.answer.text)
    cut_off = "" if finished else ", cut off (--max-new-tokens)"
    say(f"{said.file}: {seconds:.1f} s{cut_off}", err=True)


@collecting_later()
def draw_answer(request: InferRequest) -> None:
    """Draw what the one prompt asks for, and print the file's name."""
    from mindspeed_mm.tasks.answer import drawing

    drawn = drawing.run(request)
    if request.as_json:
        say_json(asdict(drawn))
    else:
        say(f"{drawn.file}: {drawn.width} × {drawn.height}")


@collecting_later()
def answer_rows(request: InferRequest) -> None:
    """Answer every row of the file, and print how many there were."""
    from mindspeed_mm.tasks.answer import infer

    outcome = infer.run(request)
    if outcome is not None:
        tell_outcome(request, outcome)


def tell_outcome(request: InferRequest, outcome: InferOutcome) -> None:
    """Print how many rows were answered."""
    if request.as_json:
        say_json(asdict(outcome))
        return
    kept = f", {outcome.kept} were already there" if outcome.kept else ""
    say(f"{outcome.out}: {outcome.answered} answered{kept}")
    if outcome.cut_off:
        longest = request.longest_answer
        say(f"{outcome.cut_off} answers were cut off at {longest} tokens (--max-new-tokens)", err=True)


# --- models that answer and draw -------------------------------------------------------------------------------------


def answer_or_draw(request: InferRequest) -> int:
    """Answer one prompt, or every row of a file, in words or by pictures."""
    request.check_unified(given_names())
    check_inputs(request)
    respond = answer_in_parts if request.data is None else answer_rows_in_parts
    return share("infer", request, lambda: respond(request))


@collecting_later()
def answer_in_parts(request: InferRequest) -> None:
    """Answer the prompt, and print what is said, or the name of the picture's file."""
    from mindspeed_mm.tasks.answer import unified

    made: unified.SaidInParts | unified.DrawnInParts
    if request.draw is None:
        made = unified.answer(request)
        shown = made.text
    else:
        made = unified.draw(request)
        shown = f"{made.file}: {made.width} × {made.height}"
    if request.as_json:
        say_json(asdict(made))
    else:
        say(shown)


@collecting_later()
def answer_rows_in_parts(request: InferRequest) -> None:
    """Answer every row of the file, and print how many there were."""
    from mindspeed_mm.tasks.answer import unified_rows

    tell_outcome(request, unified_rows.run(request))


COMMANDS: dict[ModelKind, Callable[[InferRequest], int]] = {
    LANGUAGE: answer,
    GENERATOR: generate,
    UNIFIED: answer_or_draw,
}
"""Kind of model → what is done."""
