"""The Triton model repository: its configuration files, atomic publication, generations and checks."""
