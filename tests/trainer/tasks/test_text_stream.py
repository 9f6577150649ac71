"""Pieces of text are those of the whole text, no character is split, and a stop string is found wherever it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.tokenizers.registry import build_tokenizer
from trainer.tasks.text_stream import TextStream

BYTES = build_tokenizer("ByteTokenizer", {})
TEXTS = st.text(st.sampled_from("ab \n\u00e9\u4f60\U0001f600"), max_size=20)


def pieces(ids: list[int], prompt: str = "", **options: object) -> tuple[list[str], TextStream]:
    stream, out = TextStream(BYTES, list(prompt.encode()), **options), []  # type: ignore[arg-type]
    for token in ids:
        if stream.stopped:
            break
        out.append(stream.add(token))
    return [*out, stream.finish()], stream


@given(TEXTS, TEXTS)
def test_the_pieces_are_the_text_and_whole_characters(text, prompt):
    given_out, stream = pieces(list(text.encode()), prompt)
    assert "".join(given_out) == stream.text == text
    assert not any("\ufffd" in piece for piece in given_out)


@given(TEXTS, st.lists(st.text(st.sampled_from("ab \n\u4f60"), min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_first_stop_string_ends_the_text(text, stops):
    at = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    given_out, stream = pieces(list(text.encode()), stop=tuple(stops))
    # A longer stop string that begins earlier may be completed later than a short one.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = (
        min((text[: min(ends)].find(stop) for stop in stops if stop in text[: min(ends)]), default=at) if ends else at
    )
    assert stream.text == "".join(given_out) == text[:first]
    assert stream.stopped == any(stop in text for stop in stops)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_are_all_given_out(ids):
    given_out, stream = pieces(ids)
    assert "".join(given_out) == stream.text == BYTES.decode(ids)


def test_nothing_that_may_begin_a_stop_string_is_given_out():
    given_out, stream = pieces(list(b"one ENX END"), stop=("END",))
    assert given_out == ["o", "n", "e", " ", "", "", "ENX", " ", "", "", "", ""] and stream.stopped
    given_out, stream = pieces(list(b"one EN"), stop=("END",))
    assert given_out[-1] == "EN" and not stream.stopped


def test_a_kept_stop_string_ends_the_text():
    assert pieces(list(b"a\nb"), stop=("\n",), keep_stop=True)[1].text == "a\n"
    assert pieces(list(b"a\nb"), stop=("\n",))[1].text == "a"


class Joined:
    """A tokenizer of bytes with one token more, 256: a full stop and the first byte of a character."""

    def decode(self, ids):
        return b"".join(b".\xe2" if id == 256 else bytes([id]) for id in ids).decode(errors="replace")


def test_a_stop_string_before_an_unfinished_character_ends_the_text_too():
    for options, text in (({}, "a"), ({"keep_stop": True}, "a.\ufffd")):
        stream = TextStream(Joined(), [], stop=(".",), **options)  # type: ignore[arg-type]
        given_out = [stream.add(97), stream.add(256), stream.finish()]
        assert "".join(given_out) == stream.text == text and stream.stopped


def test_stops_before_the_least_number_of_tokens_do_not_count():
    stream = TextStream(BYTES, [], stop=(".",))
    assert stream.add(ord("."), stops=False) == "." and not stream.stopped
    assert stream.add(ord("."), stops=True) == "" and stream.stopped


@pytest.mark.parametrize("count", [3, 40])
def test_an_unfinished_character_at_the_end_is_shown_as_such(count):
    assert pieces([0xE4] * count)[1].text == BYTES.decode([0xE4] * count)
