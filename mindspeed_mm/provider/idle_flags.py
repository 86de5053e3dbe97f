"""The flags of Megatron-Core, MindSpeed and MindSpeed-MM that have no effect here, and those that are errors, by the
reason why."""

from __future__ import annotations

from mindspeed_mm.provider.launch_flag import LaunchFlag, idle, refused

_KERNELS = "kernels are chosen for the device at hand"
_OVERLAP = "sharding (FSDP2) overlaps communication with the computation by itself"
_FOLDER = "the model's folder says it"
_ROUTER = "the model's own router says it"
_FP32 = "gradients are summed in fp32, unless fsdp2_config.yaml says otherwise"
_NOT_NEEDED = "nothing here needs it"
_LAUNCH = "it is for torchrun, which starts the ranks"
_RANKS = "the libraries of the device at hand decide how ranks talk to one another"
_LOGS = (
    "metrics.jsonl and TensorBoard's events in the run folder hold every number; --mm-set training.report_to=[wandb] "
    "adds a tracker"
)
_CHECKPOINTS = "checkpoints have one layout, which every rank writes and reads a part of"
_CHECKS = "losses and gradients are checked at every step; --mm-set training.on_nonfinite=skip leaves a bad step out"
_ROWS = "data.json or your own loader says it"
_LOSS_SCALE = "only gradients in fp16 are scaled, and their scale adapts by itself"
_RING = "attention over several ranks is planned here"
_SIGNALS = "a signal always saves a checkpoint and ends the run"

