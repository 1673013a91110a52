"""Users that many machines share: records in a Redis cluster, in Feast's layout."""
