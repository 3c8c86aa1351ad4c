"""One self-contained HTML file with charts, which needs no network and no other file.

Every text is escaped in this module, whatever its origin. A content security policy allows only the
page's own two scripts, by their digests, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tiered_kv.errors import TieredKVError
from tiered_kv.formatting import plain

from .charts import Chart, legend
from .page_style import STYLE

DRAW = """
for (const data of document.querySelectorAll('script[type="application/json"]')) {
  const chart = JSON.parse(data.textContent);
  const options = {responsive: true, displayModeBar: false};
  Plotly.newPlot(data.previousElementSibling, chart.data, chart.layout, options);
}
"""
"""Script that draws every chart into the element that precedes the chart's data."""


class PlotlyMissing(TieredKVError):
    """The package plotly, which draws the charts, is not installed."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of texts.

    Attributes:
        columns: by column name, True if the column contains numbers.
        rows: the cells of each row.
    """

    columns: Mapping[str, bool]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Story:
    """A paragraph with a heading, and further paragraphs that can be expanded.

    Attributes:
        text: the paragraph.
        more: the further paragraphs.
    """

    heading: str
    text: str
    more: Sequence[str]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page: heading, text, charts, stories and tables.

    Attributes:
        charts: charts by heading, which are placed side by side where there is space.
    """

    heading: str
    text: str = ""
    charts: Mapping[str, Chart] = field(default_factory=dict)
    stories: Sequence[Story] = ()
    tables: Sequence[TextTable] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """Contents of a page.

    Attributes:
        text: paragraphs under the title.
        headline: the most important figures, by name.
    """

    title: str
    text: Sequence[str]
    headline: Mapping[str, str]
    sections: Sequence[Section]


def html_of(page: Page) -> Iterator[str]:
    """Yield the page as HTML, in pieces.

    Raises:
        PlotlyMissing: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PlotlyMissing(
            "the report's charts need plotly: install it with pip install 'tiered-kv[report]'"
        ) from None
    library: str = get_plotlyjs()
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (library, DRAW))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {scripts}"
    yield f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(page.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(page.title)}</h1>
"""
    yield from (f"<p>{_text(one)}</p>\n" for one in page.text)
    yield '<dl class="headline">\n'
    for name, value in page.headline.items():
        yield f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>\n"
    yield "</dl>\n"
    for section in page.sections:
        yield from _section(section)
    yield f"<script>{library}</script>\n<script>{DRAW}</script>\n</body>\n</html>\n"


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{_text(section.heading)}</h2>\n"
    if section.text:
        yield f"<p>{_text(section.text)}</p>\n"
    if section.charts:
        yield '<div class="charts">\n'
        for heading, chart in section.charts.items():
            yield "<figure>\n"
            if heading:
                yield f"<figcaption>{_text(heading)}</figcaption>\n"
            yield from _legend(chart)
            height = int(chart["layout"]["height"])
            yield f'<div style="height: {height}px"></div>'
            yield f'<script type="application/json">{_json(chart)}</script>\n</figure>\n'
        yield "</div>\n"
    if section.stories:
        yield "<ol>\n"
        for one in section.stories:
            yield f"<li><h3>{_text(one.heading)}</h3>\n<p>{_text(one.text)}</p>\n"
            yield "<details><summary>Complete timeline</summary>\n"
            yield from (f"<p>{_text(text)}</p>\n" for text in one.more)
            yield "</details></li>\n"
        yield "</ol>\n"
    for table in section.tables:
        yield from _table(table)
    yield "</section>\n"


def _legend(chart: Chart) -> Iterator[str]:
    yield '<div class="legend">'
    for name, colour in legend(chart).items():
        yield f'<span><i style="background: {_text(colour)}"></i>{_text(name)}</span>'
    yield "</div>\n"


def _table(table: TextTable) -> Iterator[str]:
    kinds = [' class="number"' if is_number else "" for is_number in table.columns.values()]
    yield '<div class="scroll"><table>\n<thead><tr>'
    for name, kind in zip(table.columns, kinds, strict=True):
        yield f"<th{kind}>{_text(name)}</th>"
    yield "</tr></thead>\n<tbody>\n"
    for row in table.rows:
        cells = zip(row, kinds, strict=True)
        yield f"<tr>{''.join(f'<td{kind}>{_text(cell)}</td>' for cell, kind in cells)}</tr>\n"
    yield "</tbody></table></div>\n"


def _text(text: str) -> str:
    """Return a text escaped for HTML. Unprintable characters, and characters that change the text
    direction, become question marks.
    """
    return html.escape(plain(text))


def _json(chart: Chart) -> str:
    """Return a chart as JSON without ``<`` and ``>``, so that it cannot close its HTML element.
    plotly validates the property names, and encodes arrays compactly.
    """
    from plotly.graph_objects import Figure, layout
    from plotly.io.json import to_json_plotly

    figure = Figure(data=chart["data"], layout={"template": layout.Template(), **chart["layout"]})
    text: str = to_json_plotly(figure, engine="json")
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
