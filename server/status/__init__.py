"""Finding out how a server is: ready, healthy, drifted, and why it ended."""
