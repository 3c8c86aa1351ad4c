"""Refusals: answers other than what was asked for, each a status with a sentence."""

from __future__ import annotations

NO_JOB = "There is no job of this id: it is over, was forgotten, or never came."


class Refusal(Exception):
    """A request that is not answered.

    Attributes:
        status: status of HTTP.
        sentence: what is wrong and what to do; nothing of the request is in it.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
