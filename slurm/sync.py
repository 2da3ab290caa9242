"""Uploads wandb runs that were logged offline: `python -m slurm.sync`, on a machine that reaches the server.

Every attempt of a run has a folder of its own under the run's one id, and the newest is complete (it begins with the
history of the checkpoint it went on from), so that alone is uploaded. What has been uploaded is written down beside it,
and uploaded again only once it has grown or a newer attempt has begun: doing it twice, or every hour, does no harm.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.command import finish
from experiments.errors import RunError
from experiments.files import write_json
from experiments.runners.run_dir import read_record
from experiments.train import say

from .selection import runs_folder, select

UPLOADED = "uploaded.json"
OFFLINE = re.compile(r"offline-run-(\d{8}_\d{6})-(.+)")
# A file that has not grown for so long is not waited for, even where its run's card says that it is running.
QUIET_S = 900
UPLOAD_TIMEOUT_S = 1800.0
REACH_TIMEOUT_S = 15.0
# So many failures one after the other are not the runs' fault.
IN_A_ROW = 3


@dataclass(frozen=True)
class Upload:
    """The newest offline attempt of a run."""

    id: str
    folder: Path

    @property
    def log(self) -> Path:
        """The file that wandb writes."""
        return self.folder / f"run-{self.id}.wandb"

    @property
    def marker(self) -> Path:
        """Says what has been uploaded of this run."""
        return self.folder.parent / UPLOADED

    @property
    def size(self) -> int:
        """Bytes logged so far."""
        return self.log.stat().st_size

    def done(self) -> bool:
        """Whether all of it has been uploaded, and wandb has confirmed it."""
        known = _read(self.marker).get(self.id)
        return known == {"folder": self.folder.name, "bytes": self.size} and bool(self.confirmations())

    def confirmations(self) -> list[Path]:
        """The marks that wandb leaves beside a log once the server has taken all of it."""
        return list(self.folder.glob("*.wandb.synced"))

    def note_done(self, size: int) -> None:
        """Writes down that its first `size` bytes have been uploaded."""
        write_json(self.marker, _read(self.marker) | {self.id: {"folder": self.folder.name, "bytes": size}})

    def being_written(self) -> bool:
        """Whether its run is under way."""
        state = _read(self.folder.parent.parent / "run.json").get("state")
        return state == "running" and time.time() - self.log.stat().st_mtime < QUIET_S


def newest_attempts(run: Path) -> list[Upload]:
    """The newest offline attempt of each wandb id in a run folder; those without a log are passed over."""
    newest: dict[str, tuple[str, Path]] = {}
    for folder in (run / "wandb").glob("offline-run-*"):
        match = OFFLINE.fullmatch(folder.name)
        if match and (folder / f"run-{match[2]}.wandb").is_file():
            newest[match[2]] = max(newest.get(match[2], ("", folder)), (match[1], folder))
    return [Upload(identifier, folder) for identifier, (_, folder) in sorted(newest.items())]


def sync(runs: Sequence[Path], dry_run: bool = False) -> tuple[int, int]:
    """Uploads what has not been uploaded yet.

    Args:
        runs: run folders.
        dry_run: only says what would be uploaded.

    Returns:
        How many were uploaded (or would be), and how many are left for later because their runs are under way.

    Raises:
        RunError: where the server is out of reach, or refuses; what was uploaded before stays written down.
    """
    waiting = [upload for run in runs for upload in newest_attempts(run) if not upload.done()]
    ready = [upload for upload in waiting if not upload.being_written()]
    if ready and not dry_run:
        reach(server())
    failed = in_a_row = 0
    for number, upload in enumerate(ready, 1):
        say(f"{number}/{len(ready)} {upload.folder}")
        if dry_run:
            continue
        size = upload.size
        try:
            _upload(upload)
        except RunError as error:
            say(f"error: {upload.folder}: {error}")
            failed, in_a_row = failed + 1, in_a_row + 1
            if in_a_row == IN_A_ROW:
                break
        else:
            upload.note_done(size)
            in_a_row = 0
    if failed:
        stopped = f"; given up after {in_a_row} in a row" if in_a_row == IN_A_ROW else ""
        raise RunError(f"{failed} of {len(ready)} runs could not be uploaded{stopped}; the same again tries these anew")
    return len(ready), len(waiting) - len(ready)


def server() -> str:
    """Address of wandb's server, by its own settings."""
    from wandb.sdk import wandb_setup

    return str(wandb_setup.singleton().settings.base_url)


