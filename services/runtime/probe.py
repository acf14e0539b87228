"""`python -P -m services.runtime.probe https://localhost:7071/readyz`: exits with 0 if that answers with 200.

For mutual TLS: a kubelet has no certificate to show, but it can run this beside the service, in whose environment it
finds the files. Imports little, because it is run all the time.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

from ps_config.certificates import TlsFiles, client_context

TIMEOUT_SECONDS = 5.0


def probe(url: str) -> None:
    """Raises OSError, with the reason, unless the answer is 200."""
    named = [os.environ.get(f"GRADPOST_TLS_{name}") for name in ("CA", "CLIENT_CERT", "CLIENT_KEY")]
    context = client_context(TlsFiles(*(Path(name) if name else None for name in named)))
    nothing_between = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(nothing_between, urllib.request.HTTPSHandler(context=context))
    opener.open(url, timeout=TIMEOUT_SECONDS).close()


if __name__ == "__main__":
    try:
        probe(sys.argv[1])
    except OSError as error:  # HTTPError is one, too
        sys.exit(f"{sys.argv[1]}: {error}")
