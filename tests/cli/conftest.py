"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vitgraph.report import charts, markup

CHART_FILES, PAGE_SVG = charts.chart_files, markup.page_svg


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_drawn() -> Iterator[None]:
    """Drawing takes longer than most tiny runs; the tests of reports draw the charts of every kind of record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            charts, "chart_files", lambda found: {f"{c.name}.{e}": b"not drawn" for c in found for e in ("png", "svg")}
        )
        patch.setattr(markup, "page_svg", lambda chart, prefix: "")
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charts of a test are drawn, as it looks at them."""
    monkeypatch.setattr(charts, "chart_files", CHART_FILES)
    monkeypatch.setattr(markup, "page_svg", PAGE_SVG)
