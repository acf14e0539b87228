"""The inspection of a run while it trains: the reading part of the API."""
