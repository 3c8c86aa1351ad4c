"""A job's context: what its next prompt holds, as messages or as token ids."""

from __future__ import annotations

from dataclasses import dataclass

from .client import Answer, Api, Prompt
from .jobs import Turn


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat; ``role`` is system, user or assistant."""

    role: str
    content: str


class Conversation:
    """Messages so far. A context grows turn by turn, and is cut when an agent compacts it.

    Args:
        system: the system's message; none if empty.
    """

    def __init__(self, system: str = "") -> None:
        self._messages = [Message("system", system)] if system else []

    def add(self, turn: Turn) -> None:
        """Add a turn, behind the part of the context that it keeps. Roles alternate, as many chat
        templates demand: behind a message of the agent that was cut off, it ends that message."""
        if turn.kept < 1:
            self._keep(turn.kept)
        self._append("user", turn.text)

    def answered(self, answer: Answer) -> None:
        """Add an answer. An empty one becomes a blank: some servers refuse empty messages."""
        self._append("assistant", answer.text or " ")

    def prompt(self, api: Api) -> Prompt:
        """Messages, or their texts joined, as the route takes them."""
        if api is Api.CHAT:
            return [{"role": one.role, "content": one.content} for one in self._messages]
        return "".join(one.content for one in self._messages)

    def _keep(self, share: float) -> None:
        """Keep the leading ``share`` of all characters."""
        left = round(share * sum(len(message.content) for message in self._messages))
        kept: list[Message] = []
        for message in self._messages:
            content = message.content[:left]
            left -= len(content)
            if content:
                kept.append(Message(message.role, content))
        self._messages = kept

    def _append(self, role: str, text: str) -> None:
        if self._messages and self._messages[-1].role == role:
            text = f"{self._messages.pop().content} {text}"
        self._messages.append(Message(role, text))


class TokenContext:
    """Token ids so far."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def add(self, turn: Turn) -> None:
        """Add what a turn adds."""
        self._ids += turn.added

    def answered(self, answer: Answer) -> None:
        """Add an answer."""
        self._ids += answer.tokens

    def prompt(self, _api: Api) -> Prompt:
        """All ids."""
        return list(self._ids)
