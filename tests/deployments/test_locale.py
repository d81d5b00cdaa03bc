"""Files are UTF-8, whatever the locale says: an ASCII one is what cron, systemd and small containers give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deployments.config import checkout_root

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_checkpoint_and_a_config_in_utf_8_are_read_in_an_ascii_locale(tmp_path: Path) -> None:
    config = json.loads((checkout_root() / "demo/model/config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"_name_or_path": "Großes Modell 模型"}, ensure_ascii=False), encoding="utf-8"
    )
    program = (
        "import locale, sys; from engine.models.config.files.config_json import read_config_json; "
        "assert locale.getpreferredencoding(False) == 'ANSI_X3.4-1968'; "
        "print(ascii(read_config_json(sys.argv[1])['_name_or_path']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | ASCII,
        cwd=checkout_root(),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.decode().strip() == ascii("Großes Modell 模型")


def test_the_launcher_names_files_as_the_server_does(tmp_path: Path) -> None:
    """A path of the config in the locale's encoding would be another one, or none."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import os; print(os.fsencode(chr(0x6A21)))" "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    run = subprocess.run(
        ["make", "--silent", "serve", f"VENV={tmp_path}"],
        env=os.environ | ASCII,
        cwd=checkout_root(),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.decode().strip() == repr("模".encode())
