"""What `mm infer` and `mm chat` are asked: questions for a language model, prompts for a generator, or a model to talk
to, here or behind a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind
from mindspeed_mm.core.request import Request, argument, fields_of, option
from mindspeed_mm.core.seeds import MOST_SEED
from mindspeed_mm.core.whole_text import check_whole_characters
from mindspeed_mm.tasks.requests.shared import checkpoint_option, height_and_width, plugin_option

Medium = Literal["image", "video", "audio"]
QUESTIONS_AT_A_TIME, MAX_NEW_TOKENS = 32, 512
_SAMPLING_FIELDS = (
    "num_inference_steps", "guidance_scale", "negative_prompt", "num_frames", "fps", "seed", "num_samples",
    "batch_size", "strength",
)  # fmt: skip
"""Options that are fields of a `sampling` section."""


@dataclass(frozen=True)
class InferRequest(Request):
    """A model, what it is shown, and where its answers or samples go."""

    model: Path = argument()
    prompts: tuple[str, ...] = option(
        "Question to ask, or prompt to generate from; may be repeated for a generator.", (), flag="--prompt"
    )
    images: tuple[Path, ...] = option(
        "Image file; may be repeated for language models and for editing models that take several.", (), flag="--image"
    )
    videos: tuple[Path, ...] = option(
        "Video file; may be repeated for a language model. Generators: the input video of v2v.", (), flag="--video"
    )
    audios: tuple[Path, ...] = option("Sound file; may be repeated.", (), flag="--audio", only=LANGUAGE)
    out: Path | None = option("File that the answers to --data are written to, as JSON lines; or a folder for samples.")
    media_dir: Path | None = option("Folder that media paths in --data or --prompts are relative to.")
    batch_size: int | None = option(
        "Number of questions or samples at a time; default: 32 questions, 1 sample.", least=1
    )
    overwrite: bool = option("Discard what --out already holds.", False)
    as_json: bool = option("Print the answer, or a summary, as JSON.", False, flag="--json")
    data: Path | None = option(
        "Rows to answer (conversations, or prompt and image). BAGEL draws where the row's own answer is a picture.",
        only=LANGUAGE,
    )
    config: Path | None = option(
        "YAML to use instead of the run's. For a language model its data section describes the rows; for a generator "
        "its plugins, model and sampling sections apply."
    )
    max_new_tokens: int | None = option(
        f"Maximum length of an answer in tokens. Default: {MAX_NEW_TOKENS}; of speech as the model was released.",
        least=1,
        only=LANGUAGE,
    )
    temperature: float | None = option(
        "Sampling temperature; 0 is greedy. Default: that of the model's generation_config.json.",
        least=0,
        only=LANGUAGE,
    )
    top_p: float | None = option(
        "Sample from the most likely tokens whose probabilities add up to this; default: generation_config.json.",
        above=0,
        most=1,
        only=LANGUAGE,
    )
    top_k: int | None = option(
        "Sample from the k most likely tokens, 0: all; default: generation_config.json.", least=0, only=LANGUAGE
    )
    beams: int | None = option(
        "Number of beams of a beam search; default: generation_config.json.", least=1, only=LANGUAGE
    )
    hide_thoughts: bool = option("Remove thoughts from the answers.", False, only=LANGUAGE)
    stops: tuple[str, ...] = option(
        "Text before which an answer ends, thoughts included; may be repeated.",
        (),
        flag="--stop",
        only=LANGUAGE,
    )
    speak: Path | None = option(
        "Speak into this WAV file: the text of --prompt or, if the model answers questions (Qwen3-Omni), its answer.",
        only=LANGUAGE,
    )
    speaker: str | None = option("Name of the voice that --speak uses.", only=LANGUAGE)
    audio_text: str | None = option(
        "What is said in --audio, the recording of a voice that --speak copies.", only=LANGUAGE
    )
    instructions: str | None = option("How --speak is to sound, in words, for models that follow them.", only=LANGUAGE)
    draw: Path | None = option(
        "Answer --prompt with a picture, in this PNG file (Janus-Pro, BAGEL, InternVL-U).", only=LANGUAGE
    )
    prompts_file: Path | None = option(
        "File with one prompt per line, or JSON lines.", flag="--prompts", only=GENERATOR
    )
    num_inference_steps: int | None = option(
        "Number of denoising steps. Default: the run's; otherwise what the model was released with (FLUX.1 schnell: 4);"
        " otherwise the default of its diffusers pipeline.",
        flag="--steps",
        least=1,
        only=GENERATOR,
    )
    guidance_scale: float | None = option(
        "Guidance scale; 1 switches classifier-free guidance off (Z-Image: 0). Default: as of --steps; with --draw 5, "
        "of BAGEL 4, of InternVL-U 4.5.",
        least=0,
    )
    picture_guidance: float | None = option(
        "Guidance scale of the pictures in the prompt of --draw; 1 switches it off. Default: 1.5, of InternVL-U 2.",
        least=0,
        only=UNIFIED,
    )
    negative_prompt: str | None = option("Prompt that guidance steers away from.", only=GENERATOR)
    size: str | None = option("Height and width in pixels, such as 480x832. Default: as of --steps.", only=GENERATOR)
    num_frames: int | None = option(
        "Number of frames of a video. Default: as of --steps.", flag="--frames", least=1, only=GENERATOR
    )
    fps: float | None = option(
        "Frames per second of video files. Default: the run's; otherwise the rate of the clips that the model makes "
        "(CogVideoX: 8).",
        above=0,
        only=GENERATOR,
    )
    seed: int | None = option(
        "Seed, from which each row, prompt and sample derives its own. Default: 0; generators: the run's.",
        least=0,
        most=MOST_SEED,
    )
    last_image: Path | None = option("Last frame of a video.", only=GENERATOR)
    mask: Path | None = option("Mask, a picture or video that is white where content is generated.", only=GENERATOR)
    control: Path | None = option("Control video (pose, depth, edges) that samples follow.", only=GENERATOR)
    references: tuple[Path, ...] = option(
        "Picture of a subject that a video should show; may be repeated.", (), flag="--reference", only=GENERATOR
    )
    task: str | None = option("Task, if the folder allows more than one, such as i2v or flf2v.", only=GENERATOR)
    strength: float | None = option(
        "Denoising strength for --video; 1 ignores the video.", above=0, most=1, only=GENERATOR
    )
    vae_tiling: bool = option("Decode large samples tile by tile, in less memory.", False, only=GENERATOR)
    vae_slicing: bool = option("Decode one sample of a batch at a time, in less memory.", False, only=GENERATOR)
    num_samples: int | None = option("Number of samples per prompt.", least=1, only=GENERATOR)
    lora: Path | None = option(
        "Folder or safetensors file of adapters to apply to the weights; of generators ComfyUI's and kohya's, too."
    )
    adapters: tuple[str, ...] = option(
        "Adapters that rows of --data choose by their field 'adapter'; may be repeated.",
        (),
        flag="--adapter",
        metavar="NAME=FOLDER",
        only=LANGUAGE,
    )
    plugins: tuple[str, ...] = plugin_option()
    plan: Path | None = option(
        "YAML whose 'parallel' section spreads a model that is too large for one device over the processes, which then "
        "answer each row, or make each sample, together."
    )
    nproc: int = option("Number of processes on this host; they share rows or prompts.", 1, least=1)
    checkpoint: str | None = checkpoint_option()

    def __post_init__(self) -> None:
        """Check every field, and that texts are whole.

        Raises:
            UsageError: A value is out of range, or a text that ends answers is empty.
            DataError: A text holds half a character.
        """
        super().__post_init__()
        check_whole_characters(self.prompts, "--prompt")
        check_whole_characters(self.negative_prompt, "--negative-prompt")
        check_whole_characters(self.audio_text, "--audio-text")
        check_whole_characters(self.instructions, "--instructions")
        check_whole_characters(self.stops, "--stop")
        if "" in self.stops:
            raise UsageError("an empty text would end every answer", key="--stop", way_out="Give a text.")

    @property
    def media(self) -> list[tuple[Medium, Path]]:
        """Files that go with the prompt, with their kinds."""
        kinds: tuple[tuple[Medium, tuple[Path, ...]], ...] = (
            ("image", self.images),
            ("video", self.videos),
            ("audio", self.audios),
        )
        return [(kind, path) for kind, paths in kinds for path in paths]

    @property
    def prompt(self) -> str:
        """The question for a language model; empty where media ask."""
        if self.prompts:
            return self.prompts[0]
        return ""

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer in text at most."""
        return self.max_new_tokens or MAX_NEW_TOKENS

    @property
    def sampling_fields(self) -> JsonObject:
        """Given fields of a `sampling` section, by their names there.

        Raises:
            UsageError: The size is none.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.size is not None:
            given["height"], given["width"] = height_and_width(self.size, "--size")
        return given

    @property
    def vae_options(self) -> tuple[str, ...]:
        """What the VAE does to take less memory: `tiling`, `slicing`."""
        return ("tiling",) * self.vae_tiling + ("slicing",) * self.vae_slicing

    def check_kind(self, kind: ModelKind, given: Iterable[str]) -> None:
        """Raise `UsageError` for the first option that was given and is for another kind of model.

        Args:
            kind: Of the model.
            given: Names of the fields that were given.
        """
        names = set(given)
        for each in fields_of(type(self)):
            only = each.declared.only
            if each.name in names and only not in (None, kind):
                assert only is not None
                if kind is UNIFIED and each.name in _OF_UNIFIED:
                    continue
                what = f"is for {only.plural}, but this model is {kind.singular}"
                raise UsageError(what, where=str(self.model), key=each.flag, way_out="Leave it out.")

    def check_unified(self, given: Iterable[str]) -> None:
        """Check what a model that answers and draws is asked, before torch is imported.

        Args:
            given: Names of the fields that were given.

        Raises:
            UsageError: There is not one prompt, or an option says how pictures are drawn where none is.
            DataError: A file is not there.
        """
        names = set(given)
        if self.data is not None:
            self._check_unified_rows(names)
        elif len(self.prompts) != 1:
            way_out = "Put the rows into --data."
            raise UsageError("such a model answers one --prompt", key="--prompt", way_out=way_out)
        draws = self.draw is not None or self.data is not None
        for name in (*_NOT_UNIFIED, *(_OF_ROWS if self.data is None else ()), *(() if draws else _OF_DRAWING)):
            if name in names:
                what = "nothing is drawn" if name in _OF_DRAWING else "is not built for models that answer and draw"
                way_out = "Name the file for the picture: --draw FILE." if name in _OF_DRAWING else "Leave it out."
                raise UsageError(what, key=self.flag_of(name), way_out=way_out)
        for name in ("temperature", "max_new_tokens"):
            if self.draw is not None and name in names:
                raise UsageError("the answer is a picture", key=self.flag_of(name), way_out="Leave it out, or --draw.")
        for kind, path in self.media:
            if kind != "image":
                raise UsageError(f"such a model takes no {kind}", key=f"--{kind}", way_out="Leave it out.")
            if not path.is_file():
                way_out = f"Relative paths start at '{Path.cwd()}'."
                raise DataError("there is no such file", where=str(path), key=f"--{kind}", way_out=way_out)

    def _check_unified_rows(self, names: set[str]) -> None:
        """Raise `UsageError` for what does not go with rows."""
        if self.out is None:
            raise UsageError("--data needs --out", key="--out", way_out="Name the file for the answers.")
        for name in ("prompts", "images", "draw"):
            if name in names:
                what = "is for one question, and --data holds many"
                raise UsageError(what, key=self.flag_of(name), way_out="Leave it out.")

    def check_questions(self) -> None:
        """Check what a language model is asked, before torch is imported.

        Raises:
            UsageError: There is not one prompt or one file of rows, or options contradict one another.
            DataError: A file is not there.
        """
        _check_source(self)
        _check_choice(self)
        for kind, path in self.media:
            if not path.is_file():
                way_out = f"Relative paths start at '{Path.cwd()}'."
                raise DataError("there is no such file", where=str(path), key=f"--{kind}", way_out=way_out)
        if self.adapters and self.lora is not None:
            way_out = "Name them as well: --adapter NAME=FOLDER."
            raise UsageError("there are adapters for all rows as well", key="--lora", way_out=way_out)

    def check_samples(self) -> None:
        """Raise `UsageError` where a generator's samples have no folder."""
        if self.out is None:
            raise UsageError("samples need an output folder", key="--out", way_out="Name one: --out DIR.")


