"""Every YAML file of a checkout of MindSpeed-MM that is trained from, of its examples and of its own tests, trains two
steps with only paths and sizes changed. Those of its FSDP2 trainer load in a fresh process; those with `gpt_args` are
read by its older entries.

`MINDSPEED_MM_CHECKOUT=/path/to/MindSpeed-MM pytest -m slow tests/upstream -s`.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mindspeed_mm import pretrain_transformers
from mindspeed_mm.mcore.models.qwen3_5 import pretrain_qwen3_5
from tests.families.test_ltx2_precomputed import write_files as write_ltx2
from tests.helpers.mindspeed_files import make_folder, make_rows_of, paths_and_sizes
from tests.helpers.runs import losses, mm
from tests.upstream.checkout import OF_CHECKOUT, checkout

CHECKOUT = checkout() or Path()


def files_with(section: str) -> list[str]:
    """The checkout's YAML files that have a section."""
    return [
        path.relative_to(CHECKOUT).as_posix()
        for path in sorted(CHECKOUT.rglob("*.yaml") if checkout() else ())
        if re.search(f"(?m)^{section}:", path.read_text(encoding="utf-8"))
    ]


FILES, OF_FLAGS = files_with("training"), files_with("gpt_args")
PLANS = ("sharding_size:", "zero3_size:", "compute_environment:")
"""What a file says that tells how to shard or to launch, beside the flags that tell the rest."""
pytestmark = OF_CHECKOUT
FOLDERS = {
    "qwen3_omni_moe": "qwen3_omni", "qwen3_tts": "qwen3tts", "cosyvoice3_lm": "cosyvoice3",
}  # fmt: skip
"""Id → the family's name in `mindspeed_files`, where it is another."""
OF_VISION = {"num_layers": "depth", "hidden_size": "hidden_size", "num_attention_heads": "num_heads"}
OF_TEXT = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size", "kv_channels": "head_dim", "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok", "moe_ffn_hidden_size": "moe_intermediate_size",
}  # fmt: skip
"""Sizes by Megatron's names, which must be those of the folder → their names there."""
LOADS = """
import json, sys
from pathlib import Path
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
for name in sys.argv[2:]:
    said = {"file": name, "says": None}
    try:
        load_with_plugins(Path(sys.argv[1]) / name)
    except MMError as error:
        said["says"] = str(error)
    print(json.dumps(said))
"""


def test_every_file_that_a_script_starts_has_a_case() -> None:
    texts = [path.read_text(encoding="utf-8") for path in CHECKOUT.rglob("*.sh")]
    named = set(re.findall(r"(?:examples|tests)/[\w./-]+\.yaml", "\n".join(texts)))
    alone = named - {*FILES, *OF_FLAGS}
    assert len(named - alone) > 15
    for name in alone:
        assert (CHECKOUT / name).read_text(encoding="utf-8").startswith(PLANS), name


def test_every_file_loads(capsys: pytest.CaptureFixture[str]) -> None:
    made = subprocess.run(
        [sys.executable, "-c", LOADS, str(CHECKOUT), *FILES], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr
    found = [json.loads(line) for line in made.stdout.splitlines()]
    assert [each["file"] for each in found] == FILES
    refused = [each for each in found if each["says"] is not None]
    with capsys.disabled():
        print(f"\nloaded {len(found) - len(refused)}, refused {len(refused)}")
        for each in refused:
            print(f"{each['file']}: {each['says']}")
    assert refused == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_two_steps(name: str, tmp_path: Path) -> None:
    path = CHECKOUT / name
    text = path.read_text(encoding="utf-8")
    (model_id,) = re.findall(r"(?m)^  model_id: (\w+)", text)
    if model_id == "ltx2":
        changes = ltx2_changes(tmp_path)
    else:
        changes = paths_and_sizes(FOLDERS.get(model_id, model_id), tmp_path, path)
    if "quantization_plan" in text:  # a CPU has no 8-bit products
        changes.append("training.quantization_plan.extra_args.emulate=true")
    said = mm("train", path, *changes, "parallel.expert_parallel_size=1")
    assert said.code == 0, said.err
    has_learned_two_steps(tmp_path / "save")


def has_learned_two_steps(save: Path) -> None:
    """Two steps, whose losses are numbers, and not the same."""
    found = losses(save)
    assert [*found] == [1, 2] and found[1] != found[2]
    assert all(map(math.isfinite, found.values())), found


@pytest.mark.parametrize("name", OF_FLAGS)
def test_a_file_of_flags_trains_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pretrain_qwen3_5 if "mcore" in name else pretrain_transformers
    file = with_paths_and_sizes(CHECKOUT / name, tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{entry.__name__}.py", str(file), "--distributed-backend", "nccl"])
    entry.main()
    has_learned_two_steps(tmp_path / "save")


def with_paths_and_sizes(file: Path, folder: Path) -> Path:
    """A copy of a file with `gpt_args` whose paths and sizes are those of a tiny folder."""
    content = YAML(typ="safe").load(file)
    flags, model, basic = content["gpt_args"], content["model"], content["data"]["dataset_param"]["basic_parameters"]
    model_id = model.get("model_id") or model["text_decoder"]["model_id"]
    weights, rows = str(make_folder(model_id, folder / "model")), make_rows_of(model_id, folder)
    flags |= {"train_iters": 2, "global_batch_size": 2, "save": str(folder / "save"), "save_interval": 2}
    flags |= {"num_workers": 0}
    if "fsdp2_config_path" in flags:
        flags |= {"fsdp2_config_path": str(CHECKOUT / flags["fsdp2_config_path"]), "load": None}
        model["init_from_hf_path"] = weights
    else:
        flags["load"] = weights
        settings = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        see, write = model["image_encoder"]["vision_encoder"], model["text_decoder"]
        for part, section, names in ((see, "vision_config", OF_VISION), (write, "text_config", OF_TEXT)):
            part |= {name: settings[section][of_folder] for name, of_folder in names.items() if name in part}
        for each in (flags, write):
            each |= {f"{axis}_model_parallel_size": 1 for axis in ("tensor", "expert", "pipeline")}
            each["sequence_parallel"] = False
    content["data"]["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = weights
    basic |= {"dataset": str(rows), "dataset_dir": str(folder), "cache_dir": str(folder / "cache")}
    copy = folder / "run.yaml"
    with copy.open("w", encoding="utf-8") as stream:
        YAML().dump(content, stream)
    return copy


def ltx2_changes(folder: Path) -> list[str]:
    """Paths and sizes of a file of LTX-2, which names one file of weights and a text encoder apart from it."""
    write_ltx2(folder, is_2_3=False)
    sizes = json.loads((folder / "model" / "transformer" / "config.json").read_text(encoding="utf-8"))
    in_file = (
        "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers", "cross_attention_dim",
        "caption_channels",
    )  # fmt: skip
    changes = {
        "model.model_name_or_path": folder / "model",
        "model.checkpoint_path": folder / "model",
        "model.text_encoder_path": folder / "model",
        "data.dataset_param.basic_parameters.dataset_dir": folder / "data" / ".precomputed",
        "data.dataloader_param.num_workers": 0,
        "training.train_iters": 2,
        "training.lr_warmup_ratio": 0,
        "training.save": folder / "save",
        **{f"model.transformer.{name}": sizes[name] for name in in_file},
    }
    return [f"{key}={value}" for key, value in changes.items()]
