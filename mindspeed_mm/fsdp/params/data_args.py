"""The `data` section: which rows, how they are read, rendered, and dealt into batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.value_types import (
    Flag,
    Names,
    Natural,
    Number,
    OpenSection,
    PathText,
    Positive,
    Ratio,
    Seconds,
    Section,
    Tokens,
    fault,
    null_means,
    show,
)

ToolFormat = Literal[
    "default",
    "gemma4",
    "glm4",
    "glm4_moe",
    "lfm2",
    "ling",
    "llama3",
    "minimax1",
    "minimax2",
    "mistral",
    "qwen",
    "qwen3_5",
    "seed_oss",
]
"""LLaMA-Factory's names."""


CAPTIONS_OF_LISTS = ("prompts.txt", "prompt.txt", "captions.txt")
"""Files of captions that are read beside a .txt file of paths alone, line by line. For generators only."""


class DatasetAttr(Section):
    """Where a row keeps what: columns, and the tags inside a message."""

    formatting: Annotated[
        Literal["sharegpt", "alpaca", "openai", "multimodal_tool", "transcript", "text"], null_means("sharegpt")
    ] = "sharegpt"
    """Layout of a row. `sharegpt`, the default: recognised by the columns of each row. The other words allow one
    layout: `openai` and `multimodal_tool` a list of messages, `alpaca` a question and its answer in columns of their
    own, `transcript` a sound and what is said in it, `text` a document in a column `text`."""
    ranking: Flag = False
    """Whether rows are preference pairs: `chosen` and `rejected` answers to the same messages. Not needed with
    `stage: rm`, which reads them so."""
    system: str | None = None
    """Column that holds the system prompt. Not given: `system` or `system_prompt`."""
    images: str | None = None
    """Column that holds the images. Not given: `images` or `image`, whichever the row has."""
    videos: str | None = None
    """Column that holds the videos; a video may also be a list of its frames. Not given: `videos` or `video`."""
    audios: str | None = None
    """Column that holds the audio files. Not given: `audios` or `audio`."""
    tools: str | None = None
    """Column that holds the tool descriptions: a list, or JSON text of one. Not given: `tools`."""
    messages: str | None = "conversations"
    """Column that holds the messages. With the default, `messages` and `conversation` are recognised as well."""
    prompt: str | None = "instruction"
    """Column that holds the question of a row without a list of messages. With the default, `query`, `prompt`,
    `question` and `problem` are recognised as well."""
    query: str | None = "input"
    """Column that holds additional input of an instruction."""
    response: str | None = "output"
    """Column that holds the answer of a row without a list of messages. With the default, `response`, `answer`,
    `completion` and other usual names are recognised as well."""
    history: str | None = None
    """Column that holds the earlier turns of a row without a list of messages: [[question, answer], …]. Not given:
    `history`."""
    chosen: str | None = None
    """Column of the better answer in preference rows: a text, a message or a list of messages. Not given: `chosen` or
    `chosen_messages`; a row without one has its better answer where other rows have their only one."""
    rejected: str | None = None
    """Column of the worse answer in preference rows. Not given: `rejected`, `rejected_response` or
    `rejected_messages`."""
    role_tag: str | None = "from"
    """Key of a message that holds its role."""
    content_tag: str | None = "value"
    """Key of a message that holds its text."""
    user_tag: str | None = "human"
    """Role name that marks the user's turns."""
    assistant_tag: str | None = "gpt"
    """Role name that marks the model's turns."""
    observation_tag: str | None = "observation"
    """Role name that marks the results of tools."""
    function_tag: str | None = "function_call"
    """Role name that marks the calls of tools."""
    system_tag: str | None = "system"
    """Role name that marks the system prompt."""


