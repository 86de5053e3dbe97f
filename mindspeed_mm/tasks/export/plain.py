"""A run whose model has no folder, such as a plugin's plain `nn.Module`: its weights alone, with how to load them."""

from __future__ import annotations

from pathlib import Path

import torch

from mindspeed_mm.checkpoint.choice import Which, choose_checkpoint
from mindspeed_mm.checkpoint.hf_folder import write_weights
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.folder_writing import atomic_folder, copy_plain
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint, open_checkpoint
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors, Weights
from mindspeed_mm.fsdp.utils.ranks import Ranks

_CARD = """\
# {title}

Weights of `{model}` after {step:,} steps. The model is built by code of its own, so this folder has no configuration
that a library reads; `resolved.yaml` is the configuration of the run.

```python
from pathlib import Path

from safetensors.torch import load_file

weights = {{}}
for file in Path("{title}").glob("*.safetensors"):
    weights |= load_file(file)
model.load_state_dict(weights)  # a {model}
```
"""


def model_without_folder(source: Path) -> str | None:
    """The class of a run's model that came from no folder; None: it came from one, or nothing tells.

    Args:
        source: A run folder, or one of its checkpoints.
    """
    for run in (source, source.absolute().parent):
        record = RunFolder(run).run_json
        if record.exists():
            facts = read_json_object(record, CheckpointError)
            name = facts.get("model_class")
            return name if facts.get("model_name_or_path") is None and isinstance(name, str) else None
    return None


def write_plain(
    source: Path,
    target: Path,
    model: str,
    *,
    step: Which,
    weights: Weights | None,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    overwrite: bool,
) -> tuple[CommittedCheckpoint, Weights, dict[str, int], str]:
    """Write the weights of a checkpoint under the model's own names.

    Args:
        source: As of `model_without_folder`.
        target: The folder to write.
        model: The class.
        step: Which of the run's checkpoints.
        weights: The average, or as they were trained; None: the average when there is one.
        dtype: None: as they were trained.
        max_shard_bytes: Largest size of one file.
        overwrite: Replace what an earlier export has written there.

    Returns:
        The checkpoint, which weights were taken, the bytes of each tensor, and why this checkpoint.

    Raises:
        CheckpointError: It is damaged or absent.
        UsageError, MachineError: The target may not or cannot be written.
    """
    chosen = choose_checkpoint(source, step)
    checkpoint = open_checkpoint(chosen.path, Ranks(), "hash")
    reader = DcpTensors(checkpoint, weights)
    tensors = reader.lazy()
    with atomic_folder(target, overwrite=overwrite, sources=[source]) as draft:
        write_weights(
            tensors, draft, lambda _, held: dtype if dtype and held.is_floating_point else held, max_shard_bytes
        )
        resolved = RunFolder(checkpoint.path.parent).resolved
        if resolved.exists():
            copy_plain(resolved, draft / resolved.name)
        card = _CARD.format(title=target.name, model=model, step=checkpoint.iteration or 0)
        (draft / "README.md").write_text(card, encoding="utf-8")
    return checkpoint, reader.weights, {name: tensor.size_bytes for name, tensor in tensors.items()}, chosen.why
