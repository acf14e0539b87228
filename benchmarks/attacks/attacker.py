"""The attacker's process: `python -m benchmarks.attacks.attacker NAME SECONDS TARGET` prints its outcome as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from . import bombs, http1, http2
from .target import Outcome, Target

Attack = Callable[[Target, float], Outcome]

OVER_HTTP2: tuple[Attack, ...] = (
    http2.rapid_reset,
    http2.made_you_reset,
    http2.data_after_end,
    http2.continuation_flood,
    http2.settings_flood,
    http2.ping_flood,
    http2.priority_flood,
    http2.empty_frames,
    http2.zero_window,
    http2.large_headers_unread,
)
OVER_HTTP1: tuple[Attack, ...] = (
    http1.silent_connections,
    http1.slow_headers,
    http1.slow_bodies,
    http1.slow_readers,
    http1.endless_headers,
    http1.endless_trailers,
    http1.pipelining,
    bombs.frame_header_bombs,
    bombs.json_bombs,
    bombs.gzip_bombs,
)
ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (*OVER_HTTP2, *OVER_HTTP1)}


if __name__ == "__main__":
    _, name, seconds, target = sys.argv
    print(json.dumps(ATTACKS[name](Target.from_json(target), float(seconds)).to_json()))
