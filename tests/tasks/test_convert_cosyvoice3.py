"""`mm convert` of CosyVoice3: the release becomes a model folder with its tokenizer and all that makes sound, and the
weights go back to the file that CosyVoice loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()

from mindspeed_mm.checkpoint.hf_folder import asset_files  # noqa: E402
from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3Config, CosyVoice3LM  # noqa: E402
from mindspeed_mm.fsdp.utils.processor import load_processor  # noqa: E402
from tests.helpers.runs import mm  # noqa: E402
from tests.helpers.tiny_processors import byte_tokenizer  # noqa: E402

HEAD, EMBEDDING = "llm.model.lm_head.weight", "llm.model.model.embed_tokens.weight"
LLM: dict[str, Any] = {
    "vocab_size": 800, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
BASE = {"eos_token": "<|endoftext|>", "turn_start_token": "<|im_start|>", "turn_end_token": "<|im_end|>"}


def write_release(folder: Path, *, tied: bool = True) -> CosyVoice3LM:
    """The release's files, small; those of sound are only carried along."""
    torch.manual_seed(0)
    model = CosyVoice3LM(CosyVoice3Config(llm_config=LLM | {"tie_word_embeddings": tied}, speech_token_size=30)).eval()
    base = folder / "CosyVoice-BlankEN"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(LLM | {"tie_word_embeddings": True, "model_type": "qwen2"}))
    byte_tokenizer(BASE, None).save_pretrained(base)
    torch.save(model.state_dict() | {"epoch": 3, "step": 1000}, folder / "llm.pt")
    for name in ("flow.pt", "hift.pt"):
        torch.save({"weight": torch.ones(2)}, folder / name)
    for name in ("campplus.onnx", "speech_tokenizer_v3.onnx", "cosyvoice3.yaml"):
        (folder / name).write_bytes(name.encode())
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_the_release_becomes_a_folder_and_goes_back(tmp_path: Path, tied: bool) -> None:
    release, folder = tmp_path / "release", tmp_path / "folder"
    model = write_release(release, tied=tied)
    done = mm("convert", release, folder)
    assert done.code == 0 and "from a folder of kind 'cosyvoice3'" in done.out, done.err
    assert ("the embedding of text once more" in done.out) == tied

    made, report = CosyVoice3LM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert (made.config.speech_token_size, made.config.llm_config.tie_word_embeddings) == (30, tied)
    ids = torch.tensor([[3, 1, 801, 805]])
    assert torch.equal(made.eval()(input_ids=ids).logits, model(input_ids=ids).logits)

    sound = {"flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v3.onnx"}
    assert sound <= asset_files(folder).keys()  # an export of a run has them too
    for name in sound:
        assert (folder / name).read_bytes() == (release / name).read_bytes()

    back = mm("convert", folder, tmp_path / "back", "--to", "original", "--model", release)
    assert back.code == 0, back.err
    released, again = (torch.load(path / "llm.pt", weights_only=True) for path in (release, tmp_path / "back"))
    assert released.keys() - {"epoch", "step"} == again.keys()
    assert [name for name, value in again.items() if not torch.equal(value, released[name])] == []
    files = {path.name for path in release.iterdir()}
    assert files <= {path.name for path in (tmp_path / "back").iterdir()}
    assert (tmp_path / "back" / "CosyVoice-BlankEN" / "config.json").is_file()


def test_the_tokenizer_gets_the_tokens_of_the_release_in_their_order(tmp_path: Path) -> None:
    write_release(tmp_path / "release")
    assert mm("convert", tmp_path / "release", tmp_path / "folder").code == 0
    base, tokenizer = byte_tokenizer(BASE, None), load_processor(tmp_path / "folder")
    text = "[breath]Hi<|endofprompt|>[AA0][ǜ]"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert [tokens[0], *tokens[-3:]] == ["[breath]", "<|endofprompt|>", "[AA0]", "[ǜ]"]
    # Of the 280 tokens the first two are the base's already: the third is the first that is new, as in the release.
    assert tokenizer.convert_tokens_to_ids("<|endofprompt|>") == len(base)
    assert len(tokenizer) == len(base) + 278 == tokenizer.convert_tokens_to_ids("[ǜ]") + 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")


def test_what_is_no_release_is_told(tmp_path: Path) -> None:
    write_release(tmp_path / "release")
    used = mm("infer", tmp_path / "release", "--prompt", "hi", "--speak", tmp_path / "hi.wav")
    assert used.code and "is the release of CosyVoice3" in used.err and "mm convert" in used.err
    torch.save({"step": 3, "llm_decoder.weight": torch.ones(2)}, tmp_path / "release" / "llm.pt")
    other = mm("convert", tmp_path / "release", tmp_path / "folder")
    assert other.code and f"has no weight {EMBEDDING}" in other.err
    (tmp_path / "release" / "llm.pt").write_bytes(b"broken")
    assert "is broken" in mm("convert", tmp_path / "release", tmp_path / "folder").err
    assert not (tmp_path / "folder").exists()


def test_files_of_sound_are_read_before_they_are_copied(tmp_path: Path) -> None:
    write_release(tmp_path / "release")
    vocoder = tmp_path / "release" / "hift.pt"
    vocoder.write_bytes(vocoder.read_bytes()[:-40])
    cut = mm("convert", tmp_path / "release", tmp_path / "folder")
    assert cut.code and "hift.pt" in cut.err and "is broken" in cut.err and not (tmp_path / "folder").exists()
    vocoder.unlink()
    done = mm("convert", tmp_path / "release", tmp_path / "folder")
    assert done.code == 0 and "no file hift.pt" in done.err, done.err


def test_weights_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    write_release(tmp_path / "release")
    for name, key, value in (("llm.pt", EMBEDDING, float("nan")), ("flow.pt", "weight", float("-inf"))):
        stored = torch.load(tmp_path / "release" / name, weights_only=True)
        stored[key].view(-1)[-1] = value
        torch.save(stored, tmp_path / "release" / name)
    done = mm("convert", tmp_path / "release", tmp_path / "folder")
    assert done.code == 0, done.err
    assert f"warning: NaN or infinity in {EMBEDDING}" in done.out and "in weight of" in done.err, done.out + done.err
    back = mm("convert", tmp_path / "folder", tmp_path / "back", "--to", "original", "--json")
    assert sorted(json.loads(back.out)["not_finite"]) == sorted([EMBEDDING, HEAD])


def test_a_folder_goes_back_alone(tmp_path: Path) -> None:
    """Without the release beside it only the weights and what makes sound are written."""
    write_release(tmp_path / "release")
    assert mm("convert", tmp_path / "release", tmp_path / "folder").code == 0
    assert mm("convert", tmp_path / "folder", tmp_path / "back", "--to", "original").code == 0
    written = {path.name for path in (tmp_path / "back").iterdir() if path.suffix in (".pt", ".onnx", ".json", ".yaml")}
    expected = {"llm.pt", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v3.onnx"}
    assert written - {"conversion_manifest.json"} == expected
    wrong = mm("convert", tmp_path / "folder", tmp_path / "other", "--to", "original", "--model", tmp_path / "folder")
    assert wrong.code and "is not CosyVoice3's release" in wrong.err
