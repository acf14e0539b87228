"""HTTP/2 on asyncio for large bodies: the kernel reads and writes the memory of the application."""
