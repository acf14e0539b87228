"""The dashboard: one page, which shows in a browser what the coordinator's API says."""
