"""Every flag of the table: its key acts, or it says why it does not."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from mindspeed_mm.fsdp.train.build_engine import build_lr_schedule
from mindspeed_mm.provider.flags import FLAGS, LaunchFlag, by_dest
from mindspeed_mm.provider.parse import fill_absent, parse
from mindspeed_mm.provider.translate import RULES, Translated, from_flags, translate

BASE = {
    "training.micro_batch_size": ["--micro-batch-size", "2"],
    "training.train_iters": ["--train-iters", "100"],
    "training.lr": ["--lr", "1e-3"],
}
"""Key → the flag without which nothing is trained."""

FILES = {
    "fsdp2.yaml": "sharding_size: auto\nparam_dtype: bf16\n",
    "zero.yaml": "zero3_size: 4\nparam_dtype: bf16\nforward_prefetch: True\nbackward_prefetch: 'BACKWARD_PRE'\n",
    "model.json": '{"init_from_hf_path": "models/m", "loss_cfg": {"compute_mode": "chunk"}}',
    "data.json": '{"dataset_param": {"basic_parameters": {"dataset": "rows.json", "val_dataset": "others.json"}}}',
    "tools.json": '{"profile": {"enable": true, "ranks": [1]}, "sorafeature": {"save_path": "x"}}',
}


class Case(NamedTuple):
    """What a flag with a rule does."""

    words: str
    key: str
    value: Any


ACCUMULATION = "training.gradient_accumulation_steps"
TP, PP, CP, EP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context", "expert-model"))
CP2 = f"{CP} 2 --context-parallel-algo"
CASES = {
    "posttrain_method": Case("--posttrain-method dpo", "posttrain.method", "dpo"),
    "dpo_beta": Case("--posttrain-method dpo --dpo-beta 0.3", "posttrain.dpo.beta", 0.3),
    "dpo_loss_type": Case("--posttrain-method dpo --dpo-loss-type hinge", "posttrain.dpo.loss_type", ("hinge",)),
    "dpo_label_smoothing": Case(
        "--posttrain-method dpo --dpo-label-smoothing 0.1", "posttrain.dpo.label_smoothing", 0.1
    ),
    "pref_ftx": Case("--posttrain-method dpo --pref-ftx 1", "posttrain.dpo.pref_ftx", 1.0),
    "ref_model": Case("--posttrain-method dpo --ref-model other", "posttrain.reference.model_name_or_path", "other"),
    "nproc_per_node": Case("--nproc_per_node 4 --global-batch-size 16", ACCUMULATION, 2),
    "nnodes": Case("--nnodes 2 --global-batch-size 16", ACCUMULATION, 4),
    "global_batch_size": Case("--global-batch-size 64", ACCUMULATION, 4),
    "seq_length": Case("--seq-length 77", "data.dataset_param.basic_parameters.cutoff_len", 77),
    "num_workers": Case("--num-workers 5", "data.dataloader_param.num_workers", 5),
    "virtual_pipeline_model_parallel_size": Case(
        f"{PP} 2 --virtual-pipeline-model-parallel-size 3 --global-batch-size 32",
        "parallel.pp_plan.virtual_stages",
        3,
    ),
    "context_parallel_size": Case(f"{CP} 2", "parallel.ring_attention_size", 2),
    "context_parallel_algo": Case(f"{CP2} ulysses_cp_algo", "parallel.ulysses_parallel_size", 2),
    "ulysses_degree_in_cp": Case(
        f"{CP} 8 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 4", "parallel.ring_attention_size", 2
    ),
    "moe_token_dispatcher_type": Case(
        f"{EP} 2 --moe-token-dispatcher-type alltoall_seq", "parallel.ep_plan.dispatcher", "alltoall"
    ),
    "sequence_parallel": Case(
        f"{TP} 2 --sequence-parallel",
        "parallel.tp_plan.sequence_parallel",
        ("*.layers.{*}.input_layernorm", "*.layers.{*}.post_attention_layernorm"),
    ),
    "use_distributed_optimizer": Case("--use-distributed-optimizer", "parallel.fsdp_plan.reshard_after_forward", False),
    "layerzero": Case("--use-distributed-optimizer --layerzero", "parallel.fully_shard_parallel_size", 1),
    "layerzero_config": Case("--layerzero --layerzero-config zero.yaml", "parallel.fully_shard_parallel_size", 4),
    "use_torch_fsdp2": Case("--use-distributed-optimizer --use-torch-fsdp2", "parallel.fully_shard_parallel_size", 1),
    "fsdp2_config_path": Case(
        "--use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml", "parallel.fully_shard_parallel_size", "auto"
    ),
    "bf16": Case("--bf16", "parallel.fsdp_plan.param_dtype", "bf16"),
    "fp16": Case("--fp16", "parallel.fsdp_plan.param_dtype", "fp16"),
    "mixed_precision": Case("--mixed_precision bf16", "parallel.fsdp_plan.reduce_dtype", "fp32"),
    "lr_warmup_iters": Case("--lr-warmup-iters 7", "training.lr_warmup_ratio", 0.07),
    "lr_warmup_fraction": Case("--lr-warmup-fraction 0.3", "training.lr_warmup_ratio", 0.3),
    "warmup_ratio": Case("--warmup-ratio 0.3", "training.lr_warmup_ratio", 0.3),
    "lr_warmup_steps": Case("--lr_warmup_steps 7", "training.lr_warmup_ratio", 0.07),
    "lr_decay_style": Case("--lr-decay-style cosine", "training.lr_decay_style", "cosine"),
    "lr_scheduler": Case("--lr_scheduler constant_with_warmup", "training.lr_decay_style", "constant"),
    "lr_decay_iters": Case("--lr-decay-iters 50", "training.lr_decay_ratio", 0.5),
    "lr_wsd_decay_iters": Case("--lr-decay-style WSD --lr-wsd-decay-iters 20", "training.lr_decay_ratio", 0.2),
    "lr_wsd_decay_style": Case(
        "--lr-decay-style WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style cosine", "training.lr_wsd_style", "cosine"
    ),
    "grad_reduce_in_bf16": Case("--bf16 --grad-reduce-in-bf16", "parallel.fsdp_plan.reduce_dtype", "bf16"),
    "num_virtual_stages_per_pipeline_rank": Case(
        f"{PP} 2 --num-virtual-stages-per-pipeline-rank 3 --global-batch-size 32",
        "parallel.pp_plan.virtual_stages",
        3,
    ),
    "swap_optimizer": Case("--swap-optimizer", "training.optimizer", "adamw_swap"),
    "recompute_activations": Case("--recompute-activations", "features.recompute_plan.mode", "selective"),
    "pretrained_checkpoint": Case("--pretrained-checkpoint weights", "training.no_load_optim", True),
    "ckpt_step": Case("--load runs/a --ckpt-step 12", "training.load", "runs/a/iter_0000012"),
    "profile_step_start": Case("--profile-step-start 3", "tools.profile.static_param.start_step", 4),
    "profile_step_end": Case("--profile-step-end 13", "tools.profile.static_param.end_step", 14),
    "profile_ranks": Case("--profile-ranks 1 2", "tools.profile.ranks", (1, 2)),
    "mm_set": Case("--mm-set training.on_nonfinite=skip training.max_skipped_steps=7", "training.max_skipped_steps", 7),
    "optimizer": Case("--optimizer muon", "training.optimizer", "muon"),
    "optimizer_selection": Case("--optimizer-selection fused_ema_adamw", "training.ema.enable", True),
    "weight_decay_exclude_modules": Case(
        "--weight-decay-exclude-modules norm embed", "training.no_decay_params", ("*norm*", "*embed*")
    ),
    "lr_scale_modules": Case("--lr-scale-modules head", "training.lr_scaling_plan.0.match", "head"),
    "lr_mult": Case("--lr-scale-modules head --lr-mult 10", "training.lr_scaling_plan.0.scale", 10.0),
    "calculate_per_sample_loss": Case("--calculate-per-sample-loss", "features.loss_cfg.loss_type", "per_sample_loss"),
    "calculate_per_token_loss": Case("--calculate-per-token-loss", "features.loss_cfg.loss_type", "per_token_loss"),
    "load": Case("--load weights", "training.load", "weights"),
    "load_base_model": Case("--load-base-model weights", "training.load", "weights"),
    "ckpt_format": Case("--ckpt-format torch_dcp", "training.save_format", "dcp"),
    "finetune": Case("--finetune", "training.no_load_optim", True),
    "eval_interval": Case("--mm-data data.json --eval-interval 9", "training.val_interval", 9),
    "eval_iters": Case(
        "--mm-data data.json --eval-iters 3", "data.dataset_param.basic_parameters.val_max_samples", 3 * 2 * 8
    ),
    "distributed_timeout_minutes": Case("--distributed-timeout-minutes 20", "training.step_timeout_s", 1200.0),
    "recompute_granularity": Case("--recompute-granularity selective", "features.recompute_plan.mode", "selective"),
    "recompute_method": Case("--recompute-granularity full --recompute-method uniform", "features.recompute", True),
    "recompute_num_layers": Case(
        "--recompute-granularity full --recompute-method block --recompute-num-layers 0", "features.recompute", False
    ),
    "recompute_skip_core_attention": Case("--recompute-skip-core-attention", "model.skip_flash_attn_recompute", True),
    "recompute_num_layers_skip_core_attention": Case(
        "--recompute-skip-core-attention --recompute-num-layers-skip-core-attention 0",
        "model.skip_flash_attn_recompute",
        False,
    ),
    **{
        name: Case(f"--{name}", "features.fused_kernels", "auto")
        for name in ("use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb")
    },
    "mm_model": Case("--mm-model model.json", "features.enable_chunk_loss", True),
    "mm_data": Case("--mm-data data.json", "data.dataset_param.basic_parameters.dataset", "rows.json"),
    "mm_tool": Case("--mm-tool tools.json", "tools.profile.ranks", (1,)),
    "trust_remote_code": Case("--trust-remote-code", "model.trust_remote_code", True),
    "lora_target_modules": Case(
        "--lora-target-modules linear_qkv,linear_proj",
        "training.lora.target_modules",
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "lora_r": Case("--lora-target-modules q_proj --lora-r 3", "training.lora.rank", 3),
    "lora_alpha": Case("--lora-target-modules q_proj --lora-alpha 3", "training.lora.alpha", 3.0),
    "lora_dropout": Case("--lora-target-modules q_proj --lora-dropout 0.1", "training.lora.dropout", 0.1),
    "no_shuffle": Case("--no-shuffle", "data.dataloader_param.shuffle", False),
    "resolution": Case("--resolution 256", "data.dataset_param.preprocess_parameters.height", 256),
    "weighting_scheme": Case("--weighting_scheme cosmap", "training.diffusion.loss_weighting", "cosmap"),
    "validation_prompt": Case("--validation_prompt cat", "training.sampling.prompts", ("cat",)),
}
"""Flags whose rule is more than a key: name → words, and what they set."""

ONLY_NOTED = {
    "validation_epochs": "--validation_epochs 3",
    "ai_framework": "--ai-framework pytorch",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size 1",
    "start_weight_decay": "--start-weight-decay 0.01",
    "end_weight_decay": "--end-weight-decay 0.01",
    "weight_decay_incr_style": "--weight-decay-incr-style constant",
}
"""Flags with a rule that sets nothing in the case that is allowed."""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def words_of(*, without: str = "", more: Sequence[str] = ()) -> list[str]:
    base = [word for key, words in BASE.items() if key != without for word in words]
    return [*base, *more]


def run(words: Sequence[str], world_size: int | None = 8) -> Translated:
    return translate(parse(words, {} if world_size is None else {"WORLD_SIZE": str(world_size)}))


@cache
def plain() -> Arguments:
    """Of the flags that every training needs."""
    return run(words_of()).arguments


def value(arguments: Any, key: str) -> Any:
    head, _, rest = key.partition(".0.")
    found = value_at(arguments, head)
    return value_at(found[0], rest) if rest else found


def example(flag: LaunchFlag) -> list[str]:
    words = {"int": "2", "float": "0.05", "word": "some/where", "list": "a"}
    return [] if flag.kind == "switch" else [flag.example or words[flag.kind]]


OF_KIND = {
    kind: [flag for flag in FLAGS if getattr(flag, kind)] for kind in ("key", "rule", "of_loop", "idle", "refused")
}


def names(kind: str) -> Any:
    return pytest.mark.parametrize("flag", OF_KIND[kind], ids=lambda flag: flag.name)


BESIDE = {
    **{f"training.{name}": "--optimizer muon" for name in ("matched_adamw_rms", "muon_momentum", "ns_steps")},
    "features.recompute_plan.distribute_saved_activations": f"{TP} 2 --recompute-granularity full",
}
"""Keys that act beside others alone → the flags of those."""


def test_each_flag_does_one_thing() -> None:
    assert sum(map(len, OF_KIND.values())) == len(FLAGS)
    assert len(by_dest()) == len(FLAGS)
    keys = {key for key, _ in walk_fields()}
    assert {flag.key for flag in OF_KIND["key"]} <= keys
    assert {flag.rule for flag in OF_KIND["rule"]} - {"files", "settings"} == {rule.__name__ for rule in RULES}


@pytest.mark.edge("R18")
@names("key")
def test_a_flag_with_a_key_sets_it(flag: LaunchFlag) -> None:
    given, beside = example(flag), BESIDE.get(flag.key, "").split()
    arguments = run(words_of(without=flag.key, more=[*beside, flag.spellings[0], *given])).arguments
    assert value(arguments, flag.key) == (type(value(arguments, flag.key))(given[0]) if given else True)
    if flag.key not in BASE:
        assert value(plain(), flag.key) != value(arguments, flag.key)


@pytest.mark.parametrize(
    ("ranks", "beside", "reshards"),
    [(2, "", True), (4, "", False), (None, "", False), (4, f"{CP2} ulysses_cp_algo", False)],
)
def test_one_rank_keeps_no_gathered_weights(ranks: int | None, beside: str, reshards: bool) -> None:
    """Two ranks of tensor parallelism are one data rank, which gathers nothing; ranks of a sequence gather."""
    words = words_of(more=f"{TP} 2 --use-distributed-optimizer {beside}".split())
    assert run(words, ranks).arguments.parallel.fsdp_plan.reshard_after_forward is reshards


def test_flags_of_another_optimizer_have_no_effect() -> None:
    """Megatron accepts them, and a configuration does not."""
    found = run(words_of(more=["--muon-momentum", "0.5"]))
    assert found.arguments == plain()
    assert "--muon-momentum has no effect: training.optimizer: adamw does not read it." in found.notes


@pytest.mark.edge("R18")
@names("rule")
def test_a_flag_with_a_rule_acts(flag: LaunchFlag) -> None:
    if flag.dest in ONLY_NOTED:
        assert run(words_of(more=ONLY_NOTED[flag.dest].split())).arguments == plain()
        return
    case = CASES[flag.dest]
    words = case.words.split()
    assert f"--{flag.dest}" in [word.replace("-", "_").replace("__", "--", 1) for word in words]
    ranks = None if flag.dest in ("nproc_per_node", "nnodes") else 8
    assert value(run(words_of(more=words), ranks).arguments, case.key) == case.value
    at = next(i for i, word in enumerate(words) if by_dest()[flag.dest].name in (word[2:], word[2:].replace("_", "-")))
    behind = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
    try:
        left = value(run(words_of(more=[*words[:at], *words[behind:]]), ranks).arguments, case.key)
    except (ConfigError, IndexError, KeyError):
        return  # what is left needs the flag
    assert left != case.value or flag.dest in ("recompute_method",)


@pytest.mark.edge("R18")
@pytest.mark.parametrize("reason", dict.fromkeys(flag.idle for flag in OF_KIND["idle"]))
def test_flags_without_effect_say_why(reason: str) -> None:
    flags = [flag for flag in OF_KIND["idle"] if flag.idle == reason]
    found = run(words_of(more=[word for flag in flags for word in (flag.spellings[0], *example(flag))]))
    assert found.arguments == plain()
    has = "has" if len(flags) == 1 else "have"
    assert found.notes == (f"{', '.join(f'--{flag.name}' for flag in flags)} {has} no effect: {reason}.",)


@names("of_loop")
def test_a_flag_of_the_loop_is_in_the_namespace(flag: LaunchFlag) -> None:
    namespace = parse(words_of(more=[flag.spellings[0]]), {})
    assert getattr(namespace, flag.dest) is True
    assert translate(namespace).arguments == translate(parse(words_of(), {})).arguments


def megatron_rate(step: int, style: str, warm: float, decay: int, anneal: tuple[str, int], start: float) -> float:
    """`OptimizerParamScheduler.get_lr` of Megatron-Core 0.12.1, with rates from 1e-3 down to 1e-5, counted in steps."""
    high, low = 1e-3, 1e-5
    if warm > 0 and step <= warm:
        return start + (high - start) * step / warm
    if style == "constant":
        return high
    if step > decay:
        return low
    ratio = (step - warm) / (decay - warm)
    if style == "WSD":
        shape, last = anneal
        ratio = (step - (decay - last)) / last
        if ratio <= 0:
            return high
        shares = {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": 2.0 * math.pow(0.5, ratio) - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }
        return low + shares[shape] * (high - low)
    share = 1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return low + share * (high - low)


@pytest.mark.parametrize(
    ("words", "style", "warm", "decay", "anneal", "start"),
    [
        ("cosine --lr-decay-iters 400 --lr-warmup-fraction 0.1", "cosine", 40, 400, ("", 0), 0.0),
        ("linear --lr-decay-iters 2000", "linear", 0, 2000, ("", 0), 0.0),
        ("cosine --lr-decay-iters 100 --lr-warmup-fraction 0.1", "cosine", 10, 100, ("", 0), 0.0),
        ("linear --lr-warmup-iters 7 --lr-warmup-init 1e-4", "linear", 7, 200, ("", 0), 1e-4),
        ("constant --lr-warmup-iters 2", "constant", 2, 200, ("", 0), 0.0),
        ("cosine --lr-warmup-fraction 0.003", "cosine", 0.6, 200, ("", 0), 0.0),
        ("cosine --lr-warmup-fraction 0.0333", "cosine", 6.66, 200, ("", 0), 0.0),
        ("WSD --lr-wsd-decay-iters 40", "WSD", 0, 200, ("exponential", 40), 0.0),
        *(
            (
                f"WSD --lr-wsd-decay-iters 40 --lr-warmup-iters 9 --lr-wsd-decay-style {shape}",
                "WSD",
                9,
                200,
                (shape, 40),
                0.0,
            )
            for shape in ("linear", "cosine", "minus_sqrt")
        ),
    ],
)
def test_the_learning_rate_is_megatron_s(
    words: str, style: str, warm: float, decay: int, anneal: tuple[str, int], start: float
) -> None:
    """At every step of the run, its first included."""
    more = f"--lr 1e-3 --min-lr 1e-5 --train-iters 200 --lr-decay-style {words}".split()
    schedule = build_lr_schedule(run(words_of(without="training.train_iters", more=more)).arguments.training, 200)
    for step in range(200):
        expected = megatron_rate(step, style, warm, decay, anneal, start)
        assert schedule.at(step) == pytest.approx(expected, rel=1e-12, abs=1e-18), step


@pytest.mark.edge("R18")
@pytest.mark.parametrize("reason", dict.fromkeys(flag.refused for flag in OF_KIND["refused"]))
def test_refused_flags_say_why(reason: str) -> None:
    flags = [flag for flag in OF_KIND["refused"] if flag.refused == reason]
    with pytest.raises(ConfigError) as raised:
        run(words_of(more=[word for flag in flags for word in (flag.spellings[0], *example(flag))]))
    found = [(problem.where, problem.what) for problem in raised.value.problems]
    assert found == [(f"--{flag.name}", f"is not built: {reason}") for flag in flags]


def test_reasons_are_said_once() -> None:
    notes = run(words_of(more=["--use-mcore-models", "--use-flash-attn", "--swiglu"])).notes
    assert notes == (
        "--use-mcore-models, --use-flash-attn have no effect: kernels are chosen for the device at hand.",
        "--swiglu has no effect: the model's folder says it.",
    )


def test_defaults_are_megatron_s() -> None:
    config = from_flags(words_of(), {"WORLD_SIZE": "8"})
    training = config.arguments.training
    assert (training.seed, training.weight_decay, training.log_interval) == (1234, 0.01, 100)
    assert (training.lr_decay_style, training.save_interval) == ("linear", 0)
    assert str(config.origins["training.seed"]) == "derived: Megatron's default of --seed"
    assert str(config.origins["training.lr"]) == "--lr"


def test_underscores_and_dashes_are_the_same() -> None:
    assert parse(["--train_iters", "3"], {}).train_iters == 3
    assert parse(["--nproc-per-node=4", "--nnodes", "2"], {}).world_size == 8


def test_a_user_s_own_flags() -> None:
    def provider(parser: Any) -> Any:
        group = parser.add_argument_group("mine")
        group.add_argument("--my-size", type=int, default=3)
        group.add_argument("--seed", type=int, default=5)
        return parser

    namespace = parse(["--my-size", "4", *words_of()], {}, provider)
    assert (namespace.my_size, namespace.seed) == (4, 5)
    assert translate(namespace).arguments.training.lr == 1e-3


def test_a_user_s_own_flag_may_have_the_name_of_one_without_effect() -> None:
    def provider(parser: Any) -> None:
        parser.add_argument("--stage", type=int)
        parser.add_argument("--split", type=float)

    found = translate(parse(words_of(more=["--stage", "2", "--split", "0.5"]), {}, provider))
    assert found.notes == ()
    with pytest.raises(ConfigError, match="--stage"):
        run(words_of(more=["--stage", "2"]))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--lrr", "--lr"),
        ("--train-iter", "--train-iters"),
        ("--micro-batchsize", "--micro-batch-size"),
        ("--num-worker", "--num-workers"),
        ("--my-flag", ""),
        ("--hps-reward-sav", ""),  # it is an error itself
        ("--something-else", ""),
    ],
)
def test_only_near_flags_that_work_are_offered(wrong: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse([wrong, "3"], {})
    assert raised.value.problems[0].way_out == (f"Did you mean '{meant}'?" if meant else "")


def test_settings_of_the_yaml_are_judged_as_there() -> None:
    with pytest.raises(ConfigError, match=r"training.on_nonfinit.*Did you mean 'on_nonfinite'"):
        run(words_of(more=["--mm-set", "training.on_nonfinit=skip"]))


def test_a_user_s_own_flag_that_is_required() -> None:
    def provider(parser: Any) -> None:
        parser.add_argument("--mine", required=True)

    with pytest.raises(UsageError, match="the following arguments are required: --mine"):
        parse(words_of(), {}, provider)


def test_a_script_of_one_model_names_it_by_load() -> None:
    arguments = run(words_of(more=["--data-path", "rows.jsonl", "--load", "ckpt/OCR"])).arguments
    assert (arguments.model.model_name_or_path, arguments.training.load) == ("ckpt/OCR", None)


def test_defaults_of_a_program_fill_absent_flags() -> None:
    namespace = parse(words_of(), {})
    fill_absent(namespace, {"seed": 3, "lr": 7.0, "own": 1})
    training = translate(namespace).arguments.training
    assert (training.seed, training.lr, namespace.own) == (3, 1e-3, 1)


def test_unknown_words_can_be_left_out() -> None:
    assert parse(["--lrr", "3", "word"], {}, ignore_unknown=True).lr is None
    with pytest.raises(UsageError, match="--lrr  unknown flag"):
        parse(["--lrr", "3"], {})


def test_parsing_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--lr', '1', '--train-iters', '2', '--micro-batch-size', '1']\n"
        "from mindspeed_mm.arguments import parse_args\n"
        "from mindspeed_mm.provider.translate import translate\n"
        "assert translate(parse_args()).arguments.training.train_iters == 2\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
