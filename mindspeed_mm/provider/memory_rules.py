"""Rules for the flags that trade time for memory."""

from __future__ import annotations

from mindspeed_mm.fsdp.params.yaml.tree import SourcePosition
from mindspeed_mm.provider.reading import Reading

_PLAN = "features.recompute_plan"


def recomputation(reading: Reading) -> None:
    """Which layers are computed again in the backward pass."""
    granularity, place = reading.value("recompute_granularity"), reading.place("recompute_granularity")
    if granularity is None and reading.value("recompute_activations"):  # as Megatron reads it
        granularity, place = "selective", reading.place("recompute_activations")
    if "recompute_granularity" in reading.settled:
        return
    if granularity is None:
        if reading.has("recompute_method"):
            reading.draft.note("--recompute-method has no effect without --recompute-granularity.")
        return
    if reading.value("use_torch_fsdp2"):
        way_out = "Leave it out, and name recompute_modules in fsdp2_config.yaml."
        reading.draft.problem("cannot be combined with --use-torch-fsdp2", place, way_out)
        return
    method, count = reading.value("recompute_method"), reading.value("recompute_num_layers")
    put_recomputation(reading, granularity, method, count, place)


def put_recomputation(
    reading: Reading, granularity: str, method: str | None, count: int | None, place: SourcePosition
) -> None:
    """Switch recomputation on.

    Args:
        reading: Takes the keys, or the problem.
        granularity: `full` or `selective`.
        method: `uniform`: all layers. `block`: the first `count` of each pipeline stage.
        count: Number of layers; 0 with `block` switches it off.
        place: Who asks for it.
    """
    draft = reading.draft
    if granularity not in ("full", "selective"):
        draft.problem(f"'{granularity}' is neither full nor selective", place)
        return
    if method not in (None, "uniform", "block"):
        draft.problem(f"'{method}' is neither uniform nor block", reading.place("recompute_method"))
        return
    if granularity == "full" and method == "block" and count == 0:
        return
    draft.put("features.recompute", True, place)
    if granularity == "selective":
        draft.put(f"{_PLAN}.mode", "selective", place)
    elif method == "block" and count:
        _put_first_layers(reading, count, place)


def kept_attention(reading: Reading) -> None:
    """The result of attention is kept while the rest of a layer is computed again."""
    count = reading.value("recompute_num_layers_skip_core_attention")
    if not reading.value("recompute_skip_core_attention"):
        if count:
            reading.draft.note("--recompute-num-layers-skip-core-attention acts with --recompute-skip-core-attention.")
    elif count != 0:
        place = reading.place("recompute_skip_core_attention")
        reading.draft.put("model.skip_flash_attn_recompute", True, place)


def fused_kernels(reading: Reading) -> None:
    """Fused kernels where they are installed."""
    for name in ("use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb"):
        if reading.value(name):
            reading.draft.put("features.fused_kernels", "auto", reading.place(name))


def _put_first_layers(reading: Reading, count: int, place: SourcePosition) -> None:
    """Patterns of the first layers of each stage; all layers need none."""
    stages = reading.stage_layers or _even_stages(reading)
    if not stages or reading.names is None or not reading.names.layers:
        reading.draft.note(
            f"{place}: the model's layers are not known here, so all of them are computed again, not {count} a stage."
        )
        return
    if all(count >= layers for layers in stages):
        return
    spans, start = [], 0
    for layers in stages:
        last = start + min(count, layers) - 1
        if layers:
            spans.append(str(start) if last == start else f"{start}-{last}")
        start += layers
    pattern = f"{reading.names.layers}.{{{','.join(spans)}}}"
    reading.draft.put(f"{_PLAN}.apply_modules", [pattern], place)


def _even_stages(reading: Reading) -> list[int]:
    """Layers of each stage where nobody says how they are cut: as Megatron cuts them, all equal."""
    stages = reading.size("pipeline_parallel_size") * reading.draft.value("parallel.pp_plan.virtual_stages", 1)
    layers = reading.decoder_layers
    if layers is None or layers % stages:
        return []
    return [layers // stages] * stages
