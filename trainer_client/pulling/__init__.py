"""Parameters on their way in: where they land, and who waits for them."""
