"""The `data` section: which rows, how they are read, rendered, and dealt into batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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


class DatasetAttr(Section):
    """Where a row keeps what: columns, and the tags inside a message."""

    formatting: Annotated[Literal["sharegpt", "alpaca", "openai", "multimodal_tool"], null_means("sharegpt")] = (
        "sharegpt"
    )
    """Layout of a row. `sharegpt`: a list of messages, in any of the usual spellings (ShareGPT, LLaVA, MLLM, OpenAI,
    with tools: `openai` and `multimodal_tool` are other names for it). `alpaca`: instruction, input, output."""
    ranking: Flag = False
    """Rows are preference pairs: `chosen` and `rejected` answers to the same messages. `mm data` shows them; nothing
    trains on them yet."""
    system: str | None = None
    """Column of the system prompt."""
    images: str | None = None
    """Column of the images. Not given: `images` or `image`, whichever the row has."""
    videos: str | None = None
    """Column of the videos; one of them may be a list of its frames. Not given: `videos` or `video`."""
    audios: str | None = None
    """Column of the audio files. Not given: `audios` or `audio`."""
    tools: str | None = None
    """Column of the tool descriptions: a list, or JSON text of one. Not given: `tools`."""
    messages: str | None = "conversations"
    """Column of the messages. As it stands here also `messages` is recognised."""
    prompt: str | None = "instruction"
    """alpaca: column of the instruction."""
    query: str | None = "input"
    """alpaca: column of the further input."""
    response: str | None = "output"
    """alpaca: column of the answer."""
    history: str | None = None
    """alpaca: column of earlier turns."""
    chosen: str | None = None
    """Preference rows: column of the better answer, a text, a message, or messages. Not given: `chosen`."""
    rejected: str | None = None
    """Preference rows: column of the worse answer. Not given: `rejected`."""
    role_tag: str | None = "from"
    """Key of a message's role."""
    content_tag: str | None = "value"
    """Key of a message's text."""
    user_tag: str | None = "human"
    """Role of the user."""
    assistant_tag: str | None = "gpt"
    """Role of the model."""
    observation_tag: str | None = "observation"
    """Role of a tool's result."""
    function_tag: str | None = "function_call"
    """Role of a tool call."""
    system_tag: str | None = "system"
    """Role of the system prompt."""


class DataEntry(Section):
    """One data set of several, with what is special about it."""

    path: PathText
    """A file, a folder, a pattern (part-*.parquet), or a name of dataset_info.json."""
    name: str | None = None
    """What `mix.weights` and reports call it; null: the path."""
    attr: DatasetAttr | None = None
    """Where its rows keep what; null: dataset_param.attr."""
    max_samples: Positive | None = None
    """Most rows taken from it."""


def _files(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    entries = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(entry, str | dict | DataEntry) for entry in entries):
        return tuple(entries)
    raise fault(f"{show(value)} is not a path, nor a list of paths or of sections with a path")


Files = Annotated[str | tuple[str | DataEntry, ...] | None, BeforeValidator(_files)]
"""A path, a comma-separated list of paths, or a list of paths and of sections with a path."""


class MixPlan(Section):
    """Shares of several datasets."""

    weights: dict[str, Annotated[Number, Field(ge=0)]] = Field(default_factory=dict)
    """Dataset (as written in `dataset`) → weight."""
    by: Literal["samples", "tokens"] = "samples"
    """What the weights count."""


