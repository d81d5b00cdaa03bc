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
