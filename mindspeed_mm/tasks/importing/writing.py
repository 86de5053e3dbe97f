"""The text of an imported setup: YAML with a comment where a value comes from, and a list of what was left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.redaction import redact, without_secrets
from mindspeed_mm.core.terminal import visible
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.tasks.importing.draft import SettingResult
from mindspeed_mm.tasks.importing.importing import Imported

_PLAIN = re.compile(r"[A-Za-z0-9_./][\w./*@+~ -]*[\w./*+-]|[A-Za-z]")
_WIDTH = 118


def as_text(imported: Imported) -> str:
    """The YAML, without any secret."""
    lines = [_comment(f"From {imported.tool}: {imported.source}")]
    lines += [_comment(f"Download first: {command}") for command in imported.downloads]
    lines += _section_lines(imported.sections(), imported.comments, "", 0)
    for kind, title in (("idle", "Without effect here:"), ("unsupported", "Not supported, and what to do instead:")):
        found = [each for each in imported.findings if each.kind == kind]
        if found:
            lines += ["", _comment(title), *_result_lines(found)]
    return without_secrets("\n".join(lines) + "\n")


def counts(imported: Imported) -> str:
    """How many settings were translated, in a sentence."""
    numbers = imported.counted()
    text = f"{imported.tool}: {numbers['translated']} settings translated, {numbers['idle']} without effect here, "
    return text + f"{numbers['unsupported']} not supported"


def as_dict(imported: Imported) -> JsonObject:
    """For machines: the configuration, and what became of each setting."""
    told: JsonObject = redact(_told_as_data(imported))
    return told


def _told_as_data(imported: Imported) -> JsonObject:
    return {
        "tool": imported.tool,
        "source": imported.source,
        "config": imported.sections(),
        "downloads": list(imported.downloads),
        "counts": imported.counted(),
        "settings": [
            {"setting": each.word, "where": each.where, "kind": each.kind, "keys": list(each.ours), "note": each.note}
            for each in imported.findings
        ],
    }


def _section_lines(section: Mapping[str, object], comments: Mapping[str, str], prefix: str, level: int) -> list[str]:
    lines = []
    indent = "  " * level
    for name, value in section.items():
        key = prefix + name
        comment = comments.get(key, "")
        behind = f"   {_comment(comment)}" if comment else ""
        if isinstance(value, dict) and value and key not in comments:
            lines += [f"{indent}{name}:", *_section_lines(value, comments, f"{key}.", level + 1)]
        elif isinstance(value, list) and value and _is_long(value, indent, name):
            lines.append(f"{indent}{name}:{behind}")
            lines += [f"{indent}  - {_flow(each)}" for each in value]
        else:
            lines.append(f"{indent}{name}: {_flow(value)}{behind}")
    return lines


def _is_long(value: Sequence[object], indent: str, name: str) -> bool:
    return any(isinstance(each, dict) for each in value) or len(f"{indent}{name}: {_flow(value)}") > _WIDTH - 30


def _flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(str(key))}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        if value:
            return "true"
        return "false"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and parse_yaml(f"k: {text}", "").root.value["k"].node.value == text:
        return text
    return json.dumps(text, ensure_ascii=False)


def _number(value: float) -> str:
    """A float that any YAML reader takes as one: `1.0e-4`."""
    text = repr(value)
    if "e" not in text:
        return text
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}e{int(exponent):+d}".replace("e+", "e+")


def _result_lines(findings: Sequence[SettingResult]) -> list[str]:
    """Settings with the same reason on one line."""
    by_note: dict[str, list[str]] = {}
    for each in findings:
        place = each.where.rpartition("/")[2]
        by_note.setdefault(each.note, []).append(f"{each.word} ({place})" if ":" in place else each.word)
    return [_comment(f"  {', '.join(words)}: {note}") for note, words in by_note.items()]


def _comment(text: str) -> str:
    """A line of comment, whatever is in a name."""
    return f"# {visible(text)}".replace("\n", " ")
