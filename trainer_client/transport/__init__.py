"""Requests over HTTP/2 and HTTP/1.1: small ones of control, and tensors from and into memory that others own."""