_OF_DRAWING = ("num_inference_steps", "size", "guidance_scale", "picture_guidance")
_OF_UNIFIED = frozenset({"data", "draw", "temperature", "max_new_tokens", "num_inference_steps", "size"})
"""What else than options of all models one that answers and draws takes."""
_NOT_UNIFIED = ("lora", "plan", "nproc", "batch_size", "top_p")
_OF_ROWS = ("out", "media_dir", "overwrite")


def _check_source(request: InferRequest) -> None:
    """Raise `UsageError` unless there is one prompt, or a file of rows with a file for the answers."""
    media, data = request.media, request.data
    if data is not None and media:
        kind, _ = media[0]
        way_out = f"Name each {kind} in the rows of --data."
        raise UsageError(f"--{kind} can only be used with --prompt", key=f"--{kind}", way_out=way_out)
    if bool(request.prompts or media) == (data is not None):
        raise UsageError("give either --prompt or --data", way_out="See mm infer --help.")
    if len(request.prompts) > 1:
        raise UsageError("a language model answers one --prompt", key="--prompt", way_out="Put the rows into --data.")
    if data is not None and request.out is None:
        raise UsageError("--data needs --out", key="--out", way_out="Name the file for the answers.")
    _check_speech(request)
    _check_drawing(request)
    if data is not None:
        return
    if request.adapters:
        way_out = "Name the folder of the adapters that answer the prompt: --lora FOLDER."
        raise UsageError("only rows of --data choose among adapters", key="--adapter", way_out=way_out)
    for name in ("out", "overwrite", "media_dir", "batch_size"):
        if getattr(request, name):
            key = request.flag_of(name)
            way_out = "Leave it out, or put the question into --data; the answer to --prompt is printed."
            raise UsageError(f"{key} can only be used with --data", key=key, way_out=way_out)
    if request.plan is not None:
        raise UsageError("a model is spread to answer rows", key="--plan", way_out="Put the question into --data.")
    if request.nproc > 1:
        raise UsageError("one question is answered by one process", key="--nproc", way_out="Leave it out.")