class DataEntry(Section):
    """One data set of several, with what is special about it."""

    path: PathText
    """A file, a folder, a pattern (part-*.parquet), or a name of dataset_info.json."""
    name: str | None = None
    """Name of this dataset in `mix.weights` and in reports; null: its path."""
    attr: DatasetAttr | None = None
    """Names of this dataset's columns and tags; null: those of dataset_param.attr."""
    max_samples: Positive | None = None
    """Maximum number of rows taken from this dataset; null: all."""
    share: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of this dataset's rows that is taken, from the first row on; null: all. For language models only."""
    repeats: Positive | None = None
    """Number of times that an epoch reads each row of this dataset; null: once, but ten times for a folder of a
    generator named `10_dog`."""
    media_dir: PathText | None = None
    """Folder that relative paths of this dataset's media start at; null: `dataset_dir`. For language models only."""
    caption: str | None = None
    """Caption of all media of this dataset without a text file or a caption column, like `--instance_prompt` and
    `--class_prompt` of diffusers' scripts; null: such media are bad samples. For generators only."""
    prior: Flag = False
    """Use this dataset for prior preservation (DreamBooth): its samples form a separate loss term, weighted by
    `training.diffusion.prior_loss_weight`, and every micro-batch takes as many of them as of the other datasets'. For
    generators only."""
    companions: dict[str, PathText] | None = None
    """Folders of further media of this dataset, by the column that they provide (`{source: before, mask: masks}`): each
    file has the name of the medium that it belongs to, with any extension. For generators only."""
    sizes: JsonObject | None = None
    """Sizes of this dataset's media, overriding those of `preprocess_parameters`: `height` and `width`, `buckets` or
    `max_pixels`, and `num_frames`."""


def _files(value: object) -> object:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    entries = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(entry, str | dict | DataEntry) for entry in entries):
        return tuple(entries)
    raise fault(f"{show(value)} is not a path, nor a list of paths or of sections with a path")


Files = Annotated[str | tuple[str | DataEntry, ...] | None, BeforeValidator(_files)]
"""A path, a comma-separated list of paths, or a list of paths and of sections with a path."""


class MixPlan(Section):
    """Weights by which several datasets are sampled, and their unit."""

    weights: dict[str, Annotated[Number, Field(ge=0)]] = Field(default_factory=dict)
    """Sampling weight of each dataset, under its name as written in `dataset`."""
    by: Literal["samples", "tokens"] = "samples"
    """Unit in which `mix.weights` are counted: samples or tokens."""


