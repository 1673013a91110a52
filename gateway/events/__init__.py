"""Events and changes of items and users, in three shapes, on their way to the server."""
