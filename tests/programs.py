"""The programs of ci/ as modules, for tests of what is in them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

CI = Path(__file__).resolve().parent.parent / "ci"


def load(name: str) -> ModuleType:
    """ci/name."""
    loader = importlib.machinery.SourceFileLoader(f"ci_{Path(name).stem}", str(CI / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module
