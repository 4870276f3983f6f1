"""Open a run's report.html in headless Chromium, check that what it has to show shows, and keep a screenshot.

    python docs/screenshot.py runs/cartpole docs/report.png

Playwright's own browser is taken if it is there (``playwright install chromium``), else the system's. Exit status 1 if
something does not show.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Error, Page, sync_playwright

SIZE = {"width": 1280, "height": 900}
MOST_BYTES = 200_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def problems(page: Page, video: bool) -> list[str]:
    """What a reader would miss on an open page.

    Args:
        video: Whether there must be a video.
    """
    found = []
    lines = page.locator("svg polyline")
    boxes = [line.bounding_box() for line in lines.all()]
    if not any(box and box["width"] > 50 for box in boxes):
        found.append(f"no curve shows ({len(boxes)} lines)")
    videos = page.locator("video")
    if video and not videos.count():
        found.append("there is no video")
    for i in range(videos.count()):
        try:
            page.wait_for_function("i => document.querySelectorAll('video')[i].readyState >= 2", arg=i, timeout=10_000)
        except Error:
            found.append(f"video {i} has no picture: {videos.nth(i).evaluate('v => v.error && v.error.message')}")
    headings = page.locator("h2").all_inner_texts()
    missing = [name for name in ("Returns", "Configuration", "Machine") if name not in headings]
    return found + [f"there is no section {name}" for name in missing]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--no-video", action="store_true", help="the page need not have a video")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path).exists()
        system = next(filter(None, map(shutil.which, BROWSERS)), None)
        if not own and system is None:
            print("error: there is no Chromium; playwright install chromium, or install your system's", file=sys.stderr)
            return 2
        with playwright.chromium.launch(executable_path=None if own else system, args=["--no-sandbox"]) as browser:
            page = browser.new_page(viewport=SIZE)
            errors: list[str] = []
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else errors.append(
                f"the page asks for {request.url}"
            ))  # fmt: skip
            page.goto((args.run / "report.html").resolve().as_uri())
            found = problems(page, video=not args.no_video) + errors
            page.evaluate("document.querySelectorAll('video').forEach(v => { v.pause(); v.controls = false })")
            page.screenshot(path=args.out)
    if (size := args.out.stat().st_size) > MOST_BYTES:
        found.append(f"{args.out} has {size:,} bytes, more than {MOST_BYTES:,}")
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    print(args.out)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
