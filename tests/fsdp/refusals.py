"""What training refuses before its first step, each with a configuration that brings it about. One table: what
`mm train` refuses, `mm check` refuses with the same words, key and exit code."""

from __future__ import annotations

from tests.fsdp.refusals_of_adapters import ADAPTERS
from tests.fsdp.refusals_of_features import FEATURES, LOSSES, LOW_PRECISION, OPTIMIZERS
from tests.fsdp.refusals_of_generators import GENERATORS, MEDIA
from tests.fsdp.refusals_of_plans import PIPELINES, SHARDS, SIZES, TENSORS
from tests.fsdp.refusals_of_posttrain import ANSWERS, MORE_ANSWERS, MORE_PAIRS, PAIRS
from tests.fsdp.refusals_of_ranks import EXPERTS, LAYERS, SEQUENCES, TOWERS
from tests.fsdp.refusals_of_resumes import RESUMES, SAMPLES_OF_RUNS
from tests.fsdp.refusals_of_rows import FILES, ORDERS, SIZES_OF_MEDIA, TURNS
from tests.fsdp.refusals_of_settings import RUNS, TOOLS
from tests.fsdp.refusals_of_tokens import MORE_TOKENS, TOKENS
from tests.helpers.refusal import (
    BASIC,
    DATA,
    LOADER,
    LORA,
    MODEL,
    PREPROCESS,
    Refusal,
    with_a_text_model,
    with_config,
    with_file,
    with_first_row,
    with_more_tokens,
    with_weights,
    without_file,
)

KEYS = (
    Refusal("an unknown key", ("training.learning_rate=1",), "Did you mean 'lr'", "training.learning_rate"),
    Refusal("a value of another type", ("training.lr=fast",), "'fast' is not a number", "training.lr"),
    Refusal("nothing is trained", ("model.freeze=['*']",), "nothing is left to train", "model.freeze"),
    Refusal("every module frozen", ("model.freeze=[model,lm_head]",), "freezes every parameter", "model.freeze"),
    Refusal("a freeze of nothing", ("model.freeze=[model.vision]",), "matches no", "model.freeze"),
    Refusal(
        "losses by name", ("features.loss_cfg.loss_type=dict",), "no losses by name", "features.loss_cfg.loss_type"
    ),
    Refusal("inference that is not read", ("inference.seed=3",), "does not have", "inference.seed"),
    Refusal("an id that nobody has", ("model.model_id=qwen33",), "'qwen33' is not registered", "model.model_id"),
    Refusal(
        "a data set that nobody has",
        ("data.dataset_param.dataset_type=hugging",),
        "'hugging' is not registered",
        "data.dataset_param.dataset_type",
    ),
    Refusal(
        "a plugin that does not exist", ("training.plugin=[no_such]",), "No module named 'no_such'", "training.plugin"
    ),
    Refusal("validation without rows", ("training.val_interval=2",), "no rows for validation", "training.val_interval"),
    Refusal(
        "weights of two sources",
        ("model.train_from_scratch=true", "training.lora.enable=true"),
        "adapters of existing weights",
        "model.train_from_scratch",
    ),
    Refusal(
        "a saved layout without its model",
        (
            "training.save_format=hf",
            "model.model_name_or_path=null",
            f"{PREPROCESS}.model_name_or_path={{folder}}/model",
        ),
        "copied from there",
        "training.save_format",
    ),
)

FOLDERS = (
    Refusal("no model folder", (f"{MODEL}={{folder}}/none",), "none", MODEL, DATA),
    Refusal("no config.json", (), "config.json", MODEL, DATA, without_file("model/config.json")),
    Refusal("a config.json that is not JSON", (), "JSON", "", DATA, with_file("model/config.json", "{")),
    Refusal("an unknown model type", (), "is not a model type", "model_type", DATA, with_config(model_type="qwen9")),
    Refusal(
        "quantised weights",
        (),
        "are quantised",
        "quantization_config",
        DATA,
        with_config(quantization_config={"quant_method": "gptq"}),
    ),
    Refusal("no weights", (), "safetensors", "", DATA, without_file("model/model.safetensors")),
    Refusal(
        "weights that are missing",
        (),
        "missing in the folder",
        "model.language_model.norm.weight",
        DATA,
        with_weights(lambda weights: weights.pop("model.language_model.norm.weight")),
    ),
    Refusal(
        "weights of another form",
        (),
        "stored with shape (3,)",
        "model.language_model.norm.weight",
        DATA,
        with_weights(
            lambda w: w.update({"model.language_model.norm.weight": w["model.language_model.norm.weight"][:3]})
        ),
    ),
    Refusal("a longer tokenizer", (), "the model's embedding 320 rows", "vocab_size", DATA, with_more_tokens),
    Refusal("another token for pictures", (), "marks them by", "image_token_id", DATA, with_config(image_token_id=7)),
    Refusal(
        "weights to go on from that are not there", ("training.load={folder}/none",), "none", "training.load", DATA
    ),
    Refusal(
        "a chat template that reaches for Python",
        (),
        "refused as unsafe",
        "",
        DATA,
        with_file("model/chat_template.jinja", "{{ messages.__class__ }}"),
        by_data_check=True,
    ),
)

