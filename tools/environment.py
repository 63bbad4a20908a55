"""What a measurement was made on."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """GPU, software, commit and command; no host name."""
    root = Path(__file__).resolve().parent.parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "commit": os.environ.get("PAGETIDE_COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "command": " ".join(["python", f"tools/{Path(sys.argv[0]).name}", *(Path(a).name for a in sys.argv[1:])]),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found
