"""Refusals between features, the optimizer, low precision and the keys of the loss."""

from __future__ import annotations

from tests.fsdp.refusals_of_plans import ACCUMULATION, BLOCKS, EXPERT, PIPELINE, RING, TENSOR
from tests.helpers.refusal import BASIC, ENVIRONMENT, LOADER, LORA, PREPROCESS, Refusal, with_config

RECOMPUTE = ("features.recompute=true",)
SLICES = ("features.enable_chunk_mbs=true", "training.micro_batch_size=4")
COMPILE = ("features.compile=true", "features.compile_plan.backend=eager")
LOW, LOSS, FSDP = "training.quantization_plan", "features.loss_cfg", "parallel.fsdp_plan"
TENSORWISE = f"{LOW}.recipe_name=tensorwise"
MX_EXPERTS = (
    f"{LOW}.recipe_name=mxfp8",
    f"{LOW}.quant_converters=[quantize.linear.mx, quantize.moe.mx]",
    f"{LOW}.extra_args={{emulate: true}}",
)
LIST = "model.language_model.layers"

FEATURES = (
    Refusal(
        "re-entrant recompute that keeps results",
        (*RECOMPUTE, "features.recompute_plan.use_reentrant=true", "features.recompute_plan.mode=selective"),
        "keeps results of the forward pass",
        "features.recompute_plan.use_reentrant",
    ),
    Refusal(
        "results of a kernel that is none",
        (*RECOMPUTE, "model.skip_flash_attn_recompute=true", "model.attn_implementation=eager"),
        "attention has no kernel whose result could be kept",
        "model.skip_flash_attn_recompute",
    ),
    Refusal(
        "results of a part of a graph",
        (*RECOMPUTE, "model.skip_gdn_recompute=true", "features.compile=true"),
        "compiles a block into one graph",
        "model.skip_gdn_recompute",
    ),
    Refusal(
        "results of layers that are not here",
        (*RECOMPUTE, "model.skip_gdn_recompute=true"),
        "has no layers of",
        "model.skip_gdn_recompute",
    ),
    Refusal(
        "results of attention with dropout",
        (*RECOMPUTE, "model.skip_flash_attn_recompute=true"),
        "has a dropout of 0.1 in its attention",
        "model.skip_flash_attn_recompute",
        spoil=with_config(attention_dropout=0.1),
        base="text",
    ),
    Refusal(
        "inputs divided among one rank",
        (*RECOMPUTE, "features.recompute_plan.distribute_saved_activations=true"),
        "no other rank has the same inputs",
        "features.recompute_plan.distribute_saved_activations",
    ),
    Refusal(
        "inputs of experts divided",
        (*RECOMPUTE, f"{TENSOR}=2", "features.recompute_plan.distribute_saved_activations=true"),
        "none is a whole block without experts",
        "features.recompute_plan.distribute_saved_activations",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "slices of a packed row",
        (*SLICES, f"{BASIC}.packing=true"),
        "packing makes one row of a micro-batch",
        "features.enable_chunk_mbs",
    ),
    Refusal(
        "slices of a mask",
        (*SLICES, "features.skip_moe_pad_tokens=true"),
        "finds padding by the mask of the whole micro-batch",
        "features.enable_chunk_mbs",
        base="moe",
    ),
    Refusal(
        "slices of other numbers on other ranks",
        (*SLICES, f"{EXPERT}=2", f"{LOADER}.dataloader_mode=variable"),
        "micro-batches that are filled up",
        "features.enable_chunk_mbs",
        ranks=2,
        base="moe",
    ),
    Refusal(
        "recompute of a list",
        (*RECOMPUTE, f"features.recompute_plan.apply_modules=[{LIST}]"),
        "is a ModuleList, which is never called itself",
        "features.recompute_plan.apply_modules",
    ),
    Refusal(
        "recompute of a part twice",
        (*RECOMPUTE, f"features.recompute_plan.apply_modules=['{BLOCKS}','{BLOCKS}.mlp']"),
        "it would be done twice",
        "features.recompute_plan.apply_modules",
    ),
    Refusal(
        "offload inside of what is computed again",
        (
            *RECOMPUTE,
            "features.enable_activation_offload=true",
            f"features.activation_offload_plan.apply_modules=['{BLOCKS}.mlp']",
        ),
        "which is computed again instead of keeping anything",
        "features.activation_offload_plan.apply_modules",
    ),
    Refusal(
        "a compiler that nobody has",
        ("features.compile=true", "features.compile_plan.backend=fast"),
        "has no backend 'fast'",
        "features.compile_plan.backend",
    ),
    Refusal(
        "a mode of another compiler",
        (*COMPILE, "features.compile_plan.mode=max-autotune"),
        "takes no modes, inductor does",
        "features.compile_plan.mode",
    ),
    Refusal(
        "a list compiled",
        (*COMPILE, f"features.compile_plan.apply_modules=[{LIST}]"),
        "which is never called itself",
        "features.compile_plan.apply_modules",
    ),
    Refusal(
        "kernels of another device",
        ("features.fused_kernels=true",),
        "there are no fused kernels on 'cpu'",
        "features.fused_kernels",
        ENVIRONMENT,
    ),
    Refusal(
        "padding kept from experts that are not there",
        ("features.skip_moe_pad_tokens=true",),
        "has no experts behind transformers' interface",
        "features.skip_moe_pad_tokens",
    ),
    Refusal(
        "attention that nobody can choose",
        ("model.attn_implementation=native-sparse",),
        "cannot be chosen as a kernel",
        "model.attn_implementation",
    ),
    Refusal(
        "attention without a backward pass",
        ("model.attn_implementation=flex_attention",),
        "has no backward pass on a CPU",
        "model.attn_implementation",
        ENVIRONMENT,
        base="text",
    ),
)

