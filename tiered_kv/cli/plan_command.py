"""``tiered-kv plan``: estimates how much KV each tier of a server can hold.

Prints the plan as JSON or as tables, and the environment and the command that start a server as
planned, in the form that the README uses.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tiered_kv.config import TierConfig
from tiered_kv.formatting import NONE, brief, duration, size
from tiered_kv.page_group import KvKind
from tiered_kv.sizing.model_shape import read_shape
from tiered_kv.sizing.step_cost import (
    BATCHED_TOKENS,
    COMPUTE_SHARE,
    GB,
    GIB,
    GPUS,
    MEMORY_SHARE,
    RESERVED_BYTES,
    UTILISATION,
    find_gpu,
)
from tiered_kv.sizing.tier_plan import Plan, Setup, TierPlan, make_plan

from .terminal import AsJson, one_sentence, print_json, print_table

TRANSFER = {
    "kv_connector": "TieredContinuumConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""Value of ``--kv-transfer-config``."""
SCHEDULER = "tiered_kv.connectors.vllm.engine_scheduler.ContinuumScheduler"
"""Scheduler class that serves requests in the order in which their jobs started."""
SSD_FOLDER = "/nvme/tiered-kv"
"""Placeholder for the folder of pages on SSD, which the operator replaces."""
SHUTDOWN_S = 30
"""Value of ``--shutdown-timeout``, seconds: time for requests in flight and for the final flush to
SSD."""


def environment(cpu_gib: float, ssd_gib: float) -> dict[str, str]:
    """Return the environment variables for the server, by name."""
    found = {"TIERED_KV_CPU_GIB": f"{cpu_gib:g}"}
    if ssd_gib > 0:
        found["TIERED_KV_SSD_PATH"] = SSD_FOLDER
        found["TIERED_KV_SSD_GIB"] = f"{ssd_gib:g}"
    return found


def arguments(
    model: Path,
    *,
    ranks: int,
    fits: bool,
    ssd: bool,
    dtype: str,
    kv_dtype: str,
    utilization: float | None,
) -> list[str]:
    """Return the command that starts the server, as a list of words.

    Args:
        model: model folder, or its ``config.json``.
        fits: True if VRAM holds the model's longest context. Otherwise vLLM chooses the maximum
            length, because it would refuse to start with the model's own.
        ssd: True if there is a folder for the final flush.
        dtype, kv_dtype: requested types; vLLM's defaults are left out.
        utilization: fraction of VRAM; None for vLLM's default.
    """
    folder = model if model.is_dir() else model.parent
    words = ["vllm", "serve", str(folder)]
    if ranks > 1:
        words += ["--tensor-parallel-size", str(ranks)]
    if dtype != "auto":
        words += ["--dtype", dtype]
    if kv_dtype != "auto":
        words += ["--kv-cache-dtype", kv_dtype]
    if not fits:
        words += ["--max-model-len", "auto"]
    if utilization is not None:
        words += ["--gpu-memory-utilization", f"{utilization:g}"]
    if ssd:
        words += ["--shutdown-timeout", str(SHUTDOWN_S)]
    words += ["--kv-transfer-config", json.dumps(TRANSFER, separators=(",", ":"))]
    return [*words, "--scheduler-cls", SCHEDULER]


def in_shell(variables: dict[str, str], words: list[str]) -> str:
    """Return two shell commands: one exports the variables, and one starts the server. The
    options with long values start on new lines.
    """
    exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    quoted = shlex.join(words)
    for option in (" --kv-transfer-config", " --scheduler-cls"):
        quoted = quoted.replace(option, f" \\\n {option}")
    return f"export {exported}\n{quoted}"


GROUP_COLUMNS = {
    "KV": False,
    "layers": True,
    "per token": True,
    "per state": True,
    "block size": True,
    "groups": True,
}
"""Columns of the table of KV types; the value is True for columns of numbers."""

TIER_COLUMNS = {
    "tier": False,
    "KV capacity": True,
    "contexts": True,
    "tokens": True,
    "time to restore": True,
    "break-even gap": True,
}
"""Columns of the table of tiers; the value is True for columns of numbers."""


