"""The table of the token scopes that requests need.

A new route goes here; a test compares this table with the routes of both applications. The gate looks a request up
once. Any other request, also with a path that does not exist, needs `admin`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ps_config.tokens import Scope
from ps_protocol import routes

OPENAPI = "/openapi.json"
DASHBOARD = "/"
DASHBOARD_FILE = "/dashboard/{name}"
PROBES = frozenset({("GET", routes.HEALTH), ("GET", routes.READY)})

# None: no token is needed, as for probes.
ROUTE_SCOPES: Mapping[tuple[str, str], Scope | None] = {
    ("GET", routes.HEALTH): None,
    ("GET", routes.READY): None,
    # a page without data, which asks for a token
    ("GET", DASHBOARD): None,
    ("GET", DASHBOARD_FILE): None,
    # reading
    ("GET", routes.METRICS): "read",
    ("GET", OPENAPI): "read",
    ("GET", routes.STATE): "read",
    ("GET", routes.SHARD): "read",
    ("GET", routes.BLOCK_STATISTICS): "read",
    ("GET", routes.STATUS): "read",
    ("GET", routes.SUMMARY): "read",
    ("GET", routes.PARAMETERS): "read",
    ("GET", routes.PARAMETER): "read",
    ("GET", routes.STATISTICS): "read",
    ("GET", routes.MODEL): "read",
    ("GET", routes.CURVES): "read",
    ("GET", routes.HISTORY): "read",
    ("GET", routes.HISTORY_RUN): "read",
    ("GET", routes.EVENTS): "read",
    ("GET", routes.CONTROLS): "read",
    ("GET", routes.TARGETS): "read",
    ("GET", routes.CHECKPOINTS): "read",
    # trainers
    ("POST", routes.SEND): "train",
    ("POST", routes.GET): "train",
    ("POST", routes.SLOTS): "train",
    ("POST", routes.NORM): "train",
    ("POST", routes.BARRIER): "train",
    ("POST", routes.INITIAL): "train",
    ("GET", routes.BUFFERS): "train",
    ("POST", routes.JOIN_TRAINER): "train",
    ("POST", routes.DECLARE_MODEL): "train",
    ("GET", routes.PLAN): "train",
    ("POST", routes.TRAINER_HEARTBEAT): "train",
    ("POST", routes.LEAVE): "train",
    # services among each other
    ("GET", routes.UPDATES): "admin",
    ("GET", routes.SHARD_COPY): "admin",
    ("GET", routes.RUN): "admin",
    ("POST", routes.REPORT_STANDBY): "admin",
    ("POST", routes.REGISTER_PSERVER): "admin",
    ("POST", routes.PSERVER_HEARTBEAT): "admin",
    ("POST", routes.PSERVER_ENDED): "admin",
    ("PUT", routes.RUN): "admin",
    ("PUT", routes.MEMBERS): "admin",
    ("PUT", routes.FREEZE): "admin",
    ("GET", routes.RESTORABLE): "admin",
    ("PUT", routes.WANT_CHECKPOINT): "admin",
    ("PUT", routes.FENCE_STANDBY): "admin",
    ("PUT", routes.PROMOTE_STANDBY): "admin",
    # administrators
    ("POST", routes.CHECKPOINTS): "admin",
    ("POST", routes.PAUSE): "admin",
    ("POST", routes.RESUME): "admin",
    ("PUT", routes.RATE): "admin",
    ("PUT", routes.FROZEN): "admin",
    ("DELETE", routes.FROZEN): "admin",
    ("POST", routes.EVICT): "admin",
    ("POST", routes.STOP): "admin",
    ("POST", routes.ROLL_BACK): "admin",
}