WITHOUT_EFFECT: tuple[LaunchFlag, ...] = (
    *idle(
        _RANKS,
        "switch",
        "use-ring-exchange-p2p use-sharp use-tp-pp-dp-mapping lazy-mpu-init disable-gloo-group "
        "enable-gloo-process-groups disable-gloo-process-groups high-priority-stream-groups",
    ),
    *idle(
        _RANKS,
        "word",
        "distributed-backend nccl-communicator-config-path hccl-group-buffer hccl-group-buffer-adaptive DDP-impl",
    ),
    *idle(_RANKS, "int", "distributed-timeout-seconds-after-init"),
    *idle(
        _KERNELS,
        "switch",
        "use-mcore-models use-legacy-models use-flash-attn no-gradient-accumulation-fusion "
        "gemm-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion "
        "no-bias-dropout-fusion no-rope-fusion bias-gelu-fusion bias-swiglu-fusion cross-entropy-loss-fusion "
        "no-persist-layer-norm attention-softmax-in-fp32 no-attention-softmax-in-fp32 no-query-key-layer-scaling "
        "variable-seq-lengths unaligned-linear jit-compile allow-internal-format use-ascend-mc2 use-ascend-coc "
        "use-fusion-attn-v2 use-fused-moe-token-permute-and-unpermute use-fused-ring-attention-update "
        "use-fused-mlp use-nd-matmul moe-permutation-async-comm moe-permute-fusion moe-router-fusion "
        "moe-use-legacy-grouped-gemm enable-token-rearrange-opt use-multiparameter-pipeline-model-parallel "
        "use-cuda-graph enable-cuda-graph external-cuda-graph",
    ),
    *idle(_KERNELS, "int", "optimization-level empty-unused-memory-level cuda-graph-warmup-steps"),
    *idle(_KERNELS, "word", "attention-backend transformer-impl cross-entropy-fusion-impl"),
    *idle(
        _OVERLAP,
        "switch",
        "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step delay-grad-reduce "
        "no-delay-grad-reduce delay-param-gather align-grad-reduce no-align-grad-reduce align-param-gather "
        "no-align-param-gather ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw "
        "no-overlap-p2p-communication overlap-p2p-communication-warmup-flush no-scatter-gather-tensors-in-pipeline "
        "defer-embedding-wgrad-compute tp-comm-overlap tp-comm-bulk-dgrad tp-comm-bulk-wgrad "
        "disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad "
        "disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-overlap-rs-dgrad "
        "no-async-tensor-model-parallel-allreduce no-contiguous-buffers-in-local-ddp moe-shared-expert-overlap "
        "moe-alltoall-overlap-comm moe-allgather-overlap-comm use-pipe-experts use-cp-send-recv-overlap "
        "overlap-cpu-optimizer-d2h-h2d param-and-grad-buffer-pad distribute-saved-activations",
    ),
    *idle(
        _OVERLAP,
        "int",
        "ddp-bucket-size ddp-num-buckets wgrad-deferral-limit microbatch-group-size-per-virtual-pipeline-stage",
    ),
    *idle(_OVERLAP, "word", "tp-comm-overlap-cfg tp-comm-bootstrap-backend"),
    *idle(_RING, "int", "cp-window-size"),
    *idle(_RING, "switch", "attention-mask-on-cpu megatron-cp-in-bnsd kv-head-repeat-before-uly-alltoall"),
    *idle(_RING, "word", "cp-attention-mask-type context-parallel-kv-cache-policy"),
    *idle(_RING, "list", "cp-comm-type hierarchical-context-parallel-sizes"),
    *idle(
        _FOLDER,
        "switch",
        "swiglu squared-relu openai-gelu onnx-safe untie-embeddings-and-output-weights qk-layernorm "
        "multi-latent-attention multi-head-latent-attention disable-bias-linear add-bias-linear add-qkv-bias "
        "add-dense-bias skip-bias-add group-query-attention use-rotary-position-embeddings rotary-interleaved "
        "use-rope-scaling no-position-embedding apply-layernorm-1p apply-residual-connection-post-layernorm "
        "apply-query-key-layer-scaling geglu use-glm-rope gated-attention moe-use-shared-expert-gate",
    ),
    *idle(
        _FOLDER,
        "word",
        "normalization position-embedding-type attention-mask-type rope-scaling-type tokenizer-type tokenizer-model "
        "vocab-file merge-file moe-layer-freq tokenizer-name-or-path params-dtype",
    ),
    *idle(
        _FOLDER,
        "int",
        "rotary-base rotary-seq-len-interpolation-factor kv-lora-rank qk-nope-head-dim qk-rope-head-dim qk-head-dim "
        "qk-pos-emb-head-dim v-head-dim q-lora-rank rope-scaling-beta-fast rope-scaling-beta-slow "
        "rope-scaling-original-max-position-embeddings num-layers encoder-num-layers decoder-num-layers hidden-size "
        "ffn-hidden-size num-attention-heads num-query-groups kv-channels max-position-embeddings encoder-seq-length "
        "decoder-seq-length vocab-size padded-vocab-size vocab-extra-ids make-vocab-size-divisible-by num-experts "
        "moe-ffn-hidden-size moe-shared-expert-intermediate-size n-shared-experts first-k-dense-replace img-h img-w "
        "num-channels patch-dim num-classes window-size",
    ),
    *idle(
        _FOLDER,
        "float",
        "rope-scaling-factor rope-scaling-mscale rope-scaling-mscale-all-dim mscale mscale-all-dim rotary-percent "
        "rotary-scaling-factor norm-epsilon attention-dropout hidden-dropout",
    ),
    *idle(
        _ROUTER,
        "switch",
        "moe-router-pre-softmax moe-router-enable-expert-bias moe-router-padding-for-fp8 norm-topk-prob",
    ),
    *idle(_ROUTER, "int", "moe-router-topk moe-router-num-groups moe-router-group-topk topk-group"),
    *idle(_ROUTER, "float", "moe-router-topk-scaling-factor moe-router-bias-update-rate routed-scaling-factor"),
    *idle(_ROUTER, "word", "moe-router-load-balancing-type moe-router-score-function moe-router-dtype"),
    *idle(
        "weights come from the folder; those of a new model are drawn as its class draws them",
        "float",
        "init-method-std embedding-init-method-std",
    ),
    *idle(
        "weights come from the folder; those of a new model are drawn as its class draws them",
        "switch",
        "init-method-xavier-uniform",
    ),
    *idle(
        _LOGS,
        "switch",
        "enable-one-logger no-one-logger one-logger-async log-throughput log-params-norm log-num-zeros-in-grad "
        "log-progress log-timers-to-tensorboard log-batch-size-to-tensorboard log-memory-to-tensorboard "
        "log-world-size-to-tensorboard log-validation-ppl-to-tensorboard log-loss-scale-to-tensorboard "
        "log-learning-rate-to-tensorboard no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard "
        "barrier-with-L1-time no-barrier-with-level-1-timing log-straggler disable-straggler-on-startup "
        "moe-per-layer-logging log-energy",
    ),
    *idle(
        _LOGS,
        "word",
        "tensorboard-dir wandb-project wandb-exp-name wandb-save-dir wandb-entity one-logger-project "
        "one-logger-run-name app-tag-run-name app-tag-run-version timing-log-option",
    ),
    *idle(
        _LOGS,
        "int",
        "tensorboard-log-interval tensorboard-queue-size timing-log-level logging-level straggler-ctrlr-port "
        "straggler-minmax-count",
    ),
    *idle(
        _CHECKPOINTS,
        "switch",
        "use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save "
        "ckpt-fully-parallel-load ckpt-assume-constant-structure use-persistent-ckpt-worker "
        "dist-ckpt-optim-fully-reshardable",
    ),
    *idle(_CHECKPOINTS, "word", "dist-ckpt-format dist-ckpt-strictness ckpt-convert-format ckpt-convert-save"),
    *idle("what flags say is used, and not what a checkpoint says", "switch",
          "override-opt_param-scheduler use-mp-args-from-checkpoint-args"),
    *idle("a folder that is named and missing is always an error", "switch", "exit-on-missing-checkpoint"),
    *idle(_CHECKS, "switch",
          "no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss "
          "check-for-large-grads check-weight-hash-across-dp-replicas"),
    *idle(_CHECKS, "word", "rerun-mode"),
    *idle(_CHECKS, "int", "check-weight-hash-across-dp-replicas-interval"),
    *idle(_SIGNALS, "switch", "exit-signal-handler exit-signal-handler-for-dataloader"),
    *idle(_ROWS, "word", "dataloader-type split data-cache-path train-data-path valid-data-path test-data-path"),
    *idle(_ROWS, "int", "num-dataset-builder-threads"),
    *idle("towers are balanced in one way", "word", "data-balance-sorting-algo mbs-data-balance-sorting-algo"),
    *idle(
        _ROWS,
        "switch",
        "reset-position-ids reset-attention-mask eod-mask-loss no-create-attention-mask-in-dataloader "
        "no-mmap-bin-files vision-pretraining",
    ),
    *idle(_LOSS_SCALE, "float", "loss-scale"),
    *idle(_LOSS_SCALE, "int", "hysteresis"),
    *idle(_FP32, "switch", "accumulate-allreduce-grads-in-fp32"),
    *idle("--manual-gc-interval says when Python's garbage is collected", "switch", "manual-gc"),
    *idle("evaluation leaves no garbage that would have to be collected", "switch", "no-manual-gc-eval"),
    *idle("torch's profiler is the one there is", "switch", "use-pytorch-profiler"),
    *idle("--optimizer adam keeps no momentum of SGD's kind", "float", "sgd-momentum"),
    *idle(
        _NOT_NEEDED,
        "switch",
        "use-cpu-initialization no-initialization reuse-fp32-param enable-dummy-optimizer downcast-to-bf16 "
        "use-precision-aware-optimizer no-save-metadata npu-datadump",
    ),
    *idle(_NOT_NEEDED, "list", "lora-register-forward-hook"),
    *idle(_LAUNCH, "int", "node_rank master_port local-rank"),
    *idle(_LAUNCH, "word", "master_addr rdzv-id rdzv-backend rdzv-endpoint"),
    LaunchFlag("ai-framework", "word", "pytorch", rule="framework", example="pytorch"),
)  # fmt: skip

