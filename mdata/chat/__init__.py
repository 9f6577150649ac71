"""Conversations written as text by templates, and which of its tokens are trained on.

docs/design/chat.md says why a conversation becomes alternating spans: context, trained, context, trained ...
"""
