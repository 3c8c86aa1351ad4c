"""vLLM's tool-call parsers, for answers whose format the project's own reader has found.

Facts on vLLM 0.30 to 0.32:

- The engine does not know ``--tool-call-parser``: it is a flag of the API server, in no part of
  ``VllmConfig``. So the parser is chosen by the format of the answer.
- ``vllm.tool_parsers.ToolParserManager.get_tool_parser(name)(tokenizer).extract_tool_calls(text,
  request)`` works outside the server. The engine has imported the manager already; a parser's
  module takes up to a quarter of a second once, a call 0.01 to 0.5 ms.
- Parsers expect an answer without its thinking, and without the token that ended it.
- ``openai`` (gpt-oss) is a stub that raises. Mistral's, DeepSeek's and Llama's refuse a tokenizer
  without their special tokens. Several log a traceback when an answer is malformed.
- None reads a fence of mini-swe-agent, which is no tool call to vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from tiered_kv.connectors.runtime.base import ParseToolCalls
from tiered_kv.connectors.runtime.gaps.tool_reader import THREAD_NAME


def make_parser(name: str, tokenizer: Any) -> ParseToolCalls:
    """Return the parser of that name, as a function.

    Raises:
        Exception: whatever vLLM raises if the parser is missing, or refuses this tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], model="")
    parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    logging.getLogger(type(parser).__module__).addFilter(_not_of_the_reader)

    def parse(text: str) -> list[tuple[str, str]]:
        found = parser.extract_tool_calls(text, request).tool_calls
        return [(one.function.name, one.function.arguments) for one in found]

    return parse


def _not_of_the_reader(record: logging.LogRecord) -> bool:
    """Drop log records of parsers that cannot read an answer: our own reader handles it."""
    return record.threadName != THREAD_NAME
