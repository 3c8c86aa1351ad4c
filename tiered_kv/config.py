"""Settings, parsed and checked once into one frozen ``TierConfig``.

Settings come from two sources with the same keys: environment variables ``TIERED_KV_*`` and, with
precedence, the connector's ``kv_connector_extra_config`` in lower case without the prefix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path

from tiered_kv.codecs.registry import parse
from tiered_kv.remote.address import EXAMPLE, RemoteAddress, parse_address

from .errors import ConfigError

ENV_PREFIX = "TIERED_KV_"
GIB = 1 << 30

REMOTE_PASSWORD = "TIERED_KV_REMOTE_PASSWORD"
REMOTE_PASSWORD_FILE = "TIERED_KV_REMOTE_PASSWORD_FILE"
_OF_KUBERNETES = re.compile(r"TIERED_KV_(SERVICE_HOST|(SERVICE_)?PORT(_\w+)?)")
"""Variables that Kubernetes sets in every pod of a namespace with a service named tiered-kv."""
ADMIN_TOKEN = "TIERED_KV_ADMIN_TOKEN"
"""Variable with the secret token for the API server's routes, which is not a setting of the
engine."""
_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}
"""Values of a boolean setting, case-insensitive."""
_SECRETS = (ADMIN_TOKEN, REMOTE_PASSWORD, REMOTE_PASSWORD_FILE)


class Mode(Enum):
    """Mode of an engine's connector."""

    MANAGE = "manage"
    """Decisions are carried out."""
    OBSERVE = "observe"
    """Decisions are made and traced, but not carried out: the engine behaves as without tiers."""


class EventConsumer(Enum):
    """Consumer of KV events about tiers outside VRAM."""

    EXACT = "exact"
    """Any consumer: every page is reported."""
    VLLM_ROUTER = "vllm-router"
    """vLLM's router: only pages that it credits correctly are reported."""
    OFF = "off"
    """Disabled: only vLLM's own events are published."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """An operator's settings.

    Attributes:
        cpu_gib: CPU memory for pages of the whole engine, all ranks together, GiB; 0 disables the
            tier.
        cpu_path: folder on tmpfs or hugetlbfs in which CPU memory outlives the engine; None keeps
            it private to the engine.
        cpu_keep: True if the memory in ``cpu_path`` is also kept at a clean stop.
        ssd_path: folder for pages on SSD, shared by all engines configured with it; None disables
            the tier.
        ssd_gib: size limit of everything under ``ssd_path``, GiB.
        tiers: further lower tiers, by name or as ``module:Class``, fastest first.
        remote: store that many machines share; None disables the tier.
        codec: codec of pages on SSD and in the remote store: ``auto``, ``raw``, ``zstd``,
            ``zstd:LEVEL``, ``centred``, or ``module:Class`` of another package.
        io_threads: number of threads per rank for pages on SSD; 0 derives the number from the
            number of cores.
        policy: policy that chooses the tier of a finished turn's KV, by name or as
            ``module:Class``; ``none`` disables every tier.
        eviction: rule by which pages are evicted from CPU memory, by name or as ``module:Class``.
        pin_fraction: fraction of the VRAM blocks that may be pinned, 0 to 1.
        admission: ``auto`` holds new jobs back while their working set does not fit; ``off`` never
            holds jobs back. Always ``off`` with a policy other than the default.
        admission_max_wait_s: wait after which a request precedes every later request, seconds.
        hide_restores: True to leave requests that wait for a restore out of vLLM's number of
            waiting requests. Needs ``ContinuumScheduler``.
        trace: path of the current trace file; None disables the trace.
        events: consumer for which KV events of tiers outside VRAM are published, if vLLM publishes
            events.
        mode: whether decisions are carried out.
        snapshot_path: folder of snapshots of jobs; None disables snapshots.
        trace_steps: True to trace engine steps as well, in files next to the trace of turns.
        harmless_calls: worker methods that change no weights, in addition to vLLM's own. A call of
            any other method starts a new generation of pages.
    """

    cpu_gib: float = 4.0
    cpu_path: Path | None = None
    cpu_keep: bool = False
    ssd_path: Path | None = None
    ssd_gib: float = 32.0
    tiers: tuple[str, ...] = ()
    remote: RemoteAddress | None = None
    codec: str = "auto"
    io_threads: int = 0
    policy: str = "occupancy"
    eviction: str = "worth"
    pin_fraction: float = 1.0
    admission: str = "auto"
    admission_max_wait_s: float = 300.0
    hide_restores: bool = False
    trace: Path | None = None
    events: EventConsumer = EventConsumer.EXACT
    mode: Mode = Mode.MANAGE
    trace_steps: bool = False
    snapshot_path: Path | None = None
    harmless_calls: tuple[str, ...] = ()

    @property
    def observes(self) -> bool:
        """True in observe mode: decisions are made and traced, but not carried out."""
        return self.mode is Mode.OBSERVE

    @property
    def notes_path(self) -> Path | None:
        """Folder in which learned statistics and known jobs outlive the engine. None if nothing is
        kept, as in observe mode, which creates no file."""
        return None if self.observes else self.ssd_path or self.cpu_path

    @property
    def keeps_notes(self) -> bool:
        """True if learned statistics and known jobs are also kept at a clean stop."""
        return self.ssd_path is not None or self.cpu_keep

    def cpu_bytes_per_rank(self, ranks: int) -> int:
        """Size of the CPU tier on each of ``ranks`` ranks, bytes."""
        return int(self.cpu_gib * GIB) // ranks

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the lower tiers, fastest first: the SSD if it has a folder, the ``tiers``, and
        the remote store unless in observe mode."""
        ssd = ("ssd",) if self.ssd_path is not None else ()
        remote = ("remote",) if self.remote is not None and not self.observes else ()
        return ssd + self.tiers + remote

    @property
    def ssd_bytes(self) -> int:
        """Size limit of ``ssd_path``, all engines together, bytes."""
        return int(self.ssd_gib * GIB)


