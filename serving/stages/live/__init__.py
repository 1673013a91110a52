"""Reading the live store (serving/live) in the stages, and the two models that write it: `observe` and `upsert`."""
