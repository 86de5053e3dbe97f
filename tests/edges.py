"""What must hold at the edges of the product, a line each. A test that proves a line is marked
`@pytest.mark.edge("N1")`; `python -m tests.edges` prints the table of lines and their tests."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

EDGES = {
    # Numbers
    "N1": "Inference, evaluation and an exported folder show the model what training showed it.",
    "N2": "`train_on_prompt` trains no turn, whoever speaks, that a weight, `train: false` or `mask_history` took out.",
    "N3": "A model's own loss is divided once, whether it is a sum or a mean: no signature is asked which.",
    "N4": "A validation pass under a model's own mean loss counts every row once, blank ones not at all.",
    "N5": "A validation pass replaces no row by another.",
    "N6": "`val_loss` is the cross-entropy; the other terms have names of their own.",
    "N7": "A resume notices a changed order of the data.",
    "N8": "No rows are left out of every epoch.",
    "N9": "Every tensor that a processor returns and a model takes reaches the model.",
    "N10": "fp16 trains with a dynamic loss scale, kept in checkpoints.",
    # Refused, crashed, or not refused
    "R1": "Adapters continue under pipeline stages.",
    "R2": "Validation data are read in their own way beside a mixture or a stream.",
    "R3": "A resume is free to change features that do not change the run.",
    "R4": "`mm check` refuses what training refuses.",
    "R5": "A plugin may lie where built-in models lie.",
    "R6": "A plugin's plain collator trains.",
    "R7": "The memory forecast is right for a vision-language model under every plan.",
    "R8": "`mm verify` takes the patterns that train.",
    "R9": "`mm evaluate` and `mm infer` read the rows that training reads.",
    "R10": "MindSpeed-MM's FSDP2 YAML files load.",
    "R11": "Every module of a plugin package is imported.",
    "R12": "The documented steps of adding a model and a data set run as written.",
    "R13": "Whisper trains with the collator that its processor asks for.",
    "R14": "Omni folders train as they are released, and are exported whole.",
    "R15": "No key of `inference` is accepted and ignored.",
    "R16": "Media beside the rows' own file are found.",
    "R17": "A memory profile that cannot start says why; profiles run on any device.",
    "R18": "Every flag of launch scripts acts on its key, or says why it does not.",
    # Generators
    "G1": "A changed rows file is noticed by training on features.",
    "G2": "Every key of `preprocessing` that features depend on is compared with them.",
    "G3": "The caption drawn from several depends on (seed, epoch, sample id).",
    "G4": "Each generator run asks for the folders that it uses, once.",
    "G5": "`mm data check`, `preview` and `stats` show generation data.",
    "G6": "A pipeline without an optional encoder works.",
    "G7": "An exported plugin model can be sampled.",
    "G8": "Cut or empty captions and false declarations of a row are said.",
    "G9": "How far pictures are enlarged and cut is limited by keys, and said.",
    "G10": "The same global batch over another split resumes with buckets.",
    # Floors and devices
    "F1": "Training starts on torch 2.11.",
    "F2": "Qwen3-VL trains with images on transformers 5.17.",
    "F3": "Packed Qwen3-VL rows train on transformers 5.17.",
    # No one test proves F4: `make test-floor` does. Marked is that its set is at the floors.
    "F4": "The default tests pass at the floors.",
    "F5": "The floors have a constraints file that installs.",
    "D1": "Offloaded activations are copied once each way, and freed after their copies.",
    "D2": "The last module's activations stay on the device.",
    "D3": "Devices are bound to their process group; copies start from pinned memory.",
    "D4": "A level-2 profile with packing in bf16 ends.",
    # Nothing lost, nobody let in
    "S1": "No writer replaces a source, a run, a checkpoint or a folder that is not ours.",
    "S2": "A killed export leaves a whole target; the next one heals the rest.",
    "S3": "A report executes nothing.",
    "S4": "Ranks import the same code for any number of ranks.",
    "S5": "A run folder's lock holds between PID namespaces.",
    "S6": "Written files have the umask's mode.",
    "S7": "`training.save` never overwrites files that are not the run's.",
    "S8": "All paths of a configuration have one base.",
    "S9": "A rank killed inside an asynchronous save ends the job within 15 s.",
    "S10": "`run.json` records the exit code with which the process ends.",
    "S11": "Refused shards are named in our words.",
    "S12": "A mistyped manifest falls back to the older good step.",
    "S13": "Malformed input is answered with one line about the right file.",
    "S14": "Outside things are bounded: remote media, stores, workers, trackers.",
    # Use
    "U1": "Plain libraries and plugins work beside the installed set.",
    "U2": "`import mindspeed_mm as mm` trains, checks, infers and evaluates.",
    "U3": "`mm train` ends with a summary.",
    "U4": "wandb, swanlab, mlflow and trackio follow a run and never break it.",
    "U5": "One cause, one line.",
    "U6": "Rows are padded to a multiple only where a device gains by it.",
    "U7": "A fine-tuner finds what he looks for first.",
    # Borders: what a user's row, key, folder, server or default means
    "BS1": "Numbers that are not finite are refused in inference, chat, serving, evaluation, rollouts and samples.",
    "BS2": "No secret of the configuration reaches a file, a log or a tracker.",
    "BS3": "One swap replaces folders for all writers, and the next command heals a killed one.",
    "BS4": "Every failure of an outbound request is one typed error; answers are stored before they are judged.",
    "BS5": "Half-sent requests do not silence the server.",
    "BS6": "Keys follow no redirect.",
    "BS7": "No Python that is started imports from the working directory.",
    "BS8": "A time limit of a request bounds all of it.",
    "BS9": "`mm chat` answers any stream with a sentence.",
    "BS10": "No web page makes a local server compute.",
    "BS11": "Special tokens typed by a user stay text.",
    "BS12": "Answers send no control characters to a terminal.",
    "BS13": "Impossible sizes and numbers are refused in one line.",
    "BS14": "Slow or half-written input, full disks and cut streams end in one sentence.",
    "BS15": "A frozen rank ends the job soon after `step_timeout_s`.",
    "BN1": "What a request leaves out is the family's own default, by release.",
    "BN2": "Sizes and frame counts that a VAE does not give back are refused.",
    "BN3": "DreamBooth pairs subject and prior in every step.",
    "BN4": "Frames are chosen by their own times.",
    "BN5": "Sizes that fail later are refused by `mm check`.",
    "BN6": "A picture that cannot be used is counted and named.",
    "BN7": "The flags door normalises losses as its flags say.",
    "BN8": "`pref_ftx` of the flags is a mean per pair.",
    "BN9": "A stored tensor without a place is refused by every conversion.",
    "BN10": "`loss_func` may return pairs as tensors of two.",
    "BN11": "Stand-ins for torchvision that others made are taken.",
    "BN12": "Adapters and samples agree with the other program that reads or makes them.",
    "BN13": "The best checkpoint is what is exported, asked and served.",
    "BN14": "Short clips, adapters' alpha, seeds and scores are as the other tools have them.",
    "BN15": "Every artefact that is written is read back by what should read it.",
    "BN16": "Scores and masks that differ from other tools are documented.",
    "BR1": "A turn that the row says must not be trained is not trained, in every spelling.",
    "BR2": "An unknown field of a row, a message or a part is obeyed, refused or reported.",
    "BR3": "Paths written into a text are read or reported.",
    "BR4": "An answer is taught to stop unless the format itself wrote its end mark.",
    "BR5": "Text models without a padding token train.",
    "BR6": "`data:` addresses are decoded and never fetched.",
    "BR7": "`mm data` opens rows as the run would.",
    "BR8": "Tags in rows without media are text.",
    "BR9": "Media without placeholders come before the first question.",
    "BR10": "Neighbouring turns of one speaker are joined.",
    "BR11": "Row formats are recognised by their columns.",
    "BR12": "A DreamBooth folder without captions trains with one caption for all.",
    "BR13": "Media are found beside the rows before anywhere else.",
    "BR14": "Sound media and tables are read whatever their spelling.",
    "BR15": "`target_modules` takes the words that other tools take.",
    "BR16": "Tokens can be added to a vocabulary.",
    "BR17": "The server obeys what clients send, or refuses it by name.",
    "BR17b": "Every route refuses fields that it does not know.",
    "BR18": "Private settings of a `config.json` that nothing reads are ignored.",
    "BR19": "Text models in GGUF train.",
    "BR20": "Settings of data that had no effect are obeyed, refused or reported.",
    "BU1": "Features stored inside the folder of clips do not become clips.",
    "BU2": "A plugin's batch may use any key.",
    "BU3": "A run without a length, a schedule or retention takes what a practitioner would choose.",
    "BU4": "A run is a model.",
    "BU5": "Words of other tools lead to ours.",
    "BU6": "The README's sentences are true.",
    "BU7": "The first minutes are short and helpful.",
    "BU8": "Type checkers see the package's types.",
    "BU9": "Large vocabularies use the chunked loss where it is no slower.",
    "BH1": "One table says truly which models train.",
}


@functools.cache
def proofs_by_edge() -> dict[str, list[str]]:
    """The tests that are marked for each edge, as pytest names them."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.edge" not in (text := path.read_text(encoding="utf-8")):
            continue
        place = path.relative_to(ROOT)
        for prefix, node in _nodes(ast.parse(text)):
            for edge, name in _marked(node):
                found.setdefault(edge, []).append(f"{place}::{prefix}{name}" if name else str(place))
    return found


def _nodes(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """What may be marked, and what stands before its name: statements of the module, and tests of its classes."""
    for node in module.body:
        yield "", node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}::", test) for test in node.body)


def _marked(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """(edge, test) of a marked function or class; (edge, "") of a module's `pytestmark`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        marks, name = node.decorator_list, node.name
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
        marks, name = [node.value], ""
    else:
        return
    for mark in marks:
        for call in ast.walk(mark):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.edge"):
                yield from ((str(argument.value), name) for argument in call.args if isinstance(argument, ast.Constant))


if __name__ == "__main__":
    for edge, tests in proofs_by_edge().items():
        print(edge, EDGES[edge], *tests, sep="\n    ")