def load_config(env: Mapping[str, str], extra: Mapping[str, object] | None = None) -> TierConfig:
    """Read settings from ``env`` and ``extra``; ``extra`` takes precedence.

    Raises:
        ConfigError: a setting is unknown or invalid; the message names a valid one.
    """
    given: dict[str, object] = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in env.items()
        if name.startswith(ENV_PREFIX)
        and name not in _SECRETS
        and not _OF_KUBERNETES.fullmatch(name)
    }
    given.update(extra or {})
    known = [field.name for field in fields(TierConfig)]
    for key in given:
        if key not in known:
            bare = key.lower().removeprefix(ENV_PREFIX.lower())
            close = difflib.get_close_matches(bare, known, n=1)
            hint = (
                f"did you mean {close[0]}? If not, remove the setting."
                if close
                else f"remove it, or use one of {', '.join(known)}."
            )
            name = ENV_PREFIX + bare.upper()
            raise ConfigError(f"unknown setting {key!r} ({name}): {hint}")
    defaults = TierConfig()
    config = TierConfig(
        cpu_gib=_number(given, "cpu_gib", defaults.cpu_gib, 0, 1 << 20, "GiB"),
        cpu_path=_folder(given, "cpu_path"),
        cpu_keep=_flag(given, "cpu_keep"),
        ssd_path=_folder(given, "ssd_path"),
        ssd_gib=_number(given, "ssd_gib", defaults.ssd_gib, 0.001, 1 << 20, "GiB"),
        tiers=_names(given, "tiers"),
        remote=_remote(given, env),
        codec=_codec(given),
        io_threads=_whole(given, "io_threads", defaults.io_threads, 0, 256, "threads"),
        policy=_name(given, "policy", defaults.policy),
        eviction=_name(given, "eviction", defaults.eviction),
        pin_fraction=_number(given, "pin_fraction", defaults.pin_fraction, 0, 1, "(a fraction)"),
        admission=_either(given, "admission", ("auto", "off")),
        admission_max_wait_s=_number(
            given, "admission_max_wait_s", defaults.admission_max_wait_s, 0, 86_400, "seconds"
        ),
        hide_restores=_flag(given, "hide_restores"),
        trace=_path(given, "trace"),
        events=EventConsumer(_either(given, "events", tuple(one.value for one in EventConsumer))),
        mode=Mode(_either(given, "mode", ("manage", "observe"))),
        trace_steps=_flag(given, "trace_steps"),
        snapshot_path=_folder(given, "snapshot_path"),
        harmless_calls=_names(given, "harmless_calls"),
    )
    if config.policy == "none":
        config = replace(config, cpu_gib=0.0, cpu_path=None, ssd_path=None, tiers=(), remote=None)
    if config.policy != defaults.policy:  # baselines hold no job back
        config = replace(config, admission="off")
    if config.cpu_keep and config.cpu_path is None:
        raise ConfigError(
            f"{ENV_PREFIX}CPU_KEEP=1 needs a folder on tmpfs or hugetlbfs. Set one, for example "
            f"{ENV_PREFIX}CPU_PATH=/dev/shm/tiered-kv."
        )
    if config.trace_steps and config.trace is None:
        raise ConfigError(
            f"{ENV_PREFIX}TRACE_STEPS=1 needs a trace file. Set one, for example "
            f"{ENV_PREFIX}TRACE=trace.jsonl."
        )
    if config.tier_names and config.cpu_gib == 0:
        needs = "TIERS" if config.tiers else "REMOTE"
        needs = "SSD_PATH" if config.ssd_path is not None else needs
        raise ConfigError(
            f"{ENV_PREFIX}{needs} needs CPU memory, because all pages pass through it: "
            f"set {ENV_PREFIX}CPU_GIB above 0."
        )
    return config


