"""What our transports understand besides httpx's own extensions of a request."""

BODY_EXTENSION = "gradpost_body"  # a memoryview to be sent, which must not change until the request has ended
SINK_EXTENSION = "gradpost_sink"  # a `Sink` in which a good answer's body is to land; others come as httpx has it
