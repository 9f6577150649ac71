"""Conversations: the messages of a record, the templates that make text of them, and which of it is trained on.

A conversation becomes spans that take turns: context, trained, context, trained ... (docs/design/chat.md says why).
"""

from mdata.chat.messages import TRAIN_ON, Message, conversation_of
from mdata.chat.spans import Span, Template, spans_of
from mdata.chat.templates import choose_template

__all__ = ["TRAIN_ON", "Message", "Span", "Template", "choose_template", "conversation_of", "spans_of"]
