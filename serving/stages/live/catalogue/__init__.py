"""Keep the stages' arrays of items up to date with what `upsert` changed and added."""
