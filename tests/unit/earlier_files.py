"""Files as earlier versions wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash


def rewrite_sealed(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the content of a sealed file in place, and seal it again."""
    document = json.loads(path.read_bytes())["content"]
    edit(document)
    content = json.dumps(document).encode()
    path.write_bytes(b'{"xxh3_128":"%s","content":%s}\n' % (xxhash.xxh3_128_hexdigest(content).encode(), content))
