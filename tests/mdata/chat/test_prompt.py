"""The ids that a model continues with its answer: those that a training had before it, and those of transformers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from mdata.chat.jinja_template import JinjaTemplate
from mdata.chat.loss_spans import TemplateRefused, spans_of
from mdata.chat.prompt import answer_ends, answer_prompt
from mdata.chat.templates import choose_template
from mdata.sources.conversation import Message
from mdata.tokenizers.registry import build_tokenizer

MESSAGES = [("user", "Hi"), ("assistant", "Yes"), ("user", "a\nb")]
SPELLED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(*, adds: bool):
    """Bytes and four tokens; `adds`: begin each text with one and end it with another by itself."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $0 </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
        )
    config = '{"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": config.encode()}
    return tokenizer, build_tokenizer("HuggingFaceTokenizer", files)


@pytest.mark.parametrize("choice", ["chatml", "plain"])
def test_a_prompt_is_what_a_training_had_before_the_answer(choice):
    _, tokenizer = tokenizer_of(adds=False)
    template = choose_template(choice, tokenizer)
    whole = [*MESSAGES, ("assistant", "No")]
    spans = spans_of([Message(*message) for message in whole], template, train_on="assistant")
    ids = []
    for span in spans[:-1] if len(spans) % 2 == 0 else spans[:-2]:
        for part in span:
            ids += [part] if isinstance(part, int) else tokenizer.encode_batch([part])[0].tolist()
    assert answer_prompt(template, tokenizer, MESSAGES) == ids
    assert answer_ends(template, tokenizer) == {{"chatml": 259, "plain": 257}[choice]}


@pytest.mark.parametrize("adds", [True, False])
def test_a_template_of_jinja_is_one_text_without_what_the_tokenizer_adds(adds):
    library, tokenizer = tokenizer_of(adds=adds)
    template = JinjaTemplate("own", SPELLED, (("bos_token", "<s>"),)).checked()
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in MESSAGES)
    wanted = library.encode(f"<s>{turns}<|im_start|>assistant\n", add_special_tokens=False).ids
    assert answer_prompt(template, tokenizer, MESSAGES) == wanted
    assert answer_ends(template, tokenizer) == {259}


def test_what_a_template_refuses():
    _, tokenizer = tokenizer_of(adds=False)
    refusing = JinjaTemplate("own", "{{ raise_exception('no') }}", ()).checked()
    with pytest.raises(TemplateRefused, match="no"):
        answer_prompt(refusing, tokenizer, MESSAGES)
    assert answer_ends(refusing, tokenizer) == frozenset()
    by_text = JinjaTemplate("own", "{% for m in messages %}{{ m.content }};{% endfor %}", ()).checked()
    assert answer_ends(by_text, tokenizer) == frozenset()


def test_a_system_message_for_which_a_template_writes_nothing_is_refused():
    """As in training; one that the template names is left to it."""
    _, tokenizer = tokenizer_of(adds=False)
    turns = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    asks = "{% if not add_generation_prompt %}{{ raise_exception('answer') }}{% endif %}"
    conversation = [("system", "Be brief."), ("user", "Hi")]
    for source in (turns, asks + turns):
        with pytest.raises(
            TemplateRefused, match=r"message 1: role 'system' is unknown .* writes nothing for it; it has"
        ):
            answer_prompt(JinjaTemplate("own", source, ()), tokenizer, conversation)
    knows = turns + "{% if messages[0].role == 'system' %}{% endif %}"
    assert (
        answer_prompt(JinjaTemplate("own", knows, ()), tokenizer, conversation)
        == tokenizer.encode_batch(["Hi"])[0].tolist()
    )
