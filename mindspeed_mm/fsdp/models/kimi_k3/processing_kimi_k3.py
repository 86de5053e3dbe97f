"""The processor of Kimi-K3: pictures in their own size, told to the model, and conversations in its markup. The
released folder's own is code; what it does is written here, and its settings are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Kimi_K25ImageProcessor, ProcessorMixin
from transformers.image_utils import get_image_size, make_flat_list_of_images
from typing_extensions import override

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.models.kimi_k3.tiktoken_file import KimiK3Tokenizer, tiktoken_tokenizer

_SETTINGS = "preprocessor_config.json"
_PAD = "<|media_pad|>"
_OPEN_MACROS = """\
{%- macro attribute(key, value) -%}
{{ ' ' + key + '="' + (value | string | replace('&', '&amp;') | replace('"', '&quot;')) + '"' }}
{%- endmacro -%}
{%- macro begin(tag) -%}{{ '<|open|>' + tag + '<|sep|>' }}{%- endmacro -%}
{%- macro finish(tag) -%}{{ '<|close|>' + tag + '<|sep|>' }}{%- endmacro -%}
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% elif content -%}
{%- for part in content -%}
{%- if part.type in ('image', 'image_url') %}{{ '<|media_pad|>' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro note(kind, body) -%}
{{ '<|open|>message role="system" type="' + kind + '"<|sep|>' + body + '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endmacro -%}
"""
_SAY_MACROS = """\
{%- macro call(function, number) -%}
{{ '<|open|>call' + attribute('tool', function.name) + attribute('index', number) + '<|sep|>' }}
{%- for key, value in (function.arguments or {}).items() -%}
{%- if value is boolean %}{% set kind = 'boolean' %}{% elif value is none %}{% set kind = 'null' %}
{%- elif value is number %}{% set kind = 'number' %}{% elif value is string %}{% set kind = 'string' %}
{%- elif value is mapping %}{% set kind = 'object' %}{% else %}{% set kind = 'array' %}{% endif -%}
{{ '<|open|>argument' + attribute('key', key) + attribute('type', kind) + '<|sep|>' }}
{{- value if value is string else value | tojson }}{{ finish('argument') }}
{%- endfor -%}
{{ finish('call') }}
{%- endmacro -%}
{%- macro answer(message, thinks) -%}
{%- set ns = namespace(thought=message.reasoning_content or '', said=show(message.content)) -%}
{%- if not ns.thought and '</think>' in ns.said -%}
{%- set ns.thought = ns.said.split('</think>')[0].split('<think>')[-1].strip() -%}
{%- set ns.said = ns.said.split('</think>', 1)[1].lstrip() -%}
{%- endif -%}
{%- if thinks %}{{ begin('think') + ns.thought + finish('think') }}{% endif -%}
{{ begin('response') + ns.said + finish('response') }}
{%- if message.tool_calls -%}
{{ begin('tools') }}
{%- for made in message.tool_calls %}{{ call(made.function or made, loop.index) }}{% endfor -%}
{{ finish('tools') }}
{%- endif -%}
{%- endmacro -%}
"""
CHAT_TEMPLATE = (
    _OPEN_MACROS
    + _SAY_MACROS
    + """\
{%- set thinks = enable_thinking if enable_thinking is defined else (thinking if thinking is defined else true) -%}
{%- set effort = thinking_effort if thinking_effort is defined else reasoning_effort | default('max') -%}
{%- set run = namespace(calls=[], number=0) -%}
{%- if tools -%}
{{ note('tool-declare', '# Tools\\nHere are the available tools, described in JSONSchema.\\n\\n```json\\n'
   + (tools | tojson(separators=(',', ':'), sort_keys=true)) + '\\n```') }}
{%- endif -%}
{%- if thinks and effort -%}
{%- if effort not in ('low', 'high', 'max') %}{{ raise_exception('thinking_effort is low, high or max') }}{% endif -%}
{{ note('thinking-effort', '`thinking_effort` guides on how much to think in your thinking channel (not including the '
   + 'response channel), supported values include `low`, `medium`, `high`, and `max`.\\nNow the system is invoked with '
   + '`thinking_effort=' + effort + '`.') }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|open|>message' + attribute('role', message.role) }}
{%- if message.role == 'tool' -%}
{%- set run.number = run.number + 1 -%}
{%- set asked = run.calls[run.number - 1] if run.number <= run.calls | length else {} -%}
{%- if message.tool_call_id and asked.id and message.tool_call_id != asked.id -%}
{{ raise_exception('results of tools stand in another order than their calls') }}
{%- endif -%}
{%- set name = message.tool or message.name or (asked.function or asked).name -%}
{%- if not name %}{{ raise_exception('the result of a tool has no name') }}{% endif -%}
{{ attribute('tool', name) + attribute('index', run.number) + '<|sep|>' + show(message.content) }}
{%- else -%}
{%- if message.name %}{{ attribute('name', message.name) }}{% endif -%}
{{ '<|sep|>' }}
{%- if message.role == 'assistant' -%}
{%- set run.calls = message.tool_calls or [] -%}
{%- set run.number = 0 -%}
{{ answer(message, thinks) }}
{%- else %}{{ show(message.content) }}{% endif -%}
{%- endif -%}
{{ finish('message') + '<|end_of_msg|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|open|>message role="assistant"<|sep|>' + begin('think' if thinks else 'response') }}
{%- endif -%}
"""
)
"""The format of the published code, which has no template."""


class KimiK3ImageProcessor(Kimi_K25ImageProcessor):  # type: ignore[misc]
    """Kimi-K2.5's, by the released names of its settings.

    Args:
        media_proc_cfg: The released section.
        kwargs: Of the class that it derives from; they win over the section.
    """

    def __init__(self, *, media_proc_cfg: Mapping[str, object] | None = None, **kwargs: Any) -> None:
        self.media_proc_cfg = dict(media_proc_cfg or {})
        given, own = self.media_proc_cfg, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_patches": 65536}
        if (side := given.get("patch_limit_on_one_side")) is not None:
            own["size"] = {"max_height": side, "max_width": side}
        names = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
        for name in ("patch_size", "image_mean", "image_std", *names):
            if name in given:
                own[names.get(name, name)] = given[name]
        super().__init__(**own | kwargs)


class KimiK3Processor(ProcessorMixin):
    """Pictures among words.

    Args:
        image_processor: Cuts pictures into patches.
        tokenizer: Of the text model.
        chat_template: Jinja text; None: the format of the published code.

    Raises:
        ValueError: The tokenizer has no token for pictures.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.image_token_id = _PAD, tokenizer.get_vocab().get(_PAD)
        if self.image_token_id is None:
            raise ValueError(f"the tokenizer has no token {_PAD}")
        super().__init__(image_processor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """The processor of a released folder: its tokenizer.json, or else its tiktoken.model.

        Args:
            pretrained_model_name_or_path: The folder.
            kwargs: For the tokenizer.
        """
        folder = Path(pretrained_model_name_or_path)
        path = folder / _SETTINGS
        given = read_json_object(path, ModelFolderError) if path.is_file() else {}
        kept = ("media_proc_cfg", "patch_size", "merge_size", "max_patches", "size", "image_mean", "image_std")
        images = KimiK3ImageProcessor(**{name: given[name] for name in kept if name in given})
        options = {name: value for name, value in kwargs.items() if name not in ("trust_remote_code", "backend")}
        if (folder / "tokenizer.json").is_file():
            tokenizer = KimiK3Tokenizer.from_pretrained(str(folder), **options)
        else:
            tokenizer = tiktoken_tokenizer(folder, **options)
        own = setting if isinstance(setting := tokenizer.chat_template, str) else None
        return cls(images, tokenizer, chat_template=own)

    @override
    def _process_images(self, images: object, **kwargs: object) -> tuple[Any, list[str]]:
        """Patches of pictures, and what is written for each: its width and height, and a token a square of patches."""
        made = self.image_processor(images, **kwargs)
        written, merge = [], self.image_processor.merge_size
        for picture, grid in zip(make_flat_list_of_images(images), made["image_grid_thw"], strict=True):
            width, height = picture.size if hasattr(picture, "size") and not callable(picture.size) else (0, 0)
            if not width:
                height, width = get_image_size(picture)
            pads = _PAD * (int(grid.prod()) // merge**2)
            written.append(f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>")
        return made, written
