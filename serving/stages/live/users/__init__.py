"""Replace the generation's state of users by their live records, and follow their aggregations."""
