"""What is compared at load stays small, whatever the tokens of a stranger's tokenizer.json are."""

from __future__ import annotations

from mdata.tokenizers.base.self_check_texts import added_token_texts
from mdata.tokenizers.base.tokenizer_json import AddedToken


def test_long_tokens_with_ends_in_common_give_few_texts():
    """There is a text for each end that two tokens share, of their length, so their number has a limit."""
    tokens = [AddedToken(id=number, content="a" * (200 + number), lstrip=bool(number % 2)) for number in range(48)]
    texts = added_token_texts(tokens)
    assert "a" * (200 + 201 - 32) in texts
    assert sum(map(len, texts)) < 40_000_000
    longer = [AddedToken(id=number, content=f"{number}" * 1000) for number in range(48)]
    assert added_token_texts([*tokens, *longer]) == texts
