"""Requests with tensors, over HTTP/2 and HTTP/1.1."""