class BasicParameters(OpenSection):
    """Which rows are taken and how they become token ids."""

    NULL_MEANS: ClassVar[Mapping[str, str]] = {"truncation": "if_too_long"}

    dataset: Files = None
    """Path, list or comma-separated list of .json, .jsonl, .parquet and .csv files, folders of them, patterns
    (part-*.parquet) and names from dataset_info.json in dataset_dir. A list may also hold sections `{path, name, attr,
    max_samples}`. Generators also take folders of media with captions beside them, and .tar archives."""
    dataset_dir: PathText | None = None
    """Root folder of data and media. Null: relative paths of media start at the folder of the file of their rows, and
    files of rows are looked up in the working directory, then in `data`."""
    cache_dir: PathText | None = None
    """Folder that keeps samples encoded ahead of training, and hashes of the files of rows. Null: samples in
    `.mm-cache` beside the first file of rows, hashes in the user's cache, `~/.cache/mindspeed-mm`."""
    template: str | None = None
    """Chat template by name; null: the tokenizer's own."""
    chat_template: PathText | None = None
    """Jinja file with a chat template; takes precedence over `template`."""
    enable_thinking: Flag | None = None
    """Handling of thoughts by models that have a thinking mode. `true` trains on thoughts, with an empty think block
    where a row has none; `false` removes the thoughts from the rows and makes the empty block part of the prompt; null
    leaves both to the chat template. The setting also applies to inference, evaluation and the exported chat
    template."""
    default_system: str | None = None
    """System prompt of conversations that have none. It becomes part of the chat template, so it also applies to
    inference, evaluation and the exported folder. Null: what the chat template writes by itself."""
    cutoff_len: Positive = 1024
    """Maximum length of a sample, in tokens; `truncation` says what happens to longer ones."""
    train_on_prompt: Flag = False
    """Train on the whole conversation except media and the answers that a row excludes (`weight: 0`, `train: false`).
    Cannot be combined with `mask_history`."""
    mask_history: Flag = False
    """Train on the last turn of each conversation only."""
    mask_empty_thoughts: Flag = False
    """Leave empty thoughts (`<think></think>` before an answer) out of the loss, so that a model that can do both does
    not unlearn to think on rows without thoughts."""
    streaming: Flag = False
    """Read rows as they are needed instead of indexing them first."""
    overwrite_cache: Flag = False
    """Encode all samples again even if they are in the cache."""
    preprocessing_batch_size: Positive = 1000
    """Maximum number of rows that a process encodes at a time."""
    preprocessing_num_workers: Positive | None = None
    """Number of processes that encode ahead of training; null: one per core, at most 8."""
    max_samples: Positive | None = None
    """Maximum number of rows taken from each dataset; null: all."""
    tool_format: ToolFormat | None = None
    """Accepted from older files and ignored: the model's chat template renders tools and their calls. A `function_call`
    turn of a row is the JSON of one call or of a list of calls, whatever this key says."""
    val_dataset: Files = None
    """Rows used for validation, written like `dataset`."""
    val_max_samples: Natural | None = None
    """Maximum number of rows taken for validation; 0: no validation."""
    val_rate: Ratio | None = None
    """Share of the training rows that is held out for validation, at least one row."""
    packing: Flag = False
    """Pack several samples into one row of up to `cutoff_len` tokens; no sample attends to another."""
    neat_packing: Flag = False
    """Another name for `packing`, with the same effect."""
    preprocess_on_fly: Flag = True
    """Encode samples while training. False: encode all of them once before training, into the cache."""
    async_preprocess: Flag = False
    """Prepare samples in the background even where `num_workers` is 0, in one worker process."""
    async_preprocess_buffer_size: Positive | None = None
    """Number of samples that `async_preprocess` keeps ready; null: `prefetch_factor` micro-batches."""
    stage: Literal["sft", "pretrain", "rm", "prompt"] = "sft"
    """Training stage that the rows are for. `sft`: answers are trained on; `pretrain`: all of the text; `rm`:
    preference pairs; `prompt`: the model answers the last turn itself (set by `posttrain.method: grpo`)."""
    mix: MixPlan | None = None
    """Proportions in which several datasets are sampled."""
    truncation: Literal["drop", "shrink", "split", "error"] | None = None
    """What to do with samples longer than `cutoff_len`: leave them out (`drop`), remove whole turns or the end of a
    document (`shrink`), cut documents of plain text into pieces of that length and leave out other rows (`split`), or
    stop (`error`). To find where the pieces begin, `split` encodes all documents once before training, into the cache.
    Null: `split` for `stage: pretrain` unless its rows are streamed, otherwise `drop`."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """What to do with a sample that cannot be read: stop, or skip it."""
    max_bad_fraction: Ratio = 0.001
    """Share of samples that may be skipped before the run stops."""
    allow_remote_media: Flag = False
    """Fetch media from http and https URLs. Hosts must be public or listed in `media_roots`. `data:` URLs contain the
    medium and are always read."""
    media_roots: Names = ()
    """Folders in which absolute media paths are allowed, and URL prefixes that are allowed on private hosts."""

    @property
    def packs(self) -> bool:
        """Whether several samples share a row: `packing` or `neat_packing` is set."""
        return self.packing or self.neat_packing

    @property
    def if_too_long(self) -> Literal["drop", "shrink", "split", "error"]:
        """`truncation`, with its default by stage."""
        if self.truncation is not None:
            return self.truncation
        if self.stage == "pretrain" and not self.streaming:
            return "split"
        return "drop"

    @property
    def encodes_first(self) -> bool:
        """Whether all samples are encoded before training, which may take hours."""
        return not self.preprocess_on_fly or self.if_too_long == "split"


class PreprocessParameters(OpenSection):
    """The model's processor, and the sizes of media."""

    model_name_or_path: PathText | None = None
    """Folder that holds the processor; null: `model.model_name_or_path`."""
    add_tokens: Tokens = ()
    """Tokens added to the folder's tokenizer; empty: `model.add_tokens`."""
    add_special_tokens: Tokens = ()
    """Special tokens added to the folder's tokenizer; empty: `model.add_special_tokens`."""
    use_fast_tokenizer: Flag = True
    """Use the fast tokenizer, which is written in Rust."""
    split_special_tokens: Flag = True
    """Read special tokens in the text of rows, such as <|im_start|>, as plain text; false: as the tokens themselves.
    What people type in mm chat and send to mm serve is always plain text."""
    image_max_pixels: Positive | None = None
    """Maximum area of an image in pixels; larger ones are shrunk. Null: the processor's limit."""
    image_min_pixels: Natural | None = None
    """Minimum area of an image in pixels; smaller ones are enlarged. Null: the processor's limit."""
    video_max_pixels: Positive | None = None
    """Maximum area of a video frame in pixels; larger ones are shrunk. Null: the processor's limit."""
    video_min_pixels: Natural | None = None
    """Minimum area of a video frame in pixels; smaller ones are enlarged. Null: the processor's limit."""
    video_fps: Annotated[Number, Field(gt=0)] | None = None
    """Frames sampled per second of video; null: the rate of the folder's processor, or 2 where it would take every
    frame."""
    video_maxlen: Positive | None = None
    """Maximum number of frames of a video; null: the limit of the folder's processor, or 128 where it would take every
    frame."""
    image_do_pan_and_scan: Flag | None = None
    """Also show the model crops of elongated images (Gemma3's pan and scan); null: as the processor's configuration
    says."""
    crop_to_patches: Flag | None = None
    """Cut each image into tiles, as InternVL does; null: as the processor's configuration says."""
    image_max_tiles: Positive | None = None
    """Maximum number of tiles of an image (InternVL's `max_dynamic_patch`), without the small view of the whole; null:
    as the processor's configuration says."""
    use_audio_in_video: Flag = False
    """Feed the sound of videos to the model, interleaved with their frames; a video without sound is then a bad
    sample."""
    audio_sampling_rate: Positive | None = None
    """Sampling rate of audio in Hz after resampling; null: the rate of the folder's processor, or 16,000 where it does
    not say."""
    trust_remote_code: Flag = False
    """Let the folder's own Python files define the processor. They are executed, so read them first."""
    fix_mistral_regex: Flag | None = None
    """Correct the text-splitting rule of Mistral's tokenizers, which is wrong in older folders; null leaves it to
    transformers, which warns about such folders."""
    image_resolution: Positive | None = None
    """Accepted from older files and ignored; `image_max_pixels` takes its place."""
    video_resolution: Positive | None = None
    """Accepted from older files and ignored; `video_max_pixels` takes its place."""