def describe_plan(plan: Plan, variables: dict[str, str], words: Sequence[str]) -> dict[str, object]:
    """Return the description of a plan for ``--json``. Sizes are over all ranks, in bytes;
    times are in seconds.
    """
    shape, setup, layout, ranks = plan.shape, plan.setup, plan.shape.layout, plan.shape.ranks
    return {
        "architecture": shape.architecture,
        "gpu": setup.gpu,
        "gpus": ranks,
        "dtype": shape.dtype,
        "kv_dtype": shape.kv_dtype,
        "max_len": shape.max_len,
        "weights_bytes": shape.weights.nbytes,
        "weights_source": shape.weights.source,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "kv_bytes_per_token": token_bytes(plan),
        "state_bytes_per_context": state_bytes(plan),
        "kv": [
            {
                "words": one.words,
                "kind": one.kind.value,
                "span": one.reach.span,
                "layers": one.layers,
                "token_bytes": one.token_bytes * one.layers * ranks,
                "state_bytes": one.state_bytes * one.layers * ranks,
            }
            for one in shape.kv
        ],
        "groups": [
            {
                "words": group.words,
                "layers": group.layers,
                "block_tokens": group.block,
                "page_bytes": group.page_bytes * ranks,
            }
            for group in layout.groups
        ],
        "block_bytes": layout.block_bytes * ranks,
        "context": setup.context,
        "context_bytes": plan.context_bytes,
        "compute_s": plan.compute_s,
        "pin_beats_cpu_up_to_s": plan.pin_s,
        "tiers": [
            {
                "name": tier.name,
                "bytes": tier.nbytes,
                "contexts": tier.contexts,
                "tokens": tier.tokens,
                "restore_s": tier.restore_s,
                "beats_computing_up_to_s": tier.break_even_s,
            }
            for tier in plan.tiers
        ],
        "assumptions": assumptions(plan),
        "notes": list(plan.notes),
        "environment": variables,
        "command": list(words),
    }


def token_bytes(plan: Plan) -> float:
    """Return the KV bytes per token in all attention layers, over all ranks."""
    return plan.shape.ranks * sum(one.layers * one.token_bytes for one in plan.shape.kv)


def state_bytes(plan: Plan) -> int:
    """Return the state size of a context in all layers with states, over all ranks, bytes."""
    return plan.shape.ranks * sum(one.layers * one.state_bytes for one in plan.shape.kv)


def heading(plan: Plan) -> list[str]:
    """Return the lines to print above the tables."""
    shape, setup = plan.shape, plan.setup
    cards = setup.gpu if shape.ranks == 1 else f"{shape.ranks} {setup.gpu}"
    weights = shape.weights
    parts = [f"{size(token_bytes(plan))} per token"] if token_bytes(plan) else []
    parts += [f"{size(state_bytes(plan))} per state"] if state_bytes(plan) else []
    return [
        f"{shape.architecture} on {cards}: {size(weights.nbytes)} of weights ({weights.source}), "
        f"KV in {shape.kv_dtype}, {' and '.join(parts)}",
        f"a context of {setup.context:,} tokens: {size(plan.context_bytes)} of KV, "
        f"prefilled in {duration(plan.compute_s)}",
    ]


def group_rows(plan: Plan) -> list[list[str]]:
    """Return the rows of the KV types, under ``GROUP_COLUMNS``."""
    rows, shape = [], plan.shape
    for one in shape.kv:
        groups = [group for group in shape.layout.groups if one.words in group.words.split(" and ")]
        blocks = {group.block for group in groups}
        is_state = one.kind is KvKind.STATE
        total = one.layers * shape.ranks
        rows.append(
            [
                one.words,
                str(one.layers),
                NONE if is_state else size(one.token_bytes * total),
                size(one.state_bytes * total) if is_state else NONE,
                ", ".join(f"{block:,}" for block in sorted(blocks)) or "as above",
                str(len(groups)) if groups else NONE,
            ]
        )
    return rows


def tier_row(tier: TierPlan) -> list[str]:
    """Return the row of a tier, under ``TIER_COLUMNS``."""
    return [
        tier.name,
        size(tier.nbytes),
        f"{tier.contexts:,.1f}",
        f"{tier.tokens:,}",
        duration(tier.restore_s) if tier.restore_s else "resident",
        brief(tier.break_even_s) if tier.break_even_s >= 10 else duration(tier.break_even_s),
    ]


