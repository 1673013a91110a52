"""Measure the live loop: events and changed items in, changed answers out. `python -m perf live`, or one part of it:

    visible      how soon an event shows in the next answer, at 1,000 events/s beside `recommend`; what that costs `recommend`
    after        every answer that names an event by `after` reflects it
    throughput   durable events/s of many clients, and the latency of one beside the disk's own fsync
    reads        the store read of `preprocess`, over 10,000 and 1,000,000 users
    items        new items are served, unavailable ones are not
    memory       the server's memory with live state against without

Every part that needs a server starts one on a copy of the repository, whose live store is its own: the events that are
made up here never reach a shop's log.

    exchange.py   calls whose answers decide what is sent next, on one connection
    shop.py       the copy, its users, and its requests as bytes
    cli.py        the commands
"""
