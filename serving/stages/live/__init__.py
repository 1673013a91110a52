"""What the stages make of the live store (serving/live), and the two models that write it: `observe` and `upsert`."""