LOSSES = (
    Refusal(
        "slices of the model's own loss",
        (f"{LOSS}.loss_type=raw", "features.enable_chunk_loss=true"),
        "applies to the engine's loss",
        "features.enable_chunk_loss",
    ),
    Refusal(
        "a loss that is rounded",
        ("features.enable_chunk_loss=true", f"{FSDP}.output_dtype=bf16"),
        "would round the loss",
        f"{FSDP}.output_dtype",
    ),
    Refusal(
        "a router's loss offloaded that does not exist",
        (f"{LOSS}.router_aux_loss_offload=true",),
        "true, but there is no router loss",
        f"{LOSS}.router_aux_loss_offload",
        base="moe",
    ),
    Refusal(
        "a router's loss of a generator",
        (f"{LOSS}.router_aux_loss_coef=0.01",),
        "is for language models",
        f"{LOSS}.router_aux_loss_coef",
        base="flux",
    ),
    Refusal(
        "logits of a generator",
        (f"{LOSS}.z_loss_coef=0.01",),
        "has no output head",
        f"{LOSS}.z_loss_coef",
        base="flux",
    ),
    Refusal(
        "further tokens of the model's own loss",
        ("model.mtp_num_layers=1", f"{LOSS}.loss_type=raw"),
        "the model's own loss does not include them",
        f"{LOSS}.loss_type",
    ),
    Refusal(
        "further tokens of a spread sequence",
        ("model.mtp_num_layers=1", f"{RING}=2"),
        "the next token may be another rank's",
        RING,
        ranks=2,
    ),
    Refusal(
        "further tokens of split layers",
        ("model.mtp_num_layers=1", f"{TENSOR}=2"),
        "the heads' layers have no plan for it",
        TENSOR,
        ranks=2,
    ),
)

LOW_PRECISION = (
    Refusal("low precision of nothing", (f"{LOW}.apply_modules=[x]",), "nothing would be in low", f"{LOW}.recipe_name"),
    Refusal("no such recipe", (f"{LOW}.recipe_name=fp9",), "there is no recipe 'fp9'", f"{LOW}.recipe_name"),
    Refusal("8 bits without instructions", (TENSORWISE,), "a CPU has none", f"{LOW}.recipe_name", ENVIRONMENT),
    Refusal(
        "no such converter",
        (TENSORWISE, f"{LOW}.quant_converters=[conv]"),
        "there is no converter 'conv'",
        f"{LOW}.quant_converters",
    ),
    Refusal("experts of a dense model", MX_EXPERTS, "has no experts in fused parameters", f"{LOW}.quant_converters"),
    Refusal(
        "experts whose sides fill no blocks",
        MX_EXPERTS,
        "take multiples of 32",
        f"{LOW}.quant_converters",
        base="moe",
    ),
    Refusal(
        "no such setting",
        (TENSORWISE, f"{LOW}.extra_args={{colour: 1}}"),
        "has no setting 'colour'",
        f"{LOW}.extra_args",
    ),
    Refusal("8 bits of frozen weights", (TENSORWISE, *LORA), "computes trained weights in 8 bits", LOW),
    Refusal("8 bits of split layers", (TENSORWISE, f"{TENSOR}=2"), "scales whole layers", LOW, ranks=2),
    Refusal(
        "scales of other weights",
        (
            TENSORWISE,
            f"{LOW}.fsdp_low_precision_all_gather_mode=all",
            "training.ema.enable=true",
            "training.ema.use_for_evaluation=true",
        ),
        "keeps the scales of the trained weights",
        f"{LOW}.fsdp_low_precision_all_gather_mode",
    ),
    Refusal(
        "8 bits beside fp16",
        (TENSORWISE, f"{FSDP}.param_dtype=fp16"),
        "are computed from bf16",
        f"{FSDP}.param_dtype",
    ),
    Refusal(
        "a smallest scale above the first",
        ("training.min_loss_scale=10", "training.initial_loss_scale=2"),
        "is above training.initial_loss_scale",
        "training.min_loss_scale",
    ),
    Refusal("no scale", ("training.initial_loss_scale=0",), "0 is out of range", "training.initial_loss_scale"),
)

