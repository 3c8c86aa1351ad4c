"""The server commands in the documentation work: vLLM's parser knows each flag, and the settings
exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.cli.test_documented_commands import BLOCK, DOCUMENTS
from tests.deploy.example_files import compose_server, engines_of_script, kubernetes_server
from tests.deploy.unit import FOLDER, STATE, command, environment
from tiered_kv.config import load_config

# Other vLLM versions do not have this module.
cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
SETTINGS = re.compile(r"TIERED_KV_\w+=\S+")


def servers() -> list[str]:
    """Return the code blocks of the documentation that start a server, with continued lines
    joined."""
    found = list[str]()
    for path in DOCUMENTS:
        blocks = (block.replace("\\\n", " ") for block in BLOCK.findall(path.read_text()))
        found += [block for block in blocks if re.search(r"^vllm serve ", block, re.MULTILINE)]
    return found


def deployed() -> list[str]:
    """Return the commands, with their settings, of the service and the container in ``deploy/``."""
    variables = [f"{name}={value}" for name, value in environment().items()]
    _, *words = command()
    said = (FOLDER / "Containerfile").read_text().partition("FROM ")[0]
    lines = said.replace("\\\n#", " ").splitlines()
    (run,) = (line for line in lines if line.startswith("#   docker run "))
    settings, _, server = run.partition(" tiered-kv ")
    return [
        "\n".join((*variables, shlex.join(["vllm", *words]))),
        f"{settings}\nvllm serve {server}",
    ]


def examples() -> list[str]:
    """Return the commands, with their settings, of the servers in ``examples/``."""
    found = (compose_server(), kubernetes_server(), *engines_of_script())
    return [
        "\n".join((*(f"{name}={value}" for name, value in one.settings.items()), one.line))
        for one in found
    ]


def test_there_are_servers_in_the_documents() -> None:
    assert servers()


@pytest.mark.parametrize("block", [*servers(), *deployed()])
def test_vllm_accepts_every_flag_and_tiered_kv_every_variable(block: str, tmp_path: Path) -> None:
    check(block, tmp_path)


def test_vllm_and_tiered_kv_accept_the_servers_of_the_examples(tmp_path: Path) -> None:
    for block in examples():
        check(block, tmp_path)


def check(block: str, tmp_path: Path) -> None:
    """Assert that vLLM accepts the commands of a block, and tiered-kv its settings."""
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    lines = [line for line in block.split("\n") if line.startswith("vllm serve ")]
    assert lines
    for line in lines:
        parsed = parser.parse_args(shlex.split(line, comments=True)[2:])
        cli_args.validate_parsed_serve_args(parsed)
        transfer = parsed.kv_transfer_config
        if transfer is not None:
            assert transfer.kv_connector == "TieredContinuumConnector"
        if isinstance(parsed.scheduler_cls, str):
            module, _, name = parsed.scheduler_cls.rpartition(".")
            assert hasattr(importlib.import_module(module), name)
    here = block
    for folder in ("/nvme", "=/pages", STATE):
        here = here.replace(folder, folder.partition("/")[0] + str(tmp_path))
    load_config(dict(one.split("=", 1) for one in SETTINGS.findall(here)))
