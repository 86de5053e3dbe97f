"""Section G of the catalogue of bad input: model folders that are damaged, wrong or hostile.

One row each: what is done to a good folder, and what the message must say. Every row ends before any weight is trained.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from mindspeed_mm.core.errors import ConfigError, ExitCode, MMError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.template import build_template
from mindspeed_mm.fsdp.models.loading.folder import STATE, load_model_config
from mindspeed_mm.fsdp.models.modelhub import LoadReport, ModelHub
from mindspeed_mm.fsdp.models.vocabulary import check_vocabulary
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of

EMBEDDING = "model.embed_tokens.weight"
MARKER = "payload-ran"


def build_and_load(folder: Path | str, **settings: Any) -> LoadReport:
    """The way a training run takes: build, processor, weights."""
    args = ModelArguments.model_validate({"model_name_or_path": str(folder), **settings})
    model = ModelHub.build(args)
    processor = load_processor(folder)
    check_vocabulary(model, tokenizer_of(processor), where=str(folder))
    build_template(processor, DatasetParam().basic_parameters)
    return ModelHub.load_weights(model, args, seed=0, device=torch.device("cpu"))


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        edit_json(folder / "config.json", **changes)

    return edit


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_state(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = load_file(weights(folder))
        change(state)
        save_file(state, weights(folder), metadata={"format": "pt"})

    return edit


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def cut(folder: Path) -> None:
    content = weights(folder).read_bytes()
    weights(folder).write_bytes(content[: len(content) // 2])


def cut_header(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes()[:100])


def add_bytes(folder: Path) -> None:
    weights(folder).write_bytes(weights(folder).read_bytes() + b"more")


def edit_header(change: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = weights(folder).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = change(content[8 : 8 + length].decode()).encode()
        weights(folder).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])

    return edit


def key_twice(header: str) -> str:
    return '{"model.norm.weight":{"dtype":"F32","shape":[32],"data_offsets":[0,128]},' + header[1:]


def into_shards(folder: Path) -> None:
    """Split into two shards with an index, as large folders are."""
    state = load_file(weights(folder))
    weights(folder).unlink()
    names = sorted(state)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def then(*edits: Callable[[Path], Any]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        for edit in edits:
            edit(folder)

    return run


def map_to_other_shard(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][EMBEDDING] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))


def map_without(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][EMBEDDING]
    path.write_text(json.dumps(index))


def whole_file(folder: Path) -> None:
    """Of two sets of weights each library takes another."""
    save_file({"lm_head.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})


def orphan_shard(folder: Path) -> None:
    save_file({"extra": torch.zeros(1)}, folder / "model-00003-of-00003.safetensors")


def only_bin(folder: Path) -> None:
    torch.save(load_file(weights(folder)), folder / "pytorch_model.bin")
    weights(folder).unlink()


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {MARKER}",))


def malicious_bin(folder: Path) -> None:
    torch.save({"weight": torch.zeros(2), "more": Payload()}, folder / "pytorch_model.bin", pickle_module=pickle)
    weights(folder).unlink()


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.json"
    outside.write_text((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(outside)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 9\n"

ERRORS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("77 no config.json", remove("config.json"), r"no config\.json here"),
    ("78 broken JSON", write("config.json", b'{"model_type": "qwen3",'), r"config\.json.*JSON"),
    ("78 not a table", write("config.json", b"[1, 2]"), "not a table"),
    (
        "78 unknown model type",
        edit_config(model_type="qwen33"),
        "'qwen33' is not a model type.*Did you mean 'qwen3'.*--plugin",
    ),
    ("78 no model type", edit_config(model_type=None), "names no model_type"),
    ("78 private key", edit_config(_attn_implementation="evil/kernel"), "_attn_implementation.*internal state"),
    ("78 state of the class", edit_config(__class__="int"), "__class__.*internal state"),
    ("78 a method", edit_config(_get_config_dict=1), "_get_config_dict.*internal state"),
    ("78 wrong type of a setting", edit_config(hidden_size="large"), "transformers cannot read it.*hidden_size"),
    (
        "78 code of its own",
        edit_config(model_type="custom", auto_map={"AutoConfig": "configuration_custom.CustomConfig"}),
        "own Python code, which is not run.*trust_remote_code",
    ),
    (
        "79 missing shard",
        then(into_shards, remove("model-00002-of-00002.safetensors")),
        "00002-of-00002.*does not exist",
    ),
    ("79 key in the wrong shard", then(into_shards, map_to_other_shard), f"{EMBEDDING}.*found in model-00001"),
    ("79 key not in the index", then(into_shards, map_without), f"{EMBEDDING}.*not in the index"),
    ("79 whole file beside shards", then(into_shards, whole_file), "model.safetensors.*stands beside shards"),
    ("79 orphan shard", then(into_shards, orphan_shard), "00003-of-00003.*named by no entry"),
    ("79 no index", then(into_shards, remove("model.safetensors.index.json")), r"no model\.safetensors\.index\.json"),
    ("79 broken index", then(into_shards, write("model.safetensors.index.json", b"{")), "json  is not valid JSON"),
    ("80 cut", cut, r"model\.safetensors  is cut: \d+ bytes of tensors, the header promises \d+"),
    ("80 cut in the header", cut_header, "is cut.*header alone"),
    ("80 trailing bytes", add_bytes, "4 bytes that its header does not name"),
    ("80 empty", write("model.safetensors", b""), "file is empty"),
    ("80 HTML", write("model.safetensors", b"<!DOCTYPE html><html>" + b" " * 99), "is a web page"),
    ("80 LFS pointer", write("model.safetensors", LFS), "Git LFS pointer.*git lfs pull"),
    ("80 LFS pointer among shards", then(into_shards, write("model-00001-of-00002.safetensors", LFS)), "Git LFS"),
    ("80 random bytes", write("model.safetensors", b"\xff" * 200), "not a safetensors file"),
    ("80 header is not JSON", edit_header(lambda header: header.replace('"', "'")), "header is not valid JSON"),
    ("80 hole", edit_header(lambda header: header.replace('"data_offsets":[0,', '"data_offsets":[4,')), "hole|takes"),
    ("81 key twice", edit_header(key_twice), r"'model\.norm\.weight' twice"),
    (
        "82 other vocabulary",
        edit_config(vocab_size=330),
        r"0 missing, 0 unexpected, 2 of another form(.|\n)*\(330, 32\)",
    ),
    ("82 other width", edit_config(hidden_size=64), r"21 of another form(.|\n)*and 16 more"),
    ("83 missing key", edit_state(lambda state: state.pop("model.norm.weight")), r"model\.norm\.weight +missing"),
    (
        "83 unexpected key",
        edit_state(lambda state: state.update({"model.extra.weight": torch.zeros(3)})),
        r"model\.extra\.weight.*no place",
    ),
    ("83 more layers than stored", edit_config(num_hidden_layers=3, layer_types=None), "11 missing, 0 unexpected"),
    (
        "85 fp8",
        edit_state(lambda state: state.update({EMBEDDING: state[EMBEDDING].to(torch.float8_e4m3fn)})),
        "stored as float8_e4m3fn: quantised",
    ),
    (
        "85 int8",
        edit_state(lambda state: state.update({EMBEDDING: state[EMBEDDING].to(torch.int8)})),
        "stored as int8: quantised",
    ),
    (
        "85 half bytes",
        edit_header(lambda header: header.replace('"dtype":"F32"', '"dtype":"F4"', 1)),
        "stored as F4, which cannot be trained",
    ),
    ("85 quantization_config", edit_config(quantization_config={"quant_method": "awq"}), r"quantised \(awq\)"),
    ("86 only .bin", only_bin, r"only pickled weights.*convert.*save_pretrained"),
    ("86 nothing", remove("model.safetensors"), r"no \*\.safetensors here.*train_from_scratch"),
    ("87 malicious .bin", malicious_bin, r"would run (posix|nt)\.system"),
    ("88 no tokenizer", remove("tokenizer.json", "tokenizer_config.json"), "the folder has no processor or tokenizer"),
    ("88 vocabulary larger than the embedding", then(edit_config(vocab_size=300)), "320 tokens.*300 rows"),
    ("88 no chat template", remove("chat_template.jinja"), "no chat template"),
    ("88 unsafe chat template", write("chat_template.jinja", b"{{ ''.__class__ }}"), "__class__.*unsafe"),
    ("89 link out of the folder", link_out, r"config\.json  links out of the folder"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_bad_folder_is_one_clear_error(
    damage: Callable[[Path], Any], message: str, copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("text")
    damage(folder)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ModelFolderError, match=message) as caught:
        build_and_load(folder)
    assert caught.value.exit_code is ExitCode.DATA
    assert not (folder.parent / MARKER).exists()


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-2B-Instruct", "/nowhere/model"])
def test_77_hub_id_or_absent_folder(name: str) -> None:
    with pytest.raises(ModelFolderError, match=r"is not a folder.*local folder"):
        build_and_load(name)


def test_77_no_folder_named() -> None:
    with pytest.raises(ConfigError, match="model_name_or_path  is not set"):
        ModelHub.build(ModelArguments())


@pytest.mark.parametrize("trusted", [False, True])
def test_78_code_beside_a_native_class_is_not_run(trusted: bool, copied: Callable[[str], Path]) -> None:
    folder = copied("text")
    auto_map = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    edit_json(folder / "config.json", auto_map=auto_map)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_x.Tokenizer", None]})
    (folder / "modeling_x.py").write_text("raise RuntimeError('was run')")
    load_processor(folder, trust_remote_code=trusted)
    report = build_and_load(folder, trust_remote_code=trusted)
    assert any("modeling_x.py: not run" in warning for warning in report.warnings)


@pytest.mark.edge("BR18")
def test_78_private_names_that_nothing_reads_are_ignored(copied: Callable[[str], Path]) -> None:
    """transformers writes `_model_name_or_path` when it reads GGUF; `_remove_final_layer_norm` is a setting of OPT."""
    folder = copied("text")
    before = ModelHub.build(ModelArguments(model_name_or_path=str(folder))).config.to_dict()
    unread = {"_model_name_or_path": "x.gguf", "_unheard_of": [1], "_remove_final_layer_norm": False}
    edit_json(folder / "config.json", **unread)
    config = ModelHub.build(ModelArguments(model_name_or_path=str(folder))).config
    assert {key: value for key, value in config.to_dict().items() if key not in unread} == before
    assert not build_and_load(folder).warnings


@pytest.mark.edge("BR18")
def test_78_attention_of_the_library_that_a_file_was_released_with_is_not_taken_over(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("text")
    edit_json(folder / "config.json", _attn_implementation="flash_attention_2")
    assert load_model_config(folder)._attn_implementation is None


def test_78_no_name_of_the_configuration_class_can_be_set() -> None:
    plain = PreTrainedConfig()
    own = {name for name in {*dir(plain), *vars(plain)} if name.startswith("_")} - {"_name_or_path"}
    assert {"_attn_implementation", "_experts_implementation_internal", "_get_config_dict", "__class__"} <= own
    assert [name for name in sorted(own) if not STATE.fullmatch(name)] == []


def test_84_nonfinite_weights_are_named(copied: Callable[[str], Path]) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        folder = copied("text")
        edit_state(lambda state: state["model.layers.1.mlp.up_proj.weight"][3].fill_(value))(folder)  # noqa: B023
        report = build_and_load(folder)
        assert report.nonfinite == ("model.layers.1.mlp.up_proj.weight",)
        named = "NaN or infinity in model.layers.1.mlp.up_proj.weight, stored in model.safetensors"
        assert any(named in warning for warning in report.warnings)
        weights(folder).unlink()
        _remove_all(folder)


def test_89_names_that_differ_in_case(copied: Callable[[str], Path]) -> None:
    folder = copied("text")
    (folder / "Config.JSON").write_text("{}")
    assert any(
        "Config.JSON and config.json differ only in case" in warning for warning in build_and_load(folder).warnings
    )


def test_89_the_hub_cache_links_within_its_repository(copied: Callable[[str], Path], tmp_path: Path) -> None:
    original = copied("text")
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "abc123"
    blobs = repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(original.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert build_and_load(snapshot).tensors == 25


def test_good_folders_load_without_a_word(folders: dict[str, Path], copied: Callable[[str], Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for folder in folders.values():
            assert build_and_load(folder).warnings == ()
        sharded = copied("text")
        into_shards(sharded)
        assert build_and_load(sharded).warnings == ()


def test_every_number_of_the_section_has_a_case() -> None:
    covered = {int(case[0][:2]) for case in ERRORS} | {77, 78, 84, 89}
    assert covered == set(range(77, 90))
    assert issubclass(ModelFolderError, MMError)


def _remove_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
