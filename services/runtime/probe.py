"""`python -P -m services.runtime.probe https://localhost:7071/readyz`: exits with 0 if this URL answers with 200.

A kubelet cannot present a certificate where mutual TLS needs one. It runs this command beside the service instead, with
the TLS files of the service. The module imports little, because a kubelet runs it every few seconds.
"""

from __future__ import annotations

import sys
import urllib.request

from ps_config.certificates import client_context, client_files

TIMEOUT_SECONDS = 5.0


def probe(url: str) -> None:
    """Raise OSError with the reason unless the answer is 200."""
    context = client_context(client_files())
    no_proxy = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(no_proxy, urllib.request.HTTPSHandler(context=context))
    opener.open(url, timeout=TIMEOUT_SECONDS).close()


if __name__ == "__main__":
    try:
        probe(sys.argv[1])
    except OSError as error:  # including HTTPError
        sys.exit(f"{sys.argv[1]}: {error}")
