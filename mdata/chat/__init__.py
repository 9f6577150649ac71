"""Conversations as text through templates, and which tokens of it are trained on.

docs/design/chat.md says why a conversation becomes spans that take turns: context, trained, context, trained ...
"""