def reach(address: str) -> None:
    """Makes sure that a server answers: wandb itself would go on trying for hours.

    Raises:
        RunError: where it does not.
    """
    try:
        urllib.request.urlopen(address, timeout=REACH_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RunError(
            f"wandb's server {address} is out of reach from this machine ({reason}): call this where there is a "
            "network, such as a login node; nothing is lost meanwhile"
        ) from error


def wandb_command() -> list[str]:
    """The wandb of this environment."""
    return [str(Path(sys.executable).with_name("wandb"))]


def _upload(upload: Upload) -> None:
    """Has wandb upload a run. Its exit code is 0 where the server refuses too: only its mark counts.

    Raises:
        RunError: where wandb does not confirm it, with what it or the server says.
    """
    if upload.size == 0:
        raise RunError("its log is empty: the run was ended before wandb wrote anything, or the disk was full")
    for mark in upload.confirmations():  # of an upload before
        mark.unlink()
    words = [*wandb_command(), "sync", "--include-synced", str(upload.folder)]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=UPLOAD_TIMEOUT_S,
            check=False,
            # Where this process is itself one of wandb's, the upload is not to be given to that one's service.
            env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"not uploaded within {UPLOAD_TIMEOUT_S / 60:g} minutes") from None
    if done.returncode != 0 or not upload.confirmations():
        said = _said(done.stdout + done.stderr) or f"exit code {done.returncode}, and no reason given: perhaps the key"
        raise RunError(f"wandb does not upload it: {said}")


def _said(output: str) -> str:
    """What wandb objects to: its errors, or else what it says last."""
    lines = [line.strip().removeprefix("wandb:").strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR").strip() for line in lines if line.startswith("ERROR")]
    found = [line for line in errors if line not in ("", "<no message>")] or [line for line in lines if line][-2:]
    return without_keys("; ".join(dict.fromkeys(found)))


def without_keys(words: str) -> str:
    """A text without what may be somebody's key."""
    key = os.environ.get("WANDB_API_KEY")
    if key:
        words = words.replace(key, "***")
    return re.sub(r"\b(?:wandb_v\d+_\w+|[0-9a-fA-F]{40,})\b", "***", words)


def _read(file: Path) -> dict[str, object]:
    """What a note beside a log says; nothing where it is damaged: what was uploaded is then uploaded once more."""
    with suppress(RunError):
        return read_record(file)
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where all is uploaded that can be."""
    parser = argparse.ArgumentParser(prog="python -m slurm.sync", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", help="as for slurm.status; nothing for all runs")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be uploaded")
    options = parser.parse_intermixed_args(arguments)
    try:
        everything = all(word.startswith("paths.") for word in options.words)
        folder = runs_folder([word for word in options.words if word.startswith("paths.")])
        if everything:
            runs = sorted(path.parent for path in folder.glob("*/*/wandb"))
        else:
            runs = [run.folder for run in select(options.words)]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".sync.lock", timeout=0):
            uploaded, left = sync(runs, options.dry_run)
    except Timeout:
        say("error: another slurm.sync is at work on these runs")
        return 1
    except (RunError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    words = "would be uploaded" if options.dry_run else "uploaded"
    say(f"{words}: {uploaded} runs" + (f"; {left} are under way, for later" if left else ""))
    return 0


if __name__ == "__main__":
    finish(main)
