"""The `training.evaluate` section: held-out questions answered while training, the best checkpoint, when to stop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindspeed_mm.fsdp.params.value_types import Flag, Natural, Number, PathText, Positive, Section

METRIC_NAMES = {"exact": "eval_accuracy", "wer": "eval_wer", "cer": "eval_cer"}
"""How answers are compared → what their score is called in the log."""


class EvaluateArguments(Section):
    """Evaluation by generation while training, the best checkpoint, and early stopping."""

    interval: Natural = 0
    """Number of steps between evaluations, in which the model answers held-out questions; 0: none. An evaluation also
    follows the last step."""
    data: PathText | None = None
    """File of the questions and their answers, in a format that `mm evaluate --data` takes."""
    media_dir: PathText | None = None
    """Folder that media paths in `data` are relative to; null: the folder of `data`."""
    max_samples: Positive | None = None
    """Number of questions, from the beginning of `data`; null: all."""
    batch_size: Positive = 16
    """Number of questions that a rank answers at a time."""
    max_new_tokens: Positive = 128
    """Maximum length of an answer in tokens."""
    metric: Literal["exact", "wer", "cer"] = "exact"
    """How answers are compared with the expected ones. exact: whether each is the expected one (`eval_accuracy`); wer
    or cer: the share of words or characters that are wrong (`eval_wer`, `eval_cer`)."""
    ignore_case: Flag = False
    """Ignore upper and lower case when answers are compared."""
    ignore_punctuation: Flag = False
    """Compare answers without their punctuation."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept beside the newest ones, never deleted and named in `best.json`: `val_loss`
    or another number of the validation, `eval_accuracy`, `eval_wer` or `eval_cer`, or one task's, e.g.
    `eval_accuracy/reading`. Accuracies should rise, everything else should fall. Null: of a run that is validated, the
    saved checkpoint with the lowest `val_loss` is kept and named; of a model that answers and draws, the one with the
    lowest `val_total`, the weighted sum of the losses of words and pictures that training minimises."""
    min_delta: Annotated[Number, Field(ge=0)] = 0.0
    """Smallest improvement over the best value that makes a checkpoint the new best one."""
    patience: Positive | None = None
    """Number of measurements in a row that are not better than the best one, after which training stops; null: it does
    not stop."""
