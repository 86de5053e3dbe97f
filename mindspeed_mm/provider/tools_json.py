"""tools.json: the `tools` section as it stands, and where features are written."""

from __future__ import annotations

from mindspeed_mm.fsdp.params.yaml.tree import Node
from mindspeed_mm.provider.reading import Reading

_OF_EXTRACTION = "sorafeature"


def put_tools(reading: Reading, root: Node) -> None:
    """Put the profilers' settings; `sorafeature` is for the command that extracts features."""
    sections = {name: entry for name, entry in root.value.items() if name != _OF_EXTRACTION}
    if sections:
        reading.draft.put_node("tools", Node(sections, root.place))
