"""`make reference`."""

from __future__ import annotations

from ..markdown import DOCS, read
from . import DOCUMENTS

for name, renew in DOCUMENTS.items():
    (DOCS / name).write_text(renew(read(name)), encoding="utf-8")
