"""What mypy and pyright tell a user about actors on our broker, from the installed package alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).with_name("actors.py")


def wrong_lines() -> set[int]:
    lines = SAMPLE.read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")}


def checked_by_mypy(folder: Path) -> dict[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "actors.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    found = [re.fullmatch(r"actors\.py:(\d+): error: (.*)", line) for line in done.stdout.splitlines()]
    assert done.stderr == ""
    return {int(error[1]): error[2] for error in found if error is not None}


def checked_by_pyright(folder: Path) -> dict[int, str]:
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    python = sys.executable
    command = [python, "-m", "basedpyright", "--pythonpath", python, "--outputjson", "actors.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {
        finding["range"]["start"]["line"] + 1: finding["message"]
        for finding in report["generalDiagnostics"]
        if finding["severity"] == "error"
    }


@pytest.mark.parametrize("check", [checked_by_mypy, checked_by_pyright])
def test_an_actor_keeps_its_signature_on_our_broker(check, tmp_path):
    """A wrong argument is found in the editor, and not as a dead letter."""
    # Given a user's module outside this tree, so that only what is installed counts
    shutil.copy(SAMPLE, tmp_path)

    # When it is checked
    found = check(tmp_path)

    # Then the wrong lines are reported, and no other
    assert wrong_lines()
    assert set(found) == wrong_lines(), found
