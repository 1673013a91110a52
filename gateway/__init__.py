"""The shop's side: REST in the shop's own ids, with titles, in front of a tritonserver.

    browser, shop ─▶ Guard (size, time, token, rate) ─▶ routes ─▶ AsyncRecommender ─gRPC▶ tritonserver
                                                          │ no answer in time: the popular items of the generation
                                                          └▶ files of the generation (titles, vectors), live store: read-only

`app.py` has the routes. `edge/` is what every request passes before them, `answers/` answers questions, `events/` sends what
users did, and `console/` is the page.

One process without state of its own: any number of them may run side by side.
"""

import clients  # noqa: F401  so that triton_recommender is found where nothing was installed
