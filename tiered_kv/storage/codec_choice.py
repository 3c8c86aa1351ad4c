"""The codec of a tier's pages, as configured, and the rate at which they are read with it."""

from __future__ import annotations

import logging
from functools import cache

from tiered_kv.codecs.autotune import choose, measure_codec, synthetic_page
from tiered_kv.codecs.base import Codec, PageFormat
from tiered_kv.codecs.registry import parse
from tiered_kv.errors import ConfigError
from tiered_kv.storage.disk.probe import DiskSpeed

logger = logging.getLogger(__name__)


@cache
def choose_codec(
    name: str, page_format: PageFormat, speed: DiskSpeed, cores: int
) -> tuple[Codec, float]:
    """Choose a codec, once in a process for each kind of pages.

    Args:
        name: as in TIERED_KV_CODEC; ``auto`` takes the one that suits the speed.
        speed: of the disk or the link, bytes a second.
        cores: number of threads that decode at once.

    Returns:
        The codec; bytes of pages a second that can be read with it.

    Raises:
        ConfigError: there is no such codec, or it does not work.
    """
    if name == "auto":
        choice = choose(page_format, speed.read / 1e6, speed.write / 1e6, cores)
        logger.info("TIERED_KV_CODEC=auto: %s", choice.reason)
        codec = choice.codec
    else:
        try:
            codec = parse(name)(page_format)
        except ValueError as error:
            raise ConfigError(f"TIERED_KV_CODEC={name}: {error}; or write auto") from error
    try:
        one = measure_codec(codec, synthetic_page(page_format))
    except Exception as error:  # of whatever a stranger's codec does
        raise ConfigError(f"TIERED_KV_CODEC={name}: {error}; write auto") from error
    seconds = max(one.stored_bytes / speed.read, one.decode_s / cores)
    return codec, page_format.page_bytes / seconds
