"""``python -m tests.bench.peers.plot``: draw the table of loaders in docs/performance.md."""

import re
from pathlib import Path

from precache.html.charts import Panel, bars
from precache.html.pages import part

DOCS = Path(__file__).parents[3] / "docs"
PLOT = DOCS / "pictures/peers.svg"

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
    names = [row["loader"].partition(" (")[0] for row in rows]
    labels = [row["samples/s"] for row in rows]
    panel = Panel("samples/s on two cores (more is better)", list(map(_rate, rows)), labels)
    colours = ["blue" if re.match("precache|.*CachedDataset", name) else "edge" for name in names]
    chart = bars("peers", "Samples per second of each loader", names, [panel], colours)
    head, _, inside = str(chart.svg).partition("</svg>")[0].partition(">")
    head = re.sub(r"0 0 (\d+) (\d+)", lambda m: f"-8 -8 {int(m[1]) + 16} {int(m[2]) + 16}", head)
    light, dark = re.findall(r":root \{.*?\}", part("page.css"), re.DOTALL)
    style = (
        f"{light} @media (prefers-color-scheme: dark) {{ {dark} }} "
        "svg { font-family: system-ui, sans-serif; background: var(--bg); }"
    )
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{inside}</svg>\n'


def _rate(row: Row) -> float:
    return float(row["samples/s"].replace(",", ""))


def _cells(line: str) -> list[str]:
    return [re.sub(r"[*`]", "", cell).strip() for cell in line.strip("| ").split("|")]


if __name__ == "__main__":
    PLOT.write_text(draw(table_rows(DOCS / "performance.md")), "utf-8")
