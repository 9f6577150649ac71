"""Templates that would not end, or would fill the memory, are refused; the results of others do not change."""

from __future__ import annotations

import pytest

from mdata.chat import template_limits
from mdata.chat.jinja_template import JinjaTemplate, _compiled
from mdata.chat.loss_spans import TemplateRefused
from mdata.errors import UsageError
from mdata.sources.conversation import Message

MESSAGES = [Message("user", "hi"), Message("assistant", "hello\nyou")]
TWICE = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
LOOPS = "{% for i in range(100000) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {
    "loops": LOOPS,
    "output": LOOPS.replace("%}{% endfor", "%}x{% endfor", 1),
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "caller": "{% macro f(n) %}{{ caller(n) }}{% endmacro %}"
    + LOOPS.replace("%}{% endfor", "%}{{ f(1) }}{% endfor", 1),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "filters": LOOPS.replace("%}{% endfor", "%}{{ 'x'|upper }}{% endfor", 1),
    "sum": TWICE.replace("STEP", "ns.s + ns.s"),
    "concatenation": TWICE.replace("STEP", "ns.s ~ ns.s"),
    "product": TWICE.replace("STEP", "ns.s * 2"),
    "method": TWICE.replace("STEP", "ns.s.replace('', ns.s)"),
    "filter": TWICE.replace("STEP", "ns.s|replace('a', 'aa')|replace('b', 'bb')"),
    "join": TWICE.replace("STEP", "ns.s.join([ns.s, ns.s])"),
    "join filter": TWICE.replace("STEP", "[ns.s, ns.s]|join(ns.s)"),
    "format": TWICE.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
    "format method": TWICE.replace("STEP", "'{0}{0}'.format(ns.s)"),
    "format filter": TWICE.replace("STEP", "'%s%s'|format(ns.s, ns.s)"),
    "capture": TWICE.replace("{% set ns.s = STEP %}", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "nested": TWICE.replace("STEP", "[ns.s, ns.s]").replace("ns.s|length", "ns.s"),
    "nested json": TWICE.replace("STEP", "{'a': ns.s, 'b': ns.s}").replace("ns.s|length", "ns.s|tojson"),
    "long": "{{ 'x' * 10 ** 10 }}",
    "list": "{{ ([0] * 10 ** 10)|length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(s=3) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "center": "{{ 'x'.center(10000000000) }}",
    "center filter": "{{ 'x'|center(10000000000) }}",
    "indent": "{{ ('x\n' * 90000)|indent(900000) }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "star": "{{ '%*d' % (9999999999, 1) }}",
    "width of a method": "{{ '{:9999999999}'.format(1) }}",
    "width of a filter": "{{ '%9999999999d'|format(1) }}",
    "slices": "{{ [1]|slice(9999999999)|list }}",
    "many fields": "{{ ('%999999d' * 5000) % (1,) }}",
    "many fields of a method": "{{ ('{0:>999999}' * 5000).format(1) }}",
    "one text in many fields": "{{ ('{0}' * 90000).format('x' * 90000) }}",
    "width in a field": "{{ '{:{}}'.format(1, 9999999999) }}",
    "map": "{{ ['{:9999999999}']|map('format', 1)|list }}{{ ['%9999999999d']|map('format', 1)|list }}",
    "condition of a loop": LOOPS.replace("100000) %}{% endfor", "100000) if not i %}{% endfor", 1),
    "ranges": "{% for i in range(90000) %}{{ range(90000)|sum }}{% endfor %}",
    "search": "{% set l = range(90000)|list %}{% for i in l %}{{ 'x' in l }}{% endfor %}",
    "comparison": "{% set l = range(90000)|list %}{% set m = l + [] %}{% for i in l %}{{ l == m }}{% endfor %}",
    "translate": "{{ ('x' * 90000).translate({120: 'y' * 90000}) }}",
    "bytes": "{{ 'x'.encode() * 10 ** 10 }}",
    "number to bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "join of a generator": "{{ ('x' * 900000).join(range(90000)|map('string'))|length }}",
    "indent by text": "{{ ('x\n' * 90000)|indent('y' * 90000) }}",
    "work": LOOPS.replace("%}{% endfor", "%}{{ ('x' * 900000)|length }}{% endfor", 1),
    "captured text": "{% set x %}" + LOOPS.replace("%}{% endfor", "%}" + "x" * 50000 + "{% endfor", 1) + "{% endset %}",
    "captured literal": "{% set x %}"
    + LOOPS.replace("%}{% endfor", "%}{{ '" + "x" * 50000 + "' }}{% endfor", 1)
    + "{% endset %}",
    "block": "{% block b %}"
    + "x" * 50000
    + "{% endblock %}"
    + "{% set x %}"
    + LOOPS.replace("%}{% endfor", "%}{{ self.b() }}{% endfor", 1)
    + "{% endset %}",
    "lipsum": "{{ lipsum(n=99999) }}",
}