OPTIMIZERS = (
    Refusal(
        "muon with AdamW's states",
        ("training.optimizer=muon", "training.optimizer_state_dtype=int8"),
        "is for AdamW; muon keeps one state",
        "training.optimizer_state_dtype",
    ),
    Refusal(
        "muon of adapters",
        (*LORA, "training.optimizer=muon"),
        "muon has no matrix to train",
        "training.optimizer",
    ),
    Refusal(
        "muon without a matrix",
        ("training.optimizer=muon", f"model.freeze=[model.visual,'{BLOCKS}']"),
        "finds no matrix to train",
        "training.optimizer",
    ),
    Refusal(
        "states on the host twice",
        ("training.optimizer=adamw_swap", f"{FSDP}.cpu_offload=true"),
        "adamw_swap, but parallel.fsdp_plan.cpu_offload",
        "training.optimizer",
    ),
    Refusal(
        "gradients on the host twice",
        ("features.enable_gradient_offload=true", f"{FSDP}.cpu_offload=true"),
        "true, but parallel.fsdp_plan.cpu_offload",
        "features.enable_gradient_offload",
    ),
    Refusal(
        "a decay that leaves nothing stable",
        ("training.lr_decay_style=wsd",),
        "at 1.0 nothing stays stable",
        "training.lr_decay_ratio",
    ),
    Refusal(
        "parts of a schedule that are more than the whole",
        ("training.lr_decay_style=wsd", "training.lr_decay_ratio=0.8", "training.lr_warmup_ratio=0.5"),
        "add up to more than all steps",
        "training.lr_decay_ratio",
    ),
    Refusal("a smallest rate above the rate", ("training.lr_min=1",), "is above training.lr", "training.lr_min"),
    Refusal(
        "a rate for what is not an expression",
        ("training.lr_scaling_plan=[{match: '(', scale: 2}]",),
        "is not a regular expression",
        "training.lr_scaling_plan",
    ),
    Refusal(
        "8-bit states of cut rows",
        ("training.optimizer_state_dtype=int8", f"{TENSOR}=2"),
        "are cut between ranks so that",
        "training.optimizer_state_dtype",
        ranks=2,
    ),
    Refusal("a brace without its partner", ("model.freeze=['model.{*']",), "has an unmatched brace", "model.freeze"),
    Refusal("a range that is none", ("model.freeze=['model.{a-b}']",), "'{a-b}' is not a range", "model.freeze"),
    Refusal(
        "weights from scratch and from a folder",
        ("model.train_from_scratch=true", "training.load={folder}/model", "training.load_format=hf"),
        "true, but training.load names weights to start from",
        "model.train_from_scratch",
    ),
    Refusal(
        "pixels of no size",
        (f"{PREPROCESS}.image_min_pixels=9999999", f"{PREPROCESS}.image_max_pixels=1024"),
        "is above image_max_pixels",
        f"{PREPROCESS}.image_min_pixels",
    ),
    Refusal(
        "waiting without workers",
        (f"{LOADER}.prefetch_factor=2",),
        "2, but num_workers is 0",
        f"{LOADER}.prefetch_factor",
    ),
    Refusal(
        "sequence parallelism of chunks",
        (
            f"{PIPELINE}=2",
            f"{ACCUMULATION}=2",
            f"{TENSOR}=2",
            f"parallel.tp_plan.sequence_parallel=['{BLOCKS}.input_layernorm']",
            "parallel.pp_plan.schedule=interleaved1f1b",
            "parallel.pp_plan.virtual_stages=2",
        ),
        "joins tokens after the last layer of a rank",
        "parallel.tp_plan.sequence_parallel",
        ranks=4,
    ),
)
