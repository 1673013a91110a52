"""What is seen of a server while it is asked: its own counters, its processes' memory and time on the cores, latencies."""
