"""The imports of a service process, which take most of its start."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def import_process(role: str) -> ModuleType:
    """Import what a role runs, without looking for garbage meanwhile, nor ever again among what was imported.

    That takes a tenth of the imports at least, and 0.1 s of the event loop now and then. https://docs.python.org/3/library/gc.html
    """
    gc.disable()
    try:
        return importlib.import_module(f"services.{role}.process")
    finally:
        gc.freeze()
        gc.enable()
