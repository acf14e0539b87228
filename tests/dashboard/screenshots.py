"""Makes the pictures of docs/inspection.md: `python -m tests.dashboard.screenshots`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser

from ..cluster.faulty_run import FaultyRun
from .browsing import Visit, start_browser
from .conftest import SCRIPT

FOLDER = Path(__file__).parents[2] / "docs" / "images"
COLOURS = 256
CHARTS = "() => document.querySelector('#{} .main-svg')"


def take(browser: Browser, run: FaultyRun, name: str, theme: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height}
    with Visit(browser, run.cluster.address, color_scheme=theme, viewport=size) as visit:
        visit.wait_until_live()
        visit.page.wait_for_selector("#parameter-list > *")
        visit.page.click("[id='option-layers.1.mix.weight']")
        for panel in ("curves", "speed", "parameters"):
            visit.see(f"#{panel}")
            visit.wait_until(CHARTS.format(panel))
        run.wait_for_round(run.round_of(0) + 100)  # so that the charts are of now
        visit.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        picture = Image.open(io.BytesIO(visit.page.screenshot(full_page=height > width)))
        path = FOLDER / f"{name}.png"
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with start_browser() as browser, FaultyRun(1_000_000, script=SCRIPT, pservers=3, trainers=4) as run:
        for round_ in range(100, 701, 100):  # each has its own patience
            run.wait_for_round(round_)
        take(browser, run, "dashboard-light", "light", 1280, 1281)
        take(browser, run, "dashboard-dark", "dark", 1280, 620)
        take(browser, run, "dashboard-narrow", "dark", 390, 800)


if __name__ == "__main__":
    main()
