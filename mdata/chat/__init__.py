"""Conversations written as text by templates, and which of its tokens are trained on.

docs/design/chat.md says why a conversation becomes spans that take turns: context, trained, context, trained ...
"""
