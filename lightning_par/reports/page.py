"""From pieces to one HTML file, with its style and scripts inside."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_par.planner.words import count, gigabytes, seconds

__all__ = ["check_path", "render", "write_page"]

_ROOM = Path(__file__).parent


def render(template: str, **context: Any) -> str:
    """A page's HTML.

    Args:
        template: Its name in ``templates``.
        context: What the template shows. All text is escaped.
    """
    return _environment().get_template(template).render(**context)


def check_path(path: Path) -> None:
    """See that a page can be written there.

    Raises:
        ValueError: If its directory does not exist.
    """
    if not path.parent.is_dir():
        raise ValueError(
            f"{str(path)!r} can't be written: there is no directory {str(path.parent)!r}. Create it first."
        )


def write_page(path: Path, template: str, **context: Any) -> Path:
    """Write a page.

    Raises:
        ValueError: If the path's directory does not exist.
    """
    check_path(path)
    path.write_text(render(template, **context), encoding="utf-8")
    return path


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_ROOM / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["static"] = _static
    environment.filters |= {"bytes": gigabytes, "seconds": seconds, "count": count, "slug": _slug}
    return environment


def _static(name: str) -> Markup:
    """A file of ``static``, to stand in the page as it is."""
    return Markup((_ROOM / "static" / name).read_text(encoding="utf-8"))


def _slug(name: str) -> str:
    """A name as a CSS class."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
