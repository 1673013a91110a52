"""Continuous training: the log continued with live events, candidates judged on the newest of them, and published."""