class BasicParameters(OpenSection):
    """Which rows are taken and how they become token ids."""

    dataset: Files = None
    """Path, list or comma-separated list of .json, .jsonl, .parquet, .csv files, folders of them, patterns
    (part-*.parquet) and names of dataset_info.json in dataset_dir; in a list also sections
    `{path, name, attr, max_samples}`."""
    dataset_dir: PathText = "data"
    """Root of data and media. Not given: media are looked for beside the file of their rows first, then here."""
    cache_dir: PathText | None = None
    """Where samples encoded up front are kept; null: `.mm-cache` beside the first file of rows."""
    template: str | None = None
    """Named chat template; null: the tokenizer's own."""
    chat_template: PathText | None = None
    """Jinja file with a chat template; wins over `template`."""
    enable_thinking: Flag | None = None
    """For models that think: `true` trains on thoughts (an empty think block where a row has none); `false` takes the
    thoughts out of the rows, the empty block becomes part of the prompt; null leaves both to the chat template. What is
    given here holds for inference, evaluation and the exported chat template too."""
    cutoff_len: Positive = 1024
    """Most tokens of a sample."""
    train_on_prompt: Flag = False
    """Train on all that is in the conversation but media and the answers that a row takes out (`weight: 0`,
    `train: false`). Does not go with `mask_history`."""
    mask_history: Flag = False
    """Train on the last turn only."""
    streaming: Flag = False
    """Read rows as they are needed instead of indexing them first."""
    overwrite_cache: Flag = False
    """Encode all samples again although they are in the cache."""
    preprocessing_batch_size: Positive = 1000
    """Most rows that a process encodes at a time."""
    preprocessing_num_workers: Positive | None = None
    """Processes that encode up front; null: one a core, at most 8."""
    max_samples: Positive | None = None
    """Most rows taken from each dataset."""
    tool_format: ToolFormat | None = None
    """Accepted from older files: the model's chat template writes tools and their calls. In rows, a `function_call`
    turn is the JSON of a call or of a list of calls, under any of these names."""
    val_dataset: Files = None
    """Rows for validation."""
    val_max_samples: Natural | None = None
    """Most rows taken for validation; 0: no validation."""
    val_rate: Ratio | None = None
    """Share of the training rows set aside for validation."""
    packing: Flag = False
    """Put several samples into one row of up to `cutoff_len` tokens; none of them sees another."""
    neat_packing: Flag = False
    """The same as `packing`."""
    preprocess_on_fly: Flag = True
    """Encode samples while training. False: all of them before, once, into the cache."""
    async_preprocess: Flag = False
    """Prepare samples in the background even where `num_workers` is 0: by one worker process."""
    async_preprocess_buffer_size: Positive | None = None
    """Samples held ready by `async_preprocess`; null: `prefetch_factor` micro-batches."""
    stage: Literal["sft", "pretrain", "rm"] = "sft"
    """What the rows are for."""
    mix: MixPlan | None = None
    """Shares of several datasets."""
    truncation: Literal["drop", "shrink", "error"] = "drop"
    """What happens to samples above `cutoff_len`: leave out, take away whole turns, or stop."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """What happens to a sample that cannot be read."""
    max_bad_fraction: Ratio = 0.001
    """Share of samples that may be skipped before the run stops."""
    allow_remote_media: Flag = False
    """Fetch media from URLs (http, https), and read `data:` URLs. Hosts must be public, or stand in `media_roots`."""
    media_roots: Names = ()
    """Folders inside which absolute media paths are legal; beginnings of URLs on private hosts."""

    @property
    def packs(self) -> bool:
        """Whether samples share rows."""
        return self.packing or self.neat_packing


class PreprocessParameters(OpenSection):
    """The model's processor, and the sizes of media."""

    model_name_or_path: PathText | None = None
    """Folder of the processor; null: `model.model_name_or_path`."""
    use_fast_tokenizer: Flag = True
    """Use the tokenizer written in Rust."""
    split_special_tokens: Flag = False
    """Treat special tokens in the text as plain text."""
    image_max_pixels: Positive | None = None
    """Images above are shrunk. This and the following keys: null leaves it to the processor of the model's folder; what
    is given here, inference, evaluation and the exported folder take over."""
    image_min_pixels: Natural | None = None
    """Images below are enlarged."""
    video_max_pixels: Positive | None = None
    """Frames above are shrunk."""
    video_min_pixels: Natural | None = None
    """Frames below are enlarged."""
    video_fps: Annotated[Number, Field(gt=0)] | None = None
    """Frames taken a second; null: as the folder's processor takes them, 2 where it takes all."""
    video_maxlen: Positive | None = None
    """Most frames of a video; null: as the folder's processor takes them, 128 where it takes all."""
    image_do_pan_and_scan: Flag | None = None
    """Gemma3: crop wide images."""
    crop_to_patches: Flag | None = None
    """InternVL: cut an image into tiles."""
    use_audio_in_video: Flag = False
    """Feed the sound of videos, interleaved with their frames; a video without sound is a bad sample then."""
    audio_sampling_rate: Positive | None = None
    """Samples a second after resampling; null: what the folder's processor hears, 16,000 where it does not say."""
    trust_remote_code: Flag = False
    """Let the folder's own Python files define the processor. They are run: read them first."""
    fix_mistral_regex: Flag | None = None
    """Repair how a tokenizer of Mistral's splits text, which older folders have wrong; null leaves it to transformers,
    which warns of such folders."""
    image_resolution: Positive | None = None
    """Accepted from older files; `image_max_pixels` counts."""
    video_resolution: Positive | None = None
    """Accepted from older files; `video_max_pixels` counts."""


