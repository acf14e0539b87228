"""The paths of the HTTP API, and the request headers and metadata keys that are not part of the fence."""

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
BLOCKS = "/v1/blocks"
SHARD = "/v1/shard"
SLOTS = "/v1/slots"
BLOCK_STATISTICS = "/v1/statistics"
BUFFERS = "/v1/buffers"

# coordinator: membership
REGISTER_PSERVER = "/v1/pservers"
PSERVER_HEARTBEAT = "/v1/pservers/{index}/heartbeat"
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
PARAMETER_SLOTS = "/v1/slots/{name:path}"
MODEL = "/v1/model"
ACTIVITY = "/v1/activity"
CURVES = "/v1/curves"
EVENTS = "/v1/events"
EVENT_STREAM = "/v1/events/stream"
AUDIT = "/v1/audit"
# coordinator: administration, and POST of a checkpoint
CONTROLS = "/v1/controls"
PAUSE = "/v1/controls/pause"
RESUME = "/v1/controls/resume"
RATE = "/v1/controls/rate"
FROZEN = "/v1/controls/frozen/{name:path}"
EVICT = "/v1/trainers/{rank}/evict"
ROLL_BACK = "/v1/rollback"
TARGETS = "/v1/targets"
CHECKPOINTS = "/v1/checkpoints"

# "batch" or "fetch" on a barrier; "batch" on a get or a norm request makes it a batch barrier too
BARRIER_HEADER = "gradpost-barrier"
# "nonfinite" with a batch barrier: the trainer's gradient holds NaN or infinity, by itself or a pserver
VERDICT_HEADER = "gradpost-verdict"
# on a get in the synchronous mode: the base version that the trainer holds, so that only newer blocks are sent
HAVE_HEADER = "gradpost-have"
# on a get with clipping: digest, sum of squares of this pserver, total sum of squares (see norms.py)
NORM_HEADER = "gradpost-norm"
# the seconds after which the server answers round_pending
WAIT_HEADER = "gradpost-wait-seconds"

# metadata of an answer in asynchronous modes: the number of applied contributions of all trainers
APPLIED_KEY = "applied"
HISTORY_KEY = "history"  # of a shard between contributions: the newest step of each trainer in it
# metadata in the synchronous mode: the trainers whose gradients were not finite, so that the round was skipped
SKIPPED_KEY = "skipped_for"
SKIPPED_BEFORE_KEY = "skipped_before"  # skipped rounds before it, which `max_delay` lets a trainer miss
GRAD_SCALER_KEY = "grad_scaler"  # of the lowest rank, for a trainer that joins: the last object of its hyperparameters

SINCE_KEY = "since"  # of an answer without the blocks that have not changed after this round

# metadata of a pushed frame
NUM_BLOCKS_KEY = "num_blocks"
HYPER_PARAMETERS_KEY = "hyper_parameters"
NUM_SLOTS_KEY = "num_slots"  # of a frame with num_blocks: the number of slots and step states in it
COMPUTED_ON_KEY = "computed_on"  # asynchronous modes: the step after which the parameters were pulled

# metadata of a frame of slots: the step count of each block
STEPS_KEY = "steps"
# metadata of a frame of slots: the step states that a state_dict needs; a pushed frame with it holds slots only
STATES_KEY = "states"
SLOT_NAMES_KEY = "slots"  # the names of all slots
