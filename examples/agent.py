"""An agent that runs shell commands, and sends a job id to the server.

    pip install openai
    python examples/agent.py http://127.0.0.1:8000/v1 "Which file here has the most lines?"

The agent runs the commands that the model writes. Use a container or a disposable machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import uuid

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

STEPS, ANSWER_TOKENS, TOOL_S, OUTPUT_CHARS = 20, 1024, 120, 4000
RULES = "Solve the task step by step. Answer with one ```bash block, or with DONE and the result."
COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


def shell(command: str) -> str:
    """Run a command for at most ``TOOL_S`` seconds. Returns the end of its output, and its exit
    code.
    """
    words = ["timeout", str(TOOL_S), "bash", "-c", command]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    return f"{(done.stdout + done.stderr)[-OUTPUT_CHARS:]}\nexit code {done.returncode}"


def run(url: str, task: str) -> None:
    """Work on a task, and print how many tokens of each turn came from the cache."""
    client = OpenAI(
        base_url=url, api_key="none"
    )  # the default timeout is 600 s, and turns may be held back for 300 s
    model = client.models.list().data[0].id
    job = f"agent-{uuid.uuid4()}"
    chat: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"{RULES}\n\n{task}"}]
    for step in range(1, STEPS + 1):
        # Add expected_tool_s here if the duration of the next tool is known.
        hints = {"job_id": job, "is_last_step": step == STEPS}
        answer = client.chat.completions.create(
            model=model,
            messages=chat,
            max_tokens=ANSWER_TOKENS,
            extra_body={"kv_transfer_params": hints},
        )
        text = answer.choices[0].message.content or ""
        found = (answer.model_extra or {}).get("kv_transfer_params") or {}
        print(f"--- turn {step}: {found.get('tiered_kv')}\n{text}", flush=True)
        command = COMMAND.search(text)
        if command is None and "DONE" in text:
            return
        result = shell(command[1]) if command else "There is no ```bash block in your answer."
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    run(*sys.argv[1:3])