def _check_speech(request: InferRequest) -> None:
    """Raise `UsageError` where an answer is to be spoken that cannot be."""
    if request.speak is None:
        for name in ("speaker", "audio_text", "instructions"):
            if getattr(request, name) is not None:
                way_out = "Name the file for the voice: --speak FILE."
                raise UsageError("nothing is spoken", key=request.flag_of(name), way_out=way_out)
        return
    if request.data is not None:
        raise UsageError("only --prompt, or the answer to it, is spoken", key="--speak", way_out="Ask row by row.")
    if request.audio_text is not None and not request.audios:
        way_out = "Name the recording: --audio FILE."
        raise UsageError("there is no recording that it could be said in", key="--audio-text", way_out=way_out)
    if request.lora is not None:
        way_out = "Merge the adapters first: mm merge."
        raise UsageError("a model cannot speak with adapters that are not merged", key="--lora", way_out=way_out)
    for name in ("hide_thoughts", "stops"):
        if getattr(request, name):
            key, way_out = request.flag_of(name), "Leave one of them out."
            raise UsageError("all of a spoken answer is heard", key=key, way_out=way_out)


def _check_drawing(request: InferRequest) -> None:
    """Raise `UsageError` where an answer is to be drawn that cannot be."""
    if request.draw is None:
        if request.guidance_scale is not None:
            way_out = "Name the file for the picture: --draw FILE."
            raise UsageError("nothing is drawn", key="--guidance-scale", way_out=way_out)
        return
    if request.data is not None:
        raise UsageError("only the answer to --prompt is drawn", key="--draw", way_out="Ask row by row.")
    if not request.prompt:
        raise UsageError("nothing says what to draw", key="--draw", way_out="Say it: --prompt TEXT.")
    for name in ("speak", "beams", "hide_thoughts", "stops"):
        if getattr(request, name):
            key = request.flag_of(name)
            raise UsageError("the answer is a picture", key=key, way_out="Leave it out, or --draw.")
    if request.max_new_tokens is not None:
        way_out = "Leave it out."
        raise UsageError("a picture has as many codes as the model says", key="--max-new-tokens", way_out=way_out)