_POSTTRAIN = "rewards are flags of posttrain_flux_dancegrpo.py alone"
_SEARCH = "plans are not searched for from flags; mm check forecasts the memory of a plan"
_PARTS = "all parts of a model share one parallel plan"
_STAGES = "stages are cut evenly, or as pipeline_num_layers of model.json says"
_SAMPLES = (
    "a run is counted in steps: divide by --global-batch-size, and give --train-iters, --lr-decay-iters or "
    "--lr-warmup-iters"
)
_FEWER_PARTS = "parts of a layer are recomputed by --recompute-granularity selective, offloaded by --swap-attention"
_DROPPED = "no token is dropped on its way to an expert"
_LOW = "low precision is chosen by training.quantization_plan of a YAML"
_SEVERAL_STEPS = "a run ends at --train-iters, or by a signal, after which the same command continues"

REFUSED: tuple[LaunchFlag, ...] = (
    *refused(_POSTTRAIN, "word", "hps_reward_save cache_dir"),
    *refused("the entry says what is trained on, e.g. posttrain_qwen2vl_dpo.py", "word", "stage"),
    *refused(_POSTTRAIN, "float", "adv_clip_max cfg clip_range eta sampler_seed shift timestep_fraction"),
    *refused(
        _POSTTRAIN,
        "int",
        "h w t num_generations num_latent_t sample_batch_size sampling_steps sp_size train_sp_batch_size",
    ),
    *refused(_POSTTRAIN, "switch", "ignore_last init_same_noise no-save_images use_group use_hpsv2"),
    *refused(
        "the square of samples' losses is not a loss that the engine has; give the square in your loss_func",
        "switch",
        "calculate-per-sample-square-loss calculate-square-loss",
    ),
    *refused("tokens are weighted by --calculate-per-token-loss", "switch", "calculate-token-loss"),
    *refused(_SEARCH, "switch", "auto-parallel auto-parallel-mm auto-tuning auto-settings profile-subgraph-seg"),
    *refused(_PARTS, "switch", "hetero-parallel dist-train"),
    *refused(
        _PARTS,
        "int",
        "hetero-encoder-mbs-scale encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size "
        "pipeline-model-parallel-split-rank tp-x tp-y",
    ),
    *refused(_PARTS, "switch", "tp-2d moe-tp-extend-ep"),
    *refused(
        _STAGES,
        "int",
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers noop-layers "
        "num-layers-per-virtual-pipeline-stage num-layers-in-first-pipeline-stage num-layers-in-last-pipeline-stage",
    ),
    *refused(_STAGES, "word", "pipeline-model-parallel-layout schedules-method"),
    *refused(
        _STAGES,
        "switch",
        "standalone-embedding-stage account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
    ),
    *refused(_SAMPLES, "int", "train-samples lr-decay-samples lr-warmup-samples"),
    *refused("every step has the same number of samples", "list", "rampup-batch-size"),
    *refused(_SEVERAL_STEPS, "int", "exit-interval exit-duration-in-mins"),
    *refused("use evaluate_vlm.py or mm evaluate", "switch", "skip-train test-mode"),
    *refused("a checkpoint's schedule is not taken over; give the flags of the schedule", "switch",
             "use-checkpoint-opt_param-scheduler"),
    *refused("a checkpoint's settings are not taken over; give the flags", "switch", "use-checkpoint-args"),
    *refused("--async-save writes in the background, --save-interval says how often", "int",
             "non-persistent-save-interval"),
    *refused("--async-save writes in the background, --save-interval says how often", "word",
             "non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir"),
    *refused("parts of the model learn at another rate by --lr-scale-modules with --lr-mult", "float",
             "decoupled-lr decoupled-min-lr head-lr-mult"),
    *refused("--mm-set training.optimizer_state_dtype=bf16 keeps Adam's moments in less memory", "word",
             "main-params-dtype main-grads-dtype exp-avg-dtype exp-avg-sq-dtype"),
    *refused("--mm-set parallel.fsdp_plan.cpu_offload=true keeps weights and optimizer states on the host", "switch",
             "optimizer-cpu-offload use-torch-optimizer-for-cpu-offload"),
    *refused("--mm-set parallel.fsdp_plan.cpu_offload=true keeps weights and optimizer states on the host", "float",
             "optimizer-offload-fraction"),
    *refused("--use-torch-fsdp2 shards with torch's own FSDP2", "switch", "use-custom-fsdp use-megatron-fsdp"),
    *refused("--use-torch-fsdp2 shards with torch's own FSDP2", "word", "data-parallel-sharding-strategy"),
    *refused("the model's own code adds residuals, in the type of its layers", "switch", "fp32-residual-connection"),
    *refused(
        _FEWER_PARTS,
        "switch",
        "recompute-activation-function recompute-norm recompute-in-bubble recompute-in-advance "
        "enable-recompute-layers-per-pp-rank moe-layer-recompute moe-zero-memory adaptive-recompute-enable "
        "adaptive-memory-optimization smart-swap cpu-offloading",
    ),
    *refused(
        _FEWER_PARTS,
        "int",
        "recompute-activation-function-num-layers recompute-norm-num-layers cpu-offloading-num-layers",
    ),
    *refused(_FEWER_PARTS, "list", "recompute-modules"),
    *refused(_FEWER_PARTS, "word", "swap-modules"),
    *refused(_DROPPED, "float", "moe-expert-capacity-factor"),
    *refused(_DROPPED, "switch", "moe-pad-expert-input-to-capacity moe-token-dropping"),
    *refused(_DROPPED, "word", "moe-token-drop-policy"),
    *refused("the router's loss is --moe-aux-loss-coeff alone", "float", "moe-z-loss-coeff moe-input-jitter-eps"),
    *refused("heads that predict further tokens are not trained from flags", "int", "mtp-num-layers"),
    *refused("heads that predict further tokens are not trained from flags", "float", "mtp-loss-scaling-factor"),
    *refused(_LOW, "word", "fp8-format fp8-recipe fp8-amax-compute-algo"),
    *refused(_LOW, "int", "fp8-margin fp8-interval fp8-amax-history-len"),
    *refused(_LOW, "switch", "fp8-param-gather no-fp8-wgrad"),
    *refused("data.json names rows; there are no invented ones", "switch", "mock-data"),
    *refused("rows of several samples are packed by dataloader_param of data.json", "switch",
             "use-txt-dynamic-batching use-image-mbs-data-balance"),
    *refused("rows of several samples are packed by dataloader_param of data.json", "int",
             "max-seq-len dynamic-batch-buffer-size"),
    *refused("adapters are chosen by --lora-target-modules", "list", "lora-target-parameters lora-apply-modules"),
)  # fmt: skip
