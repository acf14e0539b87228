"""The dashboard: a page that shows the coordinator's API in a browser."""
