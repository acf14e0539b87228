"""What our transports understand, and tell, besides httpx's own extensions of a request and an answer."""

BODY_EXTENSION = "gradpost_body"  # memoryviews to be sent one behind the other, unchanged until the request has ended
SINK_EXTENSION = "gradpost_sink"  # a `Sink` in which a good answer's body is to land; others come as httpx has it
LOCAL_EXTENSION = "gradpost_local"  # of an answer: whether it came over a Unix socket
