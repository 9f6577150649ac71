"""Chat templates with tools, in the style of published model families, render and train as transformers does.

The templates are written for this test: each has the structure of the family that it is named after, not its text.
"""

# ruff: noqa: E501 (templates are written as published ones are)
from __future__ import annotations

import pytest

from mdata.chat.jinja_template import JinjaTemplate
from mdata.chat.loss_spans import spans_of
from mdata.sources.conversation import conversation_of, flat_messages

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Rain <now> & 'later'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain in K\u00f6ln?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": " And now? "},
    {"role": "assistant", "content": "No."},
]
SPECIAL = (("bos_token", "<s>"), ("eos_token", "</s>"))
STYLES = {
    "chatml-hermes": """{%- if tools %}<|im_start|>system
You may call:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>tool
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "qwen": """{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% else %}{% set first = 'Help.' %}{% endif -%}
<|im_start|>system
{{ first }}{% if tools %}

# Tools
{% for tool in tools %}{{ "\n" + (tool | tojson) }}{% endfor %}{% endif %}<|im_end|>
{% for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{% set f = c.function if c.function else c -%}
{{- '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif not loop.first or m.role == 'user' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama3": """{{- bos_token }}{% set rest = messages %}{% set system = '' %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set rest = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{% if tools is not none and tools is defined %}{{ 'Environment: ipython\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endif %}{{ system + '<|eot_id|>' }}
{%- for m in rest %}
{%- if 'tool_calls' in m and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set c = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role in ('tool', 'ipython') %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if m.content is mapping or m.content is iterable and m.content is not string %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "mistral": """{{- bos_token }}{% if messages[0].role == 'system' %}[SYSTEM_PROMPT] {{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + (m.content | string) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}""",
    "command-r": """{{ bos_token }}{% if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>## Tools
{% for t in tools %}def {{ t.function.name }}({% for name, p in t.function.parameters.properties.items() %}{{ name }}: {{ 'str' if p.type == 'string' else p.type }}{{ ', ' if not loop.last }}{% endfor %})
{% endfor %}<|END_OF_TURN_TOKEN|>{% endif %}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>{% else %}<|{{ m.role | upper }}_TOKEN|>{% endif %}{% if m.tool_calls %}Action: {{ m.tool_calls | map(attribute='function') | list | tojson(indent=2) }}{% else %}{{ m.content | trim }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}""",
    "gemma": """{{ bos_token }}{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}{% set ns.first = messages[0].content + '\n\n' %}{% endif %}
{%- if tools %}{% set ns.first = ns.first + (tools | tojson) + '\n' %}{% endif %}
{%- for m in messages if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}
{{ ns.first if loop.first }}{{ m.content | trim }}{% for c in m.tool_calls or [] %}```tool_code
{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %})
```{% endfor %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    "phi": """{% for m in messages %}{% if m.role == 'system' and tools %}{{ '<|system|>' + m.content + '<|tool|>' + (tools | tojson) + '<|/tool|><|end|>' }}{% else %}{{ '<|' + m.role + '|>' + m.content }}{% if m.tool_calls %}{{ '<|tool_call|>' + (m.tool_calls | tojson) + '<|/tool_call|>' }}{% endif %}{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "deepseek": """{% set ns = namespace(tool=false, system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endfor %}{{ bos_token + ns.system }}{% if tools %}{{ '\n' + (tools | tojson) }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m.content + '<|Assistant|>' }}
{%- elif m.role == 'tool' %}{{ '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}{% set ns.tool = true %}
{%- elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<|tool_call_begin|>' + c.function.name + '\n```json\n' + (c.function.arguments | tojson) + '\n```' }}{% endfor %}{{ eos_token }}{% endif %}
{%- endfor %}""",
    "glm": """[gMASK]<sop>{% if tools %}<|system|>
{% for t in tools %}## {{ t.function.name }}
{{ t.function | tojson(indent=4) }}
{% endfor %}{% endif %}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<|assistant|>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>{% endfor %}{% endfor %}{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "granite": """{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{% endif %}{% for m in messages %}<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}""",
    "zephyr": """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "vicuna": """{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% if tools %} {{ tools | tojson }}{% endif %} {% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% else %}{{ m.role | upper }}: {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}""",
    "harmony": """{%- macro params(p) %}{% for name, value in p.properties.items() %}{{ name }}: {{ value.type }}{{ ', ' if not loop.last }}{% endfor %}{% endmacro -%}
{% if tools %}<|start|>developer<|message|>namespace functions {% for t in tools %}// {{ t.function.description }}
type {{ t.function.name }} = (_: {{ params(t.function.parameters) }});{% endfor %}<|end|>{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|{{ 'return' if loop.last and m.role == 'assistant' else 'end' }}|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    "llama2": """{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + (tools | tojson if tools else '') + '\n<</SYS>>\n\n' %}{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ ' ' + eos_token }}{% else %}{{ bos_token + '[INST] ' + ns.system + m.content | trim + ' [/INST]' }}{% set ns.system = '' %}{% endif %}{% endfor %}""",
    "olmo": """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>\n' + m.content }}{% if tools %}{{ ' <functions>' + tools | tojson + '</functions>' }}{% endif %}{{ '\n' }}{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content }}{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments | dictsort %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){% endfor %}</function_calls>{% endif %}{% if not loop.last %}{{ eos_token + '\n' }}{% else %}{{ eos_token }}{% endif %}{% else %}{{ '<|' + ('environment' if m.role == 'tool' else 'user') + '|>\n' + m.content + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}""",
    "thinking": """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.reasoning_content | default('') }}
</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "nemo-inst": """{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}""",
}
REWRITES = {
    "harmony",
    "thinking",
    "nemo-inst",
    "olmo",
}  # what they write of old turns changes, so only the last answer is trained on


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["bare", "tools"])
@pytest.mark.parametrize("style", STYLES)
def test_text_and_trained_spans_are_those_of_transformers(style, tools):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    def rendered(messages, prompt=False):
        return utils.render_jinja_template(
            [messages], chat_template=STYLES[style], tools=tools, add_generation_prompt=prompt, **dict(SPECIAL)
        )[0][0]

    train_on = "last" if style in REWRITES else "assistant"
    record = {"tools": tools} if tools else {}
    template = JinjaTemplate("own", STYLES[style], SPECIAL).checked()
    talk = TALK if tools else [*TALK[:2], *TALK[4:]]
    messages, variables = conversation_of(flat_messages(talk, train_on, record=record, template=template))
    parts = ["".join(map(str, span)) for span in spans_of(messages, template, train_on=train_on, variables=variables)]
    text = rendered(talk)
    assert "".join(parts) == text
    answers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
    expected = []
    for number in answers[-1:] if train_on == "last" else answers:
        start, end = len(rendered(talk[:number], True)), len(rendered(talk[: number + 1]))
        expected.append(text[start:end].rstrip())
    assert parts[1::2] == expected
