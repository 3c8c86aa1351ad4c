"""A call of an MCP server's tool, whose progress is reported to the server of the model.

    pip install mcp httpx
    python examples/mcp_progress.py http://127.0.0.1:8000 JOB TOOL '{"argument": 1}' COMMAND …

JOB is the job whose turn called the tool, and COMMAND starts the MCP server on stdio. The server
updates its forecast of the job's gap with the progress, so that the job's KV is ready when the tool
ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import httpx
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.types import CallToolResult

EVERY_S = 1.0


async def revise(model: httpx.AsyncClient, job: str, **news: Any) -> None:
    """Report the progress of the tool that a job waits for. If that fails, the tool continues."""
    action = {"action_type": "revise", "payload": {"job_id": job, **news}}
    try:
        answer = await model.post("/tiered_kv/hints", json={"actions": [action]})
        print(news, answer.raise_for_status().json()["results"][0], flush=True)
    except httpx.HTTPError as error:
        print(f"{news} was not reported: {error}", flush=True)


async def call_tool(
    url: str, job: str, server: StdioServerParameters, tool: str, arguments: dict[str, Any]
) -> CallToolResult:
    """Call a tool, and report its progress at most once in ``EVERY_S`` seconds."""
    token = os.environ.get("TIERED_KV_ADMIN_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    sent = 0.0
    async with httpx.AsyncClient(base_url=url, headers=headers) as model, Client(server) as client:

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            nonlocal sent
            if total and time.monotonic() - sent >= EVERY_S:
                sent = time.monotonic()
                await revise(model, job, progress=progress, total=total)

        result = await client.call_tool(tool, arguments, progress_callback=on_progress)
        await revise(model, job, done=True)
        return result


if __name__ == "__main__":
    url, job, tool, given, *command = sys.argv[1:]
    server = StdioServerParameters(command=command[0], args=command[1:])
    print(asyncio.run(call_tool(url, job, server, tool, json.loads(given))))
