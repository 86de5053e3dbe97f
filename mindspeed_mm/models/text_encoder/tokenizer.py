"""`Tokenizer`: one tokenizer of transformers, or several.

Facts: `mindspeed_mm/models/text_encoder/tokenizer.py` of MindSpeed-MM.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.models.component_section import folder_of, needed, section_of

_NAME = "tokenizer_config"
_OURS = ("hub_backend", "autotokenizer_name", "from_pretrained", "local_files_only", "trust_remote_code")


class Tokenizer:
    """The tokenizers that a section describes.

    Args:
        config: A section, or a list of them: `autotokenizer_name` (a class of transformers), `from_pretrained` (its
            folder); the other keys are arguments of `from_pretrained`.

    Raises:
        ConfigError: The class is none of transformers.
        ModelFolderError: The folder holds no such tokenizer.
    """

    def __init__(self, config: Any) -> None:
        self.tokenizers: Any
        if isinstance(config, (list, tuple)):
            self.tokenizers = [_tokenizer(section_of(each)) for each in config]
        else:
            self.tokenizers = _tokenizer(section_of(config))

    def get_tokenizer(self) -> object:
        """The tokenizer, or a list of them."""
        return self.tokenizers


def _tokenizer(section: Mapping[str, object]) -> Any:
    name = str(needed(section, "autotokenizer_name", _NAME))
    prepare_for_transformers()
    found = getattr(importlib.import_module("transformers"), name, None)
    if not hasattr(found, "from_pretrained"):
        raise ConfigError(
            f"'{name}' is not built as a part",
            key=f"{_NAME}.autotokenizer_name",
            way_out="Name a class of transformers (AutoTokenizer, T5Tokenizer …). Of other models mm extract and mm "
            "train tokenize captions as the model's family does.",
        )
    folder = folder_of(section, _NAME)
    options = {key: value for key, value in section.items() if key not in _OURS}
    try:
        return found.from_pretrained(str(folder), local_files_only=True, **options)  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(f"{name} cannot be loaded: {first_line}", where=str(folder)) from error
