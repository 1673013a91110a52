"""The report of a run: run.json (results.py), its tables and pictures, and the page with both."""
