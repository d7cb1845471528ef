"""Make docs/images/run.png, the picture in the README: the top of a run's report.html in a headless browser.

`make picture [RUN=runs/NAME]`; without RUN, of the latest run. The browser fetches nothing: the page is self-contained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hetrl.errors import HetrlError
from launch.run_directory import find_run

PICTURE = Path(__file__).parent / "images" / "run.png"
WIDTH, HEIGHT = 1280, 1945  # pixels: the figures, the curves, the iteration and the devices
MOST_BYTES = 300_000
DEADLINE_SECONDS = 60
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_command(page: Path, picture: Path, profile: str, width: int, height: int) -> list[str]:
    """Return the command that draws a page; raises HetrlError where no browser is on PATH."""
    url = page.resolve().as_uri()
    if chromium := next(filter(None, map(shutil.which, CHROMIUMS)), None):
        options = ["--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium's sandbox refuses root
        return [chromium, *options, f"--window-size={width},{height}", f"--screenshot={picture}", url]
    if playwright := shutil.which("playwright"):
        return [playwright, "screenshot", f"--viewport-size={width},{height}", url, str(picture)]
    raise HetrlError(
        f"no headless browser on PATH (tried {', '.join((*CHROMIUMS, 'playwright'))}); "
        "install one, on Debian and Ubuntu with `apt-get install chromium`"
    )


def draw(page: Path, picture: Path, width: int, height: int) -> None:
    """Write the picture of a page; raises HetrlError where there is no page or no browser, or it draws nothing."""
    if not page.exists():
        raise HetrlError(f"{page}: no such page; start a run with `make submit CONFIG=configs/quickstart.yaml`")
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "picture.png"
        command = browser_command(page, drawn, f"{folder}/profile", width, height)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise HetrlError(f"{command[0]}: drew nothing within {DEADLINE_SECONDS} s; is the machine busy?") from None
        if not drawn.exists():
            told = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise HetrlError(f"{command[0]}: drew nothing (exit code {done.returncode}): {told}")
        if drawn.stat().st_size > MOST_BYTES:
            raise HetrlError(f"the picture has {drawn.stat().st_size:,} bytes of {MOST_BYTES:,}; lower --height")
        shutil.copyfile(drawn, picture)


def main() -> int:
    """Draw the run that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", help="a run's name or directory; the latest without it")
    parser.add_argument("--output", type=Path, default=PICTURE, help="where the PNG goes")
    parser.add_argument("--width", type=int, default=WIDTH, help="pixels")
    parser.add_argument("--height", type=int, default=HEIGHT, help="pixels")
    arguments = parser.parse_args()
    try:
        draw(find_run(arguments.run).path / "report.html", arguments.output, arguments.width, arguments.height)
    except HetrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
