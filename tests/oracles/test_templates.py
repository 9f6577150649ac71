"""The comparison of chat templates with transformers: on templates in the style of published families, and its failure.

The templates are written for this test: each has the structure of the family that it is named after, not its text.
"""

# ruff: noqa: E501 (templates are written as published ones are)
from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from mdata.chat import jinja_template
from tests.oracles.frame import answers
from tests.oracles.templates import CONVERSATIONS, PROGRAM, REFUSED, Reference, cases_of, expected_of

pytest.importorskip("transformers.utils.chat_template_utils")

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
    "nemo-inst": """{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{% if m == last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}""",
    "gpt-oss": """{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{{ '<|start|>functions.' + m.name + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}{% elif m.role == 'assistant' %}{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}{% if m.content %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}{% for c in m.tool_calls or [] %}{{ '<|start|>assistant to=functions.' + c.function.name + '<|message|>' + c.function.arguments | tojson + '<|call|>' }}{% endfor %}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    "smollm-training": """{% if enable_thinking is defined and not enable_thinking %}/no_think {% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{% if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
}
# What they write of old turns changes, so only the last answer is trained on.
REWRITES = {"harmony", "thinking", "nemo-inst", "olmo"}


run = functools.partial(answers, PROGRAM.compare)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file for each style."""
    for name, source in STYLES.items():
        (tmp_path / f"{name}.jinja").write_text(source)
    return tmp_path


def test_text_and_trained_spans_are_those_of_transformers(folder):
    equal, lines, reasons = run(folder)
    assert equal, reasons
    assert len(lines) == len(STYLES) + 2 and lines[-2].endswith(f" cases are {REFUSED}")
    total = len(STYLES) * len(CONVERSATIONS) * 2
    assert lines[-1] == f"{total} of {total} cases equal" and int(lines[-2].split()[0]) < 0.6 * total


@pytest.mark.parametrize("style", STYLES)
def test_a_style_trains_on_answers_after_calls(style):
    """Without this, all could be equal because all are refused."""
    train_on = "last" if style in REWRITES else "assistant"
    expected = expected_of(Reference(STYLES[style]), "a call", train_on)
    assert not isinstance(expected, Exception), expected
    assert [*map(bool, expected.trained)] == [True] * (1 if style in REWRITES else 3)


def test_a_difference_is_a_failure(folder, monkeypatch):
    kinds = ("gpt-oss.jinja", "smollm-training.jinja", "qwen.jinja")
    monkeypatch.setattr(jinja_template, "REASONING", ("reasoning_content", "other", "another"))
    equal, lines, reasons = run(folder, *kinds)
    assert not equal and not lines[-1].startswith(lines[-1].split()[2]) and "'reasoning_content'" in reasons[0]
    monkeypatch.undo()
    monkeypatch.setattr(jinja_template, "_clock", lambda date: lambda format: "yesterday")
    _, _, reasons = run(folder, *kinds)
    assert all("gpt-oss" in reason and "the text differs" in reason for reason in reasons) and reasons
    monkeypatch.undo()
    monkeypatch.setattr(jinja_template, "_BLOCK", re.compile("never"))
    _, _, reasons = run(folder, *kinds)
    assert all("smollm-training" in reason and "refused" in reason for reason in reasons) and reasons


def test_what_cannot_be_read_and_no_template_are_failures(tmp_path):
    assert run(tmp_path) == (False, ["0 of 0 cases equal"], [])
    (tmp_path / "a.jinja").write_bytes(b"\xff")
    assert run(tmp_path)[1] == ["a.jinja: 0 of 1 cases equal", "0 of 1 cases equal"]
    (tmp_path / "a.jinja").write_text("{% for %}")
    assert all(case.note == REFUSED for case in cases_of(tmp_path)), "transformers cannot compile it, either"
