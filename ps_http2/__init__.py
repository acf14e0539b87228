"""HTTP/2 on asyncio for large bodies: bytes go from the socket straight to where they belong, and back."""
