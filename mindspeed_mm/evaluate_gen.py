"""Draws VBench's prompts and lets it score the clips: `torchrun … evaluate_gen.py --mm-model eval.json --load RUN`."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.inference_sora import generator_of
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.draw import generate
from mindspeed_mm.tasks.evaluate.generated.benchmark import DIMENSIONS, check_dimensions, prompts_of, under_their_names
from mindspeed_mm.tasks.evaluate.generated.measures import told
from mindspeed_mm.tasks.evaluate.generated.vbench import find_vbench, measure_own_prompts

_SAMPLES = 5
"""Clips of a prompt that VBench asks for."""


def evaluate() -> None:
    """Print the score of each dimension; `t2v_eval_results.json` in `eval_result_path` has that of each clip.

    Raises:
        ConfigError: There is no model, or no `eval_config`.
    """
    args = parse_args()
    translated = translate(args, for_training=False)
    section, where = JsonSection(translated.model_json), str(args.mm_model or "--mm-model")
    config = section.get("eval_config")
    if not isinstance(config, JsonSection):
        raise ConfigError("is not given", where=where, key="eval_config", way_out="It names dimensions and prompts.")
    dimensions: list[str] = config.get("dimensions") or []
    check_dimensions(dimensions, where)
    package = find_vbench(Path(python) if (python := config.get("vbench_python")) else None)  # before clips are drawn
    data = config.get("dataset", JsonSection())
    basic, extra = (data.get(name, JsonSection()) for name in ("basic_param", "extra_param"))
    prompts = prompts_of(
        Path(basic.get("data_folder", "prompts")),
        dimensions,
        all_prompts=extra.get("prompt_file", "all_dimension.txt"),
        longer_prompts=extra.get("augmented_prompt_file") if extra.get("augment") else None,
        most=extra.get("prompts_per_dim", 0),
    )
    drawn = Path(section.get("save_path", "samples"))
    if config.get("need_inference", True):
        settings: JsonObject = translated.arguments.inference.sampling.model_dump(exclude_unset=True)
        settings = {name: value for name, value in settings.items() if name not in ("prompts", "prompts_file")}
        settings |= {"num_samples": extra.get("samples_per_prompt", _SAMPLES)}
        model, transformer = generator_of(translated.arguments.model, translated.arguments.training)
        texts = tuple(prompt.text for prompt in prompts)
        request = generate.GenerateRequest(prompts=texts, settings=settings, transformer=transformer)
        outcome = generate.run(model, drawn, request)
        if outcome is None:
            return  # one rank scores
        say(outcome.sentence())
    info, out = basic.get("data_path"), Path(config.get("eval_result_path", "eval_result"))
    is_offline = bool(config.get("load_ckpt_from_local", False))
    with under_their_names(drawn, prompts) as clips:
        scores = measure_own_prompts(
            clips, dimensions or DIMENSIONS, Path(info) if info else None, out, package, is_offline=is_offline
        )
    say("\n".join(told(name, one) for name, one in scores.items()))


def main() -> None:
    """Run `evaluate` as a script: an error becomes a message and an exit code."""
    run_entry(evaluate)


if __name__ == "__main__":
    main()