class DatasetParam(OpenSection):
    """Settings of one dataset: its class, its columns, its rows and the processor."""

    dataset_type: str = "huggingface"
    """Registered id of the dataset class that reads the rows."""
    attr: DatasetAttr = Field(default_factory=DatasetAttr)
    """Names of the columns and tags that a row uses."""
    basic_parameters: BasicParameters = Field(default_factory=BasicParameters)
    """Settings that choose the rows and turn them into token ids."""
    preprocess_parameters: PreprocessParameters = Field(default_factory=PreprocessParameters)
    """Settings of the processor and the sizes of media. Sizes given here also apply to inference, evaluation and the
    exported folder."""


class CollateParam(Section):
    """How samples become a batch."""

    model_name: str | None = None
    """Registered id of the collator (older name `collator_id`); null: chosen by the model's processor."""
    ignore_pad_token_for_loss: Flag = False
    """Accepted from older files and ignored: padding is never trained on."""
    pad_to_multiple_of: Positive | None = None
    """Padded rows are lengthened to a multiple of this many tokens; null: 8 on accelerators, whose kernels run faster
    with it, and 1 on a CPU."""


class DataloaderParam(Section):
    """In what order and by how many processes samples are read."""

    dataloader_mode: Literal["sampler", "base", "variable", "custom"] = "sampler"
    """How batches are formed. `sampler`: by `sampler_type`; `base`: rows in order; `variable`: batches of varying size,
    as TokenBudgetSampler makes them (generators always do this); `custom`: the dataset brings its own loader."""
    sampler_type: str = "BaseRandomBatchSampler"
    """Order and grouping of samples. BaseRandomBatchSampler and SequentialSampler set the order in which samples are
    drawn. TokenBudgetSampler fills micro-batches up to `max_tokens_per_batch`; LengthGroupedSampler and
    BucketBatchSampler form micro-batches of `micro_batch_size` samples of similar length; all three give every rank
    steps of nearly equal cost. Generators always use one size per micro-batch, whichever is named (BucketBatchSampler,
    VariableVideoBatchSampler)."""
    shuffle: Annotated[Flag, null_means(True)] = True
    """Draw a new order every epoch, which depends on the seed and the epoch alone."""
    drop_last: Annotated[Flag, null_means(True)] = True
    """Leave out the last incomplete batch of an epoch. Where micro-batches are filled by size, the samples left out
    come first in the next epoch. Generators leave out the micro-batches that do not complete a step, different ones
    each time."""
    pin_memory: Flag | None = None
    """Pin host memory for faster copies to the device; null: where there is an accelerator."""
    max_tokens_per_batch: Positive | None = None
    """Maximum number of tokens in a micro-batch, padding included; it is filled with as many samples as fit. Null: with
    `packing`, TokenBudgetSampler or mode `variable`, `training.micro_batch_size` × `cutoff_len`. Generators count
    latent tokens; null: `training.micro_batch_size` samples."""
    max_patches_per_batch: Positive | None = None
    """Maximum encoder work in a micro-batch (vision patches, audio frames), where micro-batches are filled by size;
    null: no limit."""
    shuffle_window: Positive = 10_000
    """Number of streamed rows in the shuffle buffer."""
    num_workers: Natural = 2
    """Number of worker processes that prepare batches; 0: the training process prepares them itself."""
    prefetch_factor: Positive | None = None
    """Number of batches that each worker process keeps ready; null: 2."""
    timeout: Seconds = 600.0
    """Longest wait for a micro-batch, in seconds. A worker process that hangs longer ends the run, and the error names
    its samples."""
    enable_preload: Flag = False
    """Copy the next batch to the device while the current one is trained on."""
    collate_param: CollateParam = Field(default_factory=CollateParam)
    """Settings of the collator, which turns samples into a batch."""


class DataArguments(Section):
    """Which rows, how they are read, rendered, and dealt into batches."""

    dataset_param: DatasetParam = Field(default_factory=DatasetParam)
    """Settings of the training data."""
    val_dataset_param: DatasetParam | None = None
    """Settings of the validation data, if it is read differently; null: those of the training data."""
    dataloader_param: DataloaderParam = Field(default_factory=DataloaderParam)
    """Settings of the loader: order, worker processes and batches."""

    @property
    def described(self) -> dict[str, DatasetParam]:
        """Key of each data set that has settings → its settings."""
        found = {"data.dataset_param": self.dataset_param}
        if self.val_dataset_param is not None:
            found["data.val_dataset_param"] = self.val_dataset_param
        return found
