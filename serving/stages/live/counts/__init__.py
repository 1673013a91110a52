"""Count live events: sales, trends, and pairs of items that were taken together."""
