"""Read events in three shapes, and changes of items and users, and send them to the server."""
