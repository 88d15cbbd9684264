"""A matrix of ``nvidia-smi topo -m`` that stands in a page as a table, or in a sheet, as the tool prints it."""

from __future__ import annotations

import re

from clustersim.core.page_tables import Rows, with_tables

WORD = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC")
"""What joins two parts."""
_HEAD = re.compile(r"GPU0\W*[|,;]\W*GPU1\b")


def as_printed(text: str) -> str:
    """The text with its tables of what joins GPUs as nvidia-smi prints them, and plain blanks for a page's."""
    return with_tables(text.replace("\xa0", " "), _HEAD, _matrix)


def _matrix(rows: Rows) -> list[str]:
    """The lines of a matrix; none of a table of something else. Columns may stand in any order. A NIC's row that the
    table leaves out is its column, where there is no other NIC that it could be near."""
    head, *body = rows
    label = next((row.index("GPU0") for row in body if "GPU0" in row), -1)
    if label < 0:
        return []
    about = {place: name.upper() for place, name in enumerate(head) if re.search(r"NUMA|CPU|AFFINITY", name.upper())}
    places = [place for place, name in enumerate(head) if name and place != label and place not in about]
    names = [head[place] for place in places]
    words = {row[label]: row for row in body if len(row) == len(head) and row[label] in names}
    cells = {
        name: ["X" if head[place] == name else row[place].upper() for place in places] for name, row in words.items()
    }
    if not cells or not all(WORD.fullmatch(cell) for row in cells.values() for cell in row):
        return []
    missing = [place for place, name in enumerate(names) if name not in cells]
    if len(missing) == 1 and not names[missing[0]].startswith("GPU"):
        nic = missing[0]
        if all(name.startswith("GPU") for name in cells):
            cells[names[nic]] = [cells[name][nic] if name in cells else "X" for name in names]
    homes = [
        next((place for place, name in about.items() if kind in name and "GPU NUMA" not in name), -1)
        for kind in ("CPU", "NUMA")
    ]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    for name, joined in cells.items():
        told = [words[name][place].replace(" ", "") if place >= 0 and name in words else "" for place in homes]
        lines.append("\t".join([name, *joined, *(word or "N/A" for word in told)]))
    return lines
