"""Find what will fail in a repository without starting anything."""
