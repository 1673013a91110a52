"""What keeping answers is worth on a recorded log: `python -m experiments.cache --repo … --data online-retail`.

    hit rates   the whole stretch of the log goes through a MemoryCache that lives by the log's own clock, for several ttls
    warming     how many visits find an answer when users were asked for beforehand: of every cluster in turns, or by activity
    time        the same requests to two real servers, in the log's order, in turns: without a cache, with Triton's response
                cache, with ours in memory and in Redis; ours also when it asks for the generation before every answer

What the log's requests were is not recorded, so two readings bound it: `lines` asks once for every line of an invoice (somebody
who looks around, and buys at the end: the purchase is an event when the invoice is through), `visits` once for every invoice.
Where events forget users, a visit is never answered from the cache, for the visit before ended with a purchase.

Every answer is compared with that of the server without a cache. The last line is one line of JSON; the exit code is 1 when an
answer differs.
"""
