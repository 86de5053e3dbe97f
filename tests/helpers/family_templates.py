"""Chat templates in the formats of model families, for the tests: special tokens and fixed words are the families', the
jinja text is ours. Between them they use what chat templates of real models use: macros, namespaces, loops backwards,
`loop.last`, slices, filters, tools, thoughts that are dropped from earlier turns.
"""

from __future__ import annotations

_QWEN_PARTS = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}IMAGE{%- elif part.type == 'video' -%}VIDEO{%- elif part.type == 'audio' -%}AUDIO
{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""

_QWEN_TOOLS = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' %}{{ show(messages[0].content) + '\\n\\n' }}{% endif -%}
{{- '# Tools\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + show(messages[0].content) + '<|im_end|>\\n' -}}
DEFAULT_SYSTEM
{%- endif -%}
"""

_QWEN_CALLS = """\
{%- for call in message.tool_calls -%}
{%- set call = call.function if call.function else call -%}
{%- if not loop.first or show(message.content) %}{{ '\\n' }}{% endif -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
"""

_QWEN_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
"""

_QWEN_TURNS = f"""\
{{%- for message in messages -%}}
{{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}}
{{{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}}}
{{%- elif message.role == 'assistant' -%}}
{{{{- '<|im_start|>assistant\\n' + show(message.content) -}}}}
{_QWEN_CALLS}
{{{{- '<|im_end|>\\n' -}}}}
{{%- elif message.role == 'tool' -%}}
{_QWEN_RESULT}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif -%}}
"""

_QWEN_THINKING_TURNS = f"""\
{{%- set ns = namespace(last=messages | length - 1, looking=true) -%}}
{{%- for message in messages[::-1] -%}}
{{%- set at = messages | length - 1 - loop.index0 -%}}
{{%- if ns.looking and message.role == 'user' -%}}
{{%- set ns.looking = false -%}}{{%- set ns.last = at -%}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- for message in messages -%}}
{{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}}
{{{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}}}
{{%- elif message.role == 'assistant' -%}}
{{%- set content = show(message.content) -%}}{{%- set thought = '' -%}}
{{%- if message.reasoning_content is string -%}}
{{%- set thought = message.reasoning_content -%}}
{{%- elif '</think>' in content -%}}
{{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}}
{{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}}
{{%- endif -%}}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- if loop.index0 > ns.last and (loop.last or thought) -%}}
{{{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}}}
{{%- else -%}}{{{{- content -}}}}
{{%- endif -%}}
{_QWEN_CALLS}
{{{{- '<|im_end|>\\n' -}}}}
{{%- elif message.role == 'tool' -%}}
{_QWEN_RESULT}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '<|im_start|>assistant\\n' -}}}}OPENING
{{%- endif -%}}
"""

_OPENS_WHEN_OFF = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}"
)
_OPENS_EITHER_WAY = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% else %}{{ '<think>\\n' }}{% endif -%}"
)
_VISION = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")


def _qwen(turns: str, image: str = "", video: str = "", audio: str = "", *, opening: str = "", system: str = "") -> str:
    default = "{%- else -%}{{- '<|im_start|>system\\n" + system + "<|im_end|>\\n' -}}" if system else ""
    text = _QWEN_PARTS.replace("IMAGE", image).replace("VIDEO", video).replace("AUDIO", audio)
    return text + _QWEN_TOOLS.replace("DEFAULT_SYSTEM", default) + turns.replace("OPENING", opening)


QWEN2_VL = _qwen(_QWEN_TURNS, *_VISION, system="You are a helpful assistant.")
QWEN3_VL = _qwen(_QWEN_TURNS, *_VISION)
QWEN3_5 = _qwen(_QWEN_THINKING_TURNS, *_VISION, opening=_OPENS_EITHER_WAY)
QWEN3 = _qwen(_QWEN_THINKING_TURNS, opening=_OPENS_WHEN_OFF)
QWEN2_5_OMNI = _qwen(
    _QWEN_TURNS,
    "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
    system="You are a helpful assistant.",
)
QWEN3_OMNI = _qwen(
    _QWEN_THINKING_TURNS,
    *_VISION,
    "<|audio_start|><|audio_pad|><|audio_end|>",
    opening=_OPENS_WHEN_OFF,
)
QWEN3_ASR = _qwen(_QWEN_TURNS, audio="<|audio_start|><|audio_pad|><|audio_end|>")
INTERNVL = _qwen(_QWEN_TURNS, "{{ '<IMG_CONTEXT>\\n' }}", "{{ '<video>\\n' }}")