ROWS = (
    Refusal(
        "no rows",
        (f"{BASIC}.dataset={{folder}}/none.jsonl",),
        "none.jsonl",
        f"{BASIC}.dataset",
        DATA,
    ),
    Refusal(
        "a picture that does not exist",
        (f"{LOADER}.shuffle=false",),
        "no.png",
        "images",
        DATA,
        with_first_row(images=["no.png"]),
        by_data_check=True,
    ),
    Refusal(
        "a picture too few",
        (f"{LOADER}.shuffle=false",),
        "2 <image> placeholders in the text, but 1 images",
        "images",
        DATA,
        with_first_row(
            messages=[{"role": "user", "content": "<image><image>?"}, {"role": "assistant", "content": "It."}]
        ),
        by_data_check=True,
    ),
    Refusal(
        "no turns",
        (f"{LOADER}.shuffle=false",),
        "<image> placeholders",
        "images",
        DATA,
        with_first_row(messages=[]),
        by_data_check=True,
    ),
    Refusal("an unknown template", (f"{BASIC}.template=qwen9",), "'qwen9' is not registered", f"{BASIC}.template"),
    Refusal(
        "an unknown collator",
        (f"{LOADER}.collate_param.model_name=qwen9",),
        "'qwen9' is not registered",
        f"{LOADER}.collate_param.model_name",
        by_data_check=True,
    ),
    Refusal(
        "an unknown order",
        (f"{LOADER}.sampler_type=Sorted",),
        "'Sorted'",
        f"{LOADER}.sampler_type",
        by_data_check=True,
    ),
    Refusal(
        "a collator of another model",
        (f"{LOADER}.collate_param.model_name=pairwise",),
        "chosen",
        "",
        DATA,
        by_data_check=True,
    ),
    Refusal("a share that leaves nothing", (f"{BASIC}.val_rate=1.0",), "leaves one side empty", f"{BASIC}.val_rate"),
    Refusal(
        "fewer rows than a batch",
        ("training.micro_batch_size=99",),
        "fewer than one global batch",
        f"{LOADER}.drop_last",
        DATA,
    ),
    Refusal(
        "pictures and a model without eyes",
        (f"{LOADER}.shuffle=false",),
        "image",
        "images",
        DATA,
        with_a_text_model,
        by_data_check=True,
    ),
)

MODELS = (
    Refusal(
        "adapters on nothing",
        (*LORA, "training.lora.target_modules=[qq_proj]"),
        "qq_proj",
        "training.lora.target_modules",
    ),
    Refusal(
        "adapters to go on from that are not there",
        (*LORA, "training.lora.pretrained_lora_path={folder}/none"),
        "none",
        "training.lora.pretrained_lora_path",
        DATA,
    ),
    Refusal("no such undecayed parameters", ("training.no_decay_params=[scale]",), "scale", "training.no_decay_params"),
    Refusal("no such undecayed modules", ("training.no_decay_modules=[Scale]",), "Scale", "training.no_decay_modules"),
    Refusal(
        "a rate for nothing",
        ("training.lr_scaling_plan=[{match: nothing, scale: 2}]",),
        "matches no trainable",
        "training.lr_scaling_plan[0].match",
    ),
    Refusal(
        "shards of nothing",
        ("parallel.fsdp_plan.apply_modules=['model.layer.{*}']",),
        "model.layer.{*}",
        "parallel.fsdp_plan.apply_modules",
    ),
    Refusal(
        "recompute of nothing",
        ("features.recompute=true", "features.recompute_plan.apply_modules=[none]"),
        "none",
        "features.recompute_plan.apply_modules",
    ),
    Refusal(
        "offload of nothing",
        ("features.enable_activation_offload=true", "features.activation_offload_plan.apply_modules=[none]"),
        "none",
        "features.activation_offload_plan.apply_modules",
    ),
    Refusal(
        "slices by an argument that is none",
        (
            "features.enable_chunk_mbs=true",
            "training.micro_batch_size=4",
            "features.chunkmbs_plan.chunk_kwarg_names=[none]",
            "features.chunkmbs_plan.chunk_arg_indexs=[99]",
        ),
        "99 is not an argument",
        "features.chunkmbs_plan.chunk_arg_indexs",
    ),
    Refusal(
        "another head",
        ("features.enable_chunk_loss=true", "features.chunkloss_plan.apply_module=lm_tail"),
        "lm_tail",
        "features.chunkloss_plan.apply_module",
    ),
    Refusal(
        "a router that does not exist",
        ("features.loss_cfg.router_aux_loss_coef=0.01",),
        "router",
        "features.loss_cfg.router_aux_loss_coef",
    ),
    Refusal(
        "kernels of layers that are not here",
        ("model.gdn_implementation=triton",),
        "no gated delta-net layers",
        "model.gdn_implementation",
    ),
    Refusal(
        "a generator's settings",
        ("model.transformer={num_layers: 2}",),
        "the model is not one",
        "model.transformer",
    ),
    Refusal(
        "hooks of nothing",
        ("parallel.fsdp_plan.hook_modules=[none]",),
        "none",
        "parallel.fsdp_plan.hook_modules",
    ),
)

SHORT_TABLE = (
    *(*KEYS, *FOLDERS, *ROWS, *MODELS, *TOOLS, *RUNS, *GENERATORS, *MEDIA, *SIZES, *PIPELINES, *TENSORS, *SHARDS),
    *(*SEQUENCES, *TOWERS, *EXPERTS, *LAYERS, *RESUMES, *PAIRS, *ANSWERS, *TOKENS),
)
LONG_TABLE = (
    *(*FEATURES, *LOSSES, *LOW_PRECISION, *OPTIMIZERS, *ADAPTERS),
    *(*ORDERS, *FILES, *TURNS, *SIZES_OF_MEDIA, *SAMPLES_OF_RUNS, *MORE_PAIRS, *MORE_ANSWERS, *MORE_TOKENS),
)
"""What only the long tests go through."""
