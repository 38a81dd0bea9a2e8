"""The page in headless Chromium: nobody is shut out, nothing is asked of the network, nothing scrolls sideways.

Runs where ``DS_SILENT_AXE`` names a ``node_modules`` with axe-core and puppeteer-core, and node and Chromium are there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ds_silent.runs.report import write_report
from tests.runs.report.test_report import bad_rank

MODULES = os.environ.get("DS_SILENT_AXE", "")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    not (MODULES and CHROMIUM and shutil.which("node")),
    reason="needs DS_SILENT_AXE (a node_modules with axe-core and puppeteer-core), node and Chromium",
)


@pytest.mark.parametrize("runs", [1, 2])
def test_axe_finds_nothing_and_nothing_is_too_wide(runs: int, tmp_path: Path) -> None:
    directories = [bad_rank(tmp_path / f"run-{number}") for number in range(runs)]
    page, _ = write_report(directories, tmp_path / "report.html")
    script = Path(__file__).with_name("axe.cjs")
    environment = os.environ | {"CHROMIUM": str(CHROMIUM)}
    done = subprocess.run(
        ["node", str(script), MODULES, str(page)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
