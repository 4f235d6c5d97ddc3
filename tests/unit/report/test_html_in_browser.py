"""The pages as headless Chromium shows them: nothing wider than the screen, and colours that follow light and dark."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_up_reports import bench_report, runs_report, two_runs_report
from PIL import Image

from vitgraph.report.markup import to_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")

# Reports how far the content of each page reaches beyond its frame, and where its verdict ends.
PROBE = """<!doctype html><meta charset="utf-8"><body>{frames}<pre id="found"></pre><script>
onload = () => {{
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {{
    const root = frame.contentDocument.documentElement;
    const verdict = frame.contentDocument.querySelector(".verdict").getBoundingClientRect();
    const texts = [...frame.contentDocument.querySelectorAll(".chart text")].filter(text => text.textContent.trim());
    const smallest = Math.min(...texts.map(text => text.getBoundingClientRect().height));
    found.push([frame.title, root.scrollWidth - root.clientWidth, Math.round(verdict.bottom), smallest].join(" "));
  }}
  document.getElementById("found").textContent = found.join("\\n");
}};
</script>"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    profile = tmp_path_factory.mktemp("profile")

    def run(page: Path, *options: str) -> str:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--allow-file-access-from-files", f"--user-data-dir={profile}", *options, page.as_uri()]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return result.stdout

    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    documents = {"one": bench_report(), "several": runs_report(folder), "comparison": two_runs_report(folder / "d")}
    return {name: to_html(document) for name, document in documents.items()}


def test_no_page_is_wider_than_a_phone_and_its_verdict_is_on_the_first_screen(
    chromium: Callable[..., str], pages: dict[str, str], tmp_path: Path
) -> None:
    frames = "".join(
        f'<iframe title="{name}-{width}" width="{width}" height="700" srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in (375, 1280)
    )
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(frames=frames), encoding="utf-8")
    dumped = chromium(probe, "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom")
    found = re.search(r'<pre id="found">([^<]*)</pre>', dumped)
    assert found is not None
    lines = [line.split() for line in found.group(1).splitlines()]
    assert [line[0] for line in lines] == [f"{name}-{width}" for name in pages for width in (375, 1280)]
    for title, overflow, verdict_end, smallest_text in lines:
        assert int(overflow) == 0, title
        assert float(smallest_text) >= 10, title
        if not title.startswith("several"):
            assert int(verdict_end) < 700, title


@pytest.mark.parametrize(("scheme", "is_light"), [(1, True), (0, False)])
def test_the_page_is_light_or_dark_as_the_reader_prefers(
    scheme: int, is_light: bool, chromium: Callable[..., str], pages: dict[str, str], tmp_path: Path
) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(pages["one"], encoding="utf-8")
    chromium(
        page, f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,2400", f"--screenshot={picture}"
    )
    with Image.open(picture) as image:
        grey = image.convert("L")
        ground = grey.getpixel((5, 600))
        darkest, lightest = grey.getextrema()
        red, _, blue = np.moveaxis(np.asarray(image.convert("RGB"), dtype=int), -1, 0)
    assert isinstance(ground, int)
    assert (ground > 240) == is_light
    assert (ground < 40) == (not is_light)
    assert lightest - darkest > 200
    assert (blue > red + 60).sum() > 100, "no graph mode in its colour"
    assert (red > blue + 60).sum() > 100, "no eager mode in its colour"
