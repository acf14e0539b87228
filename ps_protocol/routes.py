"""The paths of the HTTP API."""

# every service
HEALTH = "/healthz"
READY = "/readyz"
METRICS = "/metrics"

# pserver: tensors (raw ASGI endpoints)
SEND = "/v1/send"
GET = "/v1/get"
NORM = "/v1/norm"
BARRIER = "/v1/barrier"
INITIAL = "/v1/initial"
# pserver: control and inspection
RUN = "/v1/run"
FREEZE = "/v1/freeze"
MEMBERS = "/v1/members"
RESTORABLE = "/v1/restorable"
WANT_CHECKPOINT = "/v1/checkpoint"
STATE = "/v1/state"
SHARD = "/v1/shard"
SLOTS = "/v1/slots"
BLOCK_STATISTICS = "/v1/statistics"
BUFFERS = "/v1/buffers"

# pserver: replication
UPDATES = "/v1/updates"
SHARD_COPY = "/v1/shard/copy"
# standby: fail-over
FENCE_STANDBY = "/v1/standby/fence"
PROMOTE_STANDBY = "/v1/standby/promote"

# coordinator: membership
REGISTER_PSERVER = "/v1/pservers"
PSERVER_HEARTBEAT = "/v1/pservers/{index}/heartbeat"
PSERVER_ENDED = "/v1/pservers/{index}/ended"
REPORT_STANDBY = "/v1/standbys"
JOIN_TRAINER = "/v1/trainers"
TRAINER_HEARTBEAT = "/v1/trainers/{rank}/heartbeat"
DECLARE_MODEL = "/v1/trainers/{rank}/model"
LEAVE = "/v1/trainers/{rank}/leave"
# coordinator: inspection
PLAN = "/v1/plan"
STATUS = "/v1/status"
SUMMARY = "/v1/summary"
PARAMETERS = "/v1/parameters"
PARAMETER = "/v1/parameters/{name:path}"
STATISTICS = "/v1/statistics/{name:path}"
MODEL = "/v1/model"
CURVES = "/v1/curves"
HISTORY = "/v1/history"
HISTORY_RUN = "/v1/history/{run}"
EVENTS = "/v1/events"
# coordinator: administration, and POST of a checkpoint
CONTROLS = "/v1/controls"
PAUSE = "/v1/controls/pause"
RESUME = "/v1/controls/resume"
RATE = "/v1/controls/rate"
FROZEN = "/v1/controls/frozen/{name:path}"
STOP = "/v1/stop"
EVICT = "/v1/trainers/{rank}/evict"
ROLL_BACK = "/v1/rollback"
TARGETS = "/v1/targets"
CHECKPOINTS = "/v1/checkpoints"