def check_cpu_size(
    config: TierConfig, ranks: int, local_ranks: int, total_bytes: int, available_bytes: int
) -> None:
    """Check that the CPU tier fits into memory.

    Other ranks on the machine may or may not have allocated their shares already. So all shares
    must fit into the total memory, and one share must fit into the available memory.

    Args:
        ranks: number of ranks of the engine.
        local_ranks: number of these ranks that run on this machine.
        total_bytes, available_bytes: total and available memory of the machine, bytes.

    Raises:
        ConfigError: the tier is too large; the message names a size that fits.
    """
    share = config.cpu_bytes_per_rank(ranks)
    if share > available_bytes or share * local_ranks > total_bytes:
        fits = int(available_bytes * 0.8) * ranks / local_ranks / GIB
        raise ConfigError(
            f"{ENV_PREFIX}CPU_GIB={config.cpu_gib:g} does not fit: {local_ranks} of {ranks} ranks "
            f"run on a machine with {total_bytes / GIB:.1f} GiB of memory, of which "
            f"{available_bytes / GIB:.1f} GiB is available; set at most {fits:.1f}."
        )


def _number(
    given: Mapping[str, object], key: str, default: float, low: float, high: float, unit: str
) -> float:
    raw = given.get(key, default)
    name = ENV_PREFIX + key.upper()
    try:
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ValueError
        value = float(raw)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{name}={raw!r} is not a number. Set a number, for example {name}={default:g}."
        ) from None
    if not low <= value <= high:
        raise ConfigError(
            f"{name}={raw} is not between {low:,} and {high:,} {unit}. Set a value in this range, "
            f"for example {name}={default:g}."
        )
    return value


def _whole(
    given: Mapping[str, object], key: str, default: int, low: int, high: int, unit: str
) -> int:
    value = _number(given, key, default, low, high, unit)
    if value != int(value):
        name = ENV_PREFIX + key.upper()
        raise ConfigError(
            f"{name}={value:g} is not a whole number. Set a whole number, for example "
            f"{name}={default}."
        )
    return int(value)


