"""The runtime works in an engine other than vLLM."""

from __future__ import annotations

import subprocess
import sys


def test_the_runtime_works_without_vllm() -> None:
    code = """
import sys
sys.modules["vllm"] = None
from tiered_kv.testing.checked_kv import expected, text
from tiered_kv.testing.engine.rig import SecondRig
with SecondRig() as rig:
    prompt = text(300, seed=1)
    rig.ask("first", prompt)
    rig.fill()
    assert rig.ask("again", prompt) == expected(prompt, 4)
    assert rig.count("prompt_tokens_cpu") == 299
    rig.check_clean()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
