"""The picture of the loaders' figures in docs/concepts/performance.md."""

import re
from html import escape
from pathlib import Path

from precache.html.pages import part as part_of_page
from tests.bench.harness import Table, Work, part

DOCS = Path(__file__).parents[3] / "docs"
PLOT = DOCS / "pictures/peers.svg"
TITLE = "Samples/s on two cores (more is better)"

Row = dict[str, str]
"""A row of a table: column -> cell, without emphasis."""


def table_rows(document: Path) -> list[Row]:
    """Read the table of loaders in a page."""
    lines = iter(document.read_text("utf-8").splitlines())
    columns = next(_cells(line) for line in lines if line.startswith("| loader |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(columns, _cells(line), strict=True)))
    return rows


def draw(rows: list[Row]) -> str:
    """Draw samples/s of all loaders, as an SVG with a palette for light and for dark pages."""
    rows = sorted(rows, key=_rate, reverse=True)
    top, lines = _rate(rows[0]), []
    for number, row in enumerate(rows):
        name, rate, y = row["loader"].partition(" (")[0], row["samples/s"], 48 + 26 * number
        colour = "blue" if re.match("precache|.*CachedDataset", name) else "edge"
        width = 560 * _rate(row) / top
        lines += [
            f'<text x="256" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="264" y="{y}" width="{width:.1f}" height="18" fill="var(--{colour})"/>',
            f'<text x="{270 + width:.1f}" y="{y + 13}">{escape(rate)}</text>',
        ]
    told = ", ".join(f"{row['loader'].partition(' (')[0]} {row['samples/s']}" for row in rows)
    light, dark = re.findall(r":root \{.*?\}", part_of_page("page.css"), re.DOTALL)
    alt, height = escape(f"{TITLE}: {told}"), 60 + 26 * len(rows)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img"'
    return f"""{head} aria-label="{alt}">
<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}
svg {{ font: 13px system-ui, sans-serif; background: var(--bg); fill: var(--ink); }}</style>
<text x="264" y="28" fill="var(--soft)">{TITLE}</text>
{chr(10).join(lines)}
</svg>
"""


def _rate(row: Row) -> float:
    return float(row["samples/s"].replace(",", ""))


def _cells(line: str) -> list[str]:
    return [re.sub(r"[*`]", "", cell).strip() for cell in line.strip("| ").split("|")]


@part("plot")
def plot(work: Work) -> Table:
    """Draw the picture of docs/concepts/performance.md anew, from the figures in its table."""
    rows = table_rows(DOCS / "concepts/performance.md")
    PLOT.write_text(draw(rows), "utf-8")
    table = Table(f"Drawn into {PLOT}", ("loader", "samples/s|,.0f"))
    for row in rows:
        table.add(row["loader"], _rate(row))
    return table
