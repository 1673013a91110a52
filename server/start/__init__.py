"""What a start needs: the environment, free ports, memory, TLS, and one start at a time."""