def _flag(given: Mapping[str, object], key: str) -> bool:
    raw = given.get(key, "0")
    word = str(raw).lower()
    if word not in _FLAGS:
        name = ENV_PREFIX + key.upper()
        raise ConfigError(f"{name}={raw!r} is neither 0 nor 1: set {name}=0 or {name}=1.")
    return _FLAGS[word]


def _name(given: Mapping[str, object], key: str, default: str) -> str:
    raw = given.get(key, default)
    if not isinstance(raw, str) or not raw:
        name = ENV_PREFIX + key.upper()
        raise ConfigError(
            f"{name}={raw!r} is empty or not a string. Set a name, for example {name}={default}."
        )
    return raw


def _names(given: Mapping[str, object], key: str) -> tuple[str, ...]:
    raw = given.get(key, "")
    if not isinstance(raw, str):
        name = ENV_PREFIX + key.upper()
        raise ConfigError(
            f"{name}={raw!r} is not a string. Set a string of names that are separated by commas."
        )
    return tuple(name.strip() for name in raw.split(",") if name.strip())


def _remote(given: Mapping[str, object], env: Mapping[str, str]) -> RemoteAddress | None:
    raw = given.get("remote")
    if raw is None or raw == "":
        return None
    if not isinstance(raw, str):
        raise ConfigError(
            f"{ENV_PREFIX}REMOTE is not a string. Set an address, for example {EXAMPLE}."
        )
    address = parse_address(raw)
    password, path = env.get(REMOTE_PASSWORD, ""), env.get(REMOTE_PASSWORD_FILE, "")
    if password and path:
        raise ConfigError(
            f"{REMOTE_PASSWORD} and {REMOTE_PASSWORD_FILE} are both set: unset one of them."
        )
    if path:
        try:
            password = Path(path).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{REMOTE_PASSWORD_FILE}={path} cannot be read ({error}): set the path of a "
                "readable text file that contains only the password."
            ) from error
    return address.with_password(password) if password else address


def _either(given: Mapping[str, object], key: str, choices: tuple[str, ...]) -> str:
    raw = given.get(key, choices[0])
    if raw not in choices:
        name = ENV_PREFIX + key.upper()
        raise ConfigError(f"{name}={raw!r} is not valid: set it to {' or '.join(choices)}.")
    return str(raw)


def _codec(given: Mapping[str, object]) -> str:
    raw = given.get("codec", "auto")
    name = raw if isinstance(raw, str) else repr(raw)
    if name != "auto":
        try:
            parse(name)
        except ConfigError as error:
            advice = str(error).removesuffix(".")
            raise ConfigError(f"{ENV_PREFIX}CODEC: {advice}; or set auto.") from error
    return name


def _folder(given: Mapping[str, object], key: str) -> Path | None:
    raw = given.get(key)
    name = ENV_PREFIX + key.upper()
    if raw is None or raw == "":
        return None
    if not isinstance(raw, (str, Path)):
        raise ConfigError(f"{name}={raw!r} is not a path. Set the path of a folder.")
    path = Path(raw).absolute()
    try:
        if path.is_dir():
            return path
        if path.exists() or path.is_symlink():
            raise ConfigError(
                f"{name}={raw} is not a folder: set the path of a folder, which need not exist yet."
            )
        if not path.parent.is_dir():
            raise ConfigError(
                f"{name}={raw} cannot be created, because the folder {path.parent} does not "
                "exist: create that folder, or set another path."
            )
    except OSError as error:
        raise ConfigError(
            f"{name}={raw} cannot be used ({error.strerror}): set a folder that the server's "
            "user can access."
        ) from error
    return path


def _path(given: Mapping[str, object], key: str) -> Path | None:
    raw = given.get(key)
    name = ENV_PREFIX + key.upper()
    if raw is None or raw == "":
        return None
    if not isinstance(raw, (str, Path)):
        raise ConfigError(
            f"{name}={raw!r} is not a path. Set the path of a file, for example {name}=trace.jsonl."
        )
    path = Path(raw)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{name}={raw} cannot be written: set the path of a file in an existing folder."
        )
    return path
