"""A job's conversation, as text: what its next prompt holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat; ``role`` is user or assistant."""

    role: str
    content: str


class Conversation:
    """Messages so far. A context grows turn by turn, and may be cut when an agent compacts it."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def keep(self, share: float) -> None:
        """Keep the leading ``share`` of its characters, 0 to 1."""
        left = round(share * sum(len(message.content) for message in self._messages))
        kept: list[Message] = []
        for message in self._messages:
            content = message.content[:left]
            left -= len(content)
            if content:
                kept.append(Message(message.role, content))
        self._messages = kept

    def ask(self, text: str) -> None:
        """Add what the agent says next. Roles alternate, as many chat templates demand: behind a
        cut-off message of the agent it is that message's end."""
        self._add("user", text)

    def answered(self, text: str) -> None:
        """Add the model's answer. An empty one is a blank: some servers refuse empty messages."""
        self._add("assistant", text or " ")

    def chat(self) -> list[dict[str, str]]:
        """The messages, for ``/v1/chat/completions``."""
        return [{"role": one.role, "content": one.content} for one in self._messages]

    def text(self) -> str:
        """All of it as one text, for ``/v1/completions``."""
        return "".join(one.content for one in self._messages)

    def _add(self, role: str, text: str) -> None:
        if self._messages and self._messages[-1].role == role:
            text = f"{self._messages.pop().content} {text}"
        self._messages.append(Message(role, text))
