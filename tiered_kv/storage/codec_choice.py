"""The configured codec of a tier's pages, and the rate at which pages can be read with it."""

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
    """Choose a codec, once per process for each page format.

    Args:
        name: name of the codec, as in ``TIERED_KV_CODEC``; ``auto`` chooses the codec that suits
            the speed.
        speed: speed of the disk or the link, bytes per second.
        cores: number of threads that decode concurrently.

    Returns:
        The codec, and the rate at which pages can be read with it, bytes of pages per second.

    Raises:
        ConfigError: the codec does not exist, or does not work.
    """
    if name == "auto":
        choice = choose(page_format, speed.read / 1e6, speed.write / 1e6, cores)
        logger.info("TIERED_KV_CODEC=auto: %s", choice.reason)
        codec = choice.codec
    else:
        try:
            codec = parse(name)(page_format)
        except ValueError as error:
            raise ConfigError(
                f"TIERED_KV_CODEC={name} cannot be used ({error}): set another codec, or auto"
            ) from error
    try:
        one = measure_codec(codec, synthetic_page(page_format))
    except Exception as error:  # third-party codecs may raise anything
        raise ConfigError(
            f"TIERED_KV_CODEC={name}: the codec failed on a test page ({error}): set another "
            "codec, or auto"
        ) from error
    seconds = max(one.stored_bytes / speed.read, one.decode_s / cores)
    return codec, page_format.page_bytes / seconds
