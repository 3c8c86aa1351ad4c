"""The OpenAI client of load generators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2  # what the OpenAI client is built on
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

SILENCE_S = 900.0
"""A server that says nothing for so long is taken for dead: under load a turn waits minutes."""

KEEPALIVE_S = 2.0
"""Connections idle for longer are not used again: vLLM's server closes them after 5 s, and a
request sent just then would be lost."""


@asynccontextmanager
async def open_client(base_url: str, api_key: str) -> AsyncIterator[AsyncOpenAI]:
    """A client that neither limits the load nor repeats a request. No proxy stands between.

    Args:
        base_url: without ``/v1``.
    """
    http = DefaultAsyncHttpxClient(
        trust_env=False,
        timeout=SILENCE_S,
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
        ),
    )
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=api_key, http_client=http, max_retries=0
    ) as client:
        yield client