def rendered(source: str) -> str:
    template = JinjaTemplate("t", source, ())
    return template._text([message.given() for message in MESSAGES], prompt=False)


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch):
    monkeypatch.setattr(template_limits, "STEPS", 20_000)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name):
    with pytest.raises(TemplateRefused, match="the chat template fails"):
        rendered(HOSTILE[name])


COPIED = "{% set x %}" + "x" * 100_000 + "{% endset %}"
BODIES = {
    "loop": "{% for i in range(10) %}" + COPIED + "{% endfor %}",
    "macro": "{% macro f() %}" + COPIED + "{% endmacro %}" + "{{ f() }}" * 10,
    "call block": "{% macro f() %}{% for i in range(10) %}{{ caller() }}{% endfor %}{% endmacro %}"
    + "{% call f() %}" + COPIED + "{% endcall %}",
    "block": "{% block b %}" + COPIED + "{% endblock %}" + "{{ self.b() }}" * 9,
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_text_that_a_body_copies_counts_each_time(name):
    """Not only what comes out of it: a hundred thousand characters that are thrown away are work."""
    rendered(BODIES[name])
    assert _compiled(BODIES[name]).environment._steps >= 10 * 100_000 // 1024


def test_what_was_reached_is_said():
    with pytest.raises(TemplateRefused, match=r"more than 24,\d\d\d steps"):
        rendered(LOOPS)
    with pytest.raises(TemplateRefused, match=r"a value of more than 1,0\d\d,\d\d\d characters"):
        rendered("{{ 'x' * 10000000 }}")
    with pytest.raises(TemplateRefused, match="gives center a number above 1,000,000"):
        rendered("{{ 'x'.center(10000000000) }}")


def test_small_parts_of_the_output_count_together():
    with pytest.raises(TemplateRefused, match="a value of more than"):
        rendered("{% for i in range(20) %}" + "x" * 100_000 + "{% endfor %}")


def test_each_rendering_is_counted_anew():
    source = "{% for i in range(9000) %}{% endfor %}done"
    assert [rendered(source) for _ in range(4)] == ["done"] * 4


def test_a_template_that_is_nested_too_deep_is_no_template():
    with pytest.raises(UsageError, match="not valid Jinja"):
        JinjaTemplate("t", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", ()).checked()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role ~ ': ' ~ m['content'] }};{% endfor %}", "user: hi;assistant: hello\nyou;"),
        (
            "{{ 'a' ~ 1 ~ none ~ [2] }}{{ 'x' * 3 }}{{ [1] + [2] }}{{ 7 ** 3 }}{{ 'a' ~ nothing }}",
            "a1None[2]xxx[1, 2]343a",
        ),
        ("{{ messages|map(attribute='role')|join('-') }}{{ 'abc'|replace('b', 'xx') }}", "user-assistantaxxc"),
        ("{{ '%05d|%s'|format(3, 'x') }}{{ '{:>4}'.format(1) }}{{ '%d%%' % 5 }}", "00003|x   15%"),
        ("{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "321"),
        ("{% for i in [[1], [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "123"),
        ("{% for i in range(4) if i % 2 %}{{ loop.index }}{% else %}none{% endfor %}", "12"),
        ("{% for i in [] %}{% else %}none{% endfor %}{{ 'x\ny'|indent(2) }}{{ 'a b'.split(' ')|last }}", "nonex\n  yb"),
        (
            "{{ ('%d|%s' % (1700000000, '{12345678901}'))|trim }}{{ '{} {}'.format(1700000000, '%9999999999d') }}",
            "1700000000|{12345678901}1700000000 %9999999999d",
        ),
        ("{{ '{\"id\": 12345678901}'|trim|upper }}{{ 1700000000|string }}", '{"ID": 12345678901}1700000000'),
        (
            "{% if messages[0] == messages[0] and 'x' not in messages and 1 < messages|length < 3 %}yes{% endif %}",
            "yes",
        ),
        ("{{ ', '.join(messages|map(attribute='role')) }}", "user, assistant"),
        ("{{ messages[0]|tojson }}{{ 'ab'.join(['1', '2']) }}", '{"role": "user", "content": "hi"}1ab2'),
    ],
)
def test_other_templates_give_what_they_gave(source, text):
    assert rendered(source) == text


def test_a_long_text_in_many_parts_is_no_fault():
    message = Message("user", "x" * 100)
    template = JinjaTemplate("t", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ())
    assert len(template._text([message.given()] * 20_000, prompt=False)) == 20_000 * 107


def test_limits_grow_with_the_conversation():
    long = [Message("user", "x" * 3_000_000)] * 2
    template = JinjaTemplate("t", "{% for m in messages %}{{ m.content + m.content }}{% endfor %}", ())
    assert len(template._text([message.given() for message in long], prompt=False)) == 12_000_000
