"""A report or card whose statistics no longer belong to the run says so."""

import re
from html import escape
from pathlib import Path

from eyas.files import atomic_file

# The line of a page or card that says whether it is current; HTML, which Markdown takes too.
MARK = "<!-- state -->"
CARD = "README.md"


def mark_stale(path: Path, cause: str) -> None:
    """Write into the file, if it exists, that what it shows is stale, and why."""
    if not path.is_file():
        return
    line = f'{MARK}<p class="warn"><b>Stale:</b> {escape(cause)}.</p>'
    text = re.sub(f"{MARK}.*", lambda _: line, path.read_text(encoding="utf-8"), count=1)
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
