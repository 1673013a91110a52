"""Pass every request on to its route, and every answer back: limits of HTTP, tokens, rates, errors, spans."""