def assumptions(plan: Plan) -> list[str]:
    """Return sentences about the assumptions behind the figures."""
    gpu, setup = GPUS[plan.setup.gpu], plan.setup
    found = [
        f"Prefill: {plan.setup.gpu} has {gpu.flops / 1e12:,.0f} TFLOP/s and "
        f"{gpu.bandwidth / GB:,.0f} GB/s ({gpu.source}), of which steps of {BATCHED_TOKENS:,} "
        f"tokens are assumed to reach {COMPUTE_SHARE:.0%} and {MEMORY_SHARE:.0%}.",
        f"Restores from CPU memory: {plan.link / GB:,.0f} GB/s over PCIe.",
        f"VRAM: {setup.utilization:g} of {size(gpu.memory)}, less weights and "
        f"{RESERVED_BYTES / GB:g} GB for activations, on each GPU.",
        "Break-even gaps: each tier is assumed to be full, and occupying all of it for a second to "
        "cost a second of GPU time. The connector assumes the same of VRAM when VRAM is short.",
    ]
    if setup.ssd_gib > 0:
        found[2:2] = [
            f"Restores from SSD: reads at {setup.ssd_gbps:g} GB/s, then the copy from CPU memory. "
            "Capacity is given for uncompressed pages, although pages are compressed on SSD."
        ]
    return found


CONTEXT = 32_768
"""Default context length, tokens, unless the model's limit is lower. It is typical of a coding
agent after several turns."""
CPU_GIB = TierConfig().cpu_gib
"""The connector's default CPU memory for KV, GiB."""
SSD_GBPS = 3.0
"""Default read rate of an SSD, GB/s: three quarters of the raw rate of four PCIe 3 lanes."""


def plan_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model folder that contains a config.json, or the path of the config.json.",
        ),
    ],
    gpu: Annotated[str, typer.Option(metavar="NAME", help=f"GPU type: {', '.join(GPUS)}.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs (tensor parallel).")] = 1,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of concurrent jobs, running or waiting for a tool."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help=f"Context length of a job; {CONTEXT:,} by default, or the model's limit if lower.",
        ),
    ] = None,
    cpu_gib: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=(
                "CPU memory for KV, GiB. Defaults to what all jobs need, or to "
                f"{CPU_GIB:g} without --jobs."
            ),
        ),
    ] = None,
    ssd_gib: Annotated[float, typer.Option(min=0, help="SSD space for KV, GiB.")] = 0.0,
    ssd_gbps: Annotated[
        float,
        typer.Option(min=0.01, help="SSD read speed, GB/s, as measured by tiered-kv doctor."),
    ] = SSD_GBPS,
    dtype: Annotated[str, typer.Option(help="Same as vLLM's --dtype.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Same as vLLM's --kv-cache-dtype.")] = "auto",
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            min=0.05, max=1, help=f"Fraction of VRAM that vLLM uses; {UTILISATION} by default."
        ),
    ] = None,
    weights_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Size of the weights, GiB. Defaults to their size in MODEL, or to an estimate.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate how many contexts VRAM, CPU memory and SSD can hold, and how long a context takes
    to restore and to prefill. Print the flags to serve the model. The command needs the model's
    files, but no GPU.

    Exits with 2 if the model cannot be read or does not fit.
    """
    with one_sentence():
        gpu = find_gpu(gpu)
        shape = read_shape(
            model,
            gpu=gpu,
            ranks=gpus,
            dtype=dtype,
            kv_dtype=kv_dtype,
            weight_bytes=weights_gib * GIB if weights_gib is not None else None,
        )
        setup = Setup(
            gpu=gpu,
            context=context or min(CONTEXT, shape.max_len),
            jobs=jobs,
            cpu_gib=cpu_gib,
            ssd_gib=ssd_gib,
            ssd_gbps=ssd_gbps,
            utilization=gpu_memory_utilization or UTILISATION,
        )
        plan = make_plan(shape, setup, CPU_GIB)
    variables = environment(plan.cpu_gib, ssd_gib)
    words = arguments(
        model,
        ranks=gpus,
        fits=plan.tiers[0].tokens >= shape.max_len,
        ssd=ssd_gib > 0,
        dtype=dtype,
        kv_dtype=kv_dtype,
        utilization=gpu_memory_utilization,
    )
    if as_json:
        print_json(describe_plan(plan, variables, words))
        return
    for line in heading(plan):
        typer.echo(line)
    typer.echo()
    print_table(GROUP_COLUMNS, group_rows(plan))
    typer.echo()
    print_table(TIER_COLUMNS, [tier_row(tier) for tier in plan.tiers])
    typer.echo()
    if plan.pin_s is not None:
        typer.echo(
            f"When VRAM is full, a pin beats CPU memory for gaps of up to {duration(plan.pin_s)}."
        )
    for sentence in (*plan.notes, *assumptions(plan)):
        typer.echo(sentence)
    typer.echo(f"\n{in_shell(variables, words)}")
