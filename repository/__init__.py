"""The Triton model repository: its configuration files, its atomic publication, and the check that reads it back."""
