"""HTML that the report's sections share."""

from collections.abc import Iterable
from html import escape


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, escaped."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"
