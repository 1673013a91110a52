"""What every request passes before its route, and every answer after it: limits of HTTP, tokens, rates, errors, spans."""
