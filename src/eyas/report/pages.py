"""Pages from the templates of this folder; what a template is given is escaped."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from eyas.files import atomic_file
from eyas.report.svg import line_chart


def render(template: str, **values: Any) -> str:
    """Return the text of a page, which needs no other file."""
    return _environment().get_template(template).render(values)


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write a page. ``title`` is its heading; the other values are those that its template names."""
    with atomic_file(path) as beside:
        beside.write_text(render(template, **values), encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eyas.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a value that is missing is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["line_chart"] = line_chart
    return environment
