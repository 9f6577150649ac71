"""The error of the server's APIs: a status and a sentence, which each API formats in its own way."""

from __future__ import annotations


class ApiError(Exception):
    """A request is rejected, or cannot be answered.

    Args:
        status: of HTTP. text: what, the values, what was expected. param: the field. kind: OpenAI's `type`.
        code: OpenAI's `code`. detail: numbers, where `text` is given by another program.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        detail: str | None = None,
    ) -> None:
        text = text.replace("\n  ", "; ")  # programs show it in one line
        super().__init__(text)
        self.status, self.text, self.param, self.kind, self.code, self.detail = status, text, param, kind, code, detail
