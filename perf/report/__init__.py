"""What a run leaves behind, and how people read it: run.json (results.py), its tables and pictures, and the page with both."""
