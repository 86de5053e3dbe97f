"""A launch folder of somebody else's, as docs/provider.md says to use it: what it means, whether it fits, and the run,
started by its own script, which reads the log afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.mindspeed_files import make_folder
from tests.helpers.runs import losses, mm

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HERE = "examples/mine"

SCRIPT = f"""#!/bin/bash
source /usr/local/Ascend/cann/set_env.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TASK_QUEUE_ENABLE=2

NPUS_PER_NODE=2
NNODES=1
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
LOAD_PATH="{HERE}/weights"
SAVE_PATH="{HERE}/run"
TP=1
PP=2
MBS=1
GRAD_ACC_STEP=4
DP=$(($WORLD_SIZE/$TP/$PP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes $NNODES \\
    --node_rank 0 \\
    --master_addr localhost \\
    --master_port ${{PORT}}
"
GPT_ARGS="
    --use-mcore-models \\
    --tensor-model-parallel-size ${{TP}} \\
    --pipeline-model-parallel-size ${{PP}} \\
    --micro-batch-size ${{MBS}} --global-batch-size ${{GBS}} \\
    --tokenizer-type NullTokenizer --vocab-size 152064 --make-vocab-size-divisible-by 1 --seq-length 1024 \\
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu --no-masked-softmax-fusion \\
    --lr 1.0e-3 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 0.0 \\
    --train-iters 4 --seed 42 --bf16 --load $LOAD_PATH --use-flash-attn --variable-seq-lengths \\
    --init-method-std 0.01 --enable-one-logger --group-query-attention --attention-softmax-in-fp32 \\
    --use-distributed-optimizer --no-load-optim --no-load-rng --no-save-optim --no-save-rng --num-workers 1
"
MM_ARGS="
    --mm-data ./{HERE}/data.json \\
    --mm-model ./{HERE}/model.json \\
    --mm-tool ./mindspeed_mm/tools/tools.json
"
OUTPUT_ARGS="
    --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000 \\
    --save $SAVE_PATH --ckpt-format torch --log-tps
"
mkdir -p logs
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \\
    $GPT_ARGS $MM_ARGS $OUTPUT_ARGS --distributed-backend nccl 2>&1 | tee logs/log
MS=$(grep "elapsed time per iteration" logs/log | awk -F ':' '{{print $5}}' | cut -d'|' -f1 | tail -n 1)
TOKENS=$(awk -F 'tokens per sample:' '/tokens per sample/ {{print $2}}' logs/log | cut -d'|' -f1 | tail -n 1)
echo "measured $MS $TOKENS"
"""
MODEL = {
    "model_id": "qwen2_5vl",
    "image_encoder": {
        "vision_encoder": {"num_layers": 2, "hidden_size": 32, "freeze": True, "pipeline_num_layers": [2, 0]},
        "vision_projector": {"num_layers": 1, "freeze": True},
    },
    "text_decoder": {
        "num_layers": 2,
        "pipeline_num_layers": [1, 1],
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 424,
        "init_method_std": 0.01,
    },
    "text_encoder": None,
}
DATA: dict[str, Any] = {
    "dataset_param": {
        "dataset_type": "huggingface",
        "preprocess_parameters": {"model_name_or_path": f"./{HERE}/weights", "image_max_pixels": 3136},
        "basic_parameters": {
            "template": "qwen2vl",
            "dataset_dir": "./data",
            "dataset": "./data/rows.json",
            "cache_dir": "./data/cache",
        },
        "attr": {"images": "images", "messages": "messages", "role_tag": "role", "content_tag": "content",
                 "user_tag": "user", "assistant_tag": "assistant"},
    },
    "dataloader_param": {"dataloader_mode": "sampler", "drop_last": True, "shuffle": True},
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a checkout, as far as a launch needs it, with the folder in it; paths of rows start there."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PORT", "29731")
    shutil.copy(ROOT / "pretrain_vlm.py", tmp_path)
    Path("mindspeed_mm/tools").mkdir(parents=True)
    shutil.copy(ROOT / "mindspeed_mm/tools/tools.json", "mindspeed_mm/tools")
    folder = Path(HERE)
    make_folder("qwen2_5_vl", folder / "weights")
    Path("data").mkdir()
    rows = []
    for number in range(16):
        path = f"./data/{number}.jpg"
        Image.new("RGB", (56, 56), (number * 15, 255 - number * 10, number * 7)).save(path)
        turns = [("user", "<image>What colour?"), ("assistant", f"colour {number}")]
        rows.append({"images": [path], "messages": [{"role": role, "content": text} for role, text in turns]})
    Path("data/rows.json").write_text(json.dumps(rows))
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "data.json").write_text(json.dumps(DATA))
    (folder / "finetune.sh").write_text(SCRIPT)
    return tmp_path


def test_a_launch_folder_runs_as_it_is(checkout: Path) -> None:
    words = ["config", "--from-flags", f"{HERE}/finetune.sh"]
    shown = mm(*words)
    assert shown.code == 0
    Path("run.yaml").write_text(shown.out)
    checked = mm("check", "run.yaml", "--nproc", "2")
    assert checked.code == 0, checked.out + checked.err
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", f"{HERE}/finetune.sh"], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert list(losses(Path(HERE, "run"))) == [1, 2, 3, 4], done.stdout[-3000:]
    measured = done.stdout.splitlines()[-1].split()
    assert measured[0] == "measured" and all(float(number) > 0 for number in measured[1:])
    assert Path(HERE, "run_megatron", "latest_checkpointed_iteration.txt").read_text().strip() == "4"
