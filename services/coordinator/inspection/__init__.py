"""Looking into a run from outside, while it trains: the part of the API that people, dashboards and programs read."""