GLM4V = """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\\n# Tools\\n<tools>' -}}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>
{%- elif part.type == 'video' %}<|begin_of_video|><|video|><|end_of_video|>
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{{ '<|user|>\\n' + show(message.content) }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{% endif -%}
{%- elif message.role == 'system' %}{{ '<|system|>\\n' + show(message.content) }}
{%- elif message.role == 'assistant' -%}
{%- set content = show(message.content) -%}
{{- '<|assistant|>' -}}
{%- if message.reasoning_content %}{{ '\\n<think>' + message.reasoning_content.strip() + '</think>' }}
{%- else %}{{ '\\n<think></think>' }}{% endif -%}
{%- if content.strip() %}{{ '\\n' + content.strip() }}{% endif -%}
{%- for call in message.tool_calls -%}
{{- '\\n<tool_call>' + call.function.name + '\\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
{{- value if value is string else value | tojson }}{{ '</arg_value>\\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>\\n' }}{% endif -%}
{%- endif -%}
"""

LLAVA = """\
{%- for message in messages -%}
{%- if message.role == 'system' %}{{ message.content[0].text + ' ' }}{% else -%}
{{- 'USER: ' if message.role == 'user' else 'ASSISTANT: ' -}}
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor -%}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor -%}
{{- ' ' if message.role == 'user' else eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif -%}
"""

_TEXT_OF_LLAVA = "{%- for part in message.content | selectattr('type', 'equalto', 'text')"
LLAVA_ONEVISION = LLAVA.replace(
    _TEXT_OF_LLAVA,
    "{%- for part in message.content | selectattr('type', 'equalto', 'video') %}{{ '<video>\\n' }}{% endfor -%}\n"
    + _TEXT_OF_LLAVA,
)

GEMMA3 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set first = (messages[0].content if messages[0].content is string else messages[0].content[0].text) + '\\n\\n' -%}
{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must take turns') -}}
{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') -}}
{%- if message.content is string %}{{ message.content | trim }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<start_of_image>' }}
{%- elif part.type == 'text' %}{{ part.text | trim }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}
"""

PIXTRAL = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content if messages[0].content is string else messages[0].content[0].text -%}
{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
{%- if message.role == 'user' -%}
{%- if tools and rest[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 1 -%}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST]' -}}
{%- if system is defined and rest[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 1 -%}
{{- system + '\\n\\n' -}}
{%- endif -%}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{{- '[IMG]' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '[/INST]' -}}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{- '[TOOL_CALLS][' -}}
{%- for call in message.tool_calls -%}
{{- (call.function | tojson) + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ']' + eos_token -}}
{%- elif message.role == 'assistant' -%}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content %}{{ part.text }}{% endfor -%}
{%- endif -%}
{{- eos_token -}}
{%- elif message.role == 'tool' -%}
{%- set said = message.content if message.content is string else message.content[0].text -%}
{{- '[TOOL_RESULTS]{"content": ' + (said | tojson) + '}[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}
"""

KIMI_K25 = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{%- elif part.type == 'video' %}<|kimi_k25_video_placeholder|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}{{ '\\n' }}{{ show(message.content) }}<|im_end|>
{%- else -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.role == 'assistant' -%}
<think>{{ message.reasoning_content or '' }}</think>
{%- endif -%}
{{- show(message.content) -}}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id or call.function.name }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}
{%- if true %}<|tool_call_end|>{% endif -%}
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and not thinking %}<think></think>{% else %}<think>{% endif -%}
{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content.strip() }}{% set messages = messages[1:] %}{% endif -%}
{%- if tools -%}
{%- for tool in tools %}{{ '\\n\\n' + (tool | tojson(indent=4)) }}{% endfor -%}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- set call = message.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' + '<|eot_id|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}
"""

GPT_OSS = """\
{{- '<|start|>system<|message|>Reasoning: medium<|end|>' -}}
{%- if messages[0].role == 'system' or tools -%}
{{- '<|start|>developer<|message|>' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif -%}
{%- if tools -%}
{{- '\\n\\nnamespace functions {' -}}
{%- for tool in tools %}{{ '\\ntype ' + tool.function.name + ' = ' + (tool.function.parameters | tojson) }}{% endfor -%}
{{- '\\n}' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set called = namespace(name='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if message.tool_calls -%}
{%- if message.thinking or message.content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.thinking or message.content) + '<|end|>' -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}{%- set called.name = call.name -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- (call.arguments | tojson) + '<|call|>' -}}
{%- elif loop.last -%}
{%- if message.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' -}}
{%- else -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (message.content | tojson) + '<|end|>' -}}
{%- elif message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
"""