def _check_choice(request: InferRequest) -> None:
    """Raise `UsageError` where options of sampling contradict one another."""
    if request.temperature == 0:
        because, without_effect = "--temperature 0", ["top_p", "top_k"]
    elif (request.beams or 1) > 1:
        because, without_effect = "--beams", ["temperature", "top_p", "top_k"]
    else:
        return
    for name in without_effect:
        if getattr(request, name) is not None:
            key = request.flag_of(name)
            raise UsageError(f"does nothing with {because}", key=key, way_out="Leave one of them out.")


# --- mm chat ----------------------------------------------------------------------------------------------------------

_OF_SERVERS = ("name", "key_file")
_OF_FOLDERS = ("lora", "config", "plugins")


@dataclass(frozen=True)
class ChatRequest(Request):
    """A model, and how it is talked to."""

    model: str = argument()
    images: tuple[Path, ...] = option("Picture that is sent with the first message.", (), flag="--image")
    videos: tuple[Path, ...] = option("Video that is sent with the first message.", (), flag="--video")
    audios: tuple[Path, ...] = option("Audio file that is sent with the first message.", (), flag="--audio")
    system: str = option("System prompt; default: that of the model's chat template.", "")
    max_new_tokens: int | None = option(
        "Maximum length of an answer in tokens. [default: 512, or the server's]", least=1
    )
    temperature: float | None = option(
        "Sampling temperature; 0 is greedy. Default: that of the model's generation_config.json.", least=0
    )
    top_p: float | None = option(
        "Sample from the most likely tokens whose probabilities add up to this; default: generation_config.json.",
        above=0,
        most=1,
    )
    seed: int | None = option("Seed of each answer; default: a new one each time.", least=0, most=MOST_SEED)
    lora: Path | None = option("Folder of adapters to apply to the weights.")
    config: Path | None = option("YAML whose data section sets the chat template and media sizes; default: the run's.")
    name: str = option("Name of a server's model to talk to; default: the first one listed.", "")
    key_file: Path | None = option("File with the API key of a server.")
    as_json: bool = option("Print each answer as a line of JSON, once it is complete.", False, flag="--json")
    plugins: tuple[str, ...] = plugin_option()
    checkpoint: str | None = checkpoint_option()

    def check_for_server(self) -> None:
        """Raise `UsageError` for an option that only a model which is loaded here takes."""
        self._refuse(_OF_FOLDERS, "is for models that are loaded here, and a server has loaded its own")

    def check_for_folder(self) -> None:
        """Raise `UsageError` for an option that only a server takes."""
        self._refuse(_OF_SERVERS, "is for servers")

    def check_choice(self) -> None:
        """Raise `UsageError` where options of sampling contradict one another."""
        if self.temperature == 0 and self.top_p is not None:
            raise UsageError("does nothing with --temperature 0", key="--top-p", way_out="Leave one of them out.")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, name):
                raise UsageError(why, key=self.flag_of(name), way_out="Leave it out.")
