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
# coordinator: administration, besides POST of a checkpoint
CONTROLS = "/v1/controls"
PAUSE = "/v1/controls/pause"
RESUME = "/v1/controls/resume"
RATE = "/v1/controls/rate"
FROZEN = "/v1/controls/frozen/{name:path}"
EVICT = "/v1/trainers/{rank}/evict"
ROLL_BACK = "/v1/rollback"
TARGETS = "/v1/targets"
CHECKPOINTS = "/v1/checkpoints"

# "batch" or "fetch" on a barrier; "batch" on a get, or on the question for a norm, lets the batch barrier ride on it
BARRIER_HEADER = "gradpost-barrier"
# "nonfinite" with a batch barrier: the trainer's own gradient, or what a pserver said of it, holds NaN or infinity
VERDICT_HEADER = "gradpost-verdict"
# on a get in the synchronous mode: the trainer has all blocks as they were after this round, and wants what is newer
HAVE_HEADER = "gradpost-have"
# on a get where gradients are clipped: digest, sum of squares here, sum of squares everywhere (see norms.py)
NORM_HEADER = "gradpost-norm"
# how long the server may hold the answer back, in seconds; it answers round_pending after that
WAIT_HEADER = "gradpost-wait-seconds"

# metadata of an answer in the asynchronous modes: how many contributions, of all trainers, are applied there
APPLIED_KEY = "applied"
HISTORY_KEY = "history"  # of a cut of a shard: the newest step of each trainer in it
# the same in the synchronous mode: the round stepped nothing, because these trainers' gradients were not finite
SKIPPED_KEY = "skipped_for"
SKIPPED_BEFORE_KEY = "skipped_before"  # and the rounds before it that `max_delay` lets a trainer miss: those skipped
GRAD_SCALER_KEY = "grad_scaler"  # the lowest rank's, for a trainer that joins: the last object of its hyper-parameters

SINCE_KEY = "since"  # of an answer to one who has something: blocks that have not changed after this round are left out

# metadata of a pushed frame
NUM_BLOCKS_KEY = "num_blocks"
HYPER_PARAMETERS_KEY = "hyper_parameters"
NUM_SLOTS_KEY = "num_slots"  # of the same frame as num_blocks: how many slots and step states come besides
COMPUTED_ON_KEY = "computed_on"  # asynchronous modes: the step after which the parameters were pulled

# metadata of a frame of slots: how often each block was stepped
STEPS_KEY = "steps"
# the same with all that a trainer's state_dict needs; a pushed frame that has it holds slots, and nothing else
STATES_KEY = "states"
SLOT_NAMES_KEY = "slots"  # which slots there are at all