class DatasetParam(OpenSection):
    """One dataset."""

    dataset_type: str = "huggingface"
    """Registered id of the dataset class."""
    attr: DatasetAttr = Field(default_factory=DatasetAttr)
    """Where a row keeps what."""
    basic_parameters: BasicParameters = Field(default_factory=BasicParameters)
    """Which rows, and how they become token ids."""
    preprocess_parameters: PreprocessParameters = Field(default_factory=PreprocessParameters)
    """The processor and the sizes of media."""


class CollateParam(Section):
    """How samples become a batch."""

    model_name: str | None = None
    """Registered id of the collator (older name `collator_id`); null: by the model's processor."""
    ignore_pad_token_for_loss: Flag = False
    """Accepted from older files: padding is never trained on."""
    pad_to_multiple_of: Positive | None = None
    """Rows are padded to a multiple of so many tokens; null: 8 on accelerators, whose kernels gain by it, and 1 on a
    CPU."""


class DataloaderParam(Section):
    """In what order and by how many processes samples are read."""

    dataloader_mode: Literal["sampler", "base", "variable", "custom"] = "sampler"
    """`sampler`: by `sampler_type`; `base`: rows in order; `variable`: batches of varying size, as TokenBudgetSampler
    makes them (what generators do anyway); `custom`: the dataset brings its own loader."""
    sampler_type: str = "BaseRandomBatchSampler"
    """BaseRandomBatchSampler, SequentialSampler: order in which samples are drawn. TokenBudgetSampler: micro-batches
    filled up to `max_tokens_per_batch`; LengthGroupedSampler, BucketBatchSampler: `micro_batch_size` samples of similar
    length; both with steps of nearly equal cost on all ranks. Generators have one size a micro-batch whatever is named
    (BucketBatchSampler, VariableVideoBatchSampler)."""
    shuffle: Annotated[Flag, null_means(True)] = True
    """A new order every epoch, a function of seed and epoch alone."""
    drop_last: Annotated[Flag, null_means(True)] = True
    """Leave out the last short batch of an epoch. Where micro-batches are filled by size, what is left out goes first
    in the next epoch. Generators: micro-batches that do not make up a step, others each time."""
    pin_memory: Flag | None = None
    """Pin host memory for faster copies; null: where there is an accelerator."""
    max_tokens_per_batch: Positive | None = None
    """Most tokens of a micro-batch, padding included; as many samples as fit. Null: with `packing`, TokenBudgetSampler
    or mode `variable` `training.micro_batch_size` × `cutoff_len`. Generators: most latent tokens; null:
    `training.micro_batch_size` samples."""
    max_patches_per_batch: Positive | None = None
    """Most encoder work of a micro-batch (vision patches, audio frames), where micro-batches are filled by size."""
    shuffle_window: Positive = 10_000
    """Rows among which streamed rows are shuffled."""
    num_workers: Natural = 2
    """Processes that prepare batches; 0: in the trainer itself."""
    prefetch_factor: Positive | None = None
    """Batches that each process holds ready."""
    timeout: Seconds = 600.0
    """Longest wait for a micro-batch, in seconds: a process that hangs ends the run, and its samples are named."""
    enable_preload: Flag = False
    """Copy the next batch to the device while the current one is trained on."""
    collate_param: CollateParam = Field(default_factory=CollateParam)
    """How samples become a batch."""


class DataArguments(Section):
    """Which rows, how they are read, rendered, and dealt into batches."""

    dataset_param: DatasetParam = Field(default_factory=DatasetParam)
    """The training data."""
    val_dataset_param: DatasetParam | None = None
    """The validation data, when it is read differently."""
    dataloader_param: DataloaderParam = Field(default_factory=DataloaderParam)
    """Order, processes, batches."""
