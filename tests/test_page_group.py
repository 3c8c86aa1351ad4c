"""Page groups: the sections of a page, and the group's description in the fingerprint."""

from __future__ import annotations

import pytest

from tiered_kv.codecs.base import ElementType, PageFormat, Section
from tiered_kv.page_group import KvKind, KvReach, PageGroup, PageLayout, Region

LAYOUT = PageLayout((Region(0, 2, 10240, 1024, 1024),), 10)
CONV, SSM = Section(ElementType.BF16, 256), Section(ElementType.FP32, 768)
STATE = KvReach(KvKind.STATE)


def test_one_element_is_one_section() -> None:
    group = PageGroup(index=0, block_size=16, layout=LAYOUT, element=ElementType.FP16)
    assert group.page_format == PageFormat(ElementType.FP16, 2048, 16)
    assert group.page_format.sections == (Section(ElementType.FP16, 2048),)
    assert PageGroup(0, 16, LAYOUT).page_format == PageFormat(ElementType.OPAQUE, 2048, 16)


def test_sections_are_those_of_its_pages() -> None:
    group = PageGroup(0, 384, LAYOUT, reach=STATE, sections=(CONV, SSM, CONV, SSM))
    assert group.page_format == PageFormat.of([CONV, SSM, CONV, SSM], 0)
    joined = PageGroup(0, 16, LAYOUT, sections=(CONV,) * 8)
    assert joined.page_format == PageFormat(ElementType.BF16, 2048, 16)


def test_a_state_has_no_tokens_of_its_own() -> None:
    state = PageGroup(0, 384, LAYOUT, element=ElementType.FP32, reach=STATE)
    assert state.page_format == PageFormat(ElementType.FP32, 2048, 0)


def test_sections_that_do_not_form_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="sections have 1024 bytes in total, but a page has 2048"):
        PageGroup(0, 384, LAYOUT, sections=(CONV, SSM))


def test_a_fingerprint_contains_the_types_only_if_there_are_several() -> None:
    """A group's description lists the sections only if pages have several element types. Pages with
    one type keep the fingerprints that they had before sections existed."""
    plain = PageGroup(0, 16, LAYOUT, ElementType.BF16, arrangement="NHD")
    assert plain.describe() == "2x1024 NHD"
    one = PageGroup(0, 16, LAYOUT, sections=(CONV, SSM) * 2)
    other = PageGroup(0, 16, LAYOUT, sections=(SSM, CONV) * 2)
    assert one.describe() == "2x1024  bf16:256,fp32:768,bf16:256,fp32:768"
    assert one.describe() != other.describe()
