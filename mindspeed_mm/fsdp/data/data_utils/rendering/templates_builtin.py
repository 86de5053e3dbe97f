"""Chat formats of model families, for folders without a chat template of their own: turns, media and thoughts. Tools
are left to the models' own templates, whose wording of them is part of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mm.fsdp.data.data_utils.transcript_language import is_whisper
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

_SHOW = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% elif part.type == 'audio' %}AUDIO
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""

_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

_CHATML_THINKING = """\
{%- set asked = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = show(message.content) -%}
{%- set thought = message.reasoning_content or '' -%}
{%- if message.role == 'assistant' and not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > asked.last -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""

_GLM = """\
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' -}}
{%- if message.role == 'assistant' -%}
{{- '<think>' + (message.reasoning_content or '').strip() + '</think>\\n' -}}
{%- endif -%}
{{- show(message.content) -}}
{%- if message.role == 'user' and enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>\\n' }}{% endif -%}
{%- endif -%}
"""

_KIMI = """\
{%- for message in messages -%}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' -}}
{%- if message.role == 'assistant' %}{{ '<think>' + (message.reasoning_content or '') + '</think>' }}{% endif -%}
{{- show(message.content) + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_assistant|>assistant<|im_middle|>' -}}
{{- '<think></think>' if thinking is defined and not thinking else '<think>' -}}
{%- endif -%}
"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + show(message.content) | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""
"""As the prompt format of Llama 3's model card, for its base models, whose folders have no chat template."""

_PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ 'Human: ' + show(message.content) + '\\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant:' + show(message.content) + eos_token + '\\n' }}
{%- else %}{{ 'System: ' + show(message.content) + '\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif -%}
"""

_ALPACA = """\
{{- bos_token -}}
{%- if not messages or messages[0].role != 'system' -%}
{{- 'Below is an instruction that describes a task. Write a response that appropriately completes the request.' -}}
{{- '\\n\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '### Instruction:\\n' + show(message.content) + '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{ '### Response:\\n' + show(message.content) + eos_token + '\\n\\n' }}
{%- else %}{{ show(message.content) + '\\n\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '### Response:\\n' }}{% endif -%}
"""

_CONCATENATION = "{%- for message in messages %}{{ show(message.content) }}{% endfor -%}"

_WHISPER = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- show(message.content) + eos_token -}}
{%- else -%}
{{- START -}}
{%- endif -%}
{%- endfor -%}
"""


def _format(turns: str, image: str = "", video: str = "", audio: str = "") -> str:
    written = _SHOW.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)
    return written + turns


_VISION = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
_SOUND = "<|audio_start|><|audio_pad|><|audio_end|>"
_OMNI25 = (
    "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
)
_GLM_MEDIA = ("<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>")
_KIMI_MEDIA = ("<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", "<|kimi_k25_video_placeholder|>")

EMPTY = _format(_CONCATENATION)
"""The texts of the messages, one after the other."""

COMPLETION = _format("{{- bos_token -}}" + _CONCATENATION)
"""The same behind the tokenizer's first token, if it has one."""

ALPACA = _format(_ALPACA)
"""The prompts of Stanford Alpaca, as LLaMA-Factory's template of this name writes them."""

FORMATS: dict[str, str | None] = {
    "default": _format(_PLAIN),
    "qwen2vl": _format(_CHATML, *_VISION),
    "qwen2_vl": _format(_CHATML, *_VISION),
    "qwen3_vl": _format(_CHATML, *_VISION),
    "qwen3_vl_nothink": _format(_CHATML, *_VISION),
    "qwen3_6": _format(_CHATML_THINKING, *_VISION),
    "qwen3_6_nothink": _format(_CHATML_THINKING, *_VISION),
    "qwen2_omni": _format(_CHATML, *_OMNI25),
    "qwen3_omni": _format(_CHATML_THINKING, *_VISION, _SOUND),
    "qwen3_omni_nothink": _format(_CHATML_THINKING, *_VISION, _SOUND),
    "qwen3_asr": _format(_CHATML, audio=_SOUND),
    "kimi_k25": _format(_KIMI, *_KIMI_MEDIA),
    "kimi_k3": None,
    "glm4.1v": _format(_GLM, *_GLM_MEDIA),
    "glm4v_moe": _format(_GLM, *_GLM_MEDIA),
    "llama3": _format(_LLAMA3),
    "step3_vl": None,
    "minimax_m3_vl": None,
}
"""Name → format; None: only the model's own template knows it."""


def whisper_format(processor: Processor) -> str | None:
    """For Whisper, which has no chat template: the tokens that tell language and task, then what is said. What the row
    asks in words is not heard. None for other processors.
    """
    tokenizer = tokenizer_of(processor)
    prefix = getattr(tokenizer, "prefix_tokens", None)
    if not is_whisper(processor) or not prefix:
        return None
    start = "".join(tokenizer.convert_ids_to_tokens(prefix))
    # Only before the first message: a conversation of several turns has one prefix.
    return _format(_WHISPER).replace("START", f"({start!r} if loop.index0 == 0 else '')")
