"""How a person said that a checkpoint is divided, checked against the model that it is divided of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, ParallelConfig
from mindspeed_mm.checkpoint.megatron.family import Config, MegatronModel
from mindspeed_mm.checkpoint.megatron.layout import FLAG_OF_TOWER, MegatronLayout, Stages, even_layers
from mindspeed_mm.core.errors import Problem, UsageError


def layout_of(
    said: ParallelConfig, depths: Mapping[str, int], *, canonical: bool = False, u_shape: bool = False
) -> MegatronLayout:
    """The division that flags mean.

    Args:
        said: Layers of each tower, and ranks.
        depths: Layers of each tower of the model.
        canonical: Projections are stored apart.
        u_shape: Embedding, final norm and head all stand on the first stage.

    Raises:
        UsageError: Layers are named of a tower that the model does not have, or a tower has more tensor ranks than the
            language model.
    """
    named: dict[str, Stages] = {}
    given = {"text": said.llm_pp_layers, "vision": said.vit_pp_layers, "audio": said.audio_pp_layers}
    for tower, stages in given.items():
        if stages is None:
            continue
        if not stages or not all(stages):
            raise UsageError(
                f"{json.dumps(stages)} names no stage",
                key=FLAG_OF_TOWER[tower],
                way_out="Write [14,14], or one list for each virtual chunk: [[7,7],[7,7]].",
            )
        named[tower] = tuple(map(tuple, stages))
    # Its stages and chunks are those of all towers.
    text = named.get("text", ((0,),))
    layers = even_layers(depths, len(text[0]), len(text)) | named
    sizes = {}
    for tower, size, flag in (
        ("vision", said.vit_tp_size, "vit_tp_size"),
        ("audio", said.audio_tp_size, "audio_tp_size"),
    ):
        if size > said.tp_size and tower in depths:
            what = f"{size} ranks for the {tower} tower are more than tp_size {said.tp_size}"
            raise UsageError(what, key=flag)
        if size not in (0, said.tp_size) and tower in depths:
            sizes[tower] = size
    several = len(next(iter(layers.values()))[0]) > 1
    everywhere: list[str] = []
    if said.encoders_on_every_stage and several:
        everywhere = [tower for tower in depths if tower != "text"]
    return MegatronLayout(
        layers,
        tp=said.tp_size,
        ep=said.ep_size,
        tp_of_tower=sizes,
        canonical=canonical,
        everywhere=frozenset(everywhere),
        u_shape=u_shape,
    )


def depths_of(layers: Mapping[str, Stages]) -> dict[str, int]:
    """Layers of each tower of a division."""
    return {tower: sum(map(sum, stages)) for tower, stages in layers.items()}


def check_facts(said: CommonModelConfig, model: MegatronModel, config: Config, where: Path) -> None:
    """Compare what a person said of the model with its config.json.

    Raises:
        UsageError: Naming both values.
    """
    known = {
        "num_experts": model.experts,
        "num_key_value_heads": next(_found(config, "num_key_value_heads"), None),
        "tie_word_embeddings": model.tied_head,
        "llm_num_layers": model.depths.get("text"),
        "vit_num_layers": model.depths.get("vision"),
        "audio_num_layers": model.depths.get("audio"),
    }
    problems = []
    for name, value in said.model_dump(include=set(known)).items():
        if None not in (value, known[name]) and value != known[name]:
            what = f"{value} was given, and config.json has {known[name]}"
            problems.append(Problem(what, str(where), f"cfg.common_model_config.{name}"))
    if problems:
        raise UsageError("what was given contradicts the model's config.json", problems=problems)


def _found(config: Config, key: str) -> Iterator[object]:
    """Values of a key, in the configuration and then in its sections."""
    if key in config:
        yield config[key]
    for name, section in config.items():
        if isinstance(section, Mapping) and not name.startswith(("vision", "audio", "talker", "token2wav")):
            yield from _found(section, key)
