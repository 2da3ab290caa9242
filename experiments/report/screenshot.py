"""`python -m experiments.report.screenshot PAGE PICTURE`: a picture of the page, in both schemes, side by side."""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from ..errors import RunError
from ..files import write_atomic
from .browser import Browser

WIDTH, HEIGHT = 1000, 900


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 where there is no browser or no page, for a reason that is printed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report.screenshot", description=__doc__)
    parser.add_argument("page", type=Path, help="index.html of a report")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--view", default="", help="an experiment of the page (right half; default: the first)")
    options = parser.parse_args(arguments)
    if not options.page.is_file():
        print(f"error: {options.page} is not there: write it with python -m experiments.report", file=sys.stderr)
        return 1
    try:
        write_atomic(options.picture, picture(options.page, options.view))
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.picture)
    return 0


def picture(page: Path, view: str = "") -> bytes:
    """The overview in light beside a view in dark, PNG with a palette of 128 colours, which makes it small."""
    halves = []
    with Browser() as browser:
        browser.size(WIDTH, HEIGHT)
        browser.open(page)
        halves.append(browser.screenshot())
        browser.media(scheme="dark")
        browser.open(page, view or browser.value("document.querySelectorAll('[data-view]')[1]?.id ?? ''"))
        halves.append(browser.screenshot())
    images = [Image.open(io.BytesIO(half)).convert("RGB") for half in halves]
    whole = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)))
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width
    buffer = io.BytesIO()
    whole.quantize(128).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())
