"""The page about a service's API, and the headers that restrict pages.

It replaces Swagger UI, which browsers load from another site: its script could send requests to this origin, and many
clusters have no connection to the internet. This page has no script.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any

from .scopes import OPENAPI, needed_scope

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;vertical-align:top;"
    "border-bottom:1px solid #8884}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

PAGE_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def render_operations(document: dict[str, Any]) -> str:
    """Return an OpenAPI document as a page: each request with the scope that its token needs, and a summary."""
    rows = [
        f"<tr><td><code>{escape(method.upper())} {escape(path)}</code></td>"
        f"<td>{needed_scope(method.upper(), path) or ''}</td>"
        f"<td>{escape(_summary(operation))}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = escape(document["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f'<body><h1>{title}</h1><p>Schemas of all bodies and answers: <a href="{OPENAPI}">{OPENAPI}</a>.</p>'
        "<table><thead><tr><th>request</th><th>scope</th><th></th></tr></thead><tbody>"
        f"{''.join(rows)}</tbody></table></body></html>"
    )


def _summary(operation: dict[str, Any]) -> str:
    return str(operation.get("description") or operation.get("summary", "")).partition("\n\n")[0]
