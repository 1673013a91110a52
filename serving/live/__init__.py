"""The live event loop: events in, durable state out, answers that know of them.

    observe ─▶ Event ─┐                                ┌─▶ events     sequence -> packed event (the log)
                      ├─▶ Writer ─▶ one transaction ───┼─▶ users, items   id -> packed record (the state)
    upsert ─▶ Change ─┘        (one fsync, then ack)   └─▶ seen, keys, columns, meta
                                                              │
    preprocess, retrieve, rank ◀── Reader ◀── read-only transactions of other processes, no locks, no copies

One LMDB environment per shop is beside the repository. The log and the state that follows from it change in the same
transaction, so after a crash both are there or neither is, and no event is applied twice.
"""
